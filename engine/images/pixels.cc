// SPDX-License-Identifier: Apache-2.0
#include "engine/images/pixels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "engine/core/each_isa.h"

namespace denoised {
namespace {

double Triangle(double x) { return std::max(0.0, 1.0 - std::abs(x)); }

/// Of three lobes.
double Lanczos(double x) {
  if (x == 0) return 1;
  if (std::abs(x) >= 3) return 0;
  const double angle = std::numbers::pi * x;
  return 3 * std::sin(angle) * std::sin(angle / 3) / (angle * angle);
}

/// The source positions that one output position reads, and their weights.
class Taps {
 public:
  /// Scaling `from` positions to `to`, at the output position `i`.
  Taps(ResizeFilter filter, int from, int64_t to, int64_t i)
      : filter_(filter == ResizeFilter::kLanczos ? Lanczos : Triangle) {
    const double scale = static_cast<double>(from) / static_cast<double>(to);
    width_ = std::max(scale, 1.0);
    const double support = width_ * (filter == ResizeFilter::kLanczos ? 3 : 1);
    centre_ = (static_cast<double>(i) + 0.5) * scale;
    first_ = std::max(0, static_cast<int>(std::floor(centre_ - support)));
    last_ = std::min(from - 1, static_cast<int>(std::ceil(centre_ + support)));
    while (first_ < last_ && Height(first_) == 0) ++first_;
    while (last_ > first_ && Height(last_) == 0) --last_;
    for (int j = first_; j <= last_; ++j) sum_ += Height(j);
  }

  int first() const { return first_; }
  int last() const { return last_; }
  /// The weight of source position `j`. All weights add up to 1.
  float Weight(int j) const { return static_cast<float>(Height(j) / sum_); }

 private:
  double Height(int j) const { return filter_((j + 0.5 - centre_) / width_); }

  double (*filter_)(double);
  double width_, centre_, sum_ = 0;
  int first_, last_;
};

/// One direction of ResizePart: `from` positions are scaled to `to`, of which `count` are computed,
/// from `first` on.
struct Direction {
  ResizeFilter filter;
  int from;
  int64_t to, first;
  int count;

  Taps TapsOf(int i) const { return {filter, from, to, first + i}; }
  /// The source positions that these read.
  int source_first() const { return TapsOf(0).first(); }
  int source_count() const { return TapsOf(count - 1).last() + 1 - source_first(); }
};

constexpr float kUnbounded = std::numeric_limits<float>::infinity();

/// What FilterMiddle() reads and writes: [outer, positions, inner] floats. `stride` is that of the
/// positions, `outer_stride` that of the outer dimension; inner elements are adjacent. Results are
/// clipped to [−bound, bound].
struct Middle {
  const float* source;
  float* target;
  int64_t outer_stride, stride, inner;
  float bound;
};

/// Filters lines [outer_first, outer_last) at output positions [first, last). kInner: the inner
/// elements, if known at compile time, else 0.
template <int kInner>
void FilterPart(const Middle& of, const Direction& direction, int64_t outer_first,
                int64_t outer_last, int first, int last) {
  const int to = direction.count, source_first = direction.source_first();
  const int64_t inner = kInner > 0 ? kInner : of.inner;
  for (int64_t o = outer_first; o < outer_last; ++o)
    std::fill(of.target + (o * to + first) * inner, of.target + (o * to + last) * inner, 0.0f);
  // The weights of a long line would take more memory than the image: only some are kept at once,
  // those of several outputs or of a part of one. A line is read from its beginning to its end,
  // since lines lie whole kilobytes apart and would fight for few places of a cache.
  struct Run {
    int i, begin, size;  // output position, source positions
  };
  std::array<float, 1024> weights;
  std::vector<Run> runs;
  int kept = 0;
  const auto filter = [&] {
    for (int64_t o = outer_first; o < outer_last; ++o) {
      const float* weight = weights.data();
      for (const Run& run : runs) {
        float* row = of.target + (o * to + run.i) * inner;
        const float* from =
            of.source + o * of.outer_stride + (run.begin - source_first) * of.stride;
        for (int t = 0; t < run.size; ++t, ++weight, from += of.stride)
          for (int64_t c = 0; c < inner; ++c) row[c] += *weight * from[c];
      }
    }
    runs.clear();
    kept = 0;
  };
  for (int i = first; i < last; ++i) {
    const Taps taps = direction.TapsOf(i);
    for (int begin = taps.first(); begin <= taps.last();) {
      const int room = static_cast<int>(weights.size()) - kept;
      const int size = std::min(room, taps.last() - begin + 1);
      for (int t = 0; t < size; ++t) weights[kept + t] = taps.Weight(begin + t);
      runs.push_back({i, begin, size});
      begin += size;
      kept += size;
      if (kept == static_cast<int>(weights.size())) filter();
    }
  }
  filter();
  if (of.bound == kUnbounded) return;
  for (int64_t o = outer_first; o < outer_last; ++o) {
    for (int64_t i = (o * to + first) * inner; i < (o * to + last) * inner; ++i)
      of.target[i] = std::clamp(of.target[i], -of.bound, of.bound);
  }
}

/// Filters the middle dimension of [outer, direction.source_count(), inner].
Tensor FilterMiddle(const float* source, int64_t outer_stride, int64_t stride, int64_t outer,
                    const Direction& direction, int64_t inner, float bound,
                    const ParallelFor& parallel_for) {
  const int to = direction.count;
  Tensor out = Tensor::Host({outer, to, inner}, DType::kF32);
  const Middle of{source, out.as<float>(), outer_stride, stride, inner, bound};
  const auto filter = inner == 3 ? FilterPart<3> : inner == 1 ? FilterPart<1> : FilterPart<0>;
  const int64_t lines = outer > 1 ? outer : to;  // that tasks share
  // The lines of a task share its weights, which take as long to compute as a few lines to filter.
  const int64_t least = outer > 1 ? 16 : 1;
  const int64_t at_once =
      std::max(least, kTaskBytes * lines / (out.elements() * static_cast<int64_t>(sizeof(float))));
  parallel_for(static_cast<int>((lines + at_once - 1) / at_once), [&](int task) {
    const int64_t first = task * at_once, last = std::min(lines, first + at_once);
    if (outer > 1) {
      filter(of, direction, first, last, 0, to);
    } else {
      filter(of, direction, 0, 1, static_cast<int>(first), static_cast<int>(last));
    }
  });
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
Tensor Resize(const Tensor& image, int height, int width, ResizeFilter filter) {
  return ResizePart(image, height, width, 0, 0, height, width, OneByOne, filter);
}

Tensor ResizePart(const Tensor& image, int64_t full_height, int64_t full_width, int64_t top,
                  int64_t left, int height, int width, const ParallelFor& parallel_for,
                  ResizeFilter filter) {
  const Direction rows{filter, static_cast<int>(image.dim(0)), full_height, top, height};
  const Direction columns{filter, static_cast<int>(image.dim(1)), full_width, left, width};
  if (rows.from == full_height && columns.from == full_width && height == full_height &&
      width == full_width)
    return image;
  float bound = kUnbounded;
  if (filter == ResizeFilter::kLanczos) {
    bound = 1;
    for (const float value : image.span<float>()) bound = std::max(bound, std::abs(value));
  }
  const int64_t channels = image.dim(2);
  const int64_t row = columns.from * channels, source_width = columns.source_count();
  const float* const source =
      image.as<float>() + rows.source_first() * row + columns.source_first() * channels;
  // The image between the two passes must not be large if neither the source nor the result is. It
  // would be if a line of 2^24 pixels became as wide as it is long. All parts have the same order.
  // Lanczos clips between the passes, so their order matters: Pillow makes lines first. So does
  // this, unless that image would be larger than both, which it is if the result is wider and
  // lower.
  const bool lines_first = filter == ResizeFilter::kLanczos
                               ? full_width <= columns.from || rows.from <= full_height
                               : rows.from * full_width <= full_height * columns.from;
  if (lines_first) {
    const Tensor wide = FilterMiddle(source, row, channels, rows.source_count(), columns, channels,
                                     bound, parallel_for);
    return FilterMiddle(wide.as<float>(), 0, width * channels, 1, rows, width * channels, bound,
                        parallel_for)
        .Reshape({height, width, channels});
  }
  const Tensor high =
      FilterMiddle(source, 0, row, 1, rows, source_width * channels, bound, parallel_for);
  return FilterMiddle(high.as<float>(), source_width * channels, channels, height, columns,
                      channels, bound, parallel_for)
      .Reshape({height, width, channels});
}

Tensor FitWithin(const Tensor& image, int max_edge, const ParallelFor& parallel_for) {
  const int64_t height = image.dim(0), width = image.dim(1);
  const int64_t longest = std::max(height, width);
  if (longest <= max_edge) return image;
  const auto scaled = [&](int64_t edge) {
    return std::max<int>(1, static_cast<int>((edge * max_edge + longest / 2) / longest));
  };
  const int to_height = scaled(height), to_width = scaled(width);
  return ResizePart(image, to_height, to_width, 0, 0, to_height, to_width, parallel_for);
}

}  // namespace denoised
