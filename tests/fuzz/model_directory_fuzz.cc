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
constexpr const char* kFiles[] = {"model_index.json", "config.json", "scheduler_config.json",
                                  "diffusion_pytorch_model.safetensors.index.json"};

struct ModelFolder : denoised::TemporaryDirectory {
  ModelFolder() {
    const float one[] = {1};
    const std::map<std::string, denoised::Tensor> shard = {
        {"w", denoised::Tensor::HostF32({1}, one)}};
    const std::string file = *this / "shard.safetensors";
    if (!denoised::WriteSafetensors(file, shard, {}).ok()) std::abort();
  }
};

}  // namespace

/// Any files are refused with a message, or the directory can be read whole.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ModelFolder folder;
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  for (const char* file : kFiles) {
    const std::string_view content = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(rest.size(), content.size() + 1));
    if (content.empty())
      std::filesystem::remove(folder / file);
    else
      folder.Write(file, std::string(content));
  }
  const auto model = denoised::ModelDirectory::Read(folder.path());
  if (!model.ok()) {
    if (model.status().message().empty()) std::abort();
    return 0;
  }
  const auto weights = model->unet().OpenWeights();
  if (weights.ok() && !weights->Has("w")) std::abort();
  return 0;
}
