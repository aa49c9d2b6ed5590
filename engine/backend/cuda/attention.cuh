// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/cuda/launch.h"

namespace denoised::cuda {

/// The set of keys and values that an image attends to.
__device__ inline int64_t KeySet(const AttentionLaunch& attention, int64_t image) {
  if (attention.key_set == nullptr) return image;
  return max(0, min(attention.key_set[image], attention.key_sets - 1));
}

/// Number of keys in a set.
__device__ inline int KeyCount(const AttentionLaunch& attention, int64_t set) {
  if (attention.key_counts == nullptr) return attention.key_tokens;
  return max(1, min(attention.key_counts[set], attention.key_tokens));
}

/// Stores the log-sum-exp of a query if it is requested. Weights were exp(scaled score − maximum),
/// and `sum` is their sum.
__device__ inline void StoreLogSumExp(const AttentionLaunch& attention, int64_t image, int head,
                                      int query, float maximum, float sum) {
  if (attention.log_sum_exp == nullptr) return;
  attention.log_sum_exp[(image * attention.heads + head) * attention.tokens + query] =
      maximum + logf(sum);
}

}  // namespace denoised::cuda
