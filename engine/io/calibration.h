// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "engine/core/status.h"

namespace denoised {

/// The scales of a denoiser's inputs in e4m3, as `denoised --calibrate` measures them, and the
/// weights that they belong to. As a file:
///
///   {"format": 1, "weights": "9f86d081884c7d65",
///    "input_scales": {"down_blocks.0.resnets.0.conv1": 0.03125, "mid_block.resnets.0.conv2":
///    null}}
///
/// Scales are powers of two. A layer with null stays in the activation dtype.
struct Calibration {
  std::string weights;                        // Weights::Fingerprint()
  std::map<std::string, float> input_scales;  // by the layer's name in the checkpoint; 0: null

  /// The name of the file in a model's directory.
  static constexpr const char* kFile = "fp8.json";

  /// InvalidArgument names the file, the field and what is expected.
  static absl::StatusOr<Calibration> Parse(const nlohmann::json& json, const std::string& file);
  nlohmann::ordered_json ToJson() const;

  /// Where the calibration of these weights is written: kFile in the model's directory, or
  /// <weights>.json in `directory` unless that is empty.
  static std::string Path(const std::string& model, const std::string& directory,
                          const std::string& weights);
  /// Reads the file in `directory`, or that of the model if there is none. NotFound if there is
  /// neither, FailedPrecondition if it is of other weights; both say how to make it.
  static absl::StatusOr<Calibration> Find(const std::string& model, const std::string& directory,
                                          const std::string& weights);
};

}  // namespace denoised
