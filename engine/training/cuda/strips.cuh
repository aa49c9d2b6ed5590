// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/cuda/element.cuh"

/// How blocks share [segments, lines, channels]: a block has a strip of channels of one part of one
/// segment's lines. A warp reads neighbouring channels of a line or of a few.

namespace denoised::training::cuda {

constexpr int kStripThreads = 256;
constexpr int kMostSegments = 65535;  // of a grid

/// V channels for each thread: eight, or one where channels are no vectors.
template <int V>
struct Strip {
  static constexpr int kChannels = V == 8 ? 64 : 32;
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

struct Range {
  int64_t begin, end;
};
/// Part `part` of `parts` of `lines`.
__device__ inline Range RangeOf(int64_t lines, int parts, int part) {
  const int64_t size = (lines + parts - 1) / parts;
  const int64_t begin = part * size;
  return {begin, begin + size < lines ? begin + size : lines};
}

/// Σ value(i) over i < kCount, a power of two, in pairs.
template <int kCount, typename Value>
__device__ inline float SumOf(const Value& value) {
  if constexpr (kCount == 1) {
    return value(0);
  } else {
    return SumOf<kCount / 2>(value) +
           SumOf<kCount / 2>([&](int i) { return value(i + kCount / 2); });
  }
}

inline denoised::cuda::Rows LinesFrom(denoised::cuda::Rows rows, int64_t first) {
  if (rows.data != nullptr)
    rows.data = static_cast<char*>(rows.data) +
                first * rows.stride * (rows.element == denoised::cuda::Element::kF32 ? 4 : 2);
  return rows;
}

}  // namespace denoised::training::cuda
