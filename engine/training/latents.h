// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <map>
#include <string>

#include "engine/training/autoencoder_kl.h"

namespace denoised::training {

/// An autoencoder's weights by checkpoint name, on the host.
using AutoencoderWeights = std::map<std::string, Tensor>;
/// NotFound or InvalidArgument as Weights::Get().
absl::StatusOr<AutoencoderWeights> ReadAutoencoder(const AutoencoderKLConfig& config,
                                                   const Weights& weights);

/// Encodes pictures, U8 [M, H, W, C], with an autoencoder that is no longer trained: F32 [M,
/// H / factor, W / factor, 2 · latent_channels] on the host, mean before deviation, scaled as the
/// network over latents reads them. With `mirrored` the pictures, mirrored left to right, follow:
/// [2M, …]. InvalidArgument if the edges are no multiples of the factor, Cancelled soon after
/// `stop` becomes true.
absl::StatusOr<Tensor> EncodePosteriors(Backend& backend, const AutoencoderKLConfig& config,
                                        const AutoencoderWeights& weights, const Tensor& pictures,
                                        bool mirrored, const std::atomic<bool>* stop = nullptr);

/// The memory that encoding takes on the device, for pictures of this shape, without scratch memory
/// of ops. Errors as EncodePosteriors().
absl::StatusOr<size_t> EncodingBytes(const Backend& backend, const AutoencoderKLConfig& config,
                                     const Shape& pictures, bool mirrored);

/// Measures mean and deviation of each latent channel over `pictures` (U8 [M, H, W, C]) and folds
/// them into quant_conv and post_quant_conv, so that with scaling_factor 1 latents have mean 0 and
/// variance 1. InvalidArgument if the autoencoder lacks these convolutions, FailedPrecondition if a
/// channel has no finite mean and deviation.
absl::Status StandardizeLatents(Backend& backend, const AutoencoderKLConfig& config,
                                const Tensor& pictures, AutoencoderWeights* weights);

}  // namespace denoised::training
