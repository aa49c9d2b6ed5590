#pragma once

#include "engine/backend/cuda/hopper.cuh"
#include "engine/backend/cuda/launch.h"

/// Sums of what a kernel is about to store, for the group norm that comes next.

namespace denoised::cuda {

/// What a lane has of the moments of a unit of 64 pixels × 64 channels. Lanes whose number modulo
/// four is their number over eight have a channel of each of the warp's two pieces of eight.
struct UnitMoments {
  static constexpr int kPieces = 2;
  ChannelMoments of[kPieces];
};

/// Of a unit of bf16 in shared memory, 128 bytes a pixel, swizzled as the copy engine lays them; by
/// the four warps of a warpgroup.
///
/// Tensor cores add: of the eight rows of X = {x₀ … x₆₃} of a warp, mma makes X·Xᵀ, whose diagonal
/// are the sums of squares, and 1·Xᵀ. Squares of bf16 are exact in fp32. Where the mean is large
/// against the spread within the unit, `squares` loses what the spread between units keeps.
__device__ inline UnitMoments MomentsOf(const unsigned char* unit) {
  constexpr uint32_t kOnes = 0x3f803f80;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = lane / 4;
  UnitMoments moments;
  float sums[UnitMoments::kPieces][2][4] =
      {};  // so many that a warp does not wait for each product
#pragma unroll
  for (int i = 0; i < UnitMoments::kPieces; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Words of channel `row`, pixels 2·(lane % 4) and the next of each eight.
      uint32_t pairs[4];
      const int pixel = half * 32 + lane, piece = warp + i * 4;
      LoadMatricesTransposed(SharedAddress(unit) + pixel * 128 + (piece ^ pixel % 8) * 16, pairs);
      float(&d)[4] = sums[i][half];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %6, %5, %6}, {%4, %5}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(pairs[2 * step]), "r"(pairs[2 * step + 1]), "r"(kOnes));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < UnitMoments::kPieces; ++i) {
    float both[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) both[j] = sums[i][0][j] + sums[i][1][j];
    const float squares = row % 2 == 0 ? both[0] : both[1];
    const float sum = row % 2 == 0 ? both[2] : both[3];
    const float mean = sum * (1.0f / kMomentPixels);
    moments.of[i] = {mean, fmaxf(fmaf(-mean, sum, squares), 0.0f)};
  }
  return moments;
}

/// Of the first `pieces` of eight channels, to to[0 … pieces · 8).
__device__ inline void StoreMoments(const UnitMoments& moments, int pieces, ChannelMoments* to) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = lane / 4;
  if (lane % 4 != row / 2) return;
#pragma unroll
  for (int i = 0; i < UnitMoments::kPieces; ++i) {
    if (warp + i * 4 < pieces) to[(warp + i * 4) * 8 + row] = moments.of[i];
  }
}

}  // namespace denoised::cuda
