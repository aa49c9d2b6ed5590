// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "engine/backend/backend.h"
#include "engine/backend/cpu/onednn.h"
#include "engine/backend/cpu/vector_ops.h"

namespace denoised {
namespace {

const BackendOptions kBf16 = {.device = "cpu", .cpu_dtype = DType::kBF16};

Tensor Random(const Shape& shape, int seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Tensor tensor = Tensor::Host(shape, DType::kF32);
  for (float& value : tensor.span<float>()) value = normal(random);
  return tensor;
}

/// ‖a − b‖ / ‖b‖
double Error(const Tensor& a, const Tensor& b) {
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < a.elements(); ++i) {
    difference += std::pow(a.as<float>()[i] - b.as<float>()[i], 2);
    norm += std::pow(b.as<float>()[i], 2);
  }
  return std::sqrt(difference / norm);
}

TEST(CpuBf16, RoundsAsOneValueAtATime) {
  std::vector<float> values = {0.0f,
                               -0.0f,
                               1.0f,
                               -1.00390625f,
                               1.01171875f,
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::denorm_min(),
                               std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN(),
                               std::bit_cast<float>(0x7fffffffu),
                               std::bit_cast<float>(0xff800001u)};
  const Tensor random = Random({1000}, 1);
  values.insert(values.end(), random.as<float>(), random.as<float>() + random.elements());
  std::vector<uint16_t> rounded(values.size());
  cpu::RoundToBf16(values.data(), rounded.data(), static_cast<int64_t>(values.size()));
  for (size_t i = 0; i < values.size(); ++i)
    EXPECT_EQ(rounded[i], FloatToBFloat16(values[i])) << values[i];
}

TEST(CpuBf16, IsRefusedWhereTheCpuCannot) {
  if (cpu::MultipliesBf16()) GTEST_SKIP() << "this CPU can";
  const absl::Status status = OpenBackend(kBf16).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("use \"fp32\""));
}

class CpuBf16Test : public testing::Test {
 protected:
  void SetUp() override {
    if (!cpu::MultipliesBf16()) GTEST_SKIP() << "this CPU has neither AVX512-BF16 nor AMX";
    fp32_ = OpenBackend({.device = "cpu"}).value();
    bf16_ = OpenBackend(kBf16).value();
  }

  /// conv(concat(x, x2), or x doubled) + residual of rows [begin, begin + count).
  Tensor Convolve(Backend& backend, bool upsample, int begin, int count) {
    const Tensor weight = Random({48, upsample ? 32 : 56, 3, 3}, 1), bias = Random({48}, 2);
    const auto packed = backend.PackConv2d(weight, bias, upsample).value();
    const int64_t edge = upsample ? 36 : 18;
    const Tensor out = Tensor::Host({count, edge, edge, 48}, DType::kF32);
    Conv2dArgs args{.x = Random({5, 18, 18, 32}, 3).Slice(begin, count), .weight = packed.get()};
    if (!upsample) args.prologue.x2 = Random({5, 18, 18, 24}, 4).Slice(begin, count);
    args.prologue.upsample2x = upsample;
    args.pad_top = args.pad_left = args.pad_bottom = args.pad_right = 1;
    args.epilogue.residual = Random({5, edge, edge, 48}, 5).Slice(begin, count);
    args.out = out;
    backend.Conv2d(args);
    EXPECT_TRUE(backend.status().ok()) << backend.status();
    return out;
  }

  std::unique_ptr<Backend> fp32_, bf16_;
};

// Rounding both operands makes an error of about 2⁻⁹ · √2 · √(1/3) = 1.6e-3 of the products' norm.
TEST_F(CpuBf16Test, ConvolutionsAreCloseToFp32) {
  for (bool upsample : {false, true}) {
    const double error = Error(Convolve(*bf16_, upsample, 0, 5), Convolve(*fp32_, upsample, 0, 5));
    EXPECT_LT(error, 4e-3);
    EXPECT_GT(error, 4e-4) << "else nothing was rounded";
  }
}

TEST_F(CpuBf16Test, ARowHasTheSameBitsInAnyBatch) {
  for (bool upsample : {false, true}) {
    const Tensor all = Convolve(*bf16_, upsample, 0, 5);
    for (int row = 0; row < 5; ++row) {
      const Tensor alone = Convolve(*bf16_, upsample, row, 1);
      EXPECT_EQ(std::memcmp(alone.data(), all.Slice(row, 1).data(), alone.bytes()), 0) << row;
    }
  }
}

// The plain weights must not be those that the layer's other form rounded.
TEST_F(CpuBf16Test, ALinearUsedBothWays) {
  const auto packed = bf16_->PackLinear({Random({40, 64}, 1)}, {}).value();
  const auto exact = fp32_->PackLinear({Random({40, 64}, 1)}, {}).value();
  const Tensor x = Random({6, 64}, 2);
  const auto run = [&](Backend& backend, const PackedLinear& weight, const Shape& in,
                       const Shape& out) {
    const Tensor y = Tensor::Host(out, DType::kF32);
    backend.Linear({.x = x.Reshape(in), .weight = &weight, .out = y});
    return y;
  };
  const Tensor tokens = run(*bf16_, *packed, {1, 6, 64}, {1, 6, 40});
  const double error = Error(tokens, run(*fp32_, *exact, {1, 6, 64}, {1, 6, 40}));
  EXPECT_LT(error, 4e-3);
  EXPECT_GT(error, 4e-4) << "else nothing was rounded";
  const Tensor vectors = run(*bf16_, *packed, {6, 64}, {6, 40});
  const Tensor expected = run(*fp32_, *exact, {6, 64}, {6, 40});
  EXPECT_EQ(std::memcmp(vectors.data(), expected.data(), vectors.bytes()), 0);
}

}  // namespace
}  // namespace denoised
