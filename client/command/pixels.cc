// SPDX-License-Identifier: Apache-2.0
#include "command/pixels.h"

#include <algorithm>

namespace denoised::command {
namespace {

constexpr int kGap = 1;             // pixels between cells
constexpr uint8_t kGapColour = 64;  // visible beside black and beside white

void Paste(const Pixels& image, int left, int top, Pixels& sheet) {
  for (int y = 0; y < image.height; ++y) {
    for (int x = 0; x < image.width; ++x) {
      const uint8_t* from = image.at(x, y);
      uint8_t* to = sheet.at(left + x, top + y);
      for (int c = 0; c < sheet.channels; ++c) to[c] = from[image.channels == 1 ? 0 : c];
    }
  }
}

}  // namespace

Pixels Blank(int width, int height, int channels) {
  return {width, height, channels,
          std::vector<uint8_t>(static_cast<size_t>(width) * height * channels)};
}

Pixels Resized(const Pixels& image, int width, int height) {
  Pixels resized = Blank(width, height, image.channels);
  const auto begin = [](int64_t i, int from, int to) { return static_cast<int>(i * from / to); };
  for (int y = 0; y < height; ++y) {
    const int y0 = begin(y, image.height, height);
    const int y1 = std::max(y0 + 1, begin(y + 1, image.height, height));
    for (int x = 0; x < width; ++x) {
      const int x0 = begin(x, image.width, width);
      const int x1 = std::max(x0 + 1, begin(x + 1, image.width, width));
      for (int c = 0; c < image.channels; ++c) {
        int64_t sum = 0;
        for (int v = y0; v < y1; ++v) {
          for (int u = x0; u < x1; ++u) sum += image.at(u, v)[c];
        }
        const int64_t area = int64_t{y1 - y0} * (x1 - x0);
        resized.at(x, y)[c] = static_cast<uint8_t>((sum + area / 2) / area);
      }
    }
  }
  return resized;
}

Pixels ContactSheet(std::span<const Pixels> images, int columns) {
  int width = 0, height = 0, channels = 1;
  for (const Pixels& image : images) {
    width = std::max(width, image.width);
    height = std::max(height, image.height);
    channels = std::max(channels, image.channels);
  }
  const int rows = (static_cast<int>(images.size()) + columns - 1) / columns;
  Pixels sheet = Blank(columns * (width + kGap) - kGap, rows * (height + kGap) - kGap, channels);
  std::fill(sheet.data.begin(), sheet.data.end(), kGapColour);
  for (int cell = 0; cell < rows * columns; ++cell) {
    const int left = cell % columns * (width + kGap), top = cell / columns * (height + kGap);
    Paste(Blank(width, height, 1), left, top, sheet);
    if (cell < static_cast<int>(images.size())) Paste(images[cell], left, top, sheet);
  }
  return sheet;
}

}  // namespace denoised::command
