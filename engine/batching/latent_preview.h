// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "engine/backend/backend.h"
#include "engine/models/codec.h"

namespace denoised {

/// Maps latents to colours by a linear function, for previews. Each latent pixel becomes one pixel,
/// so the picture is smaller by the codec's factor.
struct LatentPreview {
  // A colour has a number for each channel of images.
  std::vector<std::vector<float>> colours;  // of one unit of each latent channel
  std::vector<float> grey;                  // of latents that are zero

  /// Fits the function to what `codec` makes of flat latents: all zero, and each channel at 1 and
  /// at −1. Waits for the device.
  static absl::StatusOr<LatentPreview> Fit(Backend& backend, const Codec& codec);

  /// Host latents F32 [h, w, C] → F32 [h, w, image channels] in about [−1, 1].
  Tensor Draw(const Tensor& latents) const;
};

}  // namespace denoised
