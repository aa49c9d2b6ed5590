// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace denoised {

/// Pointwise non-linearities that ops fuse. A header of its own: device code includes it.
enum class Activation : uint8_t { kNone, kSilu, kMish, kGelu, kRelu };  // gelu: erf, not tanh

}  // namespace denoised
