// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "engine/core/status.h"
#include "engine/images/pixels.h"

namespace denoised {

/// A baseline JPEG file; `quality` 1 to 100. Larger pictures are encoded in bands of rows, with the
/// same bytes on any threads.
absl::StatusOr<std::string> EncodeJpeg(const Pixels& pixels, int quality,
                                       const ParallelFor& parallel_for = OneByOne);

/// Grey or RGB, turned and mirrored as its EXIF says, as photos are stored as the camera was held.
/// A whole picture is read if the file is odd: a JFIF version other than 1, bytes between segments,
/// or zeros between the last scan and the end. Other bytes there may be what a damaged scan leaves.
/// InvalidArgument if it is CMYK, truncated or damaged as far as libjpeg notices, or has more than
/// `max_pixels` pixels or 64 scans, both of which are checked before it is unpacked.
absl::StatusOr<Pixels> DecodeJpeg(std::string_view file, int64_t max_pixels,
                                  const ReserveMemory& reserve = nullptr);

}  // namespace denoised
