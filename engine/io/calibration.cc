// SPDX-License-Identifier: Apache-2.0
#include "engine/io/calibration.h"

#include <cmath>
#include <filesystem>

#include "engine/core/config_reader.h"

namespace denoised {

namespace fs = std::filesystem;

absl::StatusOr<Calibration> Calibration::Parse(const nlohmann::json& json,
                                               const std::string& file) {
  constexpr int kFormat = 1;
  Calibration calibration;
  ConfigReader reader(json, file);
  int format = 0;
  reader.Read("format", &format);
  if (format != kFormat)
    reader.Complain("format", fmt::format("expected {}; calibrate the model again", kFormat));
  reader.Read("weights", &calibration.weights);
  if (calibration.weights.empty())
    reader.Complain("weights", "missing: the fingerprint of the weights that were calibrated");
  const nlohmann::json& scales = reader.Raw("input_scales");
  if (!scales.is_object()) {
    reader.Complain("input_scales", "expected an object with a number, or null, for each layer");
    return reader.Finish();
  }
  for (const auto& [layer, value] : scales.items()) {
    float& scale = calibration.input_scales[layer];
    if (value.is_null()) continue;
    if (value.is_number()) scale = value.get<float>();
    int exponent = 0;
    if (!(scale > 0) || !std::isfinite(scale) || std::frexp(scale, &exponent) != 0.5f)
      reader.Complain("input_scales",
                      fmt::format("layer '{}': expected a power of two or null", layer));
  }
  DENOISED_RETURN_IF_ERROR(reader.Finish());
  return calibration;
}

nlohmann::ordered_json Calibration::ToJson() const {
  nlohmann::ordered_json json = {{"format", 1}, {"weights", weights}};
  nlohmann::ordered_json& scales = json["input_scales"] = nlohmann::ordered_json::object();
  for (const auto& [layer, scale] : input_scales)
    scales[layer] = scale == 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(scale);
  return json;
}

std::string Calibration::Path(const std::string& model, const std::string& directory,
                              const std::string& weights) {
  return directory.empty() ? (fs::path(model) / kFile).string()
                           : (fs::path(directory) / (weights + ".json")).string();
}

absl::StatusOr<Calibration> Calibration::Find(const std::string& model,
                                              const std::string& directory,
                                              const std::string& weights) {
  std::string path = Path(model, directory, weights);
  std::error_code error;
  if (!fs::exists(path, error)) path = Path(model, "", weights);
  if (!fs::exists(path, error))
    return NotFound(
        "{}: precision fp8 needs scales, and there is no {}{}; make it with denoised --calibrate "
        "{}",
        model, path,
        directory.empty() ? "" : fmt::format(" and no {}", Path(model, directory, weights)), model);
  DENOISED_ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonFile(path));
  DENOISED_ASSIGN_OR_RETURN(Calibration calibration, Parse(json, path));
  if (calibration.weights != weights)
    return FailedPrecondition(
        "{}: field 'weights' is \"{}\", but those of the model are {}: it was calibrated with "
        "others; make it again with denoised --calibrate {}",
        path, calibration.weights, weights, model);
  return calibration;
}

}  // namespace denoised
