// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

/// What PyTorch's autograd said (tests/reference/make_training_goldens.py).

namespace denoised::training {

inline std::filesystem::path TrainingGoldens() {
  return DENOISED_SOURCE_DIR "/tests/training/goldens";
}

inline nlohmann::json ReadGolden(const std::string& file) {
  std::ifstream stream(TrainingGoldens() / file);
  return nlohmann::json::parse(stream);
}

/// ±1: the top bit of splitmix64(stream · 2³² + element), as signs() in the script.
inline float Sign(uint64_t element, uint64_t stream) {
  uint64_t z = (stream << 32) + element + 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z = z ^ (z >> 31);
  return z >> 63 ? -1.0f : 1.0f;
}

/// The length of `values` − the golden's tensor, from its projections on vectors of signs: each is
/// about as long as the difference itself.
inline double Distance(std::span<const float> values, const nlohmann::json& golden) {
  double squares = 0;
  for (size_t stream = 1; stream < golden.size(); ++stream) {
    double projection = 0;
    for (size_t i = 0; i < values.size(); ++i)
      projection += static_cast<double>(values[i]) * Sign(i, stream);
    squares += std::pow(projection - golden[stream].get<double>(), 2);
  }
  return std::sqrt(squares / static_cast<double>(golden.size() - 1));
}

}  // namespace denoised::training
