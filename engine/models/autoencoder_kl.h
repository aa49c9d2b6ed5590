// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/models/vae.h"

namespace denoised {

/// The config.json of diffusers' AutoencoderKL. Names and defaults are diffusers' own
/// (models/autoencoders/autoencoder_kl.py).
struct AutoencoderKLConfig {
  VaeConfig vae;
  double shift_factor = 0;
  std::vector<double> latents_mean, latents_std;  // empty, or one for each latent channel
  bool use_quant_conv = true, use_post_quant_conv = true;

  bool operator==(const AutoencoderKLConfig&) const = default;
  /// Refuses, by name, what cannot be honoured. `file` appears in messages.
  static absl::StatusOr<AutoencoderKLConfig> Parse(const nlohmann::json& config,
                                                   const std::string& file);
};

/// diffusers' AutoencoderKL. Reads today's names of its attention and those before diffusers 0.18.
/// Latents are (z − mean) / std · scaling_factor, where mean is latents_mean or shift_factor and
/// std is latents_std or one. InvalidArgument or NotFound name the tensor and both shapes when the
/// weights do not fit.
absl::StatusOr<std::unique_ptr<Codec>> LoadAutoencoderKL(NetworkOps& ops,
                                                         const AutoencoderKLConfig& config,
                                                         const Weights& weights);

}  // namespace denoised
