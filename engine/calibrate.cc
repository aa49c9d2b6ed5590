// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "engine/core/e4m3.h"
#include "engine/device_engine.h"
#include "engine/io/calibration.h"
#include "engine/io/model_directory.h"

/// Draws images with the model as it is, all their noise levels, and records the largest input of
/// each layer that may be in e4m3.

namespace denoised {
namespace {

constexpr int kImages = 16;
/// Inputs of other seeds are seldom larger than twice the largest that was seen. The room costs no
/// accuracy, as e4m3 is a floating-point type.
constexpr float kRoom = 2;

absl::Status Write(const std::string& path, const std::string& text) {
  std::error_code error;
  const auto parent = std::filesystem::path(path).parent_path();
  std::filesystem::create_directories(parent, error);
  std::ofstream file(path, std::ios::trunc);
  file << text;
  file.close();
  if (file.good()) return absl::OkStatus();
  return FailedPrecondition(
      "{} cannot be written; make {} writable, or give another directory with --calibrations", path,
      parent.string());
}

}  // namespace

absl::StatusOr<std::string> Calibrate(const std::string& directory, const EngineOptions& options) {
  DENOISED_ASSIGN_OR_RETURN(const ModelDirectory model, ModelDirectory::Read(directory));
  DENOISED_ASSIGN_OR_RETURN(const Weights weights, model.unet().OpenWeights());
  EngineOptions on_one = options;
  on_one.devices.resize(1);
  on_one.watchdog_seconds = 0;
  const auto ranges = std::make_shared<InputRanges>();
  const BackendOpener open = [&ranges](BackendOptions backend) {
    backend.input_ranges = ranges;
    return OpenBackend(backend);
  };
  DENOISED_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, CreateEngine(on_one, open));
  const std::string name = "model";
  DENOISED_RETURN_IF_ERROR(engine->Open(name, directory, Precision::kDefault));
  ranges->Start();
  DENOISED_RETURN_IF_ERROR(
      DrawAtDefaults(*engine, name, std::min(kImages, engine->Find(name)->max_count)));
  engine.reset();  // a GPU tells its ranges when it is closed
  Calibration calibration{.weights = weights.Fingerprint(), .input_scales = {}};
  DENOISED_ASSIGN_OR_RETURN(const auto largest_inputs, ranges->largest());
  for (const auto& [layer, largest] : largest_inputs)
    calibration.input_scales[layer] = E4m3Scale(kRoom * largest);
  if (calibration.input_scales.empty())
    return FailedPrecondition("{}: no layer's input was seen", directory);
  const std::string path = Calibration::Path(directory, options.calibrations, calibration.weights);
  DENOISED_RETURN_IF_ERROR(Write(path, calibration.ToJson().dump(2) + "\n"));
  return path;
}

}  // namespace denoised
