// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// EDM's augmentation (Karras et al., arXiv 2206.00364, appendix F.2, table 6): geometric
/// transformations of the pictures. The network reads which were applied, so that it does not learn
/// to draw transformed pictures.

namespace denoised::training {

/// The numbers that the network reads for a sample: x-flip, y-flip, scaling, rotation (2),
/// anisotropy (2), translation (2). All are 0 for an unchanged picture, and when sampling.
constexpr int kAugmentLabels = 9;

struct Augmentation {
  float labels[kAugmentLabels] = {};
  /// Maps (x, y, 1) of a pixel of the result to (x, y) in the source, both relative to the centre.
  double inverse[2][3] = {{1, 0, 0}, {0, 1, 0}};
};

/// Draws the transformations of a sample. Each has `probability`, except the x-flip, which half of
/// the samples have, and the y-flip, which has half of it.
Augmentation PlanAugmentation(uint64_t seed, uint32_t step, uint32_t sample, double probability,
                              int64_t height, int64_t width);

/// `from` and `to` are [height, width, channels] and do not overlap. Bicubic (Catmull-Rom) at four
/// points per pixel; pictures are reflected at their borders. If there are only flips, pixels are
/// copied.
void Augment(const Augmentation& augmentation, const uint8_t* from, int64_t height, int64_t width,
             int64_t channels, uint8_t* to);

}  // namespace denoised::training
