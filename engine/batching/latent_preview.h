// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/models/codec.h"

namespace denoised {

/// Maps latents to colours by a linear function, for previews. Each latent pixel becomes one pixel,
/// so the picture is smaller by the codec's factor.
struct LatentPreview {
  std::vector<std::array<float, 3>> colours;  // of one unit of each latent channel
  std::array<float, 3> grey = {};             // of latents that are zero

  /// Fits the function to what `codec` makes of flat latents: all zero, and each channel at 1 and
  /// at −1. Waits for the device. For codecs that decode into RGB or grey, which is repeated.
  static absl::StatusOr<LatentPreview> Fit(Backend& backend, const Codec& codec);

  /// Host latents F32 [h, w, C] → F32 [h, w, image channels] in about [−1, 1].
  Tensor Draw(const Tensor& latents) const;

  int image_channels = 3;
};

}  // namespace denoised
