// SPDX-License-Identifier: Apache-2.0
#include "engine/training/peak.h"

#include <fmt/format.h>

#include <optional>

namespace denoised::training {
namespace {

/// FLOP per cycle and multiprocessor. From NVIDIA's white papers of the architectures (Ampere GA100
/// and GA102, Ada, Hopper): their peaks divided by multiprocessors and clock.
struct Rate {
  int bf16 = 0, fp32 = 0;
  double tensor_clock = 1;  // of the highest clock, at which the peak of bf16 is stated
};

bool IsStatedHopper(std::string_view name) {
  const auto has = [&](std::string_view part) { return name.find(part) != std::string_view::npos; };
  return (has("H100 80GB HBM3") || has("H100 PCIe") || has("H200")) && !has("NVL");
}

std::optional<Rate> RateOf(const GpuFacts& gpu) {
  // GeForce sums products of 16 bits in fp32 at half the rate.
  const int ga102 = gpu.name.find("GeForce") != std::string_view::npos ? 512 : 1024;
  switch (gpu.major * 10 + gpu.minor) {
    case 80:
      return Rate{.bf16 = 2048, .fp32 = 128};
    case 86:
    case 89:
      return Rate{.bf16 = ga102, .fp32 = 256};
    case 90:
      // Others, such as the NVL cards and the H20, are stated with less than their clocks would
      // give.
      if (!IsStatedHopper(gpu.name)) return std::nullopt;
      // The H100's SXM card is stated at 1830 MHz and its PCIe card at 1620; their highest clocks
      // are 1980 and 1755.
      return Rate{.bf16 = 4096, .fp32 = 256, .tensor_clock = 12.0 / 13};
    default:
      return std::nullopt;
  }
}

}  // namespace

double PeakFlops(const GpuFacts& gpu, DType dtype) {
  const std::optional<Rate> rate = RateOf(gpu);
  if (!rate) return 0;
  const double cycles = gpu.multiprocessors * gpu.hertz;
  if (dtype == DType::kBF16) return cycles * rate->tensor_clock * rate->bf16;
  return dtype == DType::kF32 ? cycles * rate->fp32 : 0;
}

std::string DescribeWork(double flops_per_second, double peak) {
  std::string text = fmt::format("{:.0f} GFLOP/s", flops_per_second / 1e9);
  if (peak > 0) text += fmt::format(", {:.1f} % of peak", 100 * flops_per_second / peak);
  return text;
}

}  // namespace denoised::training
