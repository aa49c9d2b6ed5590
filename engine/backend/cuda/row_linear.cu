// SPDX-License-Identifier: Apache-2.0
// Linear layers over one vector per sample, such as the time embedding's. There are few rows, so
// the time is that of loading the weight.
//
// Policy. A block computes 8 · kGroups outputs of up to 16 · kTiles rows. Its warps divide the
// inputs in chunks of 32: warp w takes chunks w, w + kWarps, …, and their sums are added in order.
// A lane reads eight neighbouring inputs of a weight's row and of x's rows; which of them an mma
// takes together does not matter as long as both operands agree. The weight is loaded before the
// predecessor has ended, and all inputs are loaded at once: they are bf16 and need no conversion
// before the mma. A row's order of sums does not depend on the number of rows or on the block.

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/mma.cuh"

namespace denoised::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kChunk = 32;  // inputs: two mma
static_assert(kDepthPadding % kChunk == 0);

/// Elements k … k + 7 of a row, zeros beyond the end.
__device__ uint4 LoadEight(const void* data, int64_t stride, int rows, int columns, int row,
                           int k) {
  const auto* from = static_cast<const __nv_bfloat16*>(data) + row * stride + k;
  return row < rows && k < columns ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
}

/// grid (columns / (8 · kGroups), rows / (16 · kTiles)). kAhead chunks of the weight are in flight
/// at one time.
template <int kTiles, int kGroups, int kAhead>
__global__ void __launch_bounds__(kThreads)
    RowLinearKernel(const __grid_constant__ Conv2dLaunch linear) {
  constexpr int kRows = 16 * kTiles, kColumns = 8 * kGroups;
  __shared__ float sums[kWarps][16][kColumns];
  ReleaseDependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = blockIdx.y * kRows, first_column = blockIdx.x * kColumns;
  const int chunks = linear.weight_stride / kChunk;

  // A thread's outputs are in one column.
  static_assert(kThreads % kColumns == 0);
  const int my_column = first_column + threadIdx.x % kColumns;
  const bool has_bias = linear.bias != nullptr && my_column < linear.outputs;
  const float bias = has_bias ? linear.bias[my_column] : 0.0f;

  float sum[kTiles][kGroups][4] = {};
  int chunk = warp;
  bool waited = false;
  do {
    uint4 b[kAhead][kGroups];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = (chunk + i * kWarps) * kChunk + lane % 4 * 8;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        b[i][g] = LoadEight(linear.weight, linear.weight_stride, linear.outputs,
                            linear.weight_stride, first_column + g * 8 + lane / 4, k);
      }
    }
    if (!waited) {
      WaitForPredecessors();
      waited = true;
    }
    uint4 a[kAhead][kTiles][2];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = (chunk + i * kWarps) * kChunk + lane % 4 * 8;
#pragma unroll
      for (int h = 0; h < 2 * kTiles; ++h) {
        a[i][h / 2][h % 2] = LoadEight(linear.x.data, linear.x.stride, linear.images,
                                       linear.channels, first_row + 8 * h + lane / 4, k);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4 upper = a[i][t][0], lower = a[i][t][1];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          Multiply(sum[t][g], {upper.x, lower.x, upper.y, lower.y}, b[i][g].x, b[i][g].y);
          Multiply(sum[t][g], {upper.z, lower.z, upper.w, lower.w}, b[i][g].z, b[i][g].w);
        }
      }
    }
    chunk += kAhead * kWarps;
  } while (chunk < chunks);

#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (t > 0) __syncthreads();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int row = lane / 4, column = 8 * g + lane % 4 * 2;
      sums[warp][row][column] = sum[t][g][0];
      sums[warp][row][column + 1] = sum[t][g][1];
      sums[warp][row + 8][column] = sum[t][g][2];
      sums[warp][row + 8][column + 1] = sum[t][g][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * kColumns; i += kThreads) {
      const int row = first_row + 16 * t + i / kColumns;
      if (row >= linear.images || my_column >= linear.outputs) continue;
      float v = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) v += sums[w][i / kColumns][i % kColumns];
      v += bias;
      if (linear.residual.data != nullptr) v += Load(linear.residual, row, my_column);
      Store(linear.out, row, my_column, Activate(linear.activation, v * linear.scale));
    }
  }
}

}  // namespace

// With many rows a GEMM is faster for wide layers, but the choice must not depend on their number.
// A wider limit than this one costs large batches more than it gives small ones
// (docs/kernels-measured.md).
constexpr int kMaxRowOutputs = 8192;

bool SuitsRowLinear(const ConvLayer& linear) {
  return linear.out_height * linear.out_width == 1 && linear.kernel == 1 &&
         linear.height * linear.width == 1 && linear.x2.data == nullptr &&
         linear.add.data == nullptr && linear.x.element == Element::kBf16 && linear.x.vector &&
         linear.channels % 8 == 0 && linear.outputs <= kMaxRowOutputs &&
         linear.weight_element == Element::kBf16;
}

cudaError_t LaunchRowLinear(const Conv2dLaunch& linear, const Queue& queue) {
  const auto launch = [&](auto kernel, int block_rows, int block_columns) {
    const unsigned columns = (linear.outputs + block_columns - 1) / block_columns;
    const unsigned rows = (linear.images + block_rows - 1) / block_rows;
    return LaunchDependent(kernel, {dim3(columns, rows), kThreads}, queue, linear);
  };
  return linear.images <= 16 ? launch(RowLinearKernel<1, 2, 4>, 16, 16)
                             : launch(RowLinearKernel<4, 4, 1>, 64, 32);
}

cudaError_t LoadRowLinearKernels() {
  return LoadKernels(0, RowLinearKernel<1, 2, 4>, RowLinearKernel<4, 4, 1>);
}

}  // namespace denoised::cuda
