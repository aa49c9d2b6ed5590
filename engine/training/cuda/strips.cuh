// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/cuda/element.cuh"
#include "engine/training/cuda/tree_sum.cuh"

/// How blocks divide [segments, lines, channels]: a block has a strip of channels, and of one
/// segment one part of the lines. A warp reads neighbouring channels of one or a few lines.

namespace denoised::training::cuda {

constexpr int kStripThreads = 256;
constexpr int kMostSegments = 65535;  // CUDA's limit of gridDim.y and gridDim.z

constexpr int kWideStrip = 64, kNarrowStrip = 32;  // channels; see StripWidth()

/// V channels per thread: eight, or one if the channels are not aligned vectors. kWidth: channels
/// of a strip.
template <int V, int kWidth = V == 8 ? kWideStrip : kNarrowStrip>
struct Strip {
  static constexpr int kChannels = kWidth;
  static constexpr int kAcross = kChannels / V;           // threads along a line
  static constexpr int kLines = kStripThreads / kAcross;  // lines at a time
  static __device__ int Line() { return threadIdx.x / kAcross; }
  static __device__ int Place() { return threadIdx.x % kAcross * V; }
  static __device__ int Column() { return blockIdx.x * kChannels + Place(); }
  static dim3 Grid(int channels, int parts, unsigned segments) {
    return dim3(static_cast<unsigned>((channels + kChannels - 1) / kChannels),
                static_cast<unsigned>(parts), segments);
  }
};
/// Narrow if half of the threads of the last wide strip would idle.
inline int StripWidth(int channels, bool vectors) {
  const int rest = channels % kWideStrip;
  return vectors && (rest == 0 || rest > kNarrowStrip) ? kWideStrip : kNarrowStrip;
}
/// V channels of a line in their memory format, so that several loads in flight take few registers.
/// Other types than vectors of bf16 are converted to fp32 at once.
template <int V, denoised::cuda::Element kElement>
struct Channels {
  float values[V];
  __device__ void Load(const denoised::cuda::Rows& rows, int64_t line, int column) {
    denoised::cuda::LoadChannelsOf<V, kElement>(rows, line, column, values);
  }
  __device__ void Get(float (&v)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = values[i];
  }
};
template <>
struct Channels<8, denoised::cuda::Element::kBf16> {
  uint4 bits;
  __device__ void Load(const denoised::cuda::Rows& rows, int64_t line, int column) {
    bits = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(rows.data) +
                                           line * rows.stride + column);
  }
  __device__ void Get(float (&v)[8]) const { denoised::cuda::UnpackBf16(bits, v); }
};
template <int V, denoised::cuda::Element kElement>
__device__ inline void StoreChannelsOf(const denoised::cuda::Rows& rows, int64_t line, int column,
                                       const float (&v)[V]) {
  if constexpr (V == 8 && kElement == denoised::cuda::Element::kBf16) {
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(rows.data) + line * rows.stride +
                              column) = denoised::cuda::PackBf16(v);
  } else {
    denoised::cuda::StoreChannels<V>(rows, line, column, v);
  }
}

/// Calls load(u, line) for kCount of a thread's lines, then use(u, line) for the same, so that
/// their loads are in flight together.
template <int kCount, int kStride, typename LoadAt, typename Use>
__device__ void ForLines(int64_t begin, int64_t end, const LoadAt& load, const Use& use) {
  for (int64_t line = begin; line < end; line += kCount * kStride) {
#pragma unroll
    for (int u = 0; u < kCount; ++u)
      if (line + u * kStride < end) load(u, line + u * kStride);
#pragma unroll
    for (int u = 0; u < kCount; ++u)
      if (line + u * kStride < end) use(u, line + u * kStride);
  }
}

struct Range {
  int64_t begin, end;
};
/// The lines of one of `parts` parts.
__device__ inline Range RangeOf(int64_t lines, int parts, int part) {
  const int64_t size = (lines + parts - 1) / parts;
  const int64_t begin = part * size;
  return {begin, begin + size < lines ? begin + size : lines};
}

}  // namespace denoised::training::cuda
