// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "engine/backend/cpu/ops.h"
#include "engine/backend/cpu/parallel.h"
#include "engine/backend/cpu/vector_ops.h"

namespace denoised::cpu {

/// diffusers' get_timestep_embedding, in double: sin and cos of t · max_period^(−i / (half −
/// shift)).
void TimestepEmbedding(const TimestepEmbeddingArgs& args) {
  const int64_t rows = args.out.dim(0), dim = args.out.dim(1), half = dim / 2;
  const int64_t sin_at = args.flip_sin_to_cos ? half : 0, cos_at = half - sin_at;
  for (int64_t n = 0; n < rows; ++n) {
    float* out = args.out.as<float>() + n * dim;
    const double t = args.scale * args.t.as<float>()[n];
    for (int64_t i = 0; i < half; ++i) {
      const double exponent =
          static_cast<double>(i) / (static_cast<double>(half) - args.freq_shift);
      const double angle = t * std::exp(-std::log(args.max_period) * exponent);
      out[sin_at + i] = static_cast<float>(std::sin(angle));
      out[cos_at + i] = static_cast<float>(std::cos(angle));
    }
    if (dim % 2 != 0) out[dim - 1] = 0;
  }
}

/// diffusers' GaussianFourierProjection.
void FourierEmbedding(const FourierEmbeddingArgs& args) {
  const int64_t rows = args.out.dim(0), half = args.weight.dim(0);
  const int64_t sin_at = args.flip_sin_to_cos ? half : 0, cos_at = half - sin_at;
  for (int64_t n = 0; n < rows; ++n) {
    float* out = args.out.as<float>() + n * 2 * half;
    const double value = args.t.as<float>()[n];
    const double t = args.log ? std::log(value) : value;
    for (int64_t i = 0; i < half; ++i) {
      const double angle = 2 * std::numbers::pi * args.weight.as<float>()[i] * t;
      out[sin_at + i] = static_cast<float>(std::sin(angle));
      out[cos_at + i] = static_cast<float>(std::cos(angle));
    }
  }
}

void Embedding(const EmbeddingArgs& args) {
  const int64_t dim = args.table.dim(1);
  for (int64_t n = 0; n < args.index.dim(0); ++n) {
    int64_t index = 0;
    if (args.index.dtype() == DType::kF32) {
      const float last = static_cast<float>(args.table.dim(0) - 1);
      index = std::lrint(std::clamp(args.index.as<float>()[n], 0.0f, last));
    } else {
      index = args.index.as<int32_t>()[n];
    }
    DENOISED_CHECK(index >= 0 && index < args.table.dim(0), "index {} of {} embeddings", index,
                   args.table.dim(0));
    std::memcpy(args.out.as<float>() + n * dim, args.table.as<float>() + index * dim,
                dim * sizeof(float));
  }
}

namespace {

/// The positions along an edge that one position of the result is made of, and their weights.
struct FirTaps {
  int64_t first = 0;
  int count = 0;
  float weights[4] = {};
};
FirTaps TapsOf(Resample kind, int64_t i) {
  if (kind == Resample::kFirDown) return {2 * i - 1, 4, {0.125f, 0.375f, 0.375f, 0.125f}};
  if (i % 2 == 0) return {i / 2 - 1, 2, {0.25f, 0.75f}};
  return {i / 2, 2, {0.75f, 0.25f}};
}

void ResampleFir(Resample kind, const Tensor& x, const Tensor& out) {
  const int64_t height = out.dim(1), width = out.dim(2), channels = out.dim(3);
  const int64_t in_height = x.dim(1), in_width = x.dim(2);
  ParallelFor(out.dim(0) * height, [&](int64_t line, int) {
    const float* from = x.as<float>() + line / height * in_height * in_width * channels;
    float* to = out.as<float>() + line * width * channels;
    const FirTaps down = TapsOf(kind, line % height);
    for (int64_t w = 0; w < width; ++w, to += channels) {
      const FirTaps across = TapsOf(kind, w);
      std::fill_n(to, channels, 0.0f);
      for (int i = 0; i < down.count; ++i) {
        const int64_t y = down.first + i;
        if (y < 0 || y >= in_height) continue;
        for (int j = 0; j < across.count; ++j) {
          const int64_t at = across.first + j;
          if (at < 0 || at >= in_width) continue;
          const float weight = down.weights[i] * across.weights[j];
          const float* pixel = from + (y * in_width + at) * channels;
          for (int64_t c = 0; c < channels; ++c) to[c] += weight * pixel[c];
        }
      }
    }
  });
}

}  // namespace

void Resample2x(Resample kind, const Tensor& x, const Tensor& out) {
  const int64_t height = out.dim(1), width = out.dim(2), channels = out.dim(3);
  const int64_t in_width = x.dim(2), in_row = x.dim(1) * in_width * channels;
  if (kind == Resample::kFirUp || kind == Resample::kFirDown) return ResampleFir(kind, x, out);
  ParallelFor(out.dim(0) * height, [&](int64_t line, int) {
    const float* from = x.as<float>() + line / height * in_row;
    float* to = out.as<float>() + line * width * channels;
    const int64_t h = line % height;
    for (int64_t w = 0; w < width; ++w, to += channels) {
      if (kind == Resample::kNearestUp) {
        std::memcpy(to, from + (h / 2 * in_width + w / 2) * channels, channels * sizeof(float));
        continue;
      }
      const float* top = from + (2 * h * in_width + 2 * w) * channels;
      const float* bottom = top + in_width * channels;
      for (int64_t c = 0; c < channels; ++c) {
        to[c] = (top[c] + top[channels + c] + bottom[c] + bottom[channels + c]) * 0.25f;
      }
    }
  });
}

void Add(const Tensor& a, float scale, const Tensor& b, float shift, Activation activation,
         const Tensor& out) {
  constexpr int64_t kChunk = 16384;  // 64 KB; less is not worth a second thread
  const int64_t count = out.elements();
  ParallelFor((count + kChunk - 1) / kChunk, [&](int64_t chunk, int) {
    const int64_t begin = chunk * kChunk;
    const int64_t length = std::min(kChunk, count - begin);
    float* y = out.as<float>() + begin;
    Axpb(a.as<float>() + begin, scale, b ? b.as<float>() + begin : nullptr, shift, y, length);
    Activate(activation, y, length);
  });
}

void GegluGate(const Tensor& x, const Tensor& out, Scratch& scratch) {
  const int64_t features = out.dim(-1);
  float* const gates = scratch.Take<float>(Threads() * features);
  ParallelFor(out.elements() / features, [&](int64_t token, int thread) {
    const float* value = x.as<float>() + token * 2 * features;
    float* to = out.as<float>() + token * features;
    float* gate = gates + thread * features;
    std::memcpy(gate, value + features, features * sizeof(float));
    Activate(Activation::kGelu, gate, features);
    for (int64_t c = 0; c < features; ++c) to[c] = value[c] * gate[c];
  });
}

void NearestCode(const Tensor& x, const Tensor& codebook, const Tensor& out) {
  const int64_t codes = codebook.dim(0), channels = codebook.dim(1);
  ParallelFor(x.elements() / channels, [&](int64_t pixel, int) {
    const float* from = x.as<float>() + pixel * channels;
    int64_t nearest = 0;
    float least = std::numeric_limits<float>::infinity();
    for (int64_t code = 0; code < codes; ++code) {
      const float* candidate = codebook.as<float>() + code * channels;
      float distance = 0;
      for (int64_t c = 0; c < channels; ++c) {
        const float difference = from[c] - candidate[c];
        distance += difference * difference;
      }
      if (distance < least) least = distance, nearest = code;
    }
    std::memcpy(out.as<float>() + pixel * channels, codebook.as<float>() + nearest * channels,
                channels * sizeof(float));
  });
}

void Gaussian(const GaussianArgs& args) {
  const int64_t channels = args.out.dim(-1);
  const float* scale = args.scale.as<float>();
  const float* shift = args.shift.as<float>();
  for (int64_t pixel = 0; pixel < args.out.elements() / channels; ++pixel) {
    const float* mean = args.moments.as<float>() + pixel * 2 * channels;
    const float* noise = args.noise ? args.noise.as<float>() + pixel * channels : nullptr;
    float* out = args.out.as<float>() + pixel * channels;
    for (int64_t c = 0; c < channels; ++c) {
      float value = mean[c];
      if (noise != nullptr) {
        const float log_variance = std::clamp(mean[channels + c], -30.0f, 20.0f);
        value += noise[c] * std::exp(0.5f * log_variance);
      }
      out[c] = value * scale[c] + shift[c];
    }
  }
}

void Copy(const Tensor& from, const Tensor& to) {
  if (to.contiguous()) {
    std::memmove(to.data(), from.data(), from.bytes());
    return;
  }
  const size_t element = SizeOf(from.dtype()), row = from.dim(-1) * element;
  for (int64_t i = 0; i < from.elements() / from.dim(-1); ++i) {
    std::memcpy(static_cast<std::byte*>(to.data()) + i * to.row_stride() * element,
                static_cast<const std::byte*>(from.data()) + i * row, row);
  }
}

void DivideRows(const Tensor& x, const Tensor& divisor, const Tensor& out) {
  const int64_t pixels = x.elements() / x.dim(0);
  for (int64_t row = 0; row < x.dim(0); ++row) {
    const float* from = x.as<float>() + row * pixels;
    float* to = out.as<float>() + row * pixels;
    const float by = divisor.as<float>()[row];
    for (int64_t i = 0; i < pixels; ++i) to[i] = from[i] / by;
  }
}

}  // namespace denoised::cpu
