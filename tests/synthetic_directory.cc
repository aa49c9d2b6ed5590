// SPDX-License-Identifier: Apache-2.0
#include "tests/synthetic_directory.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "engine/backend/counting.h"
#include "engine/core/available_cores.h"
#include "engine/core/config_reader.h"
#include "engine/models/registry.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;
using Component = ModelDirectory::Component;

absl::Status WriteJson(const fs::path& path, const nlohmann::json& json) {
  std::ofstream file(path);
  file << json.dump(2) << "\n";
  file.close();
  return file ? absl::OkStatus() : Internal("{}: cannot be written", path.string());
}

class Writer {
 public:
  Writer(ModelDirectory directory, fs::path to, DType dtype)
      : directory_(std::move(directory)), to_(std::move(to)), dtype_(dtype) {}

  absl::Status Write() {
    for (const auto& [name, component] : directory_.components)
      if (name.starts_with("tokenizer")) DENOISED_RETURN_IF_ERROR(CopyFiles(name, component));
    for (const auto& part : directory_.components) {
      const std::string& name = part.first;
      const Component& component = part.second;  // clang 14's lambdas capture no bindings
      if (name == "unet" || name.starts_with("tokenizer")) continue;
      if (name.starts_with("text_encoder")) {
        DENOISED_ASSIGN_OR_RETURN(const auto* const known, FindTextEncoder(directory_, name));
        DENOISED_ASSIGN_OR_RETURN(
            const auto encoder, WriteWeights(name, component, "model", [&](const Weights& weights) {
              return known->load(backend_, component, weights);
            }));
        text_.features += encoder->traits().features;
        text_.pooled_features = encoder->traits().pooled_features;
      } else {
        DENOISED_ASSIGN_OR_RETURN(const auto* const known, FindCodec(directory_, name));
        const auto load = [&](const Weights& weights) {
          return known->load(backend_, component, weights);
        };
        DENOISED_RETURN_IF_ERROR(WriteWeights(name, component, kDiffusers, load).status());
      }
    }
    const Component& unet = directory_.unet();
    DENOISED_ASSIGN_OR_RETURN(const auto* const known, FindDenoiser(directory_));
    const auto load = [&](const Weights& weights) {
      return known->load(backend_, unet, text_, weights);
    };
    DENOISED_RETURN_IF_ERROR(WriteWeights("unet", unet, kDiffusers, load).status());
    const fs::path scheduler = FolderOf("scheduler");
    fs::create_directories(scheduler, error_);
    const fs::path config = scheduler / "scheduler_config.json";
    if (directory_.scheduler_config) {
      // Copied: the parsed JSON has lost the infinities that diffusers writes.
      fs::copy_file(directory_.scheduler_config_file, config, error_);
      if (error_) return Internal("{}: {}", config.string(), error_.message());
    } else {
      DENOISED_RETURN_IF_ERROR(WriteJson(config, {{"_class_name", "DDIMScheduler"}}));
    }
    if (directory_.index.is_null()) return absl::OkStatus();
    return WriteJson(to_ / "model_index.json", directory_.index);
  }

 private:
  static constexpr const char* kDiffusers = "diffusion_pytorch_model";

  fs::path FolderOf(const std::string& part) const {
    return directory_.index.is_null() ? to_ : to_ / part;
  }

  /// Loads a part with weights that only have shapes, and writes the config and the weights.
  template <typename Load>
  auto WriteWeights(const std::string& name, const Component& component, const std::string& stem,
                    Load load) -> decltype(load(Weights::SyntheticToWrite(1))) {
    const Weights weights = Weights::SyntheticToWrite(1);
    auto loaded = load(weights);
    DENOISED_RETURN_IF_ERROR(loaded.status());
    const fs::path folder = FolderOf(name);
    fs::create_directories(folder, error_);
    DENOISED_RETURN_IF_ERROR(WriteJson(folder / "config.json", component.config));
    DENOISED_RETURN_IF_ERROR(weights.WriteSynthetic((folder / (stem + ".safetensors")).string(),
                                                    dtype_, AvailableCores()));
    return loaded;
  }

  absl::Status CopyFiles(const std::string& name, const Component& component) {
    const fs::path folder = FolderOf(name);
    fs::create_directories(folder, error_);
    for (const auto& file : fs::directory_iterator(component.directory, error_))
      if (file.is_regular_file(error_))
        fs::copy_file(file.path(), folder / file.path().filename(),
                      fs::copy_options::overwrite_existing, error_);
    return error_ ? Internal("{}: cannot be copied ({})", component.directory, error_.message())
                  : absl::OkStatus();
  }

  const ModelDirectory directory_;
  const fs::path to_;
  const DType dtype_;
  CountingBackend backend_{Device::kCpu, DType::kF32};
  TextStates text_;
  std::error_code error_;  // what cannot be made cannot be written to either, and that is told
};

}  // namespace

absl::Status WriteSynthetic(ModelDirectory directory, const std::string& to, DType dtype) {
  return Writer(std::move(directory), to, dtype).Write();
}

}  // namespace denoised
