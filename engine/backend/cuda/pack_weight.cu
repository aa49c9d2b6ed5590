// SPDX-License-Identifier: Apache-2.0
// Converts weights from the layout of the file to that of the kernels, on the device; the host only
// copies bytes.
//
// Policy. A thread takes the taps of one (output, channel) pair, which are contiguous in the file;
// neighbouring threads write neighbouring channels of each tap. Weights in e4m3 pass twice: first
// for the largest of each output, from which its scale follows.

#include <cuda_fp16.h>

#include "engine/backend/cuda/e4m3.cuh"
#include "engine/core/e4m3.h"

namespace denoised::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float ToFloat(float value) { return value; }
__device__ float ToFloat(__half value) { return __half2float(value); }
__device__ float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }

/// The packed position of the output of a pair.
__device__ int64_t OutputOf(const PackWeightLaunch& pack, int64_t pair) {
  const int64_t output = pair / pack.channels, features = pack.gated_outputs / 2;
  return features == 0 ? output
                       : GatedOutput(output, features, GatedBlock(static_cast<int>(features)));
}

/// Calls use(phase, tap, weight) for each packed weight of a pair. In phases, a weight is the sum
/// of the taps of a 3×3 window that read the same pixel of the image before it is doubled.
template <typename T, typename Use>
__device__ void ForEachTap(const PackWeightLaunch& pack, const T* from, const Use& use) {
  if (pack.phase_outputs == 0) {
    for (int tap = 0; tap < pack.taps; ++tap) use(0, tap, ToFloat(from[tap]));
    return;
  }
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
    for (int tap = 0; tap < 4; ++tap) use(phase, tap, sums[tap]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    PackWeightKernel(const __grid_constant__ PackWeightLaunch pack) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= pack.pairs) return;
  const int64_t pair = pack.first_pair + i;
  const int64_t output = OutputOf(pack, pair), channel = pair % pack.channels;
  ForEachTap(pack, static_cast<const T*>(pack.from) + i * pack.taps,
             [&](int phase, int tap, float weight) {
               Store(pack.to, phase * pack.phase_outputs + output,
                     static_cast<int64_t>(tap) * pack.channels + channel, weight);
             });
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    LargestWeightsKernel(const __grid_constant__ PackWeightLaunch pack) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t known = i < pack.pairs ? i : pack.pairs - 1;  // all lanes vote below
  float largest = 0;
  ForEachTap(pack, static_cast<const T*>(pack.from) + known * pack.taps,
             [&](int, int, float weight) { largest = fmaxf(largest, fabsf(weight)); });
  // Numbers ≥ 0 are ordered as their bits, and the order of the maxima does not matter.
  const auto output = static_cast<unsigned>(OutputOf(pack, pack.first_pair + known));
  const unsigned lanes = __match_any_sync(~0u, output);
  const unsigned bits = __reduce_max_sync(lanes, __float_as_uint(largest));
  if (threadIdx.x % 32 == __ffs(static_cast<int>(lanes)) - 1) {
    atomicMax(reinterpret_cast<unsigned*>(pack.scales) + output, bits);
  }
}

__global__ void __launch_bounds__(kThreads)
    E4m3ScalesKernel(float* scales, int outputs, float input_scale) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (i < outputs) scales[i] = E4m3Scale(scales[i]) * input_scale;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    PackE4m3WeightKernel(const __grid_constant__ PackWeightLaunch pack) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= pack.pairs) return;
  const int64_t pair = pack.first_pair + i;
  const int64_t output = OutputOf(pack, pair), channel = pair % pack.channels;
  const int64_t tap_channels = (pack.channels + kE4m3Vector - 1) / kE4m3Vector * kE4m3Vector;
  const float inverse = pack.input_scale / pack.scales[output];  // of powers of two
  ForEachTap(pack, static_cast<const T*>(pack.from) + i * pack.taps,
             [&](int phase, int tap, float weight) {
               *E4m3At(pack.to, phase * pack.phase_outputs + output, tap * tap_channels + channel) =
                   FloatToE4m3(weight * inverse);
             });
}

using Kernel = void (*)(PackWeightLaunch);

cudaError_t Launch(Kernel kernel, const PackWeightLaunch& pack, const Queue& queue) {
  if (kernel == nullptr) return cudaErrorInvalidValue;
  const auto blocks = static_cast<unsigned>((pack.pairs + kThreads - 1) / kThreads);
  kernel<<<blocks, kThreads, 0, queue.stream>>>(pack);
  return cudaGetLastError();
}

/// The kernel for weights of this element type.
Kernel Of(Element element, Kernel f32, Kernel f16, Kernel bf16) {
  switch (element) {
    case Element::kF32:
      return f32;
    case Element::kF16:
      return f16;
    case Element::kBf16:
      return bf16;
    case Element::kE4m3x2:
      break;
  }
  return nullptr;
}

}  // namespace

cudaError_t LaunchPackWeight(const PackWeightLaunch& pack, const Queue& queue) {
  const Kernel kernel = pack.to.element == Element::kE4m3x2
                            ? Of(pack.from_element, PackE4m3WeightKernel<float>,
                                 PackE4m3WeightKernel<__half>, PackE4m3WeightKernel<__nv_bfloat16>)
                            : Of(pack.from_element, PackWeightKernel<float>,
                                 PackWeightKernel<__half>, PackWeightKernel<__nv_bfloat16>);
  return Launch(kernel, pack, queue);
}

cudaError_t LaunchLargestWeights(const PackWeightLaunch& pack, const Queue& queue) {
  return Launch(Of(pack.from_element, LargestWeightsKernel<float>, LargestWeightsKernel<__half>,
                   LargestWeightsKernel<__nv_bfloat16>),
                pack, queue);
}

cudaError_t LaunchE4m3Scales(float* scales, int outputs, float input_scale, const Queue& queue) {
  E4m3ScalesKernel<<<(outputs + kThreads - 1) / kThreads, kThreads, 0, queue.stream>>>(
      scales, outputs, input_scale);
  return cudaGetLastError();
}

cudaError_t LoadPackWeightKernels() {
  return LoadKernels(0, PackWeightKernel<float>, PackWeightKernel<__half>,
                     PackWeightKernel<__nv_bfloat16>, LargestWeightsKernel<float>,
                     LargestWeightsKernel<__half>, LargestWeightsKernel<__nv_bfloat16>,
                     PackE4m3WeightKernel<float>, PackE4m3WeightKernel<__half>,
                     PackE4m3WeightKernel<__nv_bfloat16>, E4m3ScalesKernel);
}

}  // namespace denoised::cuda
