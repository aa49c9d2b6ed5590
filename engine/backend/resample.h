// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace denoised {

/// Resampling by two, for blocks that resample without a convolution.
enum class Resample : uint8_t {
  kNearestUp,  // to 2n, or to 2n − 1 without the last line
  kAveragePoolDown,
  // With the filter (1, 3, 3, 1) / 8 along each edge, zeros outside: diffusers' upfirdn2d with its
  // gain. Rows and columns of `out`:
  kFirUp,    // out[2i] = (x[i − 1] + 3·x[i]) / 4, out[2i + 1] = (3·x[i] + x[i + 1]) / 4
  kFirDown,  // out[i] = (x[2i − 1] + 3·x[2i] + 3·x[2i + 1] + x[2i + 2]) / 8
};
constexpr bool Doubles(Resample kind) {
  return kind == Resample::kNearestUp || kind == Resample::kFirUp;
}
/// With the same filter, the other way. All filters are symmetric, so for even edges the transpose
/// of doubling is 4 times its opposite, and that of halving a fourth of it.
constexpr Resample Opposite(Resample kind) {
  switch (kind) {
    case Resample::kNearestUp:
      return Resample::kAveragePoolDown;
    case Resample::kAveragePoolDown:
      return Resample::kNearestUp;
    case Resample::kFirUp:
      return Resample::kFirDown;
    case Resample::kFirDown:
      return Resample::kFirUp;
  }
  return kind;
}

}  // namespace denoised
