// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/models/codec.h"

namespace denoised {

/// Doubles latents into pixels; nothing else in a simulation resamples, so a test may say what
/// decoding costs (SimulatedBackend::decode_cost). Latents that are huge, beyond about 3e26, become
/// infinite pixels, though they are finite; the others keep their bits.
class FakeCodec final : public Codec {
 public:
  explicit FakeCodec(int channels) {
    traits_ = {.image_channels = channels, .latent_channels = channels, .factor = 2};
    traits_.encodes = false;
  }
  const CodecTraits& traits() const override { return traits_; }
  Tensor Decode(nn::Context& context, const Tensor& latents) const override {
    const Tensor pixels =
        context.NewF32({latents.dim(0), 2 * latents.dim(1), 2 * latents.dim(2), latents.dim(3)});
    context.ops.Resample2x(Resample::kNearestUp, latents, pixels);
    const Tensor large = context.NewF32(pixels.shape()), out = context.NewF32(pixels.shape());
    context.ops.Add(pixels, 0x1p40f, Tensor(), 0.0f, Activation::kNone, large);
    context.ops.Add(large, 0x1p-40f, Tensor(), 0.0f, Activation::kNone, out);
    return out;
  }
  Tensor Encode(nn::Context&, const Tensor&, const Tensor&) const override { return {}; }
  Tensor EncodeUnscaled(nn::Context&, const Tensor&) const override { return {}; }

 private:
  CodecTraits traits_;
};

}  // namespace denoised
