// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/models/codec.h"

namespace denoised {

/// Colours of latents by a linear function, for previews: each latent pixel becomes one pixel of a
/// picture that is smaller by the codec's factor.
struct LatentPreview {
  std::vector<std::array<float, 3>> colours;  // of one unit of each latent channel
  std::array<float, 3> grey = {};             // of latents that are zero

  /// What `codec` decodes flat latents into: all zero, and each channel one above and below zero.
  /// Waits for the device. For codecs that decode into RGB; a grey image's colour is repeated.
  static absl::StatusOr<LatentPreview> Fit(Backend& backend, const Codec& codec);

  /// Host latents F32 [h, w, C] → F32 [h, w, image channels] in about [−1, 1].
  Tensor Draw(const Tensor& latents) const;

  int image_channels = 3;
};

}  // namespace denoised
