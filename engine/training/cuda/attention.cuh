// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/training/cuda/launch.h"

/// The backward pass of attention, as attention.cu's kernels and Hopper's have it: one gradient of
/// the tokens that blocks own, queries or keys, against all others of their image.

namespace denoised::training::cuda {

constexpr float kLog2E = 1.4426950408889634f;

/// Queries with the gradient of their outputs, or keys with their values.
struct Tokens {
  Rows first, second;
  int count = 0;  // of an image
};

struct Gradient {
  Tokens own, others;
  int heads = 1, dim = 0;
  float scale = 1;
  bool causal = false;
  Rows out;                            // the forward pass's
  const float* log_sum_exp = nullptr;  // [images, heads, queries], as delta
  float* delta = nullptr;              // written by queries, read by keys
  Rows d_first, d_second;              // d_second: of keys
};

/// The kernels for Hopper, for bf16 in vectors. Of few own tokens a warpgroup would idle.
inline bool SuitsGradientHopper(const Gradient& gradient) {
  return gradient.dim <= 256 && !gradient.causal && gradient.own.count > 64;
}
template <bool kOfKeys>
cudaError_t LaunchGradientHopper(const Gradient& gradient, int images, const Queue& queue);

}  // namespace denoised::training::cuda
