// SPDX-License-Identifier: Apache-2.0
// A model directory for benchmarks of an architecture that has no checkpoint here.
//
//   synthetic-model CONFIG.json DIRECTORY
//
// DIRECTORY gets the config, random weights, and a DDIM scheduler where none lies beside the
// config. Speed does not depend on weights; the images are noise.

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "engine/core/config_reader.h"
#include "engine/models/unet2d.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;

absl::Status Write(const fs::path& config_file, const fs::path& directory) {
  DENOISED_ASSIGN_OR_RETURN(const auto json, ReadJsonFile(config_file.string()));
  DENOISED_ASSIGN_OR_RETURN(const UNet2DConfig config,
                            UNet2DConfig::Parse(json, config_file.string()));
  DENOISED_ASSIGN_OR_RETURN(std::unique_ptr<Backend> cpu, OpenBackend({.device = "cpu"}));
  const Weights weights = Weights::Synthetic(1);
  DENOISED_RETURN_IF_ERROR(LoadUNet2D(*cpu, config, weights).status());
  std::error_code error;
  fs::create_directories(directory, error);
  DENOISED_RETURN_IF_ERROR(
      weights.WriteSynthetic((directory / "diffusion_pytorch_model.safetensors").string()));
  std::ofstream(directory / "config.json") << json.dump(2);
  nlohmann::json scheduler = {{"_class_name", "DDIMScheduler"}};
  const fs::path beside = config_file.parent_path() / "scheduler_config.json";
  if (fs::exists(beside, error)) {
    DENOISED_ASSIGN_OR_RETURN(scheduler, ReadJsonFile(beside.string()));
  }
  std::ofstream file(directory / "scheduler_config.json");
  file << scheduler.dump(2);
  file.close();
  if (!file) return Internal("{}: cannot be written", directory.string());
  return absl::OkStatus();
}

}  // namespace
}  // namespace denoised

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: synthetic-model CONFIG.json DIRECTORY\n", stderr);
    return 2;
  }
  const absl::Status status = denoised::Write(argv[1], argv[2]);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}
