// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "engine/core/each_isa.h"

/// What the vectorised loops of the CPU share, in serving and in training.

namespace denoised::cpu {

/// e^x without a branch, so that loops vectorise. x = n·ln 2 + r with |r| ≤ ln 2 / 2, e^r by its
/// Taylor series up to r⁷ (remainder below 6e-9), 2ⁿ by building the exponent. Clamped to the
/// exponents of normal numbers.
inline float Exp(float x) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves an integer in the low bits
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // their sum is ln 2
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  return p * std::bit_cast<float>((exponent + 127) << 23);
}

/// Φ(x), the distribution function of N(0, 1), by the tail Φ(−|x|) = e^(−x²/2)·P(1 / (1 + 0.45·|x|
/// / √2)), which is the form of Abramowitz and Stegun 7.1.26. P was fitted to it by least squares,
/// weighted until the largest error of the tail was smallest: 5e-10.
inline float NormalCdf(float x) {
  const float u = 1.0f / (1.0f + 0.318198052f * std::fabs(x));
  float p = 0.04628492147f;
  p = p * u - 0.24705263972f;
  p = p * u + 0.42858481407f;
  p = p * u - 0.18790237606f;
  p = p * u + 0.23008587956f;
  p = p * u + 0.10050452501f;
  p = p * u + 0.12949486077f;
  const float tail = p * u * Exp(-0.5f * x * x);
  return x < 0.0f ? tail : 1.0f - tail;
}

}  // namespace denoised::cpu
