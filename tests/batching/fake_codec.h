// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/models/codec.h"

namespace denoised {

/// Doubles latents into pixels, and halves pixels into latents; nothing else in a simulation
/// resamples, so a test may say what they cost (SimulatedBackend::decode_cost, encode_cost).
/// Latents that are huge, beyond about 3e26, become infinite pixels, though they are finite; the
/// others keep their bits.
class FakeCodec final : public Codec {
 public:
  explicit FakeCodec(int channels, bool encodes = false) {
    traits_ = {.image_channels = channels,
               .latent_channels = channels,
               .factor = 2,
               .encoded_channels = encodes ? channels : 0};
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
  Tensor Encode(nn::Context& context, const Tensor& pixels) const override {
    const Tensor latents =
        context.NewF32({pixels.dim(0), pixels.dim(1) / 2, pixels.dim(2) / 2, pixels.dim(3)});
    context.ops.Resample2x(Resample::kAveragePoolDown, pixels, latents);
    return latents;
  }
  /// As from a distribution of width 1.
  void SampleLatents(NetworkOps& ops, const SampleLatentsArgs& args) const override {
    ops.Add(args.encoded, 1.0f, args.noise, 0.0f, Activation::kNone, args.out);
  }

 private:
  CodecTraits traits_;
};

}  // namespace denoised
