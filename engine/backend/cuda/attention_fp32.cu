// SPDX-License-Identifier: Apache-2.0
// Softmax attention in fp32 arithmetic: for the debugging mode, and for head dimensions that the
// tensor-core kernel cannot load. Any element type, any dimension up to kMaxHeadDim.
//
// Policy. A warp owns one query, a block kWarps queries of one head of one image. Keys come in
// tiles of 32 through shared memory. For each tile, each lane computes the score of one key, then
// adds its columns of the values, with a running maximum (arXiv 1805.02867). Every query sees key
// 0, so its maximum is finite from the first tile on.

#include "engine/backend/cuda/attention.cuh"
#include "engine/backend/cuda/element.cuh"

namespace denoised::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kKeys = 32;
constexpr int kLaneColumns = kMaxHeadDim / 32;

constexpr int SharedBytes(int dim) {
  return (kWarps * dim + kKeys * (dim + 1)) * static_cast<int>(sizeof(float));
}

template <bool kSelects>  // SelectsKeys()
__global__ void __launch_bounds__(kThreads)
    AttentionFp32Kernel(const __grid_constant__ AttentionLaunch attention) {
  extern __shared__ __align__(16) float floats[];
  const int dim = attention.dim, line = dim | 1;  // odd: a column is spread over all banks
  float* queries = floats;                        // [kWarps][dim]
  float* tile = floats + kWarps * dim;            // [kKeys][line]: keys, then values

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int query = blockIdx.x * kWarps + warp;
  const bool active = query < attention.tokens;
  const int64_t head_column = static_cast<int64_t>(blockIdx.y) * dim;
  const int64_t query_row = static_cast<int64_t>(blockIdx.z) * attention.tokens + query;
  int64_t set = blockIdx.z;
  int key_tokens = attention.key_tokens;  // in this image's set
  int keys_end = key_tokens;              // end of the keys that any query of this block sees
  int visible = key_tokens;               // end of the keys that this warp's query sees
  if constexpr (kSelects) {
    set = KeySet(attention, blockIdx.z);
    key_tokens = keys_end = visible = KeyCount(attention, set);
    if (attention.causal) {
      keys_end = min(key_tokens, static_cast<int>(blockIdx.x + 1) * kWarps);
      visible = min(key_tokens, query + 1);
    }
  }
  const int64_t key_row = set * attention.key_tokens;

  for (int d = lane; d < dim; d += 32) {
    queries[warp * dim + d] = active ? Load(attention.q, query_row, head_column + d) : 0.0f;
  }
  const auto fill = [&](const Rows& rows, int first_key) {
    for (int key = warp; key < kKeys; key += kWarps) {
      const bool valid = first_key + key < key_tokens;
      for (int d = lane; d < dim; d += 32) {
        tile[key * line + d] =
            valid ? Load(rows, key_row + first_key + key, head_column + d) : 0.0f;
      }
    }
  };

  float output[kLaneColumns] = {};
  float maximum = -INFINITY, sum = 0;
  for (int first_key = 0; first_key < keys_end; first_key += kKeys) {
    __syncthreads();
    fill(attention.k, first_key);
    __syncthreads();
    float score = 0;
    for (int d = 0; d < dim; ++d)
      score = fmaf(queries[warp * dim + d], tile[lane * line + d], score);
    score = first_key + lane < visible ? score * attention.scale : -INFINITY;
    const float tile_maximum = fmaxf(maximum, WarpMax(score));
    const float shrink = expf(maximum - tile_maximum);
    const float weight = expf(score - tile_maximum);
    maximum = tile_maximum;
    sum = sum * shrink + WarpSum(weight);
    __syncthreads();
    fill(attention.v, first_key);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) output[i] *= shrink;
    for (int key = 0; key < kKeys; ++key) {
      const float w = __shfl_sync(~0u, weight, key);
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        const int d = i * 32 + lane;
        if (d < dim) output[i] = fmaf(w, tile[key * line + d], output[i]);
      }
    }
  }
  if (!active) return;
  if (lane == 0) StoreLogSumExp(attention, blockIdx.z, blockIdx.y, query, maximum, sum);
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    const int d = i * 32 + lane;
    if (d < dim) Store(attention.out, query_row, head_column + d, output[i] / sum);
  }
}

}  // namespace

cudaError_t LaunchAttentionFp32(const AttentionLaunch& attention, const Queue& queue) {
  const dim3 grid((attention.tokens + kWarps - 1) / kWarps, attention.heads, attention.images);
  const auto kernel =
      SelectsKeys(attention) ? AttentionFp32Kernel<true> : AttentionFp32Kernel<false>;
  kernel<<<grid, kThreads, SharedBytes(attention.dim), queue.stream>>>(attention);
  return cudaGetLastError();
}

cudaError_t LoadAttentionFp32Kernels() {
  return LoadKernels(SharedBytes(kMaxHeadDim), AttentionFp32Kernel<false>,
                     AttentionFp32Kernel<true>);
}

}  // namespace denoised::cuda
