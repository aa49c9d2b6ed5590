// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "engine/core/status.h"
#include "engine/io/weights.h"

namespace denoised {

/// The contents of a diffusers model directory, not yet interpreted. Two layouts:
///
///   pipeline  model_index.json, unet/ {config.json, weights}, scheduler/ {scheduler_config.json};
///             the parts may also lie beside model_index.json, as in early published models
///   model     config.json of a UNet2DModel, weights, and perhaps scheduler_config.json
///
/// A plain value; copy and share it freely.
struct ModelDirectory {
  std::string root;
  nlohmann::json index;  // model_index.json; null without one

  nlohmann::json unet_config;
  std::string unet_config_file;  // path, for messages
  std::string unet_directory;    // where the weights are

  std::optional<nlohmann::json> scheduler_config;  // with the index's _class_name, if it has one
  std::string scheduler_config_file;

  /// model_index.json's id2label: class → text, contiguous from 0; empty when there is none.
  std::map<int, std::string> labels;

  // model_index.json's "_denoised", our own object; diffusers ignores fields that begin with '_'.
  int null_class = -1;    // the class that stands for "no condition"; −1: none, so no guidance
  int default_steps = 0;  // 0: the sampler's own default
  double default_guidance_scale = 1;

  /// NotFound if a file is missing, InvalidArgument if a field is not supported. The message names
  /// file, field, value and remedy.
  static absl::StatusOr<ModelDirectory> Read(const std::string& root);

  /// Fills index, labels and the fields of _denoised from a model_index.json's content. `file`
  /// appears in messages.
  absl::Status ParseIndex(const nlohmann::json& json, const std::string& file);

  /// Maps the UNet's weights: diffusion_pytorch_model.safetensors or model.safetensors, as
  /// Safetensors::OpenDirectory finds them.
  absl::StatusOr<Weights> OpenWeights() const;
};

}  // namespace denoised
