// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "engine/core/tensor.h"

namespace denoised::training {

struct GpuFacts {
  std::string_view name;     // "NVIDIA A100-SXM4-80GB"
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  double hertz = 0;  // the highest clock of the multiprocessors
};

/// FLOP/s of dense products with sums in fp32, as the maker states them: of bf16 on tensor cores,
/// of fp32 on the others. 0 where it is not known.
double PeakFlops(const GpuFacts& gpu, DType dtype);

/// For people: "1234 GFLOP/s, 41.0 % of peak", or without a share if `peak` is 0.
std::string DescribeWork(double flops_per_second, double peak);

}  // namespace denoised::training
