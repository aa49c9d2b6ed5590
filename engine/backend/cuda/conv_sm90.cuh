#pragma once

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/hopper.cuh"
#include "engine/backend/cuda/tensor_map.h"

/// What the convolution kernels for Hopper share: steps along k, how sums begin and leave, and how
/// the copy engine is told of weights.
///
/// A step is 64 channels under one tap. k is walked chunk by chunk of 64 channels, those of x
/// before those of x2, and under every tap of the window before the next chunk: so the two kernels
/// add in the same order, and give the same bits.

namespace denoised::cuda {

static_assert(kStep == 64);  // 128 bytes of bf16, the widest swizzle
constexpr int kStepBytes = kStep * 2;

__device__ inline void AddPair(uint32_t pair, float& a, float& b) {
  a += __uint_as_float(pair << 16);
  b += __uint_as_float(pair & 0xffff0000u);
}

/// Sums begin with the bias of their output, so that it costs nothing at the end; those of a later
/// split begin with zero. Without branches: products read the sums later than it seems.
template <int kSums>
__device__ inline void BeginSums(const Conv2dLaunch& conv, const float* bias, int n0,
                                 float (&sums)[kSums]) {
  const int first = n0 + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    float2 pair = {0, 0};
    if (bias != nullptr && first + j * 8 < conv.outputs) {
      pair = __ldg(reinterpret_cast<const float2*>(bias + first + j * 8));
    }
    sums[4 * j] = sums[4 * j + 2] = pair.x;
    sums[4 * j + 1] = sums[4 * j + 3] = pair.y;
  }
}

/// act(sum · scale), in place.
__device__ inline void FinishSums(const Conv2dLaunch& conv, float (&v)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] *= conv.scale;
  if (conv.activation != Activation::kSilu) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = __fdividef(v[j], 1.0f + __expf(-v[j]));
}

/// A warpgroup's sums of 64 pixels through shared memory, in boxes of 64 pixels × kBox outputs as
/// the copy engine lays them: the residual, when there is one, lies in `staging` already; the
/// outputs take its place.
template <int kBox, int kSums>
__device__ inline void FinishStaged(const Conv2dLaunch& conv, unsigned char* staging,
                                    const float (&sums)[kSums]) {
  constexpr int kLine = kBox * 2;  // bytes
  constexpr int kChunks = kBox / 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  // This lane's row of the four matrices: rows 0…7 and 8…15 of eight outputs, then of the next.
  const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
  const int swizzle = kBox == 64 ? row % 8 : row / 2 % 4;
  const bool has_residual = conv.residual.data != nullptr;
#pragma unroll
  for (int j = 0; j < kSums / 4; j += 2) {
    const int chunk = j % kChunks + lane / 16;
    const uint32_t at =
        SharedAddress(staging) + j / kChunks * (64 * kLine) + row * kLine + (chunk ^ swizzle) * 16;
    float v[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) v[c] = sums[4 * j + c];
    if (has_residual) {
      uint32_t residual[4];
      LoadMatrices(at, residual);
#pragma unroll
      for (int c = 0; c < 4; ++c) AddPair(residual[c], v[2 * c], v[2 * c + 1]);
    }
    FinishSums(conv, v);
    uint32_t packed[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) packed[c] = PackBf16(v[2 * c], v[2 * c + 1]);
    StoreMatrices(at, packed);
  }
}

/// conv.weight, [phases, outputs, taps, channels + channels2], in boxes of a step for
/// `outputs_at_once`.
inline CUresult EncodeWeight(CUtensorMap* map, const Conv2dLaunch& conv, int taps, int phases,
                             int outputs_at_once) {
  const cuuint64_t channels = static_cast<cuuint64_t>(conv.channels + conv.channels2);
  const cuuint64_t outputs = static_cast<cuuint64_t>(conv.outputs);
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(conv.weight_stride) * 2;
  const cuuint64_t dims[4] = {channels, static_cast<cuuint64_t>(taps), outputs,
                              static_cast<cuuint64_t>(phases)};
  const cuuint64_t strides[3] = {channels * 2, row_bytes, row_bytes * outputs};
  const cuuint32_t box[4] = {kStep, 1, static_cast<cuuint32_t>(outputs_at_once), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  return GetTensorMapEncoders().tiled(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(conv.weight), dims, strides, box,
      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace denoised::cuda
