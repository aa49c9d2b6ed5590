// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "engine/images/pixels.h"

/// EXIF in picture files: how a photo is to be turned.

namespace denoised {

/// What precedes EXIF in a JPEG's segment, and, against their standards, in some files of other
/// formats.
inline constexpr std::string_view kExifPrefix("Exif\0\0", 6);

/// The Orientation of EXIF (a TIFF header and what follows, with or without the prefix), 1 to 8; 1,
/// upright, where there is none.
int ReadOrientation(std::string_view exif);

/// The picture as it is to be seen, turned and mirrored by its orientation. Takes memory for a
/// second picture meanwhile.
Pixels Upright(Pixels stored, int orientation);

}  // namespace denoised
