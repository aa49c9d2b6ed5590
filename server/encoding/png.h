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

/// Keyword (1 to 79 printable Latin-1 characters) and text of one tEXt chunk.
using TextEntries = std::vector<std::pair<std::string, std::string>>;

/// A PNG file, 8 bits a sample, with `texts` as tEXt chunks.
absl::StatusOr<std::string> EncodePng(const Pixels& pixels, const TextEntries& texts);

/// Any PNG as 8-bit grey or RGB; transparency is shown over white. InvalidArgument when it is
/// damaged or has more than `max_pixels` pixels, which is known before anything is unpacked.
absl::StatusOr<Pixels> DecodePng(std::string_view file, int64_t max_pixels,
                                 const ReserveMemory& reserve = nullptr);

}  // namespace denoised
