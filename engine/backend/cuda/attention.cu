// SPDX-License-Identifier: Apache-2.0
// Softmax attention on tensor cores, without the matrix of scores in memory (FlashAttention, arXiv
// 2205.14135 and 2307.08691).
//
// Policy. One block takes kQueries queries of one head of one image over all keys, in tiles of
// kKeys and in order, so a row's bits are the same in any batch. Each warp owns 16 queries: their
// scores, running maximum, running sum and output stay in its registers. From 256 dimensions on,
// two warps may share 16 queries: each computes all scores and half of the output. Keys and values
// are copied to shared memory asynchronously: the values while scores are computed, the next keys
// while the output is. Operands are bf16, the softmax fp32. Other dimensions than those listed are
// padded with zeros in shared memory; dimensions that are not multiples of eight go to
// attention_fp32.cu. A variant of each kernel supports shared key sets, sets with fewer keys, and
// causal attention; a causal block skips the tiles after its last query.

#include "engine/backend/cuda/attention.cuh"
#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/mma.cuh"

namespace denoised::cuda {
namespace {

template <int kDim_, int kQueries_, int kKeys_, int kSplit_>
struct Shape {
  static constexpr int kDim = kDim_, kQueries = kQueries_, kKeys = kKeys_, kSplit = kSplit_;
  static constexpr int kThreads = 32 * kQueries / 16 * kSplit;
  // Per multiprocessor, limited by registers.
  static constexpr int kBlocks = (kDim <= 64 ? 512 : 256) / kThreads;
  static constexpr int kLine = kDim + 8;  // eight rows of an 8×8 matrix lie in different banks
  static constexpr int kSharedBytes = (kQueries + 2 * kKeys) * kLine * 2;
  static_assert(kDim % (16 * kSplit) == 0 && kQueries % 16 == 0 && kKeys % 16 == 0);
  static_assert(kSharedBytes <= 99 * 1024, "what consumer chips have");
};

/// Copies rows [begin, begin + kRows) of one head; zeros beyond `count` rows and `dim` columns.
template <typename S, int kRows>
__device__ void CopyRows(const Rows& from, int64_t first_row, int begin, int count, int head,
                         int dim, __nv_bfloat16* to) {
  constexpr int kChunks = S::kDim / 8;
  const auto* data = static_cast<const __nv_bfloat16*>(from.data);
  for (int i = threadIdx.x; i < kRows * kChunks; i += S::kThreads) {
    const int row = i / kChunks, column = i % kChunks * 8;
    const bool valid = begin + row < count && column < dim;
    const int64_t offset =
        (first_row + begin + row) * from.stride + static_cast<int64_t>(head) * dim + column;
    CopyAsync16(to + row * S::kLine + column, valid ? data + offset : data, valid);
  }
}

/// The running softmax of two rows; index e of a fragment is of row e / 2.
struct Softmax {
  float scale_log2;
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // over this lane's columns; lanes are added at the end

  /// Turns scores into weights, and multiplies the output so far by what they make of its own.
  /// Every query sees key 0, so a maximum is finite from the first tile on.
  template <int kKeyFragments, int kOutputFragments>
  __device__ inline void Add(float (&scores)[kKeyFragments][4],
                             float (&output)[kOutputFragments][4]) {
    float tile_maximum[2] = {maximum[0], maximum[1]};
#pragma unroll
    for (int j = 0; j < kKeyFragments; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) tile_maximum[e / 2] = fmaxf(tile_maximum[e / 2], scores[j][e]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tile_maximum[r] = fmaxf(tile_maximum[r], __shfl_xor_sync(~0u, tile_maximum[r], 1));
      tile_maximum[r] = fmaxf(tile_maximum[r], __shfl_xor_sync(~0u, tile_maximum[r], 2));
      const float shrink = Exp2((maximum[r] - tile_maximum[r]) * scale_log2);
      maximum[r] = tile_maximum[r];
      sum[r] *= shrink;
#pragma unroll
      for (int d = 0; d < kOutputFragments; ++d) {
        output[d][2 * r] *= shrink;
        output[d][2 * r + 1] *= shrink;
      }
    }
    const float shift[2] = {maximum[0] * scale_log2, maximum[1] * scale_log2};
#pragma unroll
    for (int j = 0; j < kKeyFragments; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[j][e] = Exp2(fmaf(scores[j][e], scale_log2, -shift[e / 2]));
        sum[e / 2] += scores[j][e];
      }
    }
  }
};

template <typename S, bool kSelects>  // SelectsKeys()
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    AttentionKernel(const __grid_constant__ AttentionLaunch attention) {
  constexpr int kKeyFragments = S::kKeys / 8;
  constexpr int kOutputDim = S::kDim / S::kSplit, kOutputFragments = kOutputDim / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* queries = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* keys = queries + S::kQueries * S::kLine;
  __nv_bfloat16* values = keys + S::kKeys * S::kLine;

  const int first_query = blockIdx.x * S::kQueries, head = blockIdx.y;
  const int64_t image = blockIdx.z;
  const int64_t query_row = image * attention.tokens;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_query = warp / S::kSplit * 16, warp_dim = warp % S::kSplit * kOutputDim;

  WaitForPredecessors();
  int64_t set = image;
  int key_tokens = attention.key_tokens;  // in this image's set
  int keys_end = key_tokens;              // end of the keys that any query of this block sees
  if constexpr (kSelects) {
    set = KeySet(attention, image);
    key_tokens = keys_end = KeyCount(attention, set);
    if (attention.causal) keys_end = min(key_tokens, first_query + S::kQueries);
  }
  const int64_t key_row = set * attention.key_tokens;
  CopyRows<S, S::kQueries>(attention.q, query_row, first_query, attention.tokens, head,
                           attention.dim, queries);
  CopyRows<S, S::kKeys>(attention.k, key_row, 0, key_tokens, head, attention.dim, keys);
  CommitCopies();
  CopyRows<S, S::kKeys>(attention.v, key_row, 0, key_tokens, head, attention.dim, values);
  CommitCopies();

  // Of each tile of 16 rows, a lane holds rows lane / 4 (index 0) and lane / 4 + 8 (index 1).
  float output[kOutputFragments][4] = {};
  Softmax softmax = {attention.scale * 1.4426950408889634f};  // exp(x) = exp2(x log₂ e)

  for (int first_key = 0; first_key < keys_end; first_key += S::kKeys) {
    WaitCopies<1>();  // for the keys; the values may be in flight
    __syncthreads();
    float scores[kKeyFragments][4] = {};
#pragma unroll
    for (int d = 0; d < S::kDim; d += 16) {
      uint32_t a[4];
      LoadMatrices(a, queries + (warp_query + lane % 16) * S::kLine + d + lane / 16 * 8);
#pragma unroll
      for (int j = 0; j < kKeyFragments; j += 2) {
        uint32_t b[4];
        LoadMatrices(b,
                     keys + (j * 8 + lane % 8 + lane / 16 * 8) * S::kLine + d + lane / 8 % 2 * 8);
        Multiply(scores[j], a, b[0], b[1]);
        Multiply(scores[j + 1], a, b[2], b[3]);
      }
    }
    __syncthreads();  // all warps have read the keys
    const int next_key = first_key + S::kKeys;
    if (next_key < keys_end) {
      CopyRows<S, S::kKeys>(attention.k, key_row, next_key, key_tokens, head, attention.dim, keys);
    }
    CommitCopies();

    const bool later = kSelects && attention.causal && next_key > first_query + 1;
    if (next_key > key_tokens || later) {
#pragma unroll
      for (int j = 0; j < kKeyFragments; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = first_key + j * 8 + lane % 4 * 2 + e % 2;
          int visible = key_tokens;
          if (later) {
            visible = min(visible, first_query + warp_query + lane / 4 + e / 2 * 8 + 1);
          }
          if (key >= visible) scores[j][e] = -INFINITY;
        }
      }
    }
    softmax.Add(scores, output);

    WaitCopies<1>();  // for the values; the next keys may be in flight
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kKeyFragments; j += 2) {
      // Two score fragments of 8 columns, rounded, are one operand fragment of 16.
      const uint32_t a[4] = {PackBf16(scores[j][0], scores[j][1]),
                             PackBf16(scores[j][2], scores[j][3]),
                             PackBf16(scores[j + 1][0], scores[j + 1][1]),
                             PackBf16(scores[j + 1][2], scores[j + 1][3])};
#pragma unroll
      for (int d = 0; d < kOutputFragments; d += 2) {
        uint32_t b[4];
        LoadMatricesTransposed(
            b, values + (j * 8 + lane % 16) * S::kLine + warp_dim + d * 8 + lane / 16 * 8);
        Multiply(output[d], a, b[0], b[1]);
        Multiply(output[d + 1], a, b[2], b[3]);
      }
    }
    __syncthreads();  // all warps have read the values
    if (next_key < keys_end) {
      CopyRows<S, S::kKeys>(attention.v, key_row, next_key, key_tokens, head, attention.dim,
                            values);
    }
    CommitCopies();
  }
  WaitCopies<0>();
  ReleaseDependents();

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = softmax.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int query = first_query + warp_query + lane / 4 + 8 * r;
    if (query >= attention.tokens) continue;
    if (warp_dim + lane % 4 == 0)
      StoreLogSumExp(attention, image, head, query, softmax.maximum[r] * attention.scale, sum);
    const float inverse = 1.0f / sum;
    auto* to = static_cast<__nv_bfloat16*>(attention.out.data) +
               (query_row + query) * attention.out.stride +
               static_cast<int64_t>(head) * attention.dim;
#pragma unroll
    for (int d = 0; d < kOutputFragments; ++d) {
      const int column = warp_dim + d * 8 + lane % 4 * 2;
      if (column < attention.dim) {
        *reinterpret_cast<uint32_t*>(to + column) =
            PackBf16(output[d][2 * r] * inverse, output[d][2 * r + 1] * inverse);
      }
    }
  }
}

// If there are many queries, wide blocks take twice as many and read the keys half as often. Large
// heads take fewer queries per block, because each is more work for its warp.
using Dim32 = Shape<32, 64, 64, 1>;
using Dim48 = Shape<48, 64, 64, 1>;
using Dim64 = Shape<64, 64, 64, 1>;
using WideDim32 = Shape<32, 128, 64, 1>;
using WideDim48 = Shape<48, 128, 64, 1>;
using WideDim64 = Shape<64, 128, 64, 1>;
using Dim80 = Shape<80, 64, 64, 1>;
using Dim96 = Shape<96, 64, 64, 1>;
using Dim128 = Shape<128, 64, 64, 1>;
using Dim160 = Shape<160, 64, 32, 1>;
using Dim256 = Shape<256, 32, 64, 2>;
using WideDim256 = Shape<256, 64, 64, 1>;
using Dim512 = Shape<512, 32, 16, 2>;

template <typename S>
cudaError_t LaunchWith(const AttentionLaunch& attention, const Queue& queue) {
  const unsigned blocks = (attention.tokens + S::kQueries - 1) / S::kQueries;
  return LaunchDependent(
      SelectsKeys(attention) ? AttentionKernel<S, true> : AttentionKernel<S, false>,
      {.grid = dim3(blocks, static_cast<unsigned>(attention.heads),
                    static_cast<unsigned>(attention.images)),
       .block = dim3(S::kThreads),
       .shared_bytes = S::kSharedBytes},
      queue, attention);
}

/// Launches S if wide blocks would leave multiprocessors empty.
template <typename S, typename Wide>
cudaError_t LaunchWidest(const AttentionLaunch& attention, const Queue& queue) {
  static_assert(S::kKeys == Wide::kKeys, "the bits depend on kKeys, the choice on the batch");
  const int64_t blocks = int64_t{(attention.tokens + Wide::kQueries - 1) / Wide::kQueries} *
                         attention.heads * attention.images;
  const bool fills =
      blocks >= queue.multiprocessors &&
      (attention.tokens - 1) % Wide::kQueries >= S::kQueries;  // no half of a block idles
  return fills ? LaunchWith<Wide>(attention, queue) : LaunchWith<S>(attention, queue);
}

template <typename... S>
cudaError_t LoadShapes() {
  for (cudaError_t error :
       {LoadKernels(S::kSharedBytes, AttentionKernel<S, false>, AttentionKernel<S, true>)...}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchAttention(const AttentionLaunch& attention, const Queue& queue) {
  if (queue.hopper && SuitsHopper(attention)) {
    return LaunchAttentionHopper(attention, queue);
  }
  if (attention.out.element == Element::kE4m3x2) return cudaErrorInvalidValue;
  const bool vector = attention.q.vector && attention.k.vector && attention.v.vector &&
                      attention.out.vector && attention.dim % 8 == 0;
  // If the scale is not positive, the largest score does not have the largest weight.
  const bool suits = vector && attention.scale > 0;
  if (attention.fp32 || !suits) return LaunchAttentionFp32(attention, queue);
  const int dim = attention.dim;
  if (dim <= 32) return LaunchWidest<Dim32, WideDim32>(attention, queue);
  if (dim <= 48) return LaunchWidest<Dim48, WideDim48>(attention, queue);
  if (dim <= 64) return LaunchWidest<Dim64, WideDim64>(attention, queue);
  if (dim <= 80) return LaunchWith<Dim80>(attention, queue);
  if (dim <= 96) return LaunchWith<Dim96>(attention, queue);
  if (dim <= 128) return LaunchWith<Dim128>(attention, queue);
  if (dim <= 160) return LaunchWith<Dim160>(attention, queue);
  if (dim <= 256) return LaunchWidest<Dim256, WideDim256>(attention, queue);
  return LaunchWith<Dim512>(attention, queue);
}

cudaError_t LoadAttentionKernels() {
  return LoadShapes<Dim32, Dim48, Dim64, WideDim32, WideDim48, WideDim64, Dim80, Dim96, Dim128,
                    Dim160, Dim256, WideDim256, Dim512>();
}

}  // namespace denoised::cuda
