// SPDX-License-Identifier: Apache-2.0
#include "engine/images/pixels.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "engine/core/each_isa.h"

namespace denoised {
namespace {

/// The source positions that one output position reads, and their weights.
class TriangleTaps {
 public:
  /// Scaling `from` positions to `to`, at the output position `i`.
  TriangleTaps(int from, int64_t to, int64_t i) {
    const double scale = static_cast<double>(from) / static_cast<double>(to);
    support_ = std::max(scale, 1.0);
    centre_ = (static_cast<double>(i) + 0.5) * scale;
    first_ = std::max(0, static_cast<int>(std::floor(centre_ - support_)));
    last_ = std::min(from - 1, static_cast<int>(std::ceil(centre_ + support_)));
    for (int j = first_; j <= last_; ++j) sum_ += Height(j);
  }

  int first() const { return first_; }
  int last() const { return last_; }
  /// The weight of source position `j`. All weights add up to 1.
  float Weight(int j) const { return static_cast<float>(Height(j) / sum_); }

 private:
  double Height(int j) const { return std::max(0.0, 1.0 - std::abs(j + 0.5 - centre_) / support_); }

  double support_, centre_, sum_ = 0;
  int first_, last_;
};

/// One direction of ResizePart: `from` positions are scaled to `to`, of which `count` are computed,
/// from `first` on.
struct Direction {
  int from;
  int64_t to, first;
  int count;

  TriangleTaps Taps(int i) const { return {from, to, first + i}; }
  /// The source positions that these read.
  int source_first() const { return Taps(0).first(); }
  int source_count() const { return Taps(count - 1).last() + 1 - source_first(); }
};

/// Filters the middle dimension of [outer, direction.source_count(), inner]. `stride` is that of
/// the middle dimension, `outer_stride` that of the outer one, in floats; inner elements are
/// adjacent.
Tensor FilterMiddle(const float* source, int64_t outer_stride, int64_t stride, int64_t outer,
                    const Direction& direction, int64_t inner) {
  const int to = direction.count, source_first = direction.source_first();
  Tensor out = Tensor::Host({outer, to, inner}, DType::kF32);
  float* target = out.as<float>();
  std::fill_n(target, out.elements(), 0.0f);
  // The weights of a long line would take more memory than the image: only a part is kept at once.
  std::array<float, 1024> weights;
  for (int i = 0; i < to; ++i) {
    const TriangleTaps taps = direction.Taps(i);
    for (int begin = taps.first(); begin <= taps.last();) {
      const int size = std::min<int>(weights.size(), taps.last() - begin + 1);
      for (int t = 0; t < size; ++t) weights[t] = taps.Weight(begin + t);
      for (int64_t o = 0; o < outer; ++o) {
        float* row = target + (o * to + i) * inner;
        for (int t = 0; t < size; ++t) {
          const float* from_row = source + o * outer_stride + (begin + t - source_first) * stride;
          for (int64_t c = 0; c < inner; ++c) row[c] += weights[t] * from_row[c];
        }
      }
      begin += size;
    }
  }
  return out;
}

DENOISED_EACH_ISA
void Quantise(const float* values, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = (values[i] + 1.0f) * 127.5f;
    // Written so that NaN fails the first comparison. lround() would give halves in fp32 other
    // bits. NOLINTNEXTLINE(bugprone-incorrect-roundings)
    out[i] = value > 0.0f ? static_cast<uint8_t>(std::min(value, 255.0f) + 0.5f) : 0;
  }
}

}  // namespace

absl::Status CheckSize(const char* format, int64_t width, int64_t height, int64_t max_pixels,
                       int64_t bytes_per_pixel, const ReserveMemory& reserve) {
  // Formats hold less than 2^31 pixels an edge, so the product fits.
  if (width * height > max_pixels) {
    return InvalidArgument("the {} has {}×{} pixels, but at most {} are accepted; scale it down",
                           format, width, height, max_pixels);
  }
  return reserve == nullptr ? absl::OkStatus() : reserve(width * height * bytes_per_pixel);
}

void OneByOne(int count, const std::function<void(int)>& task) {
  for (int i = 0; i < count; ++i) task(i);
}

std::vector<uint8_t> ToBytes(const Tensor& image, const ParallelFor& parallel_for) {
  const int64_t count = image.elements();
  std::vector<uint8_t> bytes(count);
  parallel_for(static_cast<int>((count + kTaskBytes - 1) / kTaskBytes), [&](int i) {
    const int64_t begin = i * kTaskBytes;
    Quantise(image.as<float>() + begin, std::min(kTaskBytes, count - begin), bytes.data() + begin);
  });
  return bytes;
}

Pixels ToPixels(const Tensor& image, const ParallelFor& parallel_for) {
  DENOISED_CHECK(image.shape().rank() == 3 && (image.dim(2) == 1 || image.dim(2) == 3), "shape {}",
                 image.shape().ToString());
  return {static_cast<int>(image.dim(1)), static_cast<int>(image.dim(0)),
          static_cast<int>(image.dim(2)), ToBytes(image, parallel_for)};
}

Tensor FromPixels(const Pixels& pixels, int channels) {
  DENOISED_CHECK(channels == 1 || channels == 3, "{} channels", channels);
  Tensor image = Tensor::Host({pixels.height, pixels.width, channels}, DType::kF32);
  float* out = image.as<float>();
  const int64_t count = int64_t{pixels.height} * pixels.width;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* in = pixels.samples.data() + i * pixels.channels;
    const auto unit = [](float sample) { return sample / 127.5f - 1.0f; };
    if (pixels.channels == 3 && channels == 1) {
      out[i] = unit(0.299f * in[0] + 0.587f * in[1] + 0.114f * in[2]);
    } else {
      for (int c = 0; c < channels; ++c) {
        out[i * channels + c] = unit(in[pixels.channels == 1 ? 0 : c]);
      }
    }
  }
  return image;
}

std::vector<uint8_t> OverWhite(const std::vector<uint8_t>& rgba, int channels) {
  std::vector<uint8_t> samples(rgba.size() / 4 * channels);
  for (size_t i = 0; i < rgba.size() / 4; ++i) {
    const int alpha = rgba[4 * i + 3];
    for (int c = 0; c < channels; ++c) {
      samples[channels * i + c] =
          static_cast<uint8_t>((rgba[4 * i + c] * alpha + 255 * (255 - alpha) + 127) / 255);
    }
  }
  return samples;
}

// By hand, since stb_image_resize, the distribution's only library for it, pads the edges with
// pixels that the image does not have, and may need far more memory between its two passes than
// both images.
Tensor Resize(const Tensor& image, int height, int width) {
  return ResizePart(image, height, width, 0, 0, height, width);
}

Tensor ResizePart(const Tensor& image, int64_t full_height, int64_t full_width, int64_t top,
                  int64_t left, int height, int width) {
  const Direction rows{static_cast<int>(image.dim(0)), full_height, top, height};
  const Direction columns{static_cast<int>(image.dim(1)), full_width, left, width};
  if (rows.from == full_height && columns.from == full_width && height == full_height &&
      width == full_width)
    return image;
  const int64_t channels = image.dim(2);
  const int64_t row = columns.from * channels, source_width = columns.source_count();
  const float* const source =
      image.as<float>() + rows.source_first() * row + columns.source_first() * channels;
  // The image between the two passes must not be large if neither the source nor the result is. It
  // would be if a line of 2^24 pixels became as wide as it is long. All parts have the same order.
  if (rows.from * full_width <= full_height * columns.from) {
    const Tensor wide = FilterMiddle(source, row, channels, rows.source_count(), columns, channels);
    return FilterMiddle(wide.as<float>(), 0, width * channels, 1, rows, width * channels)
        .Reshape({height, width, channels});
  }
  const Tensor high = FilterMiddle(source, 0, row, 1, rows, source_width * channels);
  return FilterMiddle(high.as<float>(), source_width * channels, channels, height, columns,
                      channels)
      .Reshape({height, width, channels});
}

Tensor FitWithin(const Tensor& image, int max_edge) {
  const int64_t height = image.dim(0), width = image.dim(1);
  const int64_t longest = std::max(height, width);
  if (longest <= max_edge) return image;
  const auto scaled = [&](int64_t edge) {
    return std::max<int>(1, static_cast<int>((edge * max_edge + longest / 2) / longest));
  };
  return Resize(image, scaled(height), scaled(width));
}

}  // namespace denoised
