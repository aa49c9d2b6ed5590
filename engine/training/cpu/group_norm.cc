// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/backend/cpu/vector_ops.h"
#include "engine/training/cpu/loops.h"
#include "engine/training/cpu/ops.h"

/// With x̂ = (x − μ)·rstd, z = (γx̂ + β)(1 + s) + t and dz = dout·act′(z), each channel of a row
/// needs A = Σ dz·(x − μ) and B = Σ dz over its pixels:
///
///   dγ = Σ rows rstd·A·(1 + s)     dβ = Σ rows B·(1 + s)     ds = γ·rstd·A + β·B     dt = B
///   dx = rstd·(dz·γ′ − c2 − x̂·c1),   γ′ = γ(1 + s),   c1 = mean of dz·γ′·x̂,   c2 = mean of dz·γ′
///
/// where the means are over the group's channels and pixels.

namespace denoised::training::cpu {
namespace {

using denoised::cpu::Moments;
using denoised::cpu::Normalize;

struct Rows {
  int64_t rows, pixels, channels, group;
};
Rows RowsOf(const GroupNormArgs& args) {
  const int64_t rows = args.x.dim(0), channels = args.x.dim(-1);
  return {rows, args.x.elements() / rows / channels, channels, channels / args.groups};
}

/// z = (x − mean)·slope + offset by channel, for one row.
void Coefficients(const GroupNormArgs& args, const Rows& size, int64_t row, float* mean,
                  float* slope, float* offset) {
  const float* scale =
      args.scale_shift ? args.scale_shift.as<float>() + row * 2 * size.channels : nullptr;
  for (int64_t c = 0; c < size.channels; ++c) {
    const float* statistics =
        args.statistics.as<float>() + (row * args.groups + c / size.group) * 2;
    const float gain = scale != nullptr ? 1.0f + scale[c] : 1.0f;
    mean[c] = statistics[0];
    slope[c] = statistics[1] * args.gamma.as<float>()[c] * gain;
    offset[c] = args.beta.as<float>()[c] * gain + (scale != nullptr ? scale[size.channels + c] : 0);
  }
}

/// Divides a row's pixels of a.dim(-1) + b.dim(-1) channels.
void SplitRow(const float* from, int64_t row, const Tensor& a, const Tensor& b) {
  const int64_t ca = a.dim(-1), cb = b.dim(-1), pixels = a.elements() / a.dim(0) / ca;
  for (int64_t p = row * pixels; p < (row + 1) * pixels; ++p, from += ca + cb) {
    std::memcpy(a.as<float>() + p * ca, from, ca * sizeof(float));
    std::memcpy(b.as<float>() + p * cb, from + ca, cb * sizeof(float));
  }
}

}  // namespace

void GroupNorm(const GroupNormArgs& args) {
  const Rows size = RowsOf(args);
  std::vector<double> sums(2 * size.channels);
  std::vector<float> coefficients(3 * size.channels);
  float* const mean = coefficients.data();
  float* const slope = mean + size.channels;
  float* const offset = slope + size.channels;
  const double count = static_cast<double>(size.group) * static_cast<double>(size.pixels);
  for (int64_t row = 0; row < size.rows; ++row) {
    const int64_t at = row * size.pixels * size.channels;
    const float* x = args.x.as<float>() + at;
    float* out = args.out.as<float>() + at;
    Moments(x, size.pixels, size.channels, sums.data(), sums.data() + size.channels);
    for (int64_t g = 0; g < args.groups; ++g) {
      double sum = 0, square = 0;
      for (int64_t c = g * size.group; c < (g + 1) * size.group; ++c) {
        sum += sums[c];
        square += sums[size.channels + c];
      }
      const double center = sum / count;
      float* statistics = args.statistics.as<float>() + (row * args.groups + g) * 2;
      statistics[0] = static_cast<float>(center);
      statistics[1] = static_cast<float>(
          1 / std::sqrt(std::max(0.0, square / count - center * center) + args.eps));
    }
    Coefficients(args, size, row, mean, slope, offset);
    Normalize(x, size.pixels, size.channels, mean, slope, offset, out, size.channels);
    denoised::cpu::Activate(args.activation, out, size.pixels * size.channels);
  }
}

void GroupNormBackward(const GroupNormBackwardArgs& args, int64_t chunk_rows) {
  const GroupNormArgs& forward = args.forward;
  const Rows size = RowsOf(forward);
  const int64_t channels = size.channels, elements = size.pixels * channels;
  const double count = static_cast<double>(size.group) * static_cast<double>(size.pixels);
  std::vector<float> by_channel(6 * channels);
  float* const mean = by_channel.data();
  float* const slope = mean + channels;
  float* const offset = slope + channels;
  float* const a = offset + channels;
  float* const b = a + channels;
  float* const k = b + channels;
  std::vector<float> both(2 * channels);  // dγ, dβ
  const auto chunk = [&](int64_t begin, int64_t rows, float* to) {
    std::vector<double> parameters(2 * channels), sums(2 * channels);
    double* const product = sums.data();
    double* const sum = product + channels;
    for (int64_t row = begin; row < begin + rows; ++row) {
      const float* x = forward.x.as<float>() + row * elements;
      Coefficients(forward, size, row, mean, slope, offset);
      float* d = ThreadScratch(0, 2 * elements);
      std::memcpy(d, args.dout.as<float>() + row * elements, elements * sizeof(float));
      if (forward.activation != Activation::kNone) {
        float* z = d + elements;
        Normalize(x, size.pixels, channels, mean, slope, offset, z, channels);
        MultiplyByDerivative(forward.activation, z, d, elements);
      }
      std::fill(sums.begin(), sums.end(), 0.0);
      CenteredMoments(d, x, mean, size.pixels, channels, product, sum);
      const float* scale =
          forward.scale_shift ? forward.scale_shift.as<float>() + row * 2 * channels : nullptr;
      for (int64_t g = 0; g < forward.groups; ++g) {
        const double rstd = forward.statistics.as<float>()[(row * forward.groups + g) * 2 + 1];
        double c1 = 0, c2 = 0;
        for (int64_t c = g * size.group; c < (g + 1) * size.group; ++c) {
          const double gain = scale != nullptr ? 1.0 + scale[c] : 1.0;
          const double gamma = forward.gamma.as<float>()[c];
          parameters[c] += rstd * product[c] * gain;
          parameters[channels + c] += sum[c] * gain;
          c1 += gamma * gain * rstd * product[c];
          c2 += gamma * gain * sum[c];
          if (scale != nullptr && args.dscale_shift) {
            float* dscale = args.dscale_shift.as<float>() + row * 2 * channels;
            dscale[c] = static_cast<float>(gamma * rstd * product[c] +
                                           forward.beta.as<float>()[c] * sum[c]);
            dscale[channels + c] = static_cast<float>(sum[c]);
          }
        }
        c1 /= count;
        c2 /= count;
        for (int64_t c = g * size.group; c < (g + 1) * size.group; ++c) {
          a[c] = slope[c];
          b[c] = static_cast<float>(-rstd * rstd * c1);
          k[c] = static_cast<float>(-rstd * c2);
        }
      }
      const float* add = args.add ? args.add.as<float>() + row * elements : nullptr;
      float* dx = args.dx_rest ? d : args.dx.as<float>() + row * elements;
      NormGradient(d, x, mean, a, b, k, add, size.pixels, channels, dx);
      if (args.dx_rest) SplitRow(dx, row, args.dx, args.dx_rest);
    }
    for (int64_t c = 0; c < 2 * channels; ++c) to[c] = static_cast<float>(parameters[c]);
  };
  SumChunks(size.rows, chunk_rows, 2 * channels, both.data(), chunk);
  std::copy_n(both.data(), channels, args.dgamma.as<float>());
  std::copy_n(both.data() + channels, channels, args.dbeta.as<float>());
}

}  // namespace denoised::training::cpu
