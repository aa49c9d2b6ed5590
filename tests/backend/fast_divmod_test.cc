// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cuda/fast_divmod.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>

namespace denoised::cuda {
namespace {

void Check(int number, int divisor) {
  const FastDivmod by(divisor);
  ASSERT_EQ(number / by, number / divisor) << number << " / " << divisor;
  ASSERT_EQ(number % by, number % divisor) << number << " % " << divisor;
}

TEST(FastDivmodTest, IsExact) {
  for (int divisor = 1; divisor <= 300; ++divisor) {
    for (int number = 0; number <= 3000; ++number) ASSERT_NO_FATAL_FAILURE(Check(number, divisor));
  }
}

TEST(FastDivmodTest, OfNothingDoesNotTrap) { EXPECT_EQ(FastDivmod(0).value, 0); }

// Where a multiplier would be off it is so beside multiples of the divisor, most where they are
// large.
TEST(FastDivmodTest, IsExactForLargeNumbers) {
  std::mt19937 random(1);
  const auto up_to = [&](int most) { return std::uniform_int_distribution<int>(1, most)(random); };
  for (int i = 0; i < 100'000; ++i) {
    const int divisor = i % 62 < 31 ? up_to(INT32_MAX >> i % 31)
                                    : static_cast<int>((int64_t{1} << i % 31) + i / 62 % 3 - 1);
    if (divisor < 1) continue;
    const int64_t multiple = INT32_MAX / divisor * int64_t{divisor};
    for (int64_t number :
         {int64_t{INT32_MAX}, multiple, multiple - 1, up_to(INT32_MAX) / divisor * int64_t{divisor},
          int64_t{up_to(INT32_MAX)}}) {
      ASSERT_NO_FATAL_FAILURE(Check(static_cast<int>(number), divisor));
    }
  }
}

}  // namespace
}  // namespace denoised::cuda
