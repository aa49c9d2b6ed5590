// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "engine/training/autoencoder_kl.h"

namespace denoised::training {

/// An autoencoder's weights by checkpoint name, on the host.
using AutoencoderWeights = std::map<std::string, Tensor>;
/// NotFound or InvalidArgument as Weights::Get().
absl::StatusOr<AutoencoderWeights> ReadAutoencoder(const AutoencoderKLConfig& config,
                                                   const Weights& weights);

/// What an autoencoder that is not trained any more makes of pictures, U8 [M, H, W, C]: F32 [M,
/// H / factor, W / factor, 2 · latent_channels] on the host, mean before deviation, scaled as the
/// network over latents reads them. With `mirrored` the pictures, mirrored left to right, follow:
/// [2M, …]. InvalidArgument if the edges are no multiples of the factor.
absl::StatusOr<Tensor> EncodePosteriors(Backend& backend, const AutoencoderKLConfig& config,
                                        const AutoencoderWeights& weights, const Tensor& pictures,
                                        bool mirrored);

/// Folds mean and deviation of each latent channel over `pictures` (U8 [M, H, W, C]) into the 1×1
/// convolutions beside, so that latents have mean 0 and variance 1 where scaling_factor is 1.
/// InvalidArgument without quant_conv and post_quant_conv.
absl::Status StandardizeLatents(Backend& backend, const AutoencoderKLConfig& config,
                                const Tensor& pictures, AutoencoderWeights* weights);

}  // namespace denoised::training
