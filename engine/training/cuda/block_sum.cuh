// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/cuda/element.cuh"

namespace denoised::training::cuda {

/// Sum over the kThreads threads of a block in a fixed order, returned to thread 0. A kernel may
/// call it once.
template <int kThreads>
__device__ double BlockSum(double value) {
  __shared__ double sums[kThreads / 32];
  value = denoised::cuda::WarpSum(value);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0) {
    for (const double part : sums) sum += part;
  }
  return sum;
}

}  // namespace denoised::training::cuda
