// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "engine/core/host_device.h"

/// Noise that depends on (seed, draw, element) alone. There is no generator state, so a row's noise
/// is the same in any batch. Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy
/// as 1, 2, 3" (SC'11). Shared by the CPU and CUDA backends.

namespace denoised {

/// Which random field of one image: its initial noise, the noise that the churn of the first
/// evaluation adds to it, the noise of the encoder that makes its init image latents, or the noise
/// of evaluation i.
constexpr uint32_t kInitialDraw = 0xffffffffu;
constexpr uint32_t kInitialChurnDraw = 0xfffffffeu;
// 0xfffffffd draws classes (engine/resolve.cc).
constexpr uint32_t kEncoderDraw = 0xfffffffcu;
/// The noise of the encoder when it encodes the part that a mask keeps, for models that read it.
constexpr uint32_t kMaskedEncoderDraw = 0xfffffffbu;

struct Philox4 {
  uint32_t v[4];
};

/// The generator itself: four words of a counter under a 64-bit key. Serving leaves c3 at 0;
/// training (engine/training/random.h) sets it.
DENOISED_HOST_DEVICE inline Philox4 PhiloxWords(uint64_t seed, uint32_t c0, uint32_t c1,
                                                uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

DENOISED_HOST_DEVICE inline Philox4 Philox(uint64_t seed, uint32_t draw, uint64_t block) {
  return PhiloxWords(seed, static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), draw,
                     0);
}

struct Normal4 {
  float v[4];
};

/// Four independent standard normals, by Box-Muller on 24-bit uniforms in (0, 1].
DENOISED_HOST_DEVICE inline Normal4 NormalOfBits(const Philox4& bits) {
  Normal4 normal;
  for (int pair = 0; pair < 2; ++pair) {
    const float u = (static_cast<float>(bits.v[2 * pair] >> 8) + 1.0f) * 0x1p-24f;
    const float angle =
        static_cast<float>(bits.v[2 * pair + 1] >> 8) * (6.283185307179586f * 0x1p-24f);
    const float radius = sqrtf(-2.0f * logf(u));
    normal.v[2 * pair] = radius * cosf(angle);
    normal.v[2 * pair + 1] = radius * sinf(angle);
  }
  return normal;
}

/// The normals of elements 4·block … 4·block+3 of an image (NHWC order).
DENOISED_HOST_DEVICE inline Normal4 PhiloxNormal(uint64_t seed, uint32_t draw, uint64_t block) {
  return NormalOfBits(Philox(seed, draw, block));
}

}  // namespace denoised
