// SPDX-License-Identifier: Apache-2.0
#include "engine/training/peak.h"

#include <gtest/gtest.h>

namespace denoised::training {
namespace {

TEST(PeakTest, IsWhatMakersState) {
  struct Published {
    GpuFacts gpu;
    double bf16, fp32;  // TFLOP/s, dense
  };
  // NVIDIA's data sheets: A100 (June 2021), A40 (2022), A10 (2021), RTX 3090 (GA102 white paper,
  // appendix A), L40S (2023), RTX 4090 (Ada white paper, appendix A), H100 (2023, SXM and PCIe),
  // H200 (2024, SXM). Where a sheet has figures with sparsity alone, half of them.
  for (const Published& each : {
           Published{{"NVIDIA A100-SXM4-80GB", 8, 0, 108, 1410e6}, 312, 19.5},
           Published{{"NVIDIA A40", 8, 6, 84, 1740e6}, 149.7, 37.4},
           Published{{"NVIDIA A10", 8, 6, 72, 1695e6}, 125, 31.2},
           Published{{"NVIDIA GeForce RTX 3090", 8, 6, 82, 1695e6}, 71, 35.6},
           Published{{"NVIDIA L40S", 8, 9, 142, 2520e6}, 362, 91.6},
           Published{{"NVIDIA GeForce RTX 4090", 8, 9, 128, 2520e6}, 165.2, 82.6},
           Published{{"NVIDIA H100 80GB HBM3", 9, 0, 132, 1980e6}, 989, 67},
           Published{{"NVIDIA H100 PCIe", 9, 0, 114, 1755e6}, 756, 51},
           Published{{"NVIDIA H200", 9, 0, 132, 1980e6}, 989, 67},
       }) {
    const double bf16 = PeakFlops(each.gpu, DType::kBF16) / 1e12,
                 fp32 = PeakFlops(each.gpu, DType::kF32) / 1e12;
    EXPECT_NEAR(bf16, each.bf16, 0.015 * each.bf16) << each.gpu.name;
    EXPECT_NEAR(fp32, each.fp32, 0.015 * each.fp32) << each.gpu.name;
  }
}

TEST(PeakTest, IsNotGuessed) {
  EXPECT_EQ(PeakFlops({"a newer one", 12, 0, 170, 2407e6}, DType::kBF16), 0);
  EXPECT_EQ(PeakFlops({"NVIDIA H200", 9, 0, 132, 1980e6}, DType::kF16), 0);
  for (const char* const name : {"NVIDIA H20", "NVIDIA H100 NVL", "NVIDIA H200 NVL"})
    EXPECT_EQ(PeakFlops({name, 9, 0, 132, 1785e6}, DType::kBF16), 0) << name;
}

TEST(PeakTest, WorkIsAShareOfAKnownPeak) {
  EXPECT_EQ(DescribeWork(98.9e12, 989e12), "98900 GFLOP/s, 10.0 % of peak");
  EXPECT_EQ(DescribeWork(12.3e9, 0), "12 GFLOP/s");
}

}  // namespace
}  // namespace denoised::training
