// SPDX-License-Identifier: Apache-2.0
#include "engine/training/cpu/loops.h"

#include <cmath>

#include "engine/backend/cpu/vector_math.h"
#include "engine/core/status.h"

namespace denoised::training::cpu {

using denoised::cpu::Exp;
using denoised::cpu::NormalCdf;

namespace {

constexpr float kNormalPeak = 0.398942280401f;  // 1 / √(2π)

/// The rarest activation. In double, since clarity matters more than speed here.
double MishDerivative(double z) {
  const double softplus = z > 30 ? z : std::log1p(std::exp(z)), t = std::tanh(softplus);
  return t + z * (1 - t * t) / (1 + std::exp(-z));
}

}  // namespace

DENOISED_EACH_ISA
void MultiplyByDerivative(Activation activation, const float* z, float* d, int64_t count) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kSilu:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        const float s = 1.0f / (1.0f + Exp(-z[i]));
        d[i] = d[i] * (s * (1.0f + z[i] * (1.0f - s)));
      }
      return;
    case Activation::kRelu:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) d[i] = z[i] > 0.0f ? d[i] : 0.0f;
      return;
    case Activation::kMish:
      for (int64_t i = 0; i < count; ++i) d[i] *= static_cast<float>(MishDerivative(z[i]));
      return;
    case Activation::kGelu:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i)
        d[i] *= NormalCdf(z[i]) + z[i] * (kNormalPeak * Exp(-0.5f * z[i] * z[i]));
      return;
    case Activation::kQuickGelu:
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        const float s = 1.0f / (1.0f + Exp(-1.702f * z[i]));
        d[i] *= s * (1.0f + 1.702f * z[i] * (1.0f - s));
      }
      return;
    case Activation::kTanh:
      DENOISED_CHECK(false, "training has no derivative of this activation");
  }
}

DENOISED_EACH_ISA
void CenteredMoments(const float* d, const float* x, const float* mean, int64_t pixels,
                     int64_t channels, double* product, double* sum) {
  // Sums of at most 16 pixels in fp32, then in double: nearly as accurate, and twice as fast.
  constexpr int64_t kChannels = 64, kPixels = 16;
  for (int64_t begin = 0; begin < channels; begin += kChannels) {
    const int64_t width = channels - begin < kChannels ? channels - begin : kChannels;
    for (int64_t first = 0; first < pixels; first += kPixels) {
      const int64_t last = first + kPixels < pixels ? first + kPixels : pixels;
      float products[kChannels] = {}, sums[kChannels] = {};
      for (int64_t p = first; p < last; ++p) {
        const float* dp = d + p * channels + begin;
        const float* xp = x + p * channels + begin;
#pragma omp simd
        for (int64_t c = 0; c < width; ++c) {
          products[c] += dp[c] * (xp[c] - mean[begin + c]);
          sums[c] += dp[c];
        }
      }
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) {
        product[begin + c] += products[c];
        sum[begin + c] += sums[c];
      }
    }
  }
}

DENOISED_EACH_ISA
void NormGradient(const float* d, const float* x, const float* mean, const float* a, const float* b,
                  const float* k, const float* add, int64_t pixels, int64_t channels, float* dx) {
  for (int64_t p = 0; p < pixels; ++p) {
    const int64_t at = p * channels;
    if (add != nullptr) {
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c)
        dx[at + c] = d[at + c] * a[c] + (x[at + c] - mean[c]) * b[c] + k[c] + add[at + c];
    } else {
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c)
        dx[at + c] = d[at + c] * a[c] + (x[at + c] - mean[c]) * b[c] + k[c];
    }
  }
}

DENOISED_EACH_ISA
void SumColumns(const float* x, int64_t pixels, int64_t channels, int64_t stride, double* out) {
  for (int64_t p = 0; p < pixels; ++p) {
    const float* row = x + p * stride;
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) out[c] += row[c];
  }
}

DENOISED_EACH_ISA
void Finish(float* y, const float* add, const float* residual, float scale, int64_t pixels,
            int64_t channels) {
  for (int64_t p = 0; p < pixels; ++p) {
    float* row = y + p * channels;
    if (add != nullptr) {
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) row[c] += add[c];
    }
    if (residual != nullptr) {
      const float* r = residual + p * channels;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) row[c] = (row[c] + r[c]) * scale;
    } else if (scale != 1.0f) {
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) row[c] *= scale;
    }
  }
}

DENOISED_EACH_ISA
void Double(const float* small, float scale, int64_t lines, int64_t width, int64_t channels,
            float* large) {
  for (int64_t line = 0; line < 2 * lines; ++line) {
    const float* from = small + line / 2 * width * channels;
    for (int64_t w = 0; w < 2 * width; ++w, large += channels) {
      const float* pixel = from + w / 2 * channels;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c) large[c] = pixel[c] * scale;
    }
  }
}

DENOISED_EACH_ISA
void SumFours(const float* large, float scale, int64_t lines, int64_t width, int64_t channels,
              float* small) {
  const int64_t line = 2 * width * channels;
  for (int64_t h = 0; h < lines; ++h) {
    for (int64_t w = 0; w < width; ++w, small += channels) {
      const float* a = large + 2 * h * line + 2 * w * channels;
      const float* b = a + line;
#pragma omp simd
      for (int64_t c = 0; c < channels; ++c)
        small[c] = ((a[c] + a[channels + c]) + (b[c] + b[channels + c])) * scale;
    }
  }
}

DENOISED_EACH_ISA
void AddTo(float* a, const float* b, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) a[i] += b[i];
}

DENOISED_EACH_ISA
double SquareSum(const float* x, int64_t count) {
  constexpr int64_t kLanes = 8;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < kLanes; ++lane)
      lanes[lane] += static_cast<double>(x[i + lane]) * x[i + lane];
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  for (; i < count; ++i) sum += static_cast<double>(x[i]) * x[i];
  return sum;
}

DENOISED_EACH_ISA
void UpdateWeights(const AdamW& adamw, const float* gradient, float* master, float* m, float* v,
                   int64_t count) {
  const AdamW k = adamw;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * k.gradient_scale;
    m[i] += k.m_share * (g - m[i]);
    v[i] += k.v_share * (g * g - v[i]);
    master[i] -=
        k.decay * master[i] + k.step_size * m[i] / (sqrtf(v[i]) / k.root_correction2 + k.eps);
  }
}

DENOISED_EACH_ISA
void MoveAverage(float share, const float* w, float* average, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) average[i] += share * (w[i] - average[i]);
}

}  // namespace denoised::training::cpu
