// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/training/cuda/launch.h"

/// The backward pass of attention, as the kernels of attention.cu and attention_sm90.cu see it:
/// blocks own tokens (queries or keys) and compute their gradients against all others of the image.

namespace denoised::training::cuda {

constexpr float kLog2E = 1.4426950408889634f;

/// Queries and the gradients of their outputs, or keys and values.
struct Tokens {
  Rows first, second;
  int count = 0;  // per image
};

struct Gradient {
  Tokens own, others;
  int heads = 1, dim = 0;
  float scale = 1;
  bool causal = false;
  Rows out;                            // of the forward pass
  const float* log_sum_exp = nullptr;  // [images, heads, queries]
  float* delta = nullptr;              // likewise; written if queries are owned, else read
  Rows d_first, d_second;              // of own.first and own.second; d_second: of values only
  Rows d_others;                       // of others.first, if one kernel computes all gradients
};

/// The kernels for Hopper; they need bf16 in aligned vectors. With few own tokens, a warpgroup
/// would idle.
inline bool SuitsGradientHopper(const Gradient& gradient) {
  return gradient.dim <= 256 && !gradient.causal && gradient.own.count > 64;
}
template <bool kOfKeys>
cudaError_t LaunchGradientHopper(const Gradient& gradient, int images, const Queue& queue);

}  // namespace denoised::training::cuda
