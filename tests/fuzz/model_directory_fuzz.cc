#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "engine/io/model_directory.h"
#include "engine/io/safetensors.h"

namespace {

namespace fs = std::filesystem;

/// The files of a model directory that an input fills, in its order, separated by zero bytes. An
/// empty part is a file that is not there.
constexpr const char* kFiles[] = {"model_index.json", "config.json", "scheduler_config.json",
                                  "diffusion_pytorch_model.safetensors.index.json"};

struct Directory {
  Directory() {
    std::string name = (fs::temp_directory_path() / "denoised-fuzz-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    path = name;
    const float one[] = {1};
    const std::map<std::string, denoised::Tensor> shard = {
        {"w", denoised::Tensor::HostF32({1}, one)}};
    const std::string file = (path / "shard.safetensors").string();
    if (!denoised::WriteSafetensors(file, shard, {}).ok()) std::abort();
  }
  ~Directory() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  fs::path path;
};

}  // namespace

/// Any files are refused with a message, or the directory can be read whole.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Directory directory;
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  for (const char* file : kFiles) {
    const std::string_view content = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(rest.size(), content.size() + 1));
    if (content.empty())
      fs::remove(directory.path / file);
    else
      std::ofstream(directory.path / file, std::ios::binary) << content;
  }
  const auto model = denoised::ModelDirectory::Read(directory.path.string());
  if (!model.ok()) {
    if (model.status().message().empty()) std::abort();
    return 0;
  }
  const auto weights = model->OpenWeights();
  if (weights.ok() && !weights->Has("w")) std::abort();
  return 0;
}
