#pragma once

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/hopper.cuh"
#include "engine/backend/cuda/tensor_map.h"

/// What the convolution kernels for Hopper share: steps along k, how sums begin and leave, and how
/// the copy engine is told of weights.
///
/// A step is 64 channels under one tap. k is walked chunk by chunk of 64 channels, those of x
/// before those of x2, and under every tap of the window before the next chunk; then come those of
/// the shortcut's x and x2, a step each. So the kernels add in the same order, and give the same
/// bits.

namespace denoised::cuda {

static_assert(kStep == 64);  // 128 bytes of bf16, the widest swizzle
constexpr int kStepBytes = kStep * 2;

/// A shortcut as the copy engine knows it.
struct ShortcutWork {
  CUtensorMap x, x2, weight;
  int chunks = 0, chunks2 = 0;
};

/// A step along k. The first `windowed` chunks have `taps` each, those of a shortcut one.
struct StepAt {
  int chunk, tap;
};
template <bool kShortcut>
__device__ inline StepAt StepOf(int step, int windowed, int taps) {
  const int beyond = step - windowed * taps;
  if (kShortcut && beyond >= 0) return {windowed + beyond, 0};
  return {step / taps, step % taps};
}
template <bool kShortcut>
__device__ inline void Advance(StepAt& at, int windowed, int taps) {
  if (++at.tap == taps || (kShortcut && at.chunk >= windowed)) at.tap = 0, ++at.chunk;
}

/// Where a chunk lies.
struct ChunkAt {
  const CUtensorMap* source;
  const CUtensorMap* weight;
  int channel, weight_channel;  // of the source and of the weight
};
template <bool kShortcut, typename Work>
__device__ inline ChunkAt ChunkOf(const Conv2dLaunch& conv, const Work& work, int chunk) {
  const int of_shortcut = chunk - work.chunks - work.chunks2;
  if (kShortcut && of_shortcut >= 0) {
    const ShortcutWork& shortcut = work.shortcut;
    const bool from_x = of_shortcut < shortcut.chunks;
    const int channel = (from_x ? of_shortcut : of_shortcut - shortcut.chunks) * kStep;
    return {from_x ? &shortcut.x : &shortcut.x2, &shortcut.weight, channel,
            from_x ? channel : conv.shortcut.channels + channel};
  }
  const bool from_x = chunk < work.chunks;
  const int of_x2 = chunk - work.chunks;
  return {from_x ? &work.x : &work.x2, &work.weight, (from_x ? chunk : of_x2) * kStep,
          from_x ? chunk * kStep : conv.channels + of_x2 * kStep};
}

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
  const int biased = bias == nullptr ? 0 : conv.outputs;  // outputs
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    float2 pair = {0, 0};
    if (first + j * 8 < biased) {
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

/// A weight [phases, outputs, taps, channels], in boxes of a step for `outputs_at_once`. `stride`:
/// elements from one output to the next.
inline CUresult EncodeWeight(CUtensorMap* map, const void* weight, int stride, int channels,
                             int taps, int outputs, int phases, int outputs_at_once) {
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(stride) * 2;
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(taps),
                              static_cast<cuuint64_t>(outputs), static_cast<cuuint64_t>(phases)};
  const cuuint64_t strides[3] = {dims[0] * 2, row_bytes, row_bytes * dims[2]};
  const cuuint32_t box[4] = {kStep, 1, static_cast<cuuint32_t>(outputs_at_once), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  return GetTensorMapEncoders().tiled(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(weight), dims, strides, box,
      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/// What `work` tells of k: chunks, sources and weights, these in boxes for `outputs_at_once`.
/// `encode(map, rows, channels, shortcut)` tells the copy engine of a source.
template <typename Work, typename Encode>
CUresult EncodeDepth(Work* work, const Conv2dLaunch& conv, int taps, int phases,
                     int outputs_at_once, const Encode& encode) {
  work->chunks = ChunksOf(conv.channels);
  work->chunks2 = ChunksOf(conv.channels2);
  CUresult result = encode(&work->x, conv.x, conv.channels, false);
  if (result == CUDA_SUCCESS && conv.x2.data != nullptr) {
    result = encode(&work->x2, conv.x2, conv.channels2, false);
  }
  if (result == CUDA_SUCCESS) {
    result =
        EncodeWeight(&work->weight, conv.weight, conv.weight_stride, conv.channels + conv.channels2,
                     taps, conv.outputs, phases, outputs_at_once);
  }
  const ShortcutLaunch& from = conv.shortcut;
  if (result != CUDA_SUCCESS || from.x.data == nullptr) return result;
  ShortcutWork& shortcut = work->shortcut;
  shortcut.chunks = ChunksOf(from.channels);
  shortcut.chunks2 = ChunksOf(from.channels2);
  result = encode(&shortcut.x, from.x, from.channels, true);
  if (result == CUDA_SUCCESS && from.x2.data != nullptr) {
    result = encode(&shortcut.x2, from.x2, from.channels2, true);
  }
  if (result != CUDA_SUCCESS) return result;
  return EncodeWeight(&shortcut.weight, from.weight, from.weight_stride,
                      from.channels + from.channels2, /*taps=*/1, conv.outputs, /*phases=*/1,
                      outputs_at_once);
}

}  // namespace denoised::cuda
