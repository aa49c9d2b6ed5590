// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cpu/vector_ops.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

// GCC compiles such a function once for each level of x86-64 and lets the loader choose. The
// sanitizers' runtimes are not up yet when the loader asks.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(DENOISED_SANITIZED)
#define DENOISED_EACH_ISA \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DENOISED_EACH_ISA
#endif

namespace denoised::cpu {
namespace {

constexpr int kLanes = 16;
/// Sixteen sums side by side; the compiler maps them to what registers there are.
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

/// e^x without a branch, so that loops vectorise. x = n·ln 2 + r with |r| ≤ ln 2 / 2, e^r by its
/// Taylor series up to r⁷ (remainder below 6e-9), 2ⁿ by building the exponent. Clamped to the
/// exponents of normal numbers.
inline float Exp(float x) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves an integer in the low bits
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // their sum is ln 2
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  return p * std::bit_cast<float>((exponent + 127) << 23);
}

/// x·tanh(ln(1 + eˣ)) with one exponential: tanh(ln u) = (u² − 1) / (u² + 1), u = 1 + eˣ.
inline float Mish(float x) {
  const float e = Exp(x > 20.0f ? 20.0f : x);  // beyond, the quotient is 1
  const float n = e * (e + 2.0f);
  return x * (n / (n + 2.0f));
}

/// x·Φ(x) with the tail of the normal distribution Φ(−|x|) = e^(−x²/2)·P(1 / (1 + 0.45·|x| / √2)),
/// which is the form of Abramowitz and Stegun 7.1.26. P was fitted to it by least squares, weighted
/// until the largest error of the tail was smallest: 5e-10.
inline float Gelu(float x) {
  const float u = 1.0f / (1.0f + 0.318198052f * std::fabs(x));
  float p = 0.04628492147f;
  p = p * u - 0.24705263972f;
  p = p * u + 0.42858481407f;
  p = p * u - 0.18790237606f;
  p = p * u + 0.23008587956f;
  p = p * u + 0.10050452501f;
  p = p * u + 0.12949486077f;
  const float tail = p * u * Exp(-0.5f * x * x);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

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
void Scale(float* x, float scale, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] *= scale;
}

}  // namespace denoised::cpu
