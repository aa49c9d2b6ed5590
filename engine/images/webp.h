// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "engine/core/status.h"
#include "engine/images/pixels.h"

namespace denoised {

/// The longest edge that the format can hold.
constexpr int kMaxWebpEdge = 16383;

/// A lossy WebP file; `quality` 1 to 100.
absl::StatusOr<std::string> EncodeWebp(const Pixels& pixels, int quality);

/// RGB, turned as its EXIF says. InvalidArgument if it is damaged or animated, or has more than
/// `max_pixels` pixels, which is checked before it is unpacked.
absl::StatusOr<Pixels> DecodeWebp(std::string_view file, int64_t max_pixels,
                                  const ReserveMemory& reserve = nullptr,
                                  Alpha alpha = Alpha::kOverWhite);

}  // namespace denoised
