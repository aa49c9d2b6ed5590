// SPDX-License-Identifier: Apache-2.0
// The implicit GEMM of conv2d.cu in fp32 arithmetic, for the debugging mode: inputs, weights and
// accumulation in fp32, one fused multiply-add per product, k in order.
//
// Policy. A block of 256 threads computes a 64 × 64 tile, a thread 4 × 4 outputs of it, in steps of
// 32 along k. Shared memory is transposed, so that a thread reads its four rows and its four
// columns as one float4 each.

#include "engine/backend/cuda/implicit_gemm.cuh"

namespace denoised::cuda {
namespace {

constexpr int kM = 64, kN = 64, kDepth = kDepthPadding, kThreads = 256;
constexpr int kLine = kM + 4;

template <bool kVector>
__global__ void __launch_bounds__(kThreads)
    Conv2dFp32Kernel(const __grid_constant__ Conv2dLaunch conv, const __grid_constant__ Plane plane,
                     int n_tiles) {
  static_assert(kM == kN && kM * (kN + 4) <= 2 * kDepth * kLine);
  __shared__ __align__(16) float shared[2 * kDepth * kLine];
  float* inputs = shared;                    // [kDepth][kLine]
  float* weights = shared + kDepth * kLine;  // [kDepth][kLine]

  const int m0 = static_cast<int>(blockIdx.x / n_tiles) * kM;
  const int n0 = static_cast<int>(blockIdx.x % n_tiles) * kN;
  const int row = threadIdx.x % kM, chunk = threadIdx.x / kM;  // loads eight elements of one row
  const int phase = static_cast<int>(blockIdx.y);
  const Window window = WindowOf(conv, plane, m0 + row, phase);
  Tap tap;
  tap.Advance(conv, chunk * 8);
  const bool has_weight = n0 + row < conv.outputs;
  const float* weight = static_cast<const float*>(conv.weight) +
                        static_cast<int64_t>(phase * conv.outputs + n0 + row) * conv.weight_stride +
                        chunk * 8;

  const int m = threadIdx.x / 16 * 4, n = threadIdx.x % 16 * 4;
  float sums[4][4] = {};
  for (int k = 0; k < conv.weight_stride; k += kDepth) {
    float v[8];
    if constexpr (kVector) {
      LoadInputs(conv, window, tap, v);
    } else {
      GatherInputs(conv, window, tap, v);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      inputs[(chunk * 8 + j) * kLine + row] = v[j];
      weights[(chunk * 8 + j) * kLine + row] = has_weight ? weight[k + j] : 0.0f;
    }
    tap.Advance(conv, kDepth);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const float4 a4 = *reinterpret_cast<const float4*>(inputs + d * kLine + m);
      const float4 b4 = *reinterpret_cast<const float4*>(weights + d * kLine + n);
      const float a[4] = {a4.x, a4.y, a4.z, a4.w}, b[4] = {b4.x, b4.y, b4.z, b4.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<float4*>(shared + (m + i) * (kN + 4) + n) =
        make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
  }
  __syncthreads();
  FinishTile<kM, kN, kThreads>(conv, plane, shared, m0, phase, n0);
}

}  // namespace

cudaError_t LaunchConv2dFp32(const Conv2dLaunch& conv, const Queue& queue) {
  const Plane plane = PlaneOf(conv);
  const int64_t m = int64_t{conv.images} * plane.pixels.value;
  const int n_tiles = (conv.outputs + kN - 1) / kN;
  const dim3 blocks(static_cast<unsigned>((m + kM - 1) / kM * n_tiles), PhasesOf(conv));
  if (HasVectorInputs(conv)) {
    Conv2dFp32Kernel<true><<<blocks, kThreads, 0, queue.stream>>>(conv, plane, n_tiles);
  } else {
    Conv2dFp32Kernel<false><<<blocks, kThreads, 0, queue.stream>>>(conv, plane, n_tiles);
  }
  return cudaGetLastError();
}

cudaError_t LoadConv2dFp32Kernels() {
  return LoadKernels(0, Conv2dFp32Kernel<true>, Conv2dFp32Kernel<false>);
}

}  // namespace denoised::cuda
