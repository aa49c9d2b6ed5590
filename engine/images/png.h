// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/core/status.h"
#include "engine/images/pixels.h"

namespace denoised {

/// Keyword (1 to 79 printable Latin-1 characters) and text, UTF-8.
using TextEntries = std::vector<std::pair<std::string, std::string>>;

/// A PNG file, 8 bits a sample, with `texts` as tEXt chunks, or as iTXt where they are more than
/// printable ASCII. Bands of rows are compressed by `parallel_for`, whose threads do not affect the
/// bytes.
absl::StatusOr<std::string> EncodePng(const Pixels& pixels, const TextEntries& texts,
                                      const ParallelFor& parallel_for = OneByOne);

/// The peak memory of the decoders: unpacked samples, up to RGBA, and the samples that it returns.
inline constexpr int64_t kPngDecodingBytesPerPixel = 4 + 3;

/// Any PNG as 8-bit grey or RGB, turned as its EXIF says. InvalidArgument if it is damaged, or has
/// more than `max_pixels` pixels, which is checked before it is unpacked.
absl::StatusOr<Pixels> DecodePng(std::string_view file, int64_t max_pixels,
                                 const ReserveMemory& reserve = nullptr,
                                 Alpha alpha = Alpha::kOverWhite);

/// How transparent a PNG is, as a grey picture, turned like the PNG: 255 where it is fully
/// transparent, 0 where it is opaque. InvalidArgument as DecodePng's, and if it has neither an
/// alpha channel nor a tRNS chunk.
absl::StatusOr<Pixels> DecodePngTransparency(std::string_view file, int64_t max_pixels,
                                             const ReserveMemory& reserve = nullptr);

}  // namespace denoised
