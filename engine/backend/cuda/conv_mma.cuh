// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "engine/backend/cuda/implicit_gemm.cuh"
#include "engine/backend/cuda/mma.cuh"

/// Shared by conv2d.cu and conv3x3.cu: the layout of shared memory, interleaving loads with MMAs,
/// initial accumulators, the epilogue, and the cost of a tile.

namespace denoised::cuda {

constexpr int kDepth = kDepthPadding;  // elements along k per step: two mma
constexpr int kChunks = kDepth / 8;    // of 16 bytes

/// Offset in elements of a chunk of a row in a tile [rows, kDepth] in shared memory, the `nth` row
/// that ldmatrix reads. Eight neighbouring rows, which it reads together, lie in different banks.
__device__ inline int Swizzled(int row, int chunk, int nth) {
  static_assert(kChunks == 4);  // two rows fill the 128 bytes of all banks
  return row * kDepth + (chunk ^ (nth / 2 % 4)) * 8;
}
__device__ inline int Swizzled(int row, int chunk) { return Swizzled(row, chunk, row); }

/// Spreads kParts pieces of work evenly over kSlots slots and runs those of `slot`.
template <int kParts, int kSlots, typename Do>
__device__ inline void Interleave(int slot, const Do& what) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (part * kSlots / kParts == slot) what(part);
  }
}

/// Whether FinishVector supports the layer: it has at most one of add and residual.
inline bool FinishesInVectors(const ConvLayer& conv) {
  return HasVectorOutputs(conv) && (conv.add.data == nullptr || conv.residual.data == nullptr);
}

/// Eight outputs from their sums, which include the bias: act((sum + beside) · scale). Requires
/// FinishesInVectors().
__device__ inline uint4 FinishVector(const Conv2dLaunch& conv, bool has_beside, uint4 beside,
                                     float (&v)[8]) {
  if (has_beside) {
    const uint32_t words[4] = {beside.x, beside.y, beside.z, beside.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) AddPair(words[j], v[2 * j], v[2 * j + 1]);
  }
  ApplyEpilogue(conv, conv.activation == Activation::kSilu, v);
  return PackBf16(v);
}

/// Initialises a warp's accumulators [16 · kM pixels, 8 · kN outputs], whose first output is `n`,
/// with the bias, which is padded to kBiasPadding.
template <int kM, int kN>
__device__ inline void InitWithBias(const float* bias, int n, int outputs,
                                    float (&sums)[kM][kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const int at = n + j * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
    const bool biased = bias != nullptr && at < outputs;
    const float2 begin = biased ? *reinterpret_cast<const float2*>(bias + at) : float2{};
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      sums[i][j][0] = sums[i][j][2] = begin.x;
      sums[i][j][1] = sums[i][j][3] = begin.y;
    }
  }
}

/// sum · scale + bias of such accumulators, in e4m3. Scales are powers of two, so this rounds once.
template <int kM, int kN>
__device__ inline void ScaleAndAddBias(const float* scales, const float* bias, int n, int outputs,
                                       float (&sums)[kM][kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const int at = n + j * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
    if (at >= outputs) continue;
    const float2 scale = *reinterpret_cast<const float2*>(scales + at);
    const float2 begin = bias != nullptr ? *reinterpret_cast<const float2*>(bias + at) : float2{};
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      sums[i][j][0] = fmaf(sums[i][j][0], scale.x, begin.x);
      sums[i][j][1] = fmaf(sums[i][j][1], scale.y, begin.y);
      sums[i][j][2] = fmaf(sums[i][j][2], scale.x, begin.x);
      sums[i][j][3] = fmaf(sums[i][j][3], scale.y, begin.y);
    }
  }
}

/// Bytes of shared memory for a warp's epilogue. Eight floats of padding put four rows into
/// different banks.
template <int kN>
constexpr int kFinishBytes = 16 * (8 * kN + 8) * 4;

/// The epilogue of such accumulators. `pixel_of(row)` is the output pixel, or −1. `staged` is
/// kFinishBytes of the warp's own; 16 rows at a time pass through it, so that each lane finishes
/// vectors of eight neighbouring outputs. The loop is not unrolled, to keep the code small.
/// kVectors: outputs are computed by FinishVector.
template <bool kVectors, int kM, int kN, typename PixelOf>
__device__ inline void FinishWarp(const Conv2dLaunch& conv, const float (&sums)[kM][kN][4],
                                  float* staged, int first_n, const PixelOf& pixel_of) {
  constexpr int kLine = 8 * kN + 8, kLanes = kN, kPasses = 16 * kLanes / 32;
  const int lane = threadIdx.x % 32;
  const int image_pixels = conv.out_height * conv.out_width;
  static_assert(16 * kLanes % 32 == 0 && kM >= 2);
  const auto row_at = [&](int pass) { return (pass * 32 + lane) / kLanes; };
  const auto column_at = [&](int pass) { return (pass * 32 + lane) % kLanes * 8; };
  const auto pixel_at = [&](int part, int pass) {
    return first_n + column_at(pass) < conv.outputs ? pixel_of(part * 16 + row_at(pass)) : -1;
  };
  // The addends of this part and the next are loaded two parts early.
  const Rows& beside_rows = conv.residual.data != nullptr ? conv.residual : conv.add;
  const bool has_beside = beside_rows.data != nullptr;
  uint4 beside[2][kPasses];
  const auto load_beside = [&](int part, int pass, uint4* to) {
    const int pixel = pixel_at(part, pass);
    if (!kVectors || !has_beside || pixel < 0) return;
    const int row = conv.residual.data != nullptr ? pixel : pixel / image_pixels;
    *to = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(beside_rows.data) +
                                          row * beside_rows.stride + first_n + column_at(pass));
  };
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) load_beside(part, pass, &beside[part][pass]);
  }
#pragma unroll 1
  for (int part = 0; part < kM; ++part) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      if (i != part) continue;  // registers cannot be indexed
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        float* to = staged + lane / 4 * kLine + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(sums[i][j][0], sums[i][j][1]);
        *reinterpret_cast<float2*>(to + 8 * kLine) = make_float2(sums[i][j][2], sums[i][j][3]);
      }
    }
    __syncwarp();
#pragma unroll(kVectors ? kPasses : 1)
    for (int pass = 0; pass < kPasses; ++pass) {
      const int pixel = pixel_at(part, pass);
      const int n = first_n + column_at(pass);
      const auto* from =
          reinterpret_cast<const float4*>(staged + row_at(pass) * kLine + column_at(pass));
      const float4 low = from[0], high = from[1];
      float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      if constexpr (kVectors) {
        const uint4 packed = FinishVector(conv, has_beside, beside[0][pass], v);
        if (pixel >= 0) *Bf16At<uint4>(conv.out, pixel, n) = packed;
        beside[0][pass] = beside[1][pass];
        if (part + 2 < kM) load_beside(part + 2, pass, &beside[1][pass]);
      } else {
        if (pixel >= 0) FinishOutputs(conv, pixel, n, v);
      }
    }
    __syncwarp();
  }
}

/// Microseconds per tile on an H200: for a step along k and for everything else, if a block has a
/// multiprocessor to itself and if `blocks` share one.
struct TileCost {
  int blocks;
  double step_alone, rest_alone, step_shared, rest_shared;
};

/// How to launch and to load the kernel of a tile.
struct TileKernel {
  cudaError_t (*launch)(Conv2dLaunch conv, const Queue& queue);
  cudaError_t (*load)();
};
template <typename Choice, int kCount>
cudaError_t LoadChoices(const Choice (&choices)[kCount]) {
  for (const Choice& choice : choices) {
    if (cudaError_t error = choice.kernel.load(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

/// Time of the busiest multiprocessor for `tiles` tiles, without the launch.
inline double Microseconds(const TileCost& cost, int64_t tiles, int steps, int multiprocessors) {
  const int64_t most = (tiles + multiprocessors - 1) / multiprocessors;
  const double alone = steps * cost.step_alone + cost.rest_alone;
  const double shared = steps * cost.step_shared + cost.rest_shared;
  const int64_t left = most % cost.blocks;  // blocks in the last round
  const double last = left == 0 ? 0
                                : alone + (shared - alone) * static_cast<double>(left - 1) /
                                              std::max(1, cost.blocks - 1);
  return static_cast<double>(most / cost.blocks) * shared + last;
}

}  // namespace denoised::cuda
