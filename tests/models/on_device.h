// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "engine/backend/backend.h"

/// Inputs and outputs of models that are compared with goldens, on every backend there is.

namespace denoised {

struct Target {
  const char* name;
  BackendOptions options;
  double tolerance;  // of ‖out − ref‖ / ‖ref‖
};
inline void PrintTo(const Target& target, std::ostream* out) { *out << target.name; }

/// fp32: PyTorch's own is within 2e-6 of float64 on these models, ours was measured to be too.
/// bf16: PyTorch's own is up to 1.5e-2 away.
inline std::vector<Target> Targets() {
  return {{"cpu", {.device = "cpu"}, 2e-5},
          {"cuda_fp32", {.device = "cuda", .fp32 = true}, 2e-5},
          {"cuda_bf16", {.device = "cuda"}, 2e-2}};
}

inline Tensor ToDevice(Backend& backend, const std::vector<float>& values, const Shape& shape,
                       DType dtype) {
  auto tensor = backend.Allocate(shape, dtype, "test input");
  EXPECT_TRUE(tensor.ok()) << tensor.status();
  if (dtype == DType::kF32) {
    backend.Upload(values.data(), values.size() * sizeof(float), *tensor);
  } else if (dtype == DType::kI32) {
    const std::vector<int32_t> integers(values.begin(), values.end());
    backend.Upload(integers.data(), integers.size() * sizeof(int32_t), *tensor);
  } else {
    std::vector<uint16_t> halves;
    for (const float value : values) halves.push_back(FloatToBFloat16(value));
    backend.Upload(halves.data(), halves.size() * sizeof(uint16_t), *tensor);
  }
  return *tensor;
}

struct Outputs {
  std::map<std::string, std::unique_ptr<Download>> downloads;
  std::vector<float> Get(const std::string& name) {
    auto tensor = downloads.at(name)->Wait();
    EXPECT_TRUE(tensor.ok()) << tensor.status();
    return tensor->ToFloats();
  }
};

}  // namespace denoised
