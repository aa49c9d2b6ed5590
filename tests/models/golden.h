// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "engine/core/tensor.h"

/// What PyTorch wrote (tests/models/goldens/README.md), in our layout and measure.

namespace denoised {

inline std::filesystem::path Goldens() { return DENOISED_SOURCE_DIR "/tests/models/goldens"; }

/// Names of the goldens that have `file`, sorted.
inline std::vector<std::string> GoldensWith(const std::string& file) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(Goldens()))
    if (std::filesystem::exists(entry.path() / file)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

/// [N, C, H, W] → F32 [N, H, W, C]; other ranks as they are.
inline Tensor ToNhwc(const Tensor& tensor) {
  const std::vector<float> from = tensor.ToFloats();
  if (tensor.shape().rank() != 4) return Tensor::HostF32(tensor.shape(), from);
  const int64_t n = tensor.dim(0), c = tensor.dim(1), h = tensor.dim(2), w = tensor.dim(3);
  Tensor to = Tensor::Host({n, h, w, c}, DType::kF32);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t channel = 0; channel < c; ++channel)
      for (int64_t p = 0; p < h * w; ++p)
        to.as<float>()[(i * h * w + p) * c + channel] = from[(i * c + channel) * h * w + p];
  return to;
}

/// ‖out − reference‖ / ‖reference‖; NaN when the sizes differ, which no tolerance accepts.
inline double RelativeError(std::span<const float> out, std::span<const float> reference) {
  if (out.size() != reference.size()) return std::nan("");
  double difference = 0, norm = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    difference += std::pow(double{out[i]} - reference[i], 2);
    norm += std::pow(double{reference[i]}, 2);
  }
  return std::sqrt(difference / norm);
}

}  // namespace denoised
