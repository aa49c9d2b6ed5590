// SPDX-License-Identifier: Apache-2.0
#include "engine/core/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace denoised {
namespace {

TEST(HalfPrecision, EveryHalfSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = HalfToFloat(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(HalfToFloat(FloatToHalf(value))));
    } else {
      EXPECT_EQ(FloatToHalf(value), bits);
    }
  }
}

TEST(HalfPrecision, EveryBFloat16SurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = BFloat16ToFloat(static_cast<uint16_t>(bits));
    if (!std::isnan(value)) {
      EXPECT_EQ(FloatToBFloat16(value), bits);
    }
  }
}

TEST(HalfPrecision, RoundsToNearestEven) {
  EXPECT_EQ(FloatToBFloat16(1.0f + 0x1p-8f), 0x3f80);  // tie to even, down
  EXPECT_EQ(FloatToBFloat16(1.0f + 0x1p-8f + 0x1p-20f), 0x3f81);
  EXPECT_EQ(FloatToHalf(1.0f + 0x1p-11f), 0x3c00);
  EXPECT_EQ(FloatToHalf(1.0f + 3 * 0x1p-11f), 0x3c02);
  EXPECT_EQ(FloatToHalf(65519.0f), 0x7bff);
  EXPECT_EQ(FloatToHalf(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToHalf(0x1p-25f), 0x0000);
  EXPECT_EQ(FloatToHalf(-0x1.8p-25f), 0x8001);
}

TEST(Tensor, SlicesAndColumnsShareTheData) {
  Tensor t = Tensor::Host({2, 3, 4}, DType::kF32);
  for (int i = 0; i < 24; ++i) t.as<float>()[i] = static_cast<float>(i);
  EXPECT_EQ(t.Slice(1, 1).as<float>()[0], 12.0f);
  const Tensor columns = t.Columns(1, 2);
  EXPECT_EQ(columns.shape(), (Shape{2, 3, 2}));
  EXPECT_FALSE(columns.contiguous());
  EXPECT_EQ(columns.as<float>()[columns.row_stride()], 5.0f);
  EXPECT_EQ(t.Reshape({6, 4}).dim(-1), 4);
  EXPECT_EQ(t.shape().ToString(), "[2, 3, 4]");
}

TEST(Tensor, MayHaveNoElements) {
  // An empty vector's data is null, which memcpy must not be given: UBSan reports it.
  const Tensor none = Tensor::HostF32({0, 3}, std::vector<float>());
  EXPECT_EQ(none.elements(), 0);
  EXPECT_TRUE(none.ToFloats().empty());
}

TEST(TensorDeathTest, ReshapeMustKeepTheCount) {
  EXPECT_DEATH(Tensor::Host({2, 3}, DType::kF32).Reshape({7}), "bug in denoised");
}

}  // namespace
}  // namespace denoised
