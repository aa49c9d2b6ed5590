// SPDX-License-Identifier: Apache-2.0
#include "engine/images/exif.h"

#include <algorithm>

namespace denoised {

// By hand: no decoder reads EXIF, and libexif unpacks all other tags too, those of camera makers
// among them.
int ReadOrientation(std::string_view exif) {
  constexpr size_t kEntryBytes = 12;
  constexpr unsigned kOrientation = 0x0112, kShort = 3;
  const std::string_view tiff =
      exif.starts_with(kExifPrefix) ? exif.substr(kExifPrefix.size()) : exif;
  const bool little_endian = tiff.starts_with("II");
  if (!little_endian && !tiff.starts_with("MM")) return 1;
  const auto number = [&](size_t at, size_t size) {
    unsigned value = 0;
    if (at + size > tiff.size()) return value;
    for (size_t i = 0; i < size; ++i) {
      value =
          value << 8 | static_cast<unsigned char>(tiff[at + (little_endian ? size - 1 - i : i)]);
    }
    return value;
  };
  const size_t directory = number(4, 4), entries = number(directory, 2);
  for (size_t i = 0; i < entries; ++i) {
    const size_t entry = directory + 2 + i * kEntryBytes;
    if (number(entry, 2) != kOrientation || number(entry + 2, 2) != kShort) continue;
    const unsigned value = number(entry + 8, 2);
    return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
  }
  return 1;
}

Pixels Upright(Pixels stored, int orientation) {
  if (orientation == 1) return stored;
  const bool turned = orientation >= 5;  // what is stored as rows are columns
  const bool from_right =
      orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
  const bool from_bottom =
      orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  Pixels seen{turned ? stored.height : stored.width, turned ? stored.width : stored.height,
              stored.channels, std::vector<uint8_t>(stored.samples.size())};
  uint8_t* out = seen.samples.data();
  for (int y = 0; y < seen.height; ++y) {
    for (int x = 0; x < seen.width; ++x) {
      int row = turned ? x : y, column = turned ? y : x;
      if (from_bottom) row = stored.height - 1 - row;
      if (from_right) column = stored.width - 1 - column;
      const size_t at = (size_t(row) * stored.width + column) * stored.channels;
      out = std::copy_n(stored.samples.data() + at, stored.channels, out);
    }
  }
  return seen;
}

}  // namespace denoised
