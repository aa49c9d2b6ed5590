// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/core/status.h"
#include "server/encoding/pixels.h"

namespace denoised {

/// Keyword (1 to 79 printable Latin-1 characters) and text, UTF-8.
using TextEntries = std::vector<std::pair<std::string, std::string>>;

/// A PNG file, 8 bits a sample, with `texts` as tEXt chunks, or as iTXt where they are more than
/// printable ASCII.
absl::StatusOr<std::string> EncodePng(const Pixels& pixels, const TextEntries& texts);

/// Memory that DecodePng takes at most: samples as they are unpacked, up to RGBA, and as they are
/// returned.
inline constexpr int64_t kPngDecodingBytesPerPixel = 4 + 3;

/// Any PNG as 8-bit grey or RGB; transparency is shown over white. InvalidArgument when it is
/// damaged or has more than `max_pixels` pixels, which is known before anything is unpacked.
absl::StatusOr<Pixels> DecodePng(std::string_view file, int64_t max_pixels,
                                 const ReserveMemory& reserve = nullptr);

}  // namespace denoised
