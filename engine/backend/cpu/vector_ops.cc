// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cpu/vector_ops.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "engine/backend/cpu/vector_math.h"
#include "engine/core/e4m3.h"

namespace denoised::cpu {
namespace {

constexpr int kLanes = 16;
/// Sixteen sums side by side; the compiler maps them to what registers there are.
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

/// x·tanh(ln(1 + eˣ)) with one exponential: tanh(ln u) = (u² − 1) / (u² + 1), u = 1 + eˣ.
inline float Mish(float x) {
  const float e = Exp(x > 20.0f ? 20.0f : x);  // beyond, the quotient is 1
  const float n = e * (e + 2.0f);
  return x * (n / (n + 2.0f));
}

inline float Gelu(float x) { return x * NormalCdf(x); }

}  // namespace

DENOISED_EACH_ISA
void Activate(Activation activation, float* y, int64_t count) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kSilu:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) y[i] = y[i] / (1.0f + Exp(-y[i]));
      return;
    case Activation::kMish:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) y[i] = Mish(y[i]);
      return;
    case Activation::kGelu:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) y[i] = Gelu(y[i]);
      return;
    case Activation::kRelu:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) y[i] = y[i] > 0.0f ? y[i] : 0.0f;
      return;
    case Activation::kQuickGelu:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) y[i] = y[i] / (1.0f + Exp(-1.702f * y[i]));
      return;
    case Activation::kTanh:
      for (int64_t i = 0; i < count; ++i) y[i] = std::tanh(y[i]);
      return;
  }
}

DENOISED_EACH_ISA
void AddScale(float* y, const float* residual, float scale, int64_t count) {
  if (residual != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) y[i] = (y[i] + residual[i]) * scale;
  } else if (scale != 1.0f) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) y[i] = y[i] * scale;
  }
}

DENOISED_EACH_ISA
void Axpb(const float* a, float scale, const float* b, float shift, float* out, int64_t count) {
  if (b != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) out[i] = a[i] * scale + b[i] + shift;
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) out[i] = a[i] * scale + shift;
  }
}

DENOISED_EACH_ISA
float Dot(const float* x, const float* w, int64_t count) {
  Lanes sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    for (int half = 0; half < 2; ++half) {
      Lanes a, b;
      std::memcpy(&a, x + i + half * kLanes, sizeof(a));
      std::memcpy(&b, w + i + half * kLanes, sizeof(b));
      sums[half] += a * b;
    }
  }
  sums[0] += sums[1];
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += sums[0][lane];
  for (; i < count; ++i) total += x[i] * w[i];
  return total;
}

DENOISED_EACH_ISA
void Moments(const float* x, int64_t pixels, int64_t channels, double* sum, double* square) {
  std::fill_n(sum, channels, 0.0);
  std::fill_n(square, channels, 0.0);
  for (int64_t p = 0; p < pixels; ++p, x += channels) {
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) {
      const double value = x[c];
      sum[c] += value;
      square[c] += value * value;
    }
  }
}

DENOISED_EACH_ISA
void Normalize(const float* x, int64_t pixels, int64_t channels, const float* mean,
               const float* slope, const float* offset, float* y, int64_t y_stride) {
  for (int64_t p = 0; p < pixels; ++p, x += channels, y += y_stride) {
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) y[c] = (x[c] - mean[c]) * slope[c] + offset[c];
  }
}

DENOISED_EACH_ISA
void NormalizeToken(const float* x, int64_t count, const float* gamma, const float* beta, float eps,
                    float* y) {
  const int64_t whole = count / kLanes * kLanes;
  const auto total = [&](const Lanes& lanes) {
    float sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
    return sum;
  };
  Lanes sums = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    Lanes part;
    std::memcpy(&part, x + i, sizeof(part));
    sums += part;
  }
  float sum = total(sums);
  for (int64_t i = whole; i < count; ++i) sum += x[i];
  const float mean = sum / static_cast<float>(count);
  Lanes squares = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    Lanes part;
    std::memcpy(&part, x + i, sizeof(part));
    part -= mean;
    squares += part * part;
  }
  float square = total(squares);
  for (int64_t i = whole; i < count; ++i) square += (x[i] - mean) * (x[i] - mean);
  const float reciprocal = 1.0f / std::sqrt(square / static_cast<float>(count) + eps);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) y[i] = (x[i] - mean) * reciprocal * gamma[i] + beta[i];
}

DENOISED_EACH_ISA
float Exponentiate(float* x, int64_t count) {
  float max = x[0];
#pragma omp simd reduction(max : max)
  for (int64_t i = 0; i < count; ++i) max = x[i] > max ? x[i] : max;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] = Exp(x[i] - max);
  Lanes sums = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Lanes part;
    std::memcpy(&part, x + i, sizeof(part));
    sums += part;
  }
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
  for (; i < count; ++i) total += x[i];
  return 1.0f / total;
}

DENOISED_EACH_ISA
void RoundToBf16(const float* from, uint16_t* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(from[i]);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    to[i] = static_cast<uint16_t>(from[i] != from[i] ? bits >> 16 | 0x40 : rounded);
  }
}

DENOISED_EACH_ISA
void ScaleAndRoundToE4m3(const float* from, float factor, float* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = RoundToE4m3(from[i] * factor);
}

DENOISED_EACH_ISA
void ScaleAndRoundToE4m3(const float* from, float factor, uint16_t* to, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(RoundToE4m3(from[i] * factor));
    to[i] = static_cast<uint16_t>(bits >> 16);
  }
}

DENOISED_EACH_ISA
void Scale(float* x, float scale, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] *= scale;
}

}  // namespace denoised::cpu
