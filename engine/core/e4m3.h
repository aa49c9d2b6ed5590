// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#include "engine/core/host_device.h"

/// E4M3 of the OCP 8-bit floating point specification (OFP8, revision 1.0, section 5): a sign, four
/// bits of exponent with bias 7, three of fraction. Its numbers are ±448 down to ±2⁻⁶, subnormal to
/// ±2⁻⁹, and zero; 0x7f and 0xff are NaN; there is no infinity. Rounding is that of PTX's
/// cvt.rn.satfinite.e4m3x2: to nearest, ties to even, what is larger becomes ±448.
///
/// A tensor in e4m3 has scales s: a number x is kept as x / s. Scales are powers of two, so
/// dividing by them and multiplying with them rounds nothing. That costs no accuracy: what a
/// floating-point number loses does not depend on its exponent, as long as it is not subnormal.

namespace denoised {

constexpr float kLargestE4m3 = 448;

/// The number of e4m3 that is nearest to `value`, as a float. NaN stays NaN. No branches, so that
/// loops vectorise.
DENOISED_HOST_DEVICE inline float RoundToE4m3(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits & 0x80000000u, magnitude = bits ^ sign;
  // The fraction's last 20 bits are rounded away; a carry moves on to the exponent.
  const uint32_t rounded = (magnitude + 0x7ffffu + (magnitude >> 20 & 1)) & ~0xfffffu;
  // Below 2⁻⁶ the spacing is 2⁻⁹, which is that of floats at 2¹⁴.
  float small = 0;
  std::memcpy(&small, &magnitude, sizeof(small));
  small = (small + 0x1p14f) - 0x1p14f;
  uint32_t small_bits = 0;
  std::memcpy(&small_bits, &small, sizeof(small_bits));
  constexpr uint32_t kNormal = 0x3c800000;    // 2⁻⁶
  constexpr uint32_t kLargest = 0x43e00000;   // 448
  constexpr uint32_t kInfinity = 0x7f800000;  // and above it NaN
  uint32_t result = magnitude < kNormal ? small_bits : rounded;
  result = result > kLargest ? kLargest : result;
  result = magnitude > kInfinity ? magnitude : result;
  result |= sign;
  float out = 0;
  std::memcpy(&out, &result, sizeof(out));
  return out;
}

/// The eight bits of RoundToE4m3(value).
DENOISED_HOST_DEVICE inline uint8_t FloatToE4m3(float value) {
  const float rounded = RoundToE4m3(value);
  uint32_t bits = 0;
  std::memcpy(&bits, &rounded, sizeof(bits));
  const uint32_t sign = bits >> 31 << 7, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7f);
  if (magnitude >= 0x3c800000u)  // from 2⁻⁶ on; biases are 127 and 7
    return static_cast<uint8_t>(sign | ((magnitude >> 20) - (120u << 3)));
  const float units = (rounded < 0 ? -rounded : rounded) * 512;  // of 2⁻⁹
  return static_cast<uint8_t>(sign | static_cast<uint32_t>(units));
}

/// Exact.
DENOISED_HOST_DEVICE inline float E4m3ToFloat(uint8_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80) << 24, magnitude = bits & 0x7fu;
  uint32_t result = 0;
  if (magnitude == 0x7f) {
    result = 0x7fc00000u;
  } else if (magnitude >= 8) {
    result = (magnitude + (120u << 3)) << 20;
  } else {
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    std::memcpy(&result, &value, sizeof(result));
  }
  result |= sign;
  float out = 0;
  std::memcpy(&out, &result, sizeof(out));
  return out;
}

/// The scale for numbers of up to `largest`, finite and ≥ 0: the smallest power of two s with
/// largest / s ≤ 448, within [2⁻⁶⁴, 2⁶⁴]; 1 for 0.
DENOISED_HOST_DEVICE inline float E4m3Scale(float largest) {
  if (largest == 0) return 1;
  float scale = 0x1p-64f;
  while (scale < 0x1p64f && largest > kLargestE4m3 * scale) scale *= 2;
  return scale;
}

}  // namespace denoised
