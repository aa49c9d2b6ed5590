// SPDX-License-Identifier: Apache-2.0
// The backward pass of attention, without the matrix of scores in memory (FlashAttention, arXiv
// 2205.14135 and 2307.08691). With the forward pass's log-sum-exp L of each query:
//
//   P = exp(scale·QKᵀ − L)    Δ = Σ dO·O    dS = P ∘ (dO Vᵀ − Δ)
//   dQ = scale·dS K           dK = scale·dSᵀ Q    dV = Pᵀ dO
//
// Policy, unless there are few tokens. One kernel owns queries and computes Δ and dQ; a second owns
// keys and computes dK and dV. Both recompute P and dS, so no block adds to another block's sums.
// They are one template. A block owns tokens of one head of one image, queries (Q, dO) or keys
// (K, V), and iterates over the others in order, so the bits of a token depend on its image alone.
//
// Tensor cores: each warp owns kTiles · 16 tokens and keeps their gradients in registers. It
// computes P and dS for kChunk others at a time; the accumulators of one product are the operand of
// the next. The others pass through a ring of two cp.async stages. Above 128 dimensions, kSplit
// warps share their tokens: each computes all scores and a part of the gradients' columns. Other
// dimensions than those listed are padded with zeros in shared memory.
//
// Few tokens: if the queries and the keys of a head fit one tile, one kernel computes all three
// gradients, with five products instead of seven, and reads each operand once. Its warps own keys,
// so Pᵀ and dSᵀ are left operands in registers. dSᵀ also goes through shared memory, for dQ.
//
// Plain, in fp32 arithmetic, for any element type and any dimension up to kMaxHeadDim: a warp owns
// one token. Each lane computes the score of one other token, then some columns of the gradients.

#include <algorithm>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/mma.cuh"
#include "engine/training/cuda/attention.cuh"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

/// Whether the query attends to the key; both are of one image.
template <bool kOfKeys>
__device__ inline bool Sees(const Gradient& gradient, int own, int other) {
  const int key = kOfKeys ? own : other;
  return (kOfKeys || key < gradient.others.count) &&
         (!gradient.causal || key <= (kOfKeys ? other : own));
}
/// The others with which `count` own tokens, starting at `first`, share any score.
struct Range {
  int begin, end;
};
template <bool kOfKeys>
__device__ inline Range OthersOf(const Gradient& gradient, int first, int count) {
  if (!gradient.causal) return {0, gradient.others.count};
  return kOfKeys ? Range{first, gradient.others.count}
                 : Range{0, min(gradient.others.count, first + count)};
}

// Tensor cores.

/// Each group of kSplit warps owns kTiles · 16 tokens.
template <int kDim_, int kWarps_, int kTiles_, int kOthers_, int kChunk_, int kSplit_ = 1>
struct Shape {
  static constexpr int kDim = kDim_, kWarps = kWarps_, kTiles = kTiles_, kOthers = kOthers_,
                       kChunk = kChunk_, kSplit = kSplit_;
  static constexpr int kThreads = 32 * kWarps, kOwn = kWarps / kSplit * kTiles * 16;
  static constexpr int kBlocks = 256 / kThreads;  // per multiprocessor, limited by registers
  static constexpr int kLine = kDim + 8;  // eight rows of an 8×8 matrix lie in different banks
  static constexpr int kColumns = kDim / kSplit;
  static constexpr int kStage = 2 * kOthers * kLine;
  // Behind the two stages: log-sum-exp and Δ of their queries, if the block owns keys.
  static constexpr int kSharedBytes = (2 * kOwn * kLine + 2 * kStage) * 2 + 2 * 2 * kOthers * 4;
  static_assert(kColumns % 32 == 0 && kOthers % kChunk == 0 && kChunk % 16 == 0);
  static_assert(kSharedBytes <= 99 * 1024, "what consumer chips have");
};

/// Copies kCount tokens of one head, starting at `begin`. Missing tokens and dimensions are zeros.
template <typename S, int kCount>
__device__ inline void CopyTokens(const Rows& from, int row, int begin, int count, int column,
                                  int dim, __nv_bfloat16* to) {
  constexpr int kVectors = S::kDim / 8, kLines = S::kThreads / kVectors;
  static_assert(S::kThreads % kVectors == 0 && kCount % kLines == 0);
  const auto* data = static_cast<const __nv_bfloat16*>(from.data);
  const int c = threadIdx.x % kVectors * 8;
#pragma unroll
  for (int i = 0; i < kCount; i += kLines) {
    const int line = i + threadIdx.x / kVectors, token = begin + line;
    const bool valid = token < count && c < dim;
    CopyAsync16(to + line * S::kLine + c,
                valid ? data + int64_t{row + token} * from.stride + column + c : data, valid);
  }
}

/// Two accumulators of 8 columns, rounded, are one left operand of 16.
__device__ inline void PackOperand(const float (&low)[4], const float (&high)[4],
                                   uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float(&from)[4] = i < 2 ? low : high;
    a[i] = PackBf16(from[i % 2 * 2], from[i % 2 * 2 + 1]);
  }
}

/// Adds the products of the warp's tokens with kChunk others. The arguments are this lane's
/// addresses for ldmatrix.
template <typename S>
__device__ inline void MultiplyTokens(uint32_t own, uint32_t others,
                                      float (&to)[S::kTiles][S::kChunk / 8][4]) {
#pragma unroll
  for (int d = 0; d < S::kDim; d += 16) {
    uint32_t a[S::kTiles][4];
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) LoadMatrices(a[t], own + (t * 16 * S::kLine + d) * 2);
#pragma unroll
    for (int j = 0; j < S::kChunk / 8; j += 2) {
      uint32_t b[4];
      LoadMatrices(b, others + (j * 8 * S::kLine + d) * 2);
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        Multiply(to[t][j], a[t], b[0], b[1]);
        Multiply(to[t][j + 1], a[t], b[2], b[3]);
      }
    }
  }
}

/// Adds the product of weights with 16 others to a gradient. `others` likewise.
template <typename S>
__device__ inline void AddTokens(const uint32_t (&weights)[S::kTiles][4], uint32_t others,
                                 float (&sums)[S::kTiles][S::kColumns / 8][4]) {
#pragma unroll
  for (int c = 0; c < S::kColumns / 8; c += 2) {
    uint32_t b[4];
    LoadMatricesTransposed(b, others + c * 8 * 2);
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) {
      Multiply(sums[t][c], weights[t], b[0], b[1]);
      Multiply(sums[t][c + 1], weights[t], b[2], b[3]);
    }
  }
}

/// Stores 16 bytes if `wanted`. nvcc splits some assignments of uint4 into words.
__device__ inline void StoreVectorIf(bool wanted, void* to, const uint32_t (&words)[4]) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %5, 0;\n"
      "@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(to),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(static_cast<int>(wanted))
      : "memory");
}

/// Stores a warp's part of one gradient: [kTiles · 16 tokens, kColumns]. A quad of lanes has eight
/// neighbouring columns of a row; after the exchange each lane has a vector of 16 bytes.
template <typename S>
__device__ inline void StoreGradient(const Rows& to, int token, int count, int row, int column,
                                     int end, float scale,
                                     const float (&sums)[S::kTiles][S::kColumns / 8][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = token + t * 16 + half * 8 + lane / 4;
      auto* line = static_cast<__nv_bfloat16*>(to.data) + int64_t{row + at} * to.stride + column;
#pragma unroll
      for (int c = 0; c < S::kColumns / 8; c += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&from)[4] = sums[t][c + i];
          words[i] = PackBf16(from[2 * half] * scale, from[2 * half + 1] * scale);
        }
        ExchangeInQuad(words);
        const int first = (c + lane % 4) * 8;
        StoreVectorIf(at < count && first < end, line + first, words);
      }
    }
  }
}

/// Log-sum-exp · log₂ e and Δ of a lane's queries: rows lane / 4 and lane / 4 + 8 of each tile
/// of 16. `own_second`: dout of the CTA's queries, which begin at `begin`. Δ is also stored if
/// `stores`.
template <typename S>
__device__ inline void ReadQueries(const Gradient& gradient, const __nv_bfloat16* own_second,
                                   int own_row, int64_t queries, int begin, int warp_token,
                                   int column, bool stores, float (&log2)[S::kTiles][2],
                                   float (&delta)[S::kTiles][2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = warp_token + t * 16 + half * 8 + lane / 4;
      const bool valid = begin + token < gradient.own.count;
      float sum = 0;
      for (int c = lane % 4 * 8; valid && c < gradient.dim; c += 32) {
        float dout[8], out[8];
        UnpackBf16(*reinterpret_cast<const uint4*>(own_second + token * S::kLine + c), dout);
        LoadVectorOf<Element::kBf16>(
            gradient.out, int64_t{own_row + begin + token} * gradient.out.stride + column + c, out);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(dout[i], out[i], sum);
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      delta[t][half] = sum;
      log2[t][half] = valid ? gradient.log_sum_exp[queries + begin + token] * kLog2E : INFINITY;
      if (valid && stores && lane % 4 == 0) gradient.delta[queries + begin + token] = sum;
    }
  }
}

template <typename S, bool kOfKeys>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    GradientKernel(const __grid_constant__ Gradient gradient) {
  WaitForPredecessors();
  constexpr int kFragments = S::kChunk / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* const own_first = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* const own_second = own_first + S::kOwn * S::kLine;
  __nv_bfloat16* const ring = own_second + S::kOwn * S::kLine;
  auto* const numbers = reinterpret_cast<float*>(ring + 2 * S::kStage);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Rows are counted in 32 bits to save registers.
  const int begin = blockIdx.x * S::kOwn, head = blockIdx.y, image = blockIdx.z;
  const int column = head * gradient.dim;
  const int own_row = image * gradient.own.count, other_row = image * gradient.others.count;
  const int64_t queries = (int64_t{image} * gradient.heads + head) *
                          (kOfKeys ? gradient.others.count : gradient.own.count);
  const int warp_token = warp / S::kSplit * S::kTiles * 16;
  const int warp_column = warp % S::kSplit * S::kColumns;
  const Range range = OthersOf<kOfKeys>(gradient, begin, S::kOwn);

  const auto load = [&](int first, int stage) {
    __nv_bfloat16* const to = ring + stage * S::kStage;
    const Tokens& others = gradient.others;
    CopyTokens<S, S::kOthers>(others.first, other_row, first, others.count, column, gradient.dim,
                              to);
    CopyTokens<S, S::kOthers>(others.second, other_row, first, others.count, column, gradient.dim,
                              to + S::kOthers * S::kLine);
    if constexpr (kOfKeys) {
      for (int i = threadIdx.x; i < 2 * S::kOthers; i += S::kThreads) {
        const float* from = i < S::kOthers ? gradient.log_sum_exp : gradient.delta;
        const int query = first + i % S::kOthers;
        const bool valid = query < others.count;
        CopyAsync4(numbers + stage * 2 * S::kOthers + i, valid ? from + queries + query : from,
                   valid);
      }
    }
    CommitCopies();
  };

  // Stages begin at multiples of kOthers, even if the range does not.
  int first = range.begin / S::kOthers * S::kOthers;
  CopyTokens<S, S::kOwn>(gradient.own.first, own_row, begin, gradient.own.count, column,
                         gradient.dim, own_first);
  CopyTokens<S, S::kOwn>(gradient.own.second, own_row, begin, gradient.own.count, column,
                         gradient.dim, own_second);
  load(first, 0);
  WaitCopies<0>();
  __syncthreads();

  // Of each tile of 16 rows, a lane holds rows lane / 4 (half 0) and lane / 4 + 8 (half 1).
  const float scale_log2 = gradient.scale * kLog2E;  // exp(x) = exp2(x log₂ e)
  float own_log2[S::kTiles][2], own_delta[S::kTiles][2];
  if constexpr (!kOfKeys) {
    ReadQueries<S>(gradient, own_second, own_row, queries, begin, warp_token, column,
                   warp_column == 0, own_log2, own_delta);
  }

  // Row addresses for ldmatrix, in bytes: lane 8i + j gives row j of the i-th 8×8 matrix.
  constexpr int kOwnBytes = S::kOwn * S::kLine * 2, kOthersBytes = S::kOthers * S::kLine * 2;
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t own = address + ((warp_token + lane % 16) * S::kLine + lane / 16 * 8) * 2;
  const uint32_t other_line = ((lane % 8 + lane / 16 * 8) * S::kLine + lane / 8 % 2 * 8) * 2;
  const uint32_t other_column = (lane % 16 * S::kLine + warp_column + lane / 16 * 8) * 2;

  float sums_first[S::kTiles][S::kColumns / 8][4] = {};
  float sums_second[kOfKeys ? S::kTiles : 1][kOfKeys ? S::kColumns / 8 : 1][4] = {};
  for (int stage = 0; first < range.end; first += S::kOthers, stage ^= 1) {
    WaitCopies<0>();
    __syncthreads();  // this stage is full, and no warp reads the other one
    if (first + S::kOthers < range.end) load(first + S::kOthers, stage ^ 1);
    uint32_t other = address + 2 * kOwnBytes + stage * 2 * kOthersBytes;
    // Missing queries need no mask: their operands, log-sum-exp and Δ are zeros.
    const bool masked = kOfKeys ? gradient.causal && first < begin + S::kOwn
                                : first + S::kOthers > gradient.others.count ||
                                      (gradient.causal && first + S::kOthers > begin + 1);
#pragma unroll 1
    for (int chunk = 0; chunk < S::kOthers; chunk += S::kChunk, other += S::kChunk * S::kLine * 2) {
      float s[S::kTiles][kFragments][4] = {}, dp[S::kTiles][kFragments][4] = {};
      MultiplyTokens<S>(own, other + other_line, s);
      MultiplyTokens<S>(own + kOwnBytes, other + kOthersBytes + other_line, dp);

      // s becomes P, dp becomes dS.
#pragma unroll
      for (int j = 0; j < kFragments; ++j) {
        float2 log_sum_exp, delta;
        if constexpr (kOfKeys) {
          const float* const at = numbers + stage * 2 * S::kOthers + chunk + j * 8 + lane % 4 * 2;
          log_sum_exp = *reinterpret_cast<const float2*>(at);
          delta = *reinterpret_cast<const float2*>(at + S::kOthers);
        }
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float log2 = kOfKeys ? (e % 2 == 0 ? log_sum_exp.x : log_sum_exp.y) * kLog2E
                                       : own_log2[t][e / 2];
            const float d = kOfKeys ? (e % 2 == 0 ? delta.x : delta.y) : own_delta[t][e / 2];
            float p = Exp2(fmaf(s[t][j][e], scale_log2, -log2));
            if (masked &&
                !Sees<kOfKeys>(gradient, begin + warp_token + t * 16 + e / 2 * 8 + lane / 4,
                               first + chunk + j * 8 + lane % 4 * 2 + e % 2)) {
              p = 0;
            }
            s[t][j][e] = p;
            dp[t][j][e] = p * (dp[t][j][e] - d);
          }
        }
      }

#pragma unroll
      for (int j = 0; j < kFragments; j += 2) {
        const auto add = [&](const auto& weights, uint32_t others, auto& sums) {
          uint32_t a[S::kTiles][4];
#pragma unroll
          for (int t = 0; t < S::kTiles; ++t) PackOperand(weights[t][j], weights[t][j + 1], a[t]);
          AddTokens<S>(a, others + j * 8 * S::kLine * 2, sums);
        };
        if constexpr (kOfKeys) add(s, other + kOthersBytes + other_column, sums_second);
        add(dp, other + other_column, sums_first);
      }
    }
  }

  ReleaseDependents();
  const int end = gradient.dim - warp_column;
  const auto store = [&](const Rows& to, float scale, const auto& sums) {
    StoreGradient<S>(to, begin + warp_token, gradient.own.count, own_row, column + warp_column, end,
                     scale, sums);
  };
  store(gradient.d_first, gradient.scale, sums_first);
  if constexpr (kOfKeys) store(gradient.d_second, 1, sums_second);
}

// Tensor cores, few tokens.

constexpr int kFusedTokens = 64, kMaxFusedDim = 64;

/// Four warps with 16 keys each, then 16 queries each.
template <int kDim_>
struct FusedShape {
  static constexpr int kDim = kDim_, kTiles = 1, kChunk = 32, kColumns = kDim;
  static constexpr int kThreads = 32 * kFusedTokens / 16;
  static constexpr int kBlocks = 4;       // hide each other's copies
  static constexpr int kLine = kDim + 8;  // as above
  static constexpr int kTileBytes = kFusedTokens * kLine * 2;
  // K, V, Q, dO, then O, which dSᵀ [keys, queries] overwrites, log-sum-exp · log₂ e and Δ.
  static constexpr int kScoreLine = kFusedTokens + 8, kScores = 4 * kTileBytes;
  static constexpr int kNumbers = kScores + kFusedTokens * kScoreLine * 2;
  static constexpr int kSharedBytes = kNumbers + 2 * kFusedTokens * 4;
  static_assert(kLine <= kScoreLine);
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    FusedGradientKernel(const __grid_constant__ Gradient gradient) {
  WaitForPredecessors();
  constexpr int kVectors = S::kDim / 8, kLines = S::kThreads / kVectors;
  constexpr int kSteps = kFusedTokens / 16, kStepBytes = 16 * S::kLine * 2;
  extern __shared__ __align__(16) unsigned char shared[];
  const auto tile = [&](int i) {
    return reinterpret_cast<__nv_bfloat16*>(shared + i * S::kTileBytes);
  };
  auto* const log2 = reinterpret_cast<float*>(shared + S::kNumbers);
  float* const delta = log2 + kFusedTokens;

  const Tokens &keys = gradient.own, &queries = gradient.others;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = blockIdx.y, image = blockIdx.z, column = head * gradient.dim;
  const int key_row = image * keys.count, query_row = image * queries.count;
  const auto load = [&](const Rows& from, int row, int count, int i) {
    CopyTokens<S, kFusedTokens>(from, row, 0, count, column, gradient.dim, tile(i));
  };
  load(keys.first, key_row, keys.count, 0);
  load(keys.second, key_row, keys.count, 1);
  load(queries.first, query_row, queries.count, 2);
  load(queries.second, query_row, queries.count, 3);
  load(gradient.out, query_row, queries.count, 4);
  CommitCopies();
  if (const int query = threadIdx.x; query < kFusedTokens) {
    const int64_t first = (int64_t{image} * gradient.heads + head) * queries.count;
    log2[query] = query < queries.count ? gradient.log_sum_exp[first + query] * kLog2E : 0;
  }
  WaitCopies<0>();
  // Δ: a thread multiplies the vectors that it copied itself, so it needs no barrier.
#pragma unroll
  for (int i = 0; i < kFusedTokens; i += kLines) {
    const int token = i + threadIdx.x / kVectors, c = threadIdx.x % kVectors * 8;
    const auto unpack = [&](int tensor, float(&to)[8]) {
      UnpackBf16(*reinterpret_cast<const uint4*>(tile(tensor) + token * S::kLine + c), to);
    };
    float a[8], b[8], sum = 0;
    unpack(3, a);
    unpack(4, b);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(a[j], b[j], sum);
#pragma unroll
    for (int bit = 1; bit < kVectors; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    if (c == 0) delta[token] = sum;
  }
  __syncthreads();
  ReleaseDependents();

  // This lane's addresses for ldmatrix, as in GradientKernel.
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t own = address + ((warp * 16 + lane % 16) * S::kLine + lane / 16 * 8) * 2;
  const uint32_t other = address + ((lane % 8 + lane / 16 * 8) * S::kLine + lane / 8 % 2 * 8) * 2;
  const uint32_t transposed = address + (lane % 16 * S::kLine + lane / 16 * 8) * 2;

  const float scale_log2 = gradient.scale * kLog2E;
  uint32_t p[kSteps][1][4], ds[kSteps][1][4];  // Pᵀ and dSᵀ as left operands
#pragma unroll
  for (int first = 0; first < kFusedTokens; first += S::kChunk) {
    float s[1][S::kChunk / 8][4] = {}, dp[1][S::kChunk / 8][4] = {};
    const uint32_t others = other + 2 * S::kTileBytes + first * S::kLine * 2;
    MultiplyTokens<S>(own, others, s);
    MultiplyTokens<S>(own + S::kTileBytes, others + S::kTileBytes, dp);
#pragma unroll
    for (int j = 0; j < S::kChunk / 8; ++j) {
      const int query = first + j * 8 + lane % 4 * 2;
      const float2 l = *reinterpret_cast<const float2*>(log2 + query);
      const float2 d = *reinterpret_cast<const float2*>(delta + query);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = warp * 16 + e / 2 * 8 + lane / 4;
        const int last = gradient.causal ? min(query + e % 2, keys.count - 1) : keys.count - 1;
        // Missing queries need no mask, as above. Missing keys do: dQ adds their dS times zeros,
        // and infinity times zero is not zero.
        const float weight = Exp2(fmaf(s[0][j][e], scale_log2, -(e % 2 == 0 ? l.x : l.y)));
        s[0][j][e] = key <= last ? weight : 0;
        dp[0][j][e] = s[0][j][e] * (dp[0][j][e] - (e % 2 == 0 ? d.x : d.y));
      }
    }
#pragma unroll
    for (int j = 0; j < S::kChunk / 8; j += 2) {
      PackOperand(s[0][j], s[0][j + 1], p[first / 16 + j / 2][0]);
      PackOperand(dp[0][j], dp[0][j + 1], ds[first / 16 + j / 2][0]);
    }
  }

#pragma unroll
  for (int i = 0; i < kSteps * 4; ++i) {
    const int key = warp * 16 + i % 2 * 8 + lane / 4, query = i / 2 * 8 + lane % 4 * 2;
    *reinterpret_cast<uint32_t*>(shared + S::kScores + (key * S::kScoreLine + query) * 2) =
        ds[i / 4][0][i % 4];
  }
  const auto product = [&](const Rows& to, int row, int count, float scale, int i,
                           const auto& weights) {
    float sums[1][S::kColumns / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      AddTokens<S>(weights[step], transposed + i * S::kTileBytes + step * kStepBytes, sums);
    StoreGradient<S>(to, warp * 16, count, row, column, gradient.dim, scale, sums);
  };
  product(gradient.d_second, key_row, keys.count, 1, 3, p);
  product(gradient.d_first, key_row, keys.count, gradient.scale, 2, ds);
  __syncthreads();  // dSᵀ is complete
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int key = step * 16 + lane % 8 + lane / 16 * 8, query = warp * 16 + lane / 8 % 2 * 8;
    LoadMatricesTransposed(ds[step][0], address + S::kScores + (key * S::kScoreLine + query) * 2);
  }
  product(gradient.d_others, query_row, queries.count, gradient.scale, 0, ds);
}

// Plain.

constexpr int kPlainWarps = 8, kPlainOthers = 32, kLaneColumns = kMaxHeadDim / 32;

constexpr int PlainSharedBytes(int dim) {
  return (2 * kPlainWarps * dim + kPlainOthers * (dim | 1)) * 4;
}

template <bool kOfKeys>
__global__ void __launch_bounds__(32 * kPlainWarps, 2)
    PlainGradientKernel(const __grid_constant__ Gradient gradient) {
  WaitForPredecessors();
  extern __shared__ __align__(16) float floats[];
  const int dim = gradient.dim, line = dim | 1;  // odd: a column is spread over all banks
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* const own_first = floats + 2 * warp * dim;
  float* const own_second = own_first + dim;
  float* const tile = floats + 2 * kPlainWarps * dim;  // [kPlainOthers][line]

  const int begin = blockIdx.x * kPlainWarps, own = begin + warp, head = blockIdx.y;
  const bool active = own < gradient.own.count;
  const int64_t image = blockIdx.z, column = static_cast<int64_t>(head) * dim;
  const int64_t own_row = image * gradient.own.count + own;
  const int64_t other_row = image * gradient.others.count;
  const int64_t queries =
      (image * gradient.heads + head) * (kOfKeys ? gradient.others.count : gradient.own.count);
  float log_sum_exp = 0, delta = 0;
  for (int c = lane; c < dim; c += 32) {
    own_first[c] = active ? Load(gradient.own.first, own_row, column + c) : 0.0f;
    own_second[c] = active ? Load(gradient.own.second, own_row, column + c) : 0.0f;
    if (!kOfKeys && active)
      delta = fmaf(own_second[c], Load(gradient.out, own_row, column + c), delta);
  }
  if constexpr (!kOfKeys) {
    delta = WarpSum(delta);
    if (active) log_sum_exp = gradient.log_sum_exp[queries + own];
    if (active && lane == 0) gradient.delta[queries + own] = delta;
  }

  float sums_first[kLaneColumns] = {}, sums_second[kOfKeys ? kLaneColumns : 1] = {};
  const Range range = OthersOf<kOfKeys>(gradient, begin, kPlainWarps);
  for (int first = range.begin / kPlainOthers * kPlainOthers; first < range.end;
       first += kPlainOthers) {
    const int other = first + lane;
    const auto fill = [&](const Rows& rows) {
      __syncthreads();
      for (int i = warp; i < kPlainOthers; i += kPlainWarps) {
        for (int c = lane; c < dim; c += 32) {
          tile[i * line + c] = first + i < gradient.others.count
                                   ? Load(rows, other_row + first + i, column + c)
                                   : 0.0f;
        }
      }
      __syncthreads();
    };
    const auto product = [&](const float* a) {
      float sum = 0;
      for (int c = 0; c < dim; ++c) sum = fmaf(a[c], tile[lane * line + c], sum);
      return sum;
    };
    const auto add = [&](float weight, float* sums) {
      for (int i = 0; i < kPlainOthers; ++i) {
        const float w = __shfl_sync(~0u, weight, i);
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) {
          const int c = j * 32 + lane;
          if (c < dim) sums[j] = fmaf(w, tile[i * line + c], sums[j]);
        }
      }
    };
    const bool exists = active && other < gradient.others.count;
    if (kOfKeys && exists) {
      log_sum_exp = gradient.log_sum_exp[queries + other];
      delta = gradient.delta[queries + other];
    }
    fill(gradient.others.first);
    const float s = product(own_first) * gradient.scale;
    const float p = exists && Sees<kOfKeys>(gradient, own, other) ? expf(s - log_sum_exp) : 0.0f;
    fill(gradient.others.second);
    const float ds = p * (product(own_second) - delta);
    if constexpr (kOfKeys) add(p, sums_second);
    fill(gradient.others.first);
    add(ds, sums_first);
  }
  if (!active) return;
#pragma unroll
  for (int j = 0; j < kLaneColumns; ++j) {
    const int c = j * 32 + lane;
    if (c >= dim) continue;
    Store(gradient.d_first, own_row, column + c, sums_first[j] * gradient.scale);
    if constexpr (kOfKeys) Store(gradient.d_second, own_row, column + c, sums_second[j]);
  }
}

// Launches.

template <typename Kernel>
cudaError_t Launch(Kernel* kernel, const Gradient& gradient, int own, unsigned threads,
                   int shared_bytes, int images, const Queue& queue) {
  if (cudaError_t error = LoadKernel(kernel, shared_bytes); error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>((gradient.own.count + own - 1) / own),
                  static_cast<unsigned>(gradient.heads), static_cast<unsigned>(images));
  return LaunchDependent(
      kernel, {.grid = grid, .block = threads, .shared_bytes = static_cast<size_t>(shared_bytes)},
      queue, gradient);
}

template <typename S, bool kOfKeys>
cudaError_t LaunchShape(const Gradient& gradient, int images, const Queue& queue) {
  return Launch(GradientKernel<S, kOfKeys>, gradient, S::kOwn, S::kThreads, S::kSharedBytes, images,
                queue);
}

template <typename S>
cudaError_t LaunchFused(const Gradient& gradient, int images, const Queue& queue) {
  return Launch(FusedGradientKernel<S>, gradient, kFusedTokens, S::kThreads, S::kSharedBytes,
                images, queue);
}

/// Uses the smaller block if half of the last larger block would idle.
template <typename Half, typename Whole, bool kOfKeys>
cudaError_t LaunchFitting(const Gradient& gradient, int images, const Queue& queue) {
  const bool whole = (gradient.own.count - 1) % Whole::kOwn >= Half::kOwn;
  return whole ? LaunchShape<Whole, kOfKeys>(gradient, images, queue)
               : LaunchShape<Half, kOfKeys>(gradient, images, queue);
}

enum class Kernels : uint8_t { kPlain, kTensorCores, kHopper };

template <bool kOfKeys>
cudaError_t LaunchGradient(const Gradient& gradient, Kernels kernels, int images,
                           const Queue& queue) {
  const int dim = gradient.dim;
  if (kernels == Kernels::kPlain) {
    return Launch(PlainGradientKernel<kOfKeys>, gradient, kPlainWarps, 32 * kPlainWarps,
                  PlainSharedBytes(dim), images, queue);
  }
  if (kernels == Kernels::kHopper && SuitsGradientHopper(gradient))
    return LaunchGradientHopper<kOfKeys>(gradient, images, queue);
  if (dim <= 32) {
    return LaunchFitting<Shape<32, 2, 2, 64, 32>, Shape<32, 4, 2, 64, 32>, kOfKeys>(gradient,
                                                                                    images, queue);
  }
  if (dim <= 64) {
    return LaunchFitting<Shape<64, 2, 2, 64, 32>, Shape<64, 4, 2, 64, 32>, kOfKeys>(gradient,
                                                                                    images, queue);
  }
  if (dim <= 128) return LaunchShape<Shape<128, 4, 1, 32, 32>, kOfKeys>(gradient, images, queue);
  return LaunchShape<Shape<256, 4, 1, 16, 16, 2>, kOfKeys>(gradient, images, queue);
}
constexpr int kMaxTensorCoreDim = 256;

}  // namespace

cudaError_t LaunchAttentionBackward(const AttentionBackwardLaunch& backward, const Queue& queue) {
  const AttentionLaunch& forward = backward.forward;
  if (int64_t{forward.images} * std::max(forward.tokens, forward.key_tokens) > INT32_MAX)
    return cudaErrorInvalidValue;
  Kernels kernels = queue.hopper ? Kernels::kHopper : Kernels::kTensorCores;
  bool suits = !forward.fp32 && forward.dim % 8 == 0 && forward.dim <= kMaxTensorCoreDim;
  for (const Rows* rows : {&forward.q, &forward.k, &forward.v, &forward.out, &backward.dout,
                           &backward.dq, &backward.dk, &backward.dv}) {
    suits = suits && rows->vector && rows->element == Element::kBf16;
  }
  if (!suits) kernels = Kernels::kPlain;
  const Tokens queries = {forward.q, backward.dout, forward.tokens};
  const Tokens keys = {forward.k, forward.v, forward.key_tokens};
  Gradient gradient = {.own = keys,
                       .others = queries,
                       .heads = forward.heads,
                       .dim = forward.dim,
                       .scale = forward.scale,
                       .causal = forward.causal,
                       .out = forward.out,
                       .log_sum_exp = forward.log_sum_exp,
                       .delta = backward.delta,
                       .d_first = backward.dk,
                       .d_second = backward.dv,
                       .d_others = backward.dq};
  if (kernels != Kernels::kPlain && forward.dim <= kMaxFusedDim &&
      std::max(forward.tokens, forward.key_tokens) <= kFusedTokens) {
    return forward.dim <= 32 ? LaunchFused<FusedShape<32>>(gradient, forward.images, queue)
                             : LaunchFused<FusedShape<64>>(gradient, forward.images, queue);
  }
  Gradient of_queries = gradient;
  of_queries.own = queries, of_queries.others = keys;
  of_queries.d_first = backward.dq;
  if (cudaError_t error = LaunchGradient<false>(of_queries, kernels, forward.images, queue);
      error != cudaSuccess) {
    return error;
  }
  return LaunchGradient<true>(gradient, kernels, forward.images, queue);
}

}  // namespace denoised::training::cuda
