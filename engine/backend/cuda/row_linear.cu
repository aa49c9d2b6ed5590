// Linear layers over one vector a sample, as the time embedding has: few rows, so that what counts
// is how soon the weight arrives.
//
// Policy. A block makes 8 · kGroups outputs of up to 16 · kTiles rows; its warps share the inputs
// in chunks of 32, warp w taking chunks w, w + kWarps, …, and their sums are added in order. A lane
// reads eight neighbouring inputs of a weight's row and of x's rows; which of them an mma takes
// together does not matter as long as both sides agree. The weight is asked for before the
// predecessor has ended. However many rows there are, and whatever the block, each is summed alike.

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/mma.cuh"

namespace denoised::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kChunk = 32;  // inputs: two mma
static_assert(kDepthPadding % kChunk == 0);

/// Inputs k … k + 7 of a row in bf16, zeros beyond the end.
__device__ uint4 LoadInputs(const Conv2dLaunch& linear, int row, int k) {
  if (row >= linear.images || k >= linear.channels) return make_uint4(0, 0, 0, 0);
  float v[8];
  LoadVector(linear.x, row, k, v);
  return PackBf16(v);
}

/// grid (columns / (8 · kGroups), rows / (16 · kTiles)). kAhead chunks of the weight are on their
/// way at once.
template <int kTiles, int kGroups, int kAhead>
__global__ void __launch_bounds__(kThreads)
    RowLinearKernel(const __grid_constant__ Conv2dLaunch linear) {
  constexpr int kRows = 16 * kTiles, kColumns = 8 * kGroups;
  __shared__ float sums[kWarps][16][kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = blockIdx.y * kRows, first_column = blockIdx.x * kColumns;
  const int chunks = linear.weight_stride / kChunk;
  const auto* weight = static_cast<const __nv_bfloat16*>(linear.weight);

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
        const int column = first_column + g * 8 + lane / 4;
        const bool inside = k < linear.weight_stride && column < linear.outputs;
        b[i][g] = inside ? *reinterpret_cast<const uint4*>(
                               weight + static_cast<int64_t>(column) * linear.weight_stride + k)
                         : make_uint4(0, 0, 0, 0);
      }
    }
    if (!waited) {
      WaitForPredecessors();
      ReleaseDependents();
      waited = true;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = (chunk + i * kWarps) * kChunk + lane % 4 * 8;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int row = first_row + 16 * t + lane / 4;
        const uint4 upper = LoadInputs(linear, row, k), lower = LoadInputs(linear, row + 8, k);
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
      const int row = first_row + 16 * t + i / kColumns, column = first_column + i % kColumns;
      if (row >= linear.images || column >= linear.outputs) continue;
      float v = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) v += sums[w][i / kColumns][i % kColumns];
      if (linear.bias != nullptr) v += linear.bias[column];
      if (linear.residual.data != nullptr) v += Load(linear.residual, row, column);
      Store(linear.out, row, column, Activate(linear.activation, v * linear.scale));
    }
  }
}

}  // namespace

// Wider layers are matrix products as soon as there are some rows, and the choice must not follow
// their number. H200, 512 → 5632, 1 and 64 rows: 4 and 69 us here, 31 and 38 in conv2d.cu.
constexpr int kMaxRowOutputs = 2048;

bool SuitsRowLinear(const Conv2dLaunch& linear) {
  return linear.out_height * linear.out_width == 1 && linear.kernel == 1 &&
         linear.height * linear.width == 1 && linear.x2.data == nullptr &&
         linear.add.data == nullptr && linear.x.vector && linear.channels % 8 == 0 &&
         linear.outputs <= kMaxRowOutputs && linear.weight_element == Element::kBf16;
}

cudaError_t LaunchRowLinear(const Conv2dLaunch& linear, const Queue& queue) {
  const auto launch = [&](auto kernel, int block_rows, int block_columns) {
    const unsigned columns = (linear.outputs + block_columns - 1) / block_columns;
    const unsigned rows = (linear.images + block_rows - 1) / block_rows;
    return LaunchDependent(kernel, {dim3(columns, rows), kThreads}, queue, linear);
  };
  return linear.images <= 16 ? launch(RowLinearKernel<1, 2, 4>, 16, 16)
                             : launch(RowLinearKernel<4, 4, 2>, 64, 32);
}

cudaError_t LoadRowLinearKernels() {
  if (cudaError_t error = LoadKernel(RowLinearKernel<1, 2, 4>); error != cudaSuccess) return error;
  return LoadKernel(RowLinearKernel<4, 4, 2>);
}

}  // namespace denoised::cuda
