// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace denoised {

/// Pointwise non-linearities that ops fuse. A header of its own: device code includes it.
/// kGelu is exact (erf); kQuickGelu is CLIP's x·σ(1.702 x).
enum class Activation : uint8_t { kNone, kSilu, kMish, kGelu, kRelu, kQuickGelu, kTanh };

}  // namespace denoised
