// SPDX-License-Identifier: Apache-2.0
#include "engine/core/philox.h"

#include <gtest/gtest.h>

namespace denoised {
namespace {

// Known answers of Random123's kat_vectors for philox4x32-10: counter {block lo, block hi, draw,
// 0}, so the all-ones vector of that file (whose last counter word is not 0) cannot be expressed
// here.
TEST(Philox, KnownAnswerForZeroKeyAndCounter) {
  const Philox4 bits = Philox(0, 0, 0);
  EXPECT_EQ(bits.v[0], 0x6627e8d5u);
  EXPECT_EQ(bits.v[1], 0xe169c58du);
  EXPECT_EQ(bits.v[2], 0xbc57ac4cu);
  EXPECT_EQ(bits.v[3], 0x9b00dbd8u);
}

TEST(Philox, NormalsHaveTheMomentsOfANormal) {
  double sum = 0, squares = 0, fourth = 0;
  const int blocks = 1 << 18;
  for (int block = 0; block < blocks; ++block)
    for (const float z : PhiloxNormal(42, 7, block).v) {
      sum += z;
      squares += double{z} * z;
      fourth += double{z} * z * z * z;
    }
  const double n = 4.0 * blocks;
  // Standard errors: 1/√n = 0.001, √2/√n = 0.0014, √96/√n = 0.0096; five of each.
  EXPECT_NEAR(sum / n, 0, 0.005);
  EXPECT_NEAR(squares / n, 1, 0.007);
  EXPECT_NEAR(fourth / n, 3, 0.048);
}

TEST(Philox, EveryCoordinateMatters) {
  const float base = PhiloxNormal(1, 2, 3).v[0];
  EXPECT_NE(base, PhiloxNormal(uint64_t{1} << 32 | 1, 2, 3).v[0]);
  EXPECT_NE(base, PhiloxNormal(1, 3, 3).v[0]);
  EXPECT_NE(base, PhiloxNormal(1, 2, uint64_t{1} << 32 | 3).v[0]);
}

}  // namespace
}  // namespace denoised
