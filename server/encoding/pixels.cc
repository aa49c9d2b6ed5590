// SPDX-License-Identifier: Apache-2.0
#include "server/encoding/pixels.h"

#include <algorithm>
#include <cmath>

namespace denoised {
namespace {

/// For one output position: the first source position and the weights from there on.
struct Taps {
  int first = 0;
  std::vector<float> weights;
};

std::vector<Taps> TriangleTaps(int from, int to) {
  const double scale = static_cast<double>(from) / to;
  const double support = std::max(scale, 1.0);
  std::vector<Taps> all(to);
  for (int i = 0; i < to; ++i) {
    const double centre = (i + 0.5) * scale;
    const int first = std::max(0, static_cast<int>(std::floor(centre - support)));
    const int last = std::min(from - 1, static_cast<int>(std::ceil(centre + support)));
    double sum = 0;
    std::vector<double> weights;
    for (int j = first; j <= last; ++j) {
      weights.push_back(std::max(0.0, 1.0 - std::abs(j + 0.5 - centre) / support));
      sum += weights.back();
    }
    all[i].first = first;
    for (const double weight : weights) {
      all[i].weights.push_back(static_cast<float>(weight / sum));
    }
  }
  return all;
}

/// Filters the middle dimension of [outer, from, inner].
Tensor FilterMiddle(const Tensor& in, int64_t outer, int from, int to, int64_t inner) {
  const std::vector<Taps> taps = TriangleTaps(from, to);
  Tensor out = Tensor::Host({outer, to, inner}, DType::kF32);
  const float* source = in.as<float>();
  float* target = out.as<float>();
  std::fill_n(target, out.elements(), 0.0f);
  for (int64_t o = 0; o < outer; ++o) {
    for (int i = 0; i < to; ++i) {
      float* row = target + (o * to + i) * inner;
      for (size_t t = 0; t < taps[i].weights.size(); ++t) {
        const float* from_row = source + (o * from + taps[i].first + static_cast<int>(t)) * inner;
        for (int64_t c = 0; c < inner; ++c) row[c] += taps[i].weights[t] * from_row[c];
      }
    }
  }
  return out;
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

std::vector<uint8_t> ToBytes(const Tensor& image) {
  std::vector<uint8_t> bytes(image.elements());
  const float* values = image.as<float>();
  for (size_t i = 0; i < bytes.size(); ++i) {
    const float value = (values[i] + 1.0f) * 127.5f;
    // Written so that NaN fails the first comparison.
    bytes[i] = value > 0.0f ? static_cast<uint8_t>(std::min(value, 255.0f) + 0.5f) : 0;
  }
  return bytes;
}

Pixels ToPixels(const Tensor& image) {
  DENOISED_CHECK(image.shape().rank() == 3 && (image.dim(2) == 1 || image.dim(2) == 3), "shape {}",
                 image.shape().ToString());
  return {static_cast<int>(image.dim(1)), static_cast<int>(image.dim(0)),
          static_cast<int>(image.dim(2)), ToBytes(image)};
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

// Not stb_image_resize, the only library for it in the distribution: it makes up pixels beyond the
// edges, and its memory between the two passes is not bounded by the two images.
Tensor Resize(const Tensor& image, int height, int width) {
  const int from_height = static_cast<int>(image.dim(0));
  const int from_width = static_cast<int>(image.dim(1));
  if (from_height == height && from_width == width) return image;
  const int64_t channels = image.dim(2);
  // What lies between the two passes must not be large when neither image is: a line of 2^24 pixels
  // made as wide as it is long would be.
  if (int64_t{from_height} * width <= int64_t{height} * from_width) {
    const Tensor wide = FilterMiddle(image, from_height, from_width, width, channels);
    return FilterMiddle(wide, 1, from_height, height, width * channels)
        .Reshape({height, width, channels});
  }
  const Tensor high = FilterMiddle(image, 1, from_height, height, from_width * channels);
  return FilterMiddle(high, height, from_width, width, channels).Reshape({height, width, channels});
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
