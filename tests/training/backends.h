// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "engine/training/backend.h"
#include "tests/needs_gpu.h"

/// The backends that tests of training run on. Those of CUDA are skipped without a GPU.

namespace denoised::training {

inline const std::vector<std::string> kBackends = {"cpu", "cuda_fp32", "cuda_bf16"};

inline std::unique_ptr<Backend> OpenForTest(const std::string& name) {
  auto backend = name == "cpu" ? OpenCpuBackend() : OpenCudaBackend({.fp32 = name == "cuda_fp32"});
  EXPECT_TRUE(backend.ok()) << backend.status();
  return *std::move(backend);
}

/// A copy of `values`, rounded to `dtype`.
inline Tensor OnDevice(Backend& backend, const Shape& shape, std::span<const float> values,
                       DType dtype) {
  auto tensor = backend.Allocate(shape, dtype, "a test");
  EXPECT_TRUE(tensor.ok()) << tensor.status();
  if (dtype == DType::kF32) {
    backend.Upload(values.data(), values.size_bytes(), *tensor);
    return *tensor;
  }
  std::vector<uint16_t> rounded;
  for (const float value : values) rounded.push_back(FloatToBFloat16(value));
  backend.Upload(rounded.data(), rounded.size() * sizeof(uint16_t), *tensor);
  return *tensor;
}
/// The same bytes.
inline Tensor OnDevice(Backend& backend, const Tensor& host) {
  auto tensor = backend.Allocate(host.shape(), host.dtype(), "a test");
  EXPECT_TRUE(tensor.ok()) << tensor.status();
  backend.Upload(host.data(), host.bytes(), *tensor);
  return *tensor;
}
inline std::vector<float> OnHost(Backend& backend, const Tensor& tensor) {
  auto host = backend.Download(tensor);
  EXPECT_TRUE(host.ok()) << host.status();
  return host.ok() ? host->ToFloats() : std::vector<float>(tensor.elements(), NAN);
}

}  // namespace denoised::training
