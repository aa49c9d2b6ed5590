// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace denoised::command {

/// An image in memory: [height, width, channels], channels 1 (grey) or 3 (RGB).
struct Pixels {
  int width = 0, height = 0, channels = 1;
  std::vector<uint8_t> data;

  const uint8_t* at(int x, int y) const {
    return data.data() + (static_cast<size_t>(y) * width + x) * channels;
  }
  uint8_t* at(int x, int y) { return const_cast<uint8_t*>(std::as_const(*this).at(x, y)); }
};

/// All zero.
Pixels Blank(int width, int height, int channels);

/// Averages the pixels that fall together when it shrinks, repeats them when it grows. Width and
/// height >= 1. Not a library's: stb_image_resize, the only one in the distribution, blurs where
/// pixels are to be repeated, and the server's Resize makes floats smooth.
Pixels Resized(const Pixels& image, int width, int height);

/// A contact sheet: images in rows of `columns`, cells as large as the largest image, thin lines
/// between them. RGB when one of the images is. At least one image.
Pixels ContactSheet(std::span<const Pixels> images, int columns);

}  // namespace denoised::command
