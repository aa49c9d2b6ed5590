// SPDX-License-Identifier: Apache-2.0
#include "engine/core/e4m3.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "engine/core/tensor.h"

namespace denoised {
namespace {

/// From the specification's table: (−1)^s · 2^(e − 7) · 1.m, or 2⁻⁶ · 0.m for e = 0.
double Decoded(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double value =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return code & 0x80 ? -value : value;
}

/// By trying all numbers: the nearest, of two the one with an even code; the largest for all
/// beyond it.
int NearestCode(double value) {
  const double magnitude = std::fabs(value);
  int best = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const double now = std::fabs(Decoded(code) - magnitude),
                 before = std::fabs(Decoded(best) - magnitude);
    if (now < before || (now == before && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(value) ? 0x80 : 0);
}

void ExpectNearest(float value) {
  const int code = std::isnan(value) ? 0x7f | (std::signbit(value) ? 0x80 : 0) : NearestCode(value);
  ASSERT_EQ(FloatToE4m3(value), code) << value;
  if (!std::isnan(value)) {
    ASSERT_EQ(RoundToE4m3(value), static_cast<float>(Decoded(code))) << value;
    ASSERT_EQ(std::signbit(RoundToE4m3(value)), std::signbit(value)) << value;
  } else {
    ASSERT_TRUE(std::isnan(RoundToE4m3(value)));
  }
}

TEST(E4m3, EveryBfloat16) {
  for (int bits = 0; bits < 1 << 16; ++bits)
    ExpectNearest(BFloat16ToFloat(static_cast<uint16_t>(bits)));
}

// Ties, what lies beside them, and numbers all over the range of floats.
TEST(E4m3, Floats) {
  for (int code = 0; code < 0x7e; ++code) {
    const auto low = static_cast<float>(Decoded(code)),
               high = static_cast<float>(Decoded(code + 1));
    for (const float value : {low, (low + high) / 2, high}) {
      for (const float beside :
           {std::nextafter(value, -1.0f), value, std::nextafter(value, 1000.0f)}) {
        ExpectNearest(beside);
        ExpectNearest(-beside);
      }
    }
  }
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 40'009)
    ExpectNearest(std::bit_cast<float>(static_cast<uint32_t>(bits)));
}

TEST(E4m3, EveryCode) {
  for (int code = 0; code < 256; ++code) {
    const float value = E4m3ToFloat(static_cast<uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
    } else {
      EXPECT_EQ(value, Decoded(code));
    }
    EXPECT_EQ(FloatToE4m3(value), code);
  }
}

TEST(E4m3, Saturates) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float value : {448.0f, 449.0f, 1e30f, infinity}) {
    EXPECT_EQ(RoundToE4m3(value), 448);
    EXPECT_EQ(RoundToE4m3(-value), -448);
  }
}

// ml_dtypes 0.6 with NumPy, over all bfloat16 numbers that are not NaN:
//   b = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
//   c = np.clip(b[~np.isnan(b)], -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
//   h = 0
//   for x in c.tolist(): h = (h * 31 + x) % (1 << 64)
TEST(E4m3, IsThatOfMlDtypes) {
  uint64_t hash = 0;
  for (int bits = 0; bits < 1 << 16; ++bits) {
    const float value = BFloat16ToFloat(static_cast<uint16_t>(bits));
    if (!std::isnan(value)) hash = hash * 31 + FloatToE4m3(value);
  }
  EXPECT_EQ(hash, 0x925be6dd97daf860u);
}

TEST(E4m3, Scales) {
  EXPECT_EQ(E4m3Scale(0), 1);
  EXPECT_EQ(E4m3Scale(448), 1);
  EXPECT_EQ(E4m3Scale(449), 2);
  EXPECT_EQ(E4m3Scale(224), 0.5f);
  EXPECT_EQ(E4m3Scale(1e-30f), 0x1p-64f);
  EXPECT_EQ(E4m3Scale(1e30f), 0x1p64f);
  for (float largest = 1e-6f; largest < 1e6f; largest *= 1.37f) {
    const float scale = E4m3Scale(largest);
    EXPECT_EQ(std::exp2(std::round(std::log2(scale))), scale);
    EXPECT_LE(largest / scale, 448);
    EXPECT_GT(largest / scale, 224);
  }
}

}  // namespace
}  // namespace denoised
