// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "engine/models/vae.h"

namespace denoised {

/// The config.json of diffusers' VQModel. Names and defaults are diffusers' own
/// (models/autoencoders/vq_model.py).
struct VQModelConfig {
  VaeConfig vae;
  int num_vq_embeddings = 256;
  int vq_embed_dim = 3;  // latent_channels when the file has none

  /// Refuses, by name, what cannot be honoured. `file` appears in messages.
  static absl::StatusOr<VQModelConfig> Parse(const nlohmann::json& config, const std::string& file);
};

/// diffusers' VQModel: decoding first replaces every latent pixel by the nearest code of a book.
/// Latents have vq_embed_dim channels. Encoding gives them before that, and reads no noise.
/// InvalidArgument or NotFound name the tensor and both shapes when the weights do not fit.
absl::StatusOr<std::unique_ptr<Codec>> LoadVQModel(NetworkOps& ops, const VQModelConfig& config,
                                                   const Weights& weights);

}  // namespace denoised
