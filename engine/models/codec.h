// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/nn/layers.h"

namespace denoised {

struct CodecTraits {
  int image_channels = 3;
  int latent_channels = 4;
  int factor = 8;            // pixels a latent pixel stands for, along each edge
  int encoded_channels = 0;  // of what Encode() returns; 0: it has no encoder
  int64_t parameters = 0;

  bool encodes() const { return encoded_channels > 0; }
};

struct SampleLatentsArgs {
  Tensor encoded;  // of Codec::Encode()
  Tensor noise;  // optional F32 of the latents' shape, standard normal: of a distribution the mean
                 // plus the standard deviation times it; undefined: the mean
  bool unscaled = false;  // in the scale of the network, as InstructPix2Pix reads them
  Tensor out;
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
  /// pixels F32 [N, H, W, image_channels] in [−1, 1], edges multiples of `factor` → what the
  /// encoder predicts, F32 [N, h, w, encoded_channels]: latents, or means and variances of them.
  /// Only if it encodes.
  virtual Tensor Encode(nn::Context& context, const Tensor& pixels) const = 0;
  /// Latents from what Encode() predicts, into F32 [N, h, w, latent_channels].
  virtual void SampleLatents(NetworkOps& ops, const SampleLatentsArgs& args) const = 0;
};

}  // namespace denoised
