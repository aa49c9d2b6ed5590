// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/nn/layers.h"

namespace denoised {

struct CodecTraits {
  int image_channels = 3;
  int latent_channels = 4;
  int factor = 8;       // pixels a latent pixel stands for, along each edge
  bool encodes = true;  // it has an encoder
  int64_t parameters = 0;
};

/// A network that turns latents into pixels and back: diffusers' AutoencoderKL, AutoencoderTiny,
/// VQModel. Latents are as samplers see them: scaled, of about unit variance. Immutable. Rows do
/// not depend on each other.
class Codec {
 public:
  virtual ~Codec() = default;
  virtual const CodecTraits& traits() const = 0;
  /// latents F32 [N, h, w, latent_channels] → F32 [N, h·factor, w·factor, image_channels],
  /// nominally in [−1, 1], not clipped.
  virtual Tensor Decode(nn::Context& context, const Tensor& latents) const = 0;
  /// pixels F32 [N, H, W, image_channels] in [−1, 1], edges multiples of `factor` → F32 latents.
  /// Where the encoder predicts a distribution, the latents are its mean plus its standard
  /// deviation times `noise`, F32 of the latents' shape; undefined: the mean. Only if it encodes.
  virtual Tensor Encode(nn::Context& context, const Tensor& pixels, const Tensor& noise) const = 0;
  /// The mean alone, in the scale of the network, as InstructPix2Pix reads it.
  virtual Tensor EncodeUnscaled(nn::Context& context, const Tensor& pixels) const = 0;
};

}  // namespace denoised
