// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// EDM's augmentation (Karras et al., arXiv 2206.00364, appendix F.2, table 6): geometric
/// transformations of the pictures, of which the network is told, so that it does not draw them.

namespace denoised::training {

/// The numbers that the network reads of a sample: x-flip, y-flip, scaling, rotation (2),
/// anisotropy (2), translation (2). All are 0 of a picture that is as it was, and when sampling.
constexpr int kAugmentLabels = 9;

struct Augmentation {
  float labels[kAugmentLabels] = {};
  /// From a pixel of the result to one of the source, both counted from the middle: x, y and 1 to
  /// x, y.
  double inverse[2][3] = {{1, 0, 0}, {0, 1, 0}};
};

/// What happens to a sample; each transformation but the x-flip, which half of the samples have,
/// has `probability`.
Augmentation PlanAugmentation(uint64_t seed, uint32_t step, uint32_t sample, double probability,
                              int64_t height, int64_t width);

/// `from` and `to` are [height, width, channels] and do not overlap. Bicubic (Catmull-Rom), four
/// samples a pixel, pictures reflected at their borders. Flips alone copy pixels.
void Augment(const Augmentation& augmentation, const uint8_t* from, int64_t height, int64_t width,
             int64_t channels, uint8_t* to);

}  // namespace denoised::training
