// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "engine/core/tensor.h"
#include "engine/io/safetensors.h"

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

/// Plants an error: writes the weights in `directory` again, with the halves of each GEGLU swapped.
inline absl::Status SwapGegluHalves(const std::filesystem::path& directory) {
  const std::string stem = "diffusion_pytorch_model";
  DENOISED_ASSIGN_OR_RETURN(const Safetensors weights, Safetensors::OpenDirectory(directory, stem));
  auto tensors = weights.tensors();
  for (auto& [name, tensor] : tensors) {
    if (name.find(".ff.net.0.proj.") == std::string::npos) continue;
    const Tensor swapped = Tensor::Host(tensor.shape(), tensor.dtype());
    const size_t half = tensor.bytes() / 2;
    std::memcpy(swapped.data(), static_cast<const uint8_t*>(tensor.data()) + half, half);
    std::memcpy(static_cast<uint8_t*>(swapped.data()) + half, tensor.data(), half);
    tensor = swapped;
  }
  return WriteSafetensors(directory / (stem + ".safetensors"), tensors, weights.metadata());
}

}  // namespace denoised
