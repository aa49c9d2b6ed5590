// SPDX-License-Identifier: Apache-2.0
// The largest magnitude of a tensor, for calibration.
//
// Policy. Bound by memory. A thread takes eight neighbouring channels of every few rows. A block
// adds its maximum to those before by an integer atomic, since magnitudes are ordered as their bits
// are; the order does not matter.

#include <algorithm>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/launch.h"

namespace denoised::cuda {
namespace {

constexpr int kThreads = 256, kVector = 8, kMostBlocks = 1024;

__global__ void __launch_bounds__(kThreads)
    LargestKernel(const __grid_constant__ Rows x, int channels, int64_t rows, uint32_t* largest) {
  WaitForPredecessors();
  ReleaseDependents();
  const int vectors = (channels + kVector - 1) / kVector;
  float most = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < rows * vectors;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / vectors;
    const int first = static_cast<int>(i % vectors) * kVector;
    for (int c = first; c < min(first + kVector, channels); ++c)
      most = fmaxf(most, fabsf(Load(x, row, c)));  // fmaxf leaves out NaN
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
  if (threadIdx.x % 32 == 0) atomicMax(largest, __float_as_uint(most));
}

}  // namespace

cudaError_t LoadLargestKernel() { return LoadKernel(LargestKernel); }

cudaError_t LaunchLargest(const Rows& x, int channels, int64_t rows, uint32_t* largest,
                          const Queue& queue) {
  const int64_t vectors = rows * ((channels + kVector - 1) / kVector);
  const auto blocks = static_cast<unsigned>(
      std::clamp<int64_t>((vectors + kThreads - 1) / kThreads, 1, kMostBlocks));
  return LaunchDependent(LargestKernel, {.grid = blocks, .block = kThreads}, queue, x, channels,
                         rows, largest);
}

}  // namespace denoised::cuda
