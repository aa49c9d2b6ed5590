// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "engine/core/status.h"
#include "server/encoding/pixels.h"

namespace denoised {

/// The longest edge that the format can hold.
constexpr int kMaxWebpEdge = 16383;

/// A lossy WebP file; `quality` 1 to 100.
absl::StatusOr<std::string> EncodeWebp(const Pixels& pixels, int quality);

/// RGB; transparency is shown over white. InvalidArgument when it is damaged, animated, or has more
/// than `max_pixels` pixels, which is known before anything is unpacked.
absl::StatusOr<Pixels> DecodeWebp(std::string_view file, int64_t max_pixels,
                                  const ReserveMemory& reserve = nullptr);

}  // namespace denoised
