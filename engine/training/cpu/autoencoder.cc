// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "engine/training/cpu/ops.h"

namespace denoised::training::cpu {
namespace {

constexpr float kLowestLogVariance = -30, kHighestLogVariance = 20;  // diffusers' clamp
constexpr int kScales = 4;

/// For one scale of one row: adds factor · mean |difference of neighbours| to the loss, and its
/// gradient to `gradient`. `d` is [height, width, channels].
double AddEdges(const std::vector<double>& d, int64_t height, int64_t width, int64_t channels,
                double factor, std::vector<double>* gradient) {
  double loss = 0;
  const auto along = [&](int64_t lines, int64_t line_step, int64_t count, int64_t step) {
    const double share = factor / static_cast<double>(lines * (count - 1) * channels);
    for (int64_t line = 0; line < lines; ++line) {
      for (int64_t i = 0; i + 1 < count; ++i) {
        const int64_t at = line * line_step + i * step;
        for (int64_t c = at; c < at + channels; ++c) {
          const double difference = d[c + step] - d[c];
          const double slope = difference > 0 ? share : difference < 0 ? -share : 0;
          loss += std::abs(difference) * share;
          (*gradient)[c + step] += slope;
          (*gradient)[c] -= slope;
        }
      }
    }
  };
  along(height, width * channels, width, channels);
  along(width, channels, height, width * channels);
  return loss;
}

/// The loss of one row's difference d, and its gradient in place of d.
double RowLoss(int64_t height, int64_t width, int64_t channels, double edges,
               std::vector<double>* d) {
  std::vector<std::vector<double>> scales = {std::move(*d)};
  for (int scale = 1; scale < kScales && edges != 0; ++scale) {
    const std::vector<double>& from = scales.back();
    const int64_t h = height >> scale, w = width >> scale, line = 2 * w * channels;
    std::vector<double> to(h * w * channels);
    for (int64_t i = 0; i < h * w * channels; ++i) {
      const int64_t c = i % channels, x = i / channels % w, y = i / channels / w;
      const double* at = &from[2 * y * line + 2 * x * channels + c];
      to[i] = 0.25 * (at[0] + at[channels] + at[line] + at[line + channels]);
    }
    scales.push_back(std::move(to));
  }
  double loss = 0;
  std::vector<double> gradient;  // of the next coarser scale
  for (int scale = static_cast<int>(scales.size()) - 1; scale >= 0; --scale) {
    const std::vector<double>& values = scales[scale];
    const int64_t h = height >> scale, w = width >> scale;
    std::vector<double> own(values.size());
    for (size_t i = 0; !gradient.empty() && i < own.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      const int64_t c = at % channels, x = at / channels % w, y = at / channels / w;
      own[i] = 0.25 * gradient[(y / 2 * (w / 2) + x / 2) * channels + c];
    }
    if (edges != 0) loss += AddEdges(values, h, w, channels, edges, &own);
    gradient = std::move(own);
  }
  const double share = 1 / static_cast<double>(gradient.size());
  for (size_t i = 0; i < gradient.size(); ++i) {
    const double value = scales[0][i];
    loss += std::abs(value) * share;
    gradient[i] += value > 0 ? share : value < 0 ? -share : 0;
  }
  *d = std::move(gradient);
  return loss;
}

float Clamped(float log_variance) {
  return std::clamp(log_variance, kLowestLogVariance, kHighestLogVariance);
}

}  // namespace

void Gaussian(const GaussianArgs& args) {
  const int64_t channels = args.latents.dim(3), rows = args.latents.dim(0),
                count = args.latents.elements() / rows;
  for (int64_t n = 0; n < rows; ++n) {
    double kl = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float* moments =
          args.moments.as<float>() + n * 2 * count + i / channels * 2 * channels + i % channels;
      const double mean = moments[0], log_variance = Clamped(moments[channels]),
                   deviation = std::exp(0.5 * log_variance);
      args.latents.as<float>()[n * count + i] =
          static_cast<float>(mean + deviation * args.noise.as<float>()[n * count + i]);
      kl += mean * mean + deviation * deviation - 1 - log_variance;
    }
    args.kl.as<float>()[n] =
        static_cast<float>(args.weight * 0.5 * kl / static_cast<double>(count));
  }
}

void GaussianBackward(const GaussianBackwardArgs& args) {
  const GaussianArgs& forward = args.forward;
  const int64_t channels = args.dlatents.dim(3), rows = args.dlatents.dim(0),
                count = args.dlatents.elements() / rows;
  const double factor =
      static_cast<double>(args.scale) * forward.weight / static_cast<double>(count);
  for (int64_t i = 0; i < rows * count; ++i) {
    const int64_t at = i / channels * 2 * channels + i % channels;
    const float* moments = forward.moments.as<float>() + at;
    float* to = args.dmoments.as<float>() + at;
    const double log_variance = Clamped(moments[channels]),
                 deviation = std::exp(0.5 * log_variance), d = args.dlatents.as<float>()[i];
    to[0] = static_cast<float>(d + factor * moments[0]);
    const bool inside =
        moments[channels] >= kLowestLogVariance && moments[channels] <= kHighestLogVariance;
    to[channels] = inside ? static_cast<float>(0.5 * d * deviation * forward.noise.as<float>()[i] +
                                               0.5 * factor * (deviation * deviation - 1))
                          : 0.0f;
  }
}

void ReconstructionLoss(const ReconstructionLossArgs& args) {
  const int64_t rows = args.output.dim(0), height = args.output.dim(1), width = args.output.dim(2),
                channels = args.output.dim(3), count = height * width * channels;
  for (int64_t n = 0; n < rows; ++n) {
    std::vector<double> d(count);
    for (int64_t i = 0; i < count; ++i)
      d[i] = static_cast<double>(args.output.as<float>()[n * count + i]) -
             args.target.as<float>()[n * count + i];
    const double loss = RowLoss(height, width, channels, args.edges, &d);
    args.loss.as<float>()[n] =
        static_cast<float>(loss + (args.add ? args.add.as<float>()[n] : 0.0f));
    for (int64_t i = 0; i < count; ++i)
      args.doutput.as<float>()[n * count + i] = static_cast<float>(args.scale * d[i]);
  }
}

}  // namespace denoised::training::cpu
