// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "engine/core/precision.h"
#include "engine/core/status.h"
#include "engine/io/weights.h"

namespace denoised {

/// Of requests, and so of a model's own default.
constexpr double kMaxGuidanceScale = 100;

/// The contents of a diffusers model directory, not yet interpreted. Two layouts:
///
///   pipeline  model_index.json, a folder for each component that it names (unet/ {config.json,
///             weights}, scheduler/ {scheduler_config.json}, vae/, text_encoder/, tokenizer/, …);
///             components may also lie beside model_index.json, as in early published models
///   model     config.json of a UNet2DModel, weights, and perhaps scheduler_config.json
///
/// A pipeline may have one part that its index does not name: vae_tiny/, an AutoencoderTiny for
/// previews.
///
/// A plain value; copy and share it freely.
struct ModelDirectory {
  /// The name of the part for previews.
  static constexpr const char* kTinyVae = "vae_tiny";

  /// A part of the pipeline other than the scheduler.
  struct Component {
    std::string class_name;   // from the index, or else from the config: "UNet2DModel"
    std::string directory;    // where its files are
    std::string config_file;  // path of config.json, for messages
    nlohmann::json config;    // null for tokenizers, which have none

    /// Maps its weights: diffusion_pytorch_model.safetensors or model.safetensors, as
    /// Safetensors::OpenDirectory finds them.
    absl::StatusOr<Weights> OpenWeights() const;
  };

  std::string root;
  nlohmann::json index;                         // model_index.json; null without one
  std::string pipeline_class;                   // the index's _class_name; empty without one
  std::map<std::string, Component> components;  // by name: "unet" always, "vae", …

  std::optional<nlohmann::json> scheduler_config;  // with the index's _class_name, if it has one
  std::string scheduler_config_file;

  /// model_index.json's id2label: class → text, contiguous from 0; empty when there is none.
  std::map<int, std::string> labels;

  /// Of Stable Diffusion XL's pipelines: without a negative text, zeros take the place of its
  /// states.
  std::optional<bool> force_zeros_for_empty_prompt;

  // model_index.json's "_denoised", our own object; diffusers ignores fields that begin with '_'.
  int null_class = -1;    // the class that stands for "no condition"; −1: none, so no guidance
  int default_steps = 0;  // 0: the sampler's own default
  std::optional<double> default_guidance_scale;  // unset: the pipeline class's own
  Precision precision = Precision::kDefault;     // of the denoiser

  /// NotFound if a file is missing, InvalidArgument if a field is not supported. The message names
  /// file, field, value and remedy.
  static absl::StatusOr<ModelDirectory> Read(const std::string& root);

  /// Fills index, labels and the fields of _denoised from a model_index.json's content. `file`
  /// appears in messages.
  absl::Status ParseIndex(const nlohmann::json& json, const std::string& file);

  const Component& unet() const { return components.at("unet"); }
};

}  // namespace denoised
