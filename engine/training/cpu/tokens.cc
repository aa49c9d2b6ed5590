// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "engine/backend/cpu/vector_ops.h"
#include "engine/training/cpu/loops.h"
#include "engine/training/cpu/ops.h"

/// The ops of text encoders and transformer blocks other than attention. With x̂ = (x − μ)·rstd and
/// g = dout·γ, LayerNorm's gradient is dx = rstd·(g − mean(g) − x̂·mean(g·x̂)), with means over a
/// token.

namespace denoised::training::cpu {

void LayerNorm(const LayerNormArgs& args) {
  const int64_t channels = args.x.dim(-1), tokens = args.x.elements() / channels;
  const float* gamma = args.gamma.as<float>();
  const float* beta = args.beta.as<float>();
  for (int64_t token = 0; token < tokens; ++token) {
    const float* x = args.x.as<float>() + token * channels;
    float* out = args.out.as<float>() + token * channels;
    double sum = 0, square = 0;
    for (int64_t c = 0; c < channels; ++c) sum += x[c];
    const double mean = sum / static_cast<double>(channels);
    for (int64_t c = 0; c < channels; ++c) square += (x[c] - mean) * (x[c] - mean);
    const double rstd = 1 / std::sqrt(square / static_cast<double>(channels) + args.eps);
    const auto m = static_cast<float>(mean), r = static_cast<float>(rstd);
    args.statistics.as<float>()[2 * token] = m;
    args.statistics.as<float>()[2 * token + 1] = r;
#pragma omp simd
    for (int64_t c = 0; c < channels; ++c) out[c] = (x[c] - m) * r * gamma[c] + beta[c];
  }
}

void LayerNormBackward(const LayerNormBackwardArgs& args, int64_t chunk_rows) {
  const LayerNormArgs& forward = args.forward;
  const int64_t rows = forward.x.dim(0), channels = forward.x.dim(-1),
                tokens = forward.x.elements() / rows / channels;
  const float* gamma = forward.gamma.as<float>();
  std::vector<float> both(2 * channels);  // dγ, dβ
  SumChunks(
      rows, chunk_rows, 2 * channels, both.data(), [&](int64_t begin, int64_t count, float* to) {
        std::vector<double> sums(2 * channels);
        for (int64_t token = begin * tokens; token < (begin + count) * tokens; ++token) {
          const int64_t at = token * channels;
          const float* x = forward.x.as<float>() + at;
          const float* dout = args.dout.as<float>() + at;
          const float* add = args.add ? args.add.as<float>() + at : nullptr;
          float* dx = args.dx.as<float>() + at;
          const double mean = forward.statistics.as<float>()[2 * token],
                       rstd = forward.statistics.as<float>()[2 * token + 1];
          double g = 0, gx = 0;
          for (int64_t c = 0; c < channels; ++c) {
            const double normed = (x[c] - mean) * rstd, d = dout[c];
            sums[c] += d * normed;
            sums[channels + c] += d;
            g += d * gamma[c];
            gx += d * gamma[c] * normed;
          }
          g /= static_cast<double>(channels);
          gx /= static_cast<double>(channels);
          for (int64_t c = 0; c < channels; ++c) {
            const double normed = (x[c] - mean) * rstd;
            const double d = rstd * (static_cast<double>(dout[c]) * gamma[c] - g - normed * gx);
            dx[c] = static_cast<float>(add != nullptr ? d + add[c] : d);
          }
        }
        for (int64_t c = 0; c < 2 * channels; ++c) to[c] = static_cast<float>(sums[c]);
      });
  if (!args.dgamma) return;
  std::copy_n(both.data(), channels, args.dgamma.as<float>());
  std::copy_n(both.data() + channels, channels, args.dbeta.as<float>());
}

void Geglu(const Tensor& x, const Tensor& out) {
  const int64_t width = out.dim(-1), tokens = out.elements() / width;
  for (int64_t token = 0; token < tokens; ++token) {
    const float* value = x.as<float>() + token * 2 * width;
    float* to = out.as<float>() + token * width;
    std::copy_n(value + width, width, to);
    denoised::cpu::Activate(Activation::kGelu, to, width);
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) to[c] *= value[c];
  }
}

void GegluBackward(const Tensor& x, const Tensor& dout, const Tensor& dx) {
  const int64_t width = dout.dim(-1), tokens = dout.elements() / width;
  std::vector<float> activated(width), scaled(width);
  for (int64_t token = 0; token < tokens; ++token) {
    const float* value = x.as<float>() + token * 2 * width;
    const float* gate = value + width;
    const float* d = dout.as<float>() + token * width;
    float* dvalue = dx.as<float>() + token * 2 * width;
    float* dgate = dvalue + width;
    std::copy_n(gate, width, activated.data());
    denoised::cpu::Activate(Activation::kGelu, activated.data(), width);
    for (int64_t c = 0; c < width; ++c) scaled[c] = d[c] * value[c];
    MultiplyByDerivative(Activation::kGelu, gate, scaled.data(), width);
    for (int64_t c = 0; c < width; ++c) dvalue[c] = d[c] * activated[c];
    std::copy_n(scaled.data(), width, dgate);
  }
}

}  // namespace denoised::training::cpu
