// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "engine/core/status.h"
#include "server/encoding/pixels.h"

namespace denoised {

/// A baseline JPEG file; `quality` 1 to 100.
absl::StatusOr<std::string> EncodeJpeg(const Pixels& pixels, int quality);

/// Grey or RGB. InvalidArgument when it is damaged, truncated or CMYK, or has more than
/// `max_pixels` pixels or more than 64 scans, which is known before anything is unpacked.
absl::StatusOr<Pixels> DecodeJpeg(std::string_view file, int64_t max_pixels,
                                  const ReserveMemory& reserve = nullptr);

}  // namespace denoised
