// SPDX-License-Identifier: Apache-2.0
// Rounds what a layer in e4m3 reads, where the op before the layer does not.
//
// Policy. Bound by memory. A thread makes 16 numbers, one store. It loads them in vectors of eight
// if the sources are bf16 and aligned, else one by one.

#include <algorithm>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/e4m3.cuh"
#include "engine/backend/cuda/fast_divmod.h"

namespace denoised::cuda {
namespace {

constexpr int kThreads = 256;

struct RoundLaunch {
  Rows x, x2, out;
  int channels = 0, channels2 = 0;
  FastDivmod vectors;  // of a row of `out`
  int all_vectors = 0;
};

template <bool kInVectors>
__global__ void __launch_bounds__(kThreads)
    RoundToE4m3Kernel(const __grid_constant__ RoundLaunch round) {
  WaitForPredecessors();
  ReleaseDependents();
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= round.all_vectors) return;
  const int64_t row = i / round.vectors;
  const int first = i % round.vectors * kE4m3Vector, all = round.channels + round.channels2;
  float v[2][8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = first + 8 * half;
    if constexpr (kInVectors) {
      const bool of_x = channel < round.channels;
      const Rows& from = of_x ? round.x : round.x2;
      if (channel < all) {
        LoadVectorOf<Element::kBf16>(
            from, row * from.stride + (of_x ? channel : channel - round.channels), v[half]);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[half][j] = 0;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int c = channel + j;
        v[half][j] = c < round.channels ? Load(round.x, row, c)
                     : c < all          ? Load(round.x2, row, c - round.channels)
                                        : 0.0f;
      }
    }
  }
  const float inverse = 1.0f / round.out.scale;
  const uint2 low = PackE4m3(v[0], inverse), high = PackE4m3(v[1], inverse);
  *reinterpret_cast<uint4*>(E4m3At(round.out, row, first)) =
      make_uint4(low.x, low.y, high.x, high.y);
}

}  // namespace

cudaError_t LaunchRoundToE4m3(const Rows& x, int channels, const Rows& x2, int channels2,
                              int64_t rows, const Rows& out, const Queue& queue) {
  const int vectors = static_cast<int>(out.stride * 2 / kE4m3Vector);
  const bool in_vectors = InVectors(x) && InVectors(x2) && channels % 8 == 0 && channels2 % 8 == 0;
  const int64_t most = (int64_t{1} << 30) / vectors;  // rows of a launch
  for (int64_t first = 0; first < rows; first += most) {
    const int all_vectors = static_cast<int>(std::min(most, rows - first)) * vectors;
    const RoundLaunch round = {RowsFrom(x, first), RowsFrom(x2, first), RowsFrom(out, first),
                               channels,           channels2,           FastDivmod(vectors),
                               all_vectors};
    const cudaError_t error = LaunchDependent(
        in_vectors ? RoundToE4m3Kernel<true> : RoundToE4m3Kernel<false>,
        {.grid = dim3((all_vectors + kThreads - 1) / kThreads), .block = kThreads}, queue, round);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LoadRoundToE4m3Kernels() {
  return LoadKernels(0, RoundToE4m3Kernel<true>, RoundToE4m3Kernel<false>);
}

}  // namespace denoised::cuda
