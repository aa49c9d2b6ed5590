// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/models/codec.h"

namespace denoised {

/// The latents of images, as image to image begins with them; `noise` may be undefined.
inline Tensor EncodeLatents(const Codec& codec, nn::Context& context, const Tensor& pixels,
                            const Tensor& noise) {
  const Tensor encoded = codec.Encode(context, pixels);
  Tensor latents = context.NewF32(
      {encoded.dim(0), encoded.dim(1), encoded.dim(2), codec.traits().latent_channels});
  codec.SampleLatents(context.ops, {.encoded = encoded, .noise = noise, .out = latents});
  return latents;
}

}  // namespace denoised
