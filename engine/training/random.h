// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/core/philox.h"

/// The random numbers of training. Each is a function of (seed, purpose, step, sample, element)
/// alone. So a run draws the same numbers when it is repeated or resumed, with any accumulation and
/// any number of ranks. `sample` counts within the global batch of a step.

namespace denoised::training {

/// The low byte of Philox's last word, which is 0 in serving. The bytes above have the number of a
/// dropout layer.
enum class Purpose : uint32_t {
  kNoise = 1,    // ε of a sample's pixels
  kLevel = 2,    // its noise level or timestep
  kAugment = 3,  // flip and crop
  kClass = 4,    // whether its class is dropped
  kDropout = 5,
  kOrder = 6,      // the permutation of an epoch
  kInitial = 7,    // weights
  kPosterior = 8,  // a latent from the distribution that an autoencoder predicts
  kCaption = 9,    // which of a picture's captions
  kPicture = 10,   // which picture, if pictures have weights
};

/// Four random words: `block` counts elements in fours.
DENOISED_HOST_DEVICE inline Philox4 Draw(uint64_t seed, Purpose purpose, uint32_t step,
                                         uint32_t sample, uint32_t block, uint32_t layer = 0) {
  return PhiloxWords(seed, block, sample, step, static_cast<uint32_t>(purpose) | layer << 8);
}

/// Uniform in [0, 1), in steps of 2⁻²⁴.
DENOISED_HOST_DEVICE inline float UniformOf(uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}

/// A permutation of [0, count) that depends on (seed, epoch) alone, so it is not stored. A Feistel
/// network of six rounds over the next power of four, applied until the result is below `count`.
inline int64_t Permute(uint64_t seed, uint32_t epoch, int64_t count, int64_t index) {
  int bits = 1;
  while ((int64_t{1} << (2 * bits)) < count) ++bits;
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  auto value = static_cast<uint64_t>(index);
  do {
    uint64_t left = value >> bits, right = value & mask;
    for (uint32_t round = 0; round < 6; ++round) {
      const Philox4 f = Draw(seed, Purpose::kOrder, epoch, round, static_cast<uint32_t>(right));
      const uint64_t next = left ^ (f.v[0] & mask);
      left = right;
      right = next;
    }
    value = left << bits | right;
  } while (value >= static_cast<uint64_t>(count));
  return static_cast<int64_t>(value);
}

/// Such a sum of weights is above its product with any double below 1. Among the smallest doubles a
/// product may be rounded up to the sum.
constexpr double kLeastWeights = 1e-300;

/// Draws a picture with a probability proportional to its weight. `cumulative` are the cumulative
/// sums of the weights; the last is at least kLeastWeights.
inline int64_t DrawWeighted(uint64_t seed, uint32_t step, uint32_t sample,
                            const std::vector<double>& cumulative) {
  const Philox4 bits = Draw(seed, Purpose::kPicture, step, sample, 0);
  const double uniform =  // in [0, 1), in steps of 2⁻⁵³: times the sum it is rounded below the sum
      static_cast<double>(uint64_t{bits.v[0] >> 5} << 26 | bits.v[1] >> 6) * 0x1p-53;
  return std::upper_bound(cumulative.begin(), cumulative.end(), uniform * cumulative.back()) -
         cumulative.begin();
}

}  // namespace denoised::training
