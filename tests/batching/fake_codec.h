// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/models/codec.h"

namespace denoised {

/// Doubles latents into pixels; nothing else in a simulation resamples, so a test may say what
/// decoding costs (SimulatedBackend::decode_cost).
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
    return pixels;
  }
  Tensor Encode(nn::Context&, const Tensor&, const Tensor&) const override { return {}; }
  Tensor EncodeUnscaled(nn::Context&, const Tensor&) const override { return {}; }

 private:
  CodecTraits traits_;
};

}  // namespace denoised
