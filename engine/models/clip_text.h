// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "engine/models/text_encoder.h"

namespace denoised {

/// The config.json of transformers' CLIPTextModel and CLIPTextModelWithProjection. Names and
/// defaults are transformers' own (models/clip/configuration_clip.py).
struct ClipTextConfig {
  bool with_projection = false;  // the class is CLIPTextModelWithProjection
  int vocab_size = 49408;
  int hidden_size = 512;
  int intermediate_size = 2048;
  int projection_dim = 512;
  int num_hidden_layers = 12;
  int num_attention_heads = 8;
  int max_position_embeddings = 77;
  Activation hidden_act = Activation::kQuickGelu;
  double layer_norm_eps = 1e-5;
  int eos_token_id = 49407;

  bool operator==(const ClipTextConfig&) const = default;
  /// `class_name` is the class that the pipeline names for this directory. Refuses, by name, what
  /// cannot be honoured. `file` appears in messages.
  static absl::StatusOr<ClipTextConfig> Parse(const nlohmann::json& config, const std::string& file,
                                              const std::string& class_name);
};

/// CLIP's text transformer. Reads the tensors of both naming schemes: with "text_model." in front,
/// as published files have it, and without, as transformers 5.6 and later save a CLIPTextModel.
/// Pooled is text_projection of the state at the end token, or that state where the class has no
/// projection. InvalidArgument or NotFound name the tensor and both shapes when the weights do not
/// fit.
absl::StatusOr<std::unique_ptr<TextEncoder>> LoadClipText(NetworkOps& ops,
                                                          const ClipTextConfig& config,
                                                          const Weights& weights);

}  // namespace denoised
