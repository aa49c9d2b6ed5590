// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "engine/io/model_directory.h"
#include "engine/io/safetensors.h"
#include "tests/io/temporary_directory.h"

namespace {

/// The files of a model directory that an input fills, in its order, separated by zero bytes. An
/// empty part is a file that is not there.
constexpr const char* kFiles[] = {"model_index.json",
                                  "config.json",
                                  "scheduler_config.json",
                                  "diffusion_pytorch_model.safetensors.index.json",
                                  "text_encoder/config.json",
                                  "text_encoder/model.safetensors.index.json",
                                  "tokenizer/tokenizer_config.json",
                                  "vae/config.json",
                                  "vae/diffusion_pytorch_model.safetensors.index.json"};
/// They are there if one of their files is; a part without a folder lies beside the index.
constexpr const char* kFolders[] = {"text_encoder", "tokenizer", "vae"};
constexpr const char* kShard = "shard.safetensors";

struct ModelFolder : denoised::TemporaryDirectory {
  ModelFolder() {
    const float one[] = {1};
    const std::map<std::string, denoised::Tensor> shard = {
        {"w", denoised::Tensor::HostF32({1}, one)}};
    const std::string file = *this / kShard;
    if (!denoised::WriteSafetensors(file, shard, {}).ok()) std::abort();
  }
  void WriteBesideAShard(const std::string& file, std::string_view content) const {
    const auto directory = std::filesystem::path(Write(file, std::string(content))).parent_path();
    if (!std::filesystem::exists(directory / kShard))
      std::filesystem::copy_file(*this / kShard, directory / kShard);
  }
};

}  // namespace

/// Any files are refused with a message, or the directory can be read whole.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ModelFolder folder;
  for (const char* part : kFolders) std::filesystem::remove_all(folder / part);
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  for (const char* file : kFiles) {
    const std::string_view content = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(rest.size(), content.size() + 1));
    if (content.empty())
      std::filesystem::remove(folder / file);
    else
      folder.WriteBesideAShard(file, content);
  }
  const auto model = denoised::ModelDirectory::Read(folder.path());
  if (!model.ok()) {
    if (model.status().message().empty()) std::abort();
    return 0;
  }
  for (const auto& [name, component] : model->components) {
    if (name.starts_with("tokenizer")) continue;
    const auto weights = component.OpenWeights();
    if (weights.ok() && !weights->Has("w")) std::abort();
  }
  return 0;
}
