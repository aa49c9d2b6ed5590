// SPDX-License-Identifier: Apache-2.0
// Converts weights from the layout of the file to that of the kernels, on the device; the host only
// copies bytes.
//
// Policy. A thread takes the taps of one (output, channel) pair, which are contiguous in the file;
// neighbouring threads write neighbouring channels of each tap.

#include <cuda_fp16.h>

#include "engine/backend/cuda/element.cuh"

namespace denoised::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float ToFloat(float value) { return value; }
__device__ float ToFloat(__half value) { return __half2float(value); }
__device__ float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }

/// Sums the taps of a 3×3 window that read the same pixel of the image before it is doubled.
template <typename T>
__device__ void StorePhases(const PackWeightLaunch& pack, int64_t output, int64_t channel,
                            const T* from) {
  // For an even output row, the first row of the window lies in one input row and the other two in
  // the next; for an odd one, the first two in one and the last in the next. Columns likewise.
  constexpr int kTapUnder[2][3] = {{0, 1, 1}, {0, 0, 1}};
#pragma unroll
  for (int phase = 0; phase < 4; ++phase) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < 9; ++i) {
      sums[kTapUnder[phase / 2][i / 3] * 2 + kTapUnder[phase % 2][i % 3]] += ToFloat(from[i]);
    }
#pragma unroll
    for (int tap = 0; tap < 4; ++tap) {
      Store(pack.to, phase * pack.phase_outputs + output, tap * pack.channels + channel, sums[tap]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    PackWeightKernel(const __grid_constant__ PackWeightLaunch pack) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= pack.pairs) return;
  const int64_t pair = pack.first_pair + i;
  int64_t output = pair / pack.channels;
  const int64_t channel = pair % pack.channels;
  const T* from = static_cast<const T*>(pack.from) + i * pack.taps;
  if (pack.phase_outputs > 0) return StorePhases(pack, output, channel, from);
  if (pack.gated_outputs > 0) {
    const int features = static_cast<int>(pack.gated_outputs / 2);
    output = GatedOutput(output, features, GatedBlock(features));
  }
  for (int tap = 0; tap < pack.taps; ++tap) {
    Store(pack.to, output, static_cast<int64_t>(tap) * pack.channels + channel, ToFloat(from[tap]));
  }
}

template <typename T>
cudaError_t Launch(const PackWeightLaunch& pack, const Queue& queue) {
  const auto blocks = static_cast<unsigned>((pack.pairs + kThreads - 1) / kThreads);
  PackWeightKernel<T><<<blocks, kThreads, 0, queue.stream>>>(pack);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchPackWeight(const PackWeightLaunch& pack, const Queue& queue) {
  switch (pack.from_element) {
    case Element::kF32:
      return Launch<float>(pack, queue);
    case Element::kF16:
      return Launch<__half>(pack, queue);
    case Element::kBf16:
      return Launch<__nv_bfloat16>(pack, queue);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LoadPackWeightKernels() {
  for (cudaError_t error :
       {LoadKernel(PackWeightKernel<float>), LoadKernel(PackWeightKernel<__half>),
        LoadKernel(PackWeightKernel<__nv_bfloat16>)}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace denoised::cuda
