// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/models/codec.h"

namespace denoised {

/// The config.json of diffusers' AutoencoderTiny. Names and defaults are diffusers' own
/// (models/autoencoders/autoencoder_tiny.py).
struct AutoencoderTinyConfig {
  int in_channels = 3, out_channels = 3;
  std::vector<int> encoder_block_out_channels = {64, 64, 64, 64};
  std::vector<int> decoder_block_out_channels = {64, 64, 64, 64};
  Activation activation = Activation::kRelu;  // act_fn
  int latent_channels = 4;
  std::vector<int> num_encoder_blocks = {1, 3, 3, 3};
  std::vector<int> num_decoder_blocks = {3, 3, 3, 1};
  double scaling_factor = 1, shift_factor = 0;

  /// Refuses, by name, what cannot be honoured. `file` appears in messages.
  static absl::StatusOr<AutoencoderTinyConfig> Parse(const nlohmann::json& config,
                                                     const std::string& file);
};

/// diffusers' AutoencoderTiny (TAESD): convolutions and ReLUs, distilled from an AutoencoderKL.
/// Encoding gives one latent, not a distribution, and reads no noise. InvalidArgument or NotFound
/// name the tensor and both shapes when the weights do not fit.
absl::StatusOr<std::unique_ptr<Codec>> LoadAutoencoderTiny(NetworkOps& ops,
                                                           const AutoencoderTinyConfig& config,
                                                           const Weights& weights);

}  // namespace denoised
