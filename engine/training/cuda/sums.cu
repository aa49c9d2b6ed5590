// SPDX-License-Identifier: Apache-2.0
// Sums in a fixed order: columns of a gradient (for biases and time embeddings), and the tree over
// chunks for everything that is summed over samples.
//
// Policy. Column sums: a block owns a strip of channels in one part of a segment. Its threads take
// turns at the lines, and their sums are added in a fixed order. Tree: a thread owns an element, or
// if there are many splits one of its chunks and a part of their splits.

#include <algorithm>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/training/cuda/launch.h"
#include "engine/training/cuda/strips.cuh"
#include "engine/training/cuda/tree_sum.cuh"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

template <int V, int kWidth, Element kElement>
__global__ void __launch_bounds__(kStripThreads)
    ColumnSumsKernel(Rows x, int64_t lines, int channels, float* partial) {
  WaitForPredecessors();
  ReleaseDependents();
  using S = Strip<V, kWidth>;
  __shared__ float shared[S::kLines][S::kChannels];
  const int column = S::Column();
  const Range range = RangeOf(lines, gridDim.y, blockIdx.y);
  const int64_t segment = blockIdx.z;
  float sums[V] = {};
  if (column < channels) {
    Channels<V, kElement> loaded[8];
    ForLines<8, S::kLines>(
        range.begin + S::Line(), range.end,
        [&](int u, int64_t line) { loaded[u].Load(x, segment * lines + line, column); },
        [&](int u, int64_t) {
          float v[V];
          loaded[u].Get(v);
#pragma unroll
          for (int i = 0; i < V; ++i) sums[i] += v[i];
        });
  }
#pragma unroll
  for (int i = 0; i < V; ++i) shared[S::Line()][S::Place() + i] = sums[i];
  __syncthreads();
  for (int c = threadIdx.x; c < S::kChannels; c += kStripThreads) {
    const int channel = blockIdx.x * S::kChannels + c;
    if (channel >= channels) continue;
    partial[(segment * gridDim.y + blockIdx.y) * channels + channel] =
        SumOf<S::kLines>([&](int line) { return shared[line][c]; });
  }
}

constexpr int kThreads = 256;

/// Index in the result of element i of a group; −1 if it is dropped.
__device__ inline int64_t PlaceOf(const TreeSumLaunch& sum, int64_t i) {
  if (sum.taps == 1 && sum.in_channels <= sum.channels) return i;
  const auto at = static_cast<unsigned>(i);  // a weight has fewer elements
  const unsigned pair = at / sum.in_channels, channel = at % sum.in_channels;
  if (channel >= static_cast<unsigned>(sum.channels)) return -1;
  return (static_cast<int64_t>(pair / sum.taps) * sum.channels + channel) * sum.taps +
         pair % sum.taps;
}
__device__ inline void StoreSum(const TreeSumLaunch& sum, int64_t group, int64_t place,
                                float value) {
  const int64_t to = group * sum.out_stride + place;
  if (sum.out_element == Element::kBf16) {
    static_cast<__nv_bfloat16*>(sum.out)[to] = __float2bfloat16_rn(value * sum.scale);
  } else {
    static_cast<float*>(sum.out)[to] = value * sum.scale;
  }
}
__device__ inline int64_t GroupStride(const TreeSumLaunch& sum) {
  return sum.in_group > 0 ? sum.in_group : sum.chunks * sum.splits * sum.in_stride;
}

/// For many elements and few splits. Reads are coalesced. Writes are not if the
/// result has another layout, but there are fewer of them.
template <int kLeaves>
__global__ void __launch_bounds__(kThreads)
    TreeSumKernel(const __grid_constant__ TreeSumLaunch sum) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t place = i < sum.count ? PlaceOf(sum, i) : -1;
  if (place < 0) return;
  for (int64_t group = blockIdx.y; group < sum.groups; group += gridDim.y) {
    const float* const from = sum.in + group * GroupStride(sum) + i;
    StoreSum(sum, group, place,
             SumOfChunks<kLeaves, 1, float>(
                 sum.chunks, sum.splits, [&](int64_t part) { return from[part * sum.in_stride]; }));
  }
}

/// For few elements and many splits, such as a bias: a thread owns one of kLeaves chunks and one of
/// kRuns runs of its splits, and loads several splits at once. The runs are added as a tree.
constexpr int kRuns = 4;
template <int kLeaves>
__global__ void __launch_bounds__(32 * kLeaves * kRuns)
    ManySplitsKernel(const __grid_constant__ TreeSumLaunch sum) {
  WaitForPredecessors();
  ReleaseDependents();
  constexpr int kAtOnce = 16;
  __shared__ float shared[kRuns][kLeaves][32];
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  const int64_t place = i < sum.count ? PlaceOf(sum, i) : -1;
  const int64_t chunk_stride = sum.splits * sum.in_stride;
  const Range run = RangeOf(sum.splits, kRuns, threadIdx.z);
  const bool is_first = threadIdx.y == 0 && threadIdx.z == 0;
  for (int64_t group = blockIdx.y; group < sum.groups; group += gridDim.y) {
    Subtrees<float> subtrees;
    for (int64_t leaf = 0; leaf < sum.chunks / kLeaves; ++leaf) {
      const float* from = sum.in + group * GroupStride(sum) +
                          (leaf * kLeaves + threadIdx.y) * chunk_stride +
                          run.begin * sum.in_stride + i;
      float value = 0;
      for (int64_t split = run.begin; place >= 0 && split < run.end;
           split += kAtOnce, from += kAtOnce * sum.in_stride) {
        float values[kAtOnce];
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s)
          values[s] = split + s < run.end ? from[s * sum.in_stride] : 0.0f;
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) value += values[s];
      }
      shared[threadIdx.z][threadIdx.y][threadIdx.x] = value;
      __syncthreads();
      if (is_first)
        subtrees.Add(leaf, SumOf<kLeaves>([&](int chunk) {
                       return SumOf<kRuns>([&](int r) { return shared[r][chunk][threadIdx.x]; });
                     }));
      __syncthreads();
    }
    if (is_first && place >= 0) StoreSum(sum, group, place, subtrees.Sum());
  }
}

template <int kLeaves>
cudaError_t StartTreeSum(const TreeSumLaunch& sum, const Queue& queue) {
  const bool many = sum.splits >= 8;
  const int64_t elements = many ? 32 : kThreads;  // per block
  const dim3 grid(static_cast<unsigned>((sum.count + elements - 1) / elements),
                  static_cast<unsigned>(std::min<int64_t>(sum.groups, kMostSegments)));
  const dim3 block = many ? dim3(32, kLeaves, kRuns) : dim3(kThreads);
  return LaunchDependent(many ? ManySplitsKernel<kLeaves> : TreeSumKernel<kLeaves>,
                         {.grid = grid, .block = block}, queue, sum);
}

}  // namespace

int PartsOf(int64_t lines) {
  return static_cast<int>(std::clamp<int64_t>((lines + 255) / 256, 1, 64));
}

cudaError_t LaunchColumnSums(const Rows& x, int64_t segments, int64_t lines, int channels,
                             float* partial, const Queue& queue) {
  const bool vectors = x.vector && channels % 8 == 0, bf16 = x.element == Element::kBf16;
  const int width = StripWidth(channels, vectors);
  const auto kernel = !vectors ? (bf16 ? ColumnSumsKernel<1, kNarrowStrip, Element::kBf16>
                                       : ColumnSumsKernel<1, kNarrowStrip, Element::kF32>)
                      : width == kWideStrip
                          ? (bf16 ? ColumnSumsKernel<8, kWideStrip, Element::kBf16>
                                  : ColumnSumsKernel<8, kWideStrip, Element::kF32>)
                          : (bf16 ? ColumnSumsKernel<8, kNarrowStrip, Element::kBf16>
                                  : ColumnSumsKernel<8, kNarrowStrip, Element::kF32>);
  for (int64_t first = 0; first < segments; first += kMostSegments) {
    const auto count = static_cast<unsigned>(std::min<int64_t>(kMostSegments, segments - first));
    const dim3 grid = width == kWideStrip
                          ? Strip<8, kWideStrip>::Grid(channels, PartsOf(lines), count)
                          : Strip<8, kNarrowStrip>::Grid(channels, PartsOf(lines), count);
    if (cudaError_t error = LaunchDependent(kernel, {.grid = grid, .block = kStripThreads}, queue,
                                            RowsFrom(x, first * lines), lines, channels,
                                            partial + first * PartsOf(lines) * channels);
        error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchTreeSum(const TreeSumLaunch& sum, const Queue& queue) {
  const auto start = sum.chunks >= 8   ? StartTreeSum<8>
                     : sum.chunks == 4 ? StartTreeSum<4>
                     : sum.chunks == 2 ? StartTreeSum<2>
                                       : StartTreeSum<1>;
  return start(sum, queue);
}

}  // namespace denoised::training::cuda
