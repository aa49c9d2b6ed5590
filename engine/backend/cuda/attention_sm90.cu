// SPDX-License-Identifier: Apache-2.0
// Softmax attention for Hopper: attention.cu's algorithm with TMA, wgmma and mbarriers, and the
// softmax of one tile under the products of others (FlashAttention-3, arXiv 2407.08608). See
// docs/kernels.md for a picture.
//
// Policy. A query tile is 64 queries of one head of one image over all its keys, in tiles of kKeys
// and in order. It belongs to one warpgroup, whose registers hold the scores, the weights and the
// output. A CTA takes up to kGroups neighbouring query tiles of a head at a time. Its producer warp
// loads their queries and one tile of keys or values after another through a pipeline in shared
// memory that the warpgroups share. A warpgroup issues the scores of key tile i, then the output
// products of tile i - 1, and computes the weights of tile i as soon as its scores are complete.
// Warpgroups ping-pong: named barriers order their products, so that one's softmax overlaps
// another's products. Tiles with !kOverlaps have four warpgroups whose weights take the place of
// the scores: each works on one tile after the other, and the four overlap by themselves.
//
// Cross-attention: images share sets of keys, and a set may have fewer keys than there is room for
// (kSelects). The producer looks up the set and tells the consumers how many keys it has; the tiles
// are as wide as a prompt of 77 tokens needs.
//
// A row's bits depend on its own query and its image's keys alone; the size of the grid only
// decides which query tiles share a CTA. Above 256 dimensions a query tile computes 256 columns of
// the output, and scores are computed once for each of these parts. TMA fills with zeros the
// columns of queries beyond a head's dimensions, and the rows of keys and values beyond the last.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "engine/backend/cuda/attention.cuh"
#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/e4m3.cuh"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/fast_divmod.h"
#include "engine/backend/cuda/hopper.cuh"
#include "engine/backend/cuda/mma.cuh"
#include "engine/backend/cuda/tensor_map.h"

namespace denoised::cuda {
namespace {

constexpr int kQueryTile = 64;  // queries: M of one wgmma
constexpr int kLine = 64;       // dimensions: 128 bytes of bf16, the widest swizzle
constexpr int kMaxPart = 256;   // columns of the output that a warpgroup's registers hold
constexpr int kMaxShared = 232448;

/// Heads of up to kDim dimensions. kBlocks CTAs share an SM. kSelects: by SelectsKeys(). kOverlaps:
/// a warpgroup's own softmax overlaps its products.
template <int kDim_, int kKeys_, int kStages_, int kGroups_, int kBlocks_, int kMaxPart_ = kMaxPart,
          bool kSelects_ = false, bool kOverlaps_ = true>
struct Tile {
  static constexpr bool kSelects = kSelects_, kOverlaps = kOverlaps_;
  static constexpr int kDim = kDim_, kKeys = kKeys_, kStages = kStages_;
  static constexpr int kGroups = kGroups_, kBlocks = kBlocks_;
  static constexpr int kParts = (kDim + kMaxPart_ - 1) / kMaxPart_, kPart = kDim / kParts;
  static constexpr int kLines = (kPart + kLine - 1) / kLine;  // per part
  static constexpr int kStageBytes = kLines * kKeys * kLine * 2;
  static constexpr int kUnitBytes = kParts * kLines * kQueryTile * kLine * 2;
  static constexpr int kStepBytes = kGroups * kUnitBytes;
  // If there is room for the queries of two steps, those of the next step are loaded early.
  static constexpr int kAhead =
      (2 * kStepBytes + kStages * kStageBytes + 2048) * kBlocks <= kMaxShared ? 2 : 1;
  static constexpr int kBarriers = 2 * (kStages + kAhead);
  static constexpr int kSharedBytes =
      kAhead * kStepBytes + kStages * kStageBytes + kBarriers * 8 + kAhead * 8;
  // With several consumers the producer is a whole warpgroup, because setmaxnreg moves registers
  // between warpgroups.
  static constexpr int kThreads = 128 * kGroups + (kGroups > 1 ? 128 : 32);
  static constexpr int kProducerRegisters = kGroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kGroups == 2 ? 232 : kGroups == 3 ? 160 : 112;
  static_assert(kPart % 8 == 0 && kKeys % 16 == 0 && kSharedBytes <= kMaxShared);
  static_assert(kOverlaps || kParts == 1);
};

/// Arguments besides the AttentionLaunch. A step is the work of a CTA's warpgroups at one time:
/// neighbouring query tiles of one head (and part). The first `wide_heads` begin with `wide_steps`
/// of as many query tiles as there are warpgroups; what is left of them, and the other heads, are
/// divided into steps of `narrow`. All wide steps come first.
struct Params {
  CUtensorMap q, k, v;
  int query_tiles = 0;  // per head
  int wide_heads = 0, narrow = 1, steps = 0;
  FastDivmod wide_steps, left_steps, narrow_steps;  // per head; left_steps may be 0
  FastDivmod heads, blocks;
  int shift = 0;  // from one round of steps to the next, in CTAs
};

struct Step {
  int active = 0;  // query tiles
  int query = 0, part = 0, head = 0, image = 0;
};
/// Step number `turn` of this CTA; beyond the last, it has no query tiles.
template <typename T>
__device__ inline Step StepAt(const AttentionLaunch& attention, const Params& params, int turn) {
  const int blocks = gridDim.x;
  int index = turn * blocks + (static_cast<int>(blockIdx.x) + turn * params.shift) % params.blocks;
  if (index >= params.steps) return {};
  const int wide = params.wide_heads * params.wide_steps.value;
  const int left = params.wide_heads * params.left_steps.value;
  int head, first, width = params.narrow;
  if (index < wide) {
    width = T::kGroups;
    head = index / params.wide_steps, first = index % params.wide_steps * width;
  } else if (index -= wide; index < left) {
    head = index / params.left_steps;
    first = params.wide_steps.value * T::kGroups + index % params.left_steps * width;
  } else {
    index -= left;
    head = index / params.narrow_steps + params.wide_heads;
    first = index % params.narrow_steps * width;
  }
  Step step;
  step.active = min(width, params.query_tiles - first);
  step.query = first * kQueryTile;
  step.part = head % T::kParts;
  step.head = head / T::kParts % params.heads;
  // In reverse order: the previous projection left the last image in L2.
  step.image = attention.images - 1 - head / T::kParts / params.heads;
  return step;
}

/// The running softmax of two rows. Of a thread's accumulators (hopper.cuh), index 0 and 1 are row
/// 0, 2 and 3 row 1, and so on.
struct Softmax {
  // So low that the first tile's maximum replaces it and `shrink` becomes 0.
  float maximum[2] = {-FLT_MAX, -FLT_MAX};
  float sum[2] = {0, 0};     // over this lane's columns; lanes are added at the end
  float shrink[2] = {1, 1};  // factor of the output so far

  /// Turns scores into weights. The maximum moves only when it grows by more than 2^kSlack, so that
  /// the output is seldom rescaled; weights up to 2^kSlack are as precise. This depends on the row
  /// alone. Every tile has a valid key, so the maximum is finite.
  ///
  /// No branches: the compiler waits for a wgmma before any branch.
  template <int kScores>
  __device__ inline void Add(float (&scores)[kScores], float scale_log2) {
    constexpr float kSlack = 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tile_maximum = scores[2 * r];
#pragma unroll
      for (int i = 2 * r; i < kScores; i += 4) {
        tile_maximum = fmaxf(tile_maximum, fmaxf(scores[i], scores[i + 1]));
      }
      tile_maximum = fmaxf(tile_maximum, __shfl_xor_sync(~0u, tile_maximum, 1));
      tile_maximum = fmaxf(tile_maximum, __shfl_xor_sync(~0u, tile_maximum, 2));
      const float growth = (tile_maximum - maximum[r]) * scale_log2;
      const bool moves = growth > kSlack;
      shrink[r] = Exp2(moves ? -growth : 0.0f);
      maximum[r] = moves ? tile_maximum : maximum[r];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float shift = maximum[r] * scale_log2;
      float tile_sum = 0;
#pragma unroll
      for (int i = 2 * r; i < kScores; i += 4) {
        scores[i] = Exp2(fmaf(scores[i], scale_log2, -shift));
        scores[i + 1] = Exp2(fmaf(scores[i + 1], scale_log2, -shift));
        tile_sum += scores[i];
        tile_sum += scores[i + 1];
      }
      sum[r] = fmaf(sum[r], shrink[r], tile_sum);
    }
  }
};
/// Leaves out the keys from `valid` of a tile.
template <int kScores>
__device__ inline void Mask(int valid, float (&scores)[kScores]) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    if (i / 4 * 8 + column + i % 2 >= valid) scores[i] = -INFINITY;
  }
}

/// A warp's 16 rows, starting at `query`.
template <typename T>
__device__ inline void WriteOutput(const AttentionLaunch& attention, const Step& step, int query,
                                   const Softmax& softmax, const float (&output)[T::kPart / 2]) {
  constexpr int kVectors = T::kPart / 8;
  const int lane = threadIdx.x % 32;
  const bool rounds = attention.out.element == Element::kE4m3x2;
  const float inverse_scale = 1.0f / attention.out.scale;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = softmax.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float inverse = 1.0f / sum;
    const int row = query + lane / 4 + 8 * r;
    if (row < attention.tokens && step.part == 0 && lane % 4 == 0)
      StoreLogSumExp(attention, step.image, step.head, row, softmax.maximum[r] * attention.scale,
                     sum);
    const int64_t token = static_cast<int64_t>(step.image) * attention.tokens + row;
    const int64_t first_column = static_cast<int64_t>(step.head) * attention.dim;
#pragma unroll
    for (int first = 0; first < kVectors; first += 4) {
      uint32_t words[4] = {};
#pragma unroll
      for (int i = 0; i < 4 && first + i < kVectors; ++i) {
        const int j = 4 * (first + i) + 2 * r;
        words[i] = PackBf16(output[j] * inverse, output[j + 1] * inverse);
      }
      ExchangeInQuad(words);
      const int vector = first + lane % 4, column = step.part * T::kPart + vector * 8;
      if (row >= attention.tokens || vector >= kVectors || column >= attention.dim) continue;
      const uint4 eight = make_uint4(words[0], words[1], words[2], words[3]);
      if (rounds) {
        *reinterpret_cast<uint2*>(E4m3At(attention.out, token, first_column + column)) =
            PackE4m3(eight, inverse_scale);
      } else {
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(attention.out.data) +
                                  token * attention.out.stride + first_column + column) = eight;
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    AttentionHopperKernel(const __grid_constant__ AttentionLaunch attention,
                          const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char queries[];  // the swizzle's alignment
  unsigned char* const ring = queries + T::kAhead * T::kStepBytes;
  uint64_t* const full = reinterpret_cast<uint64_t*>(ring + T::kStages * T::kStageBytes);
  uint64_t* const empty = full + T::kStages;
  uint64_t* const queries_full = empty + T::kStages;
  uint64_t* const queries_empty = queries_full + T::kAhead;
  int* const key_counts = reinterpret_cast<int*>(queries_empty + T::kAhead);  // per step; kSelects

  // The shuffle tells the compiler that `warp` is uniform: descriptors live in uniform registers.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), group = warp / 4;
  const auto tiles_of = [](int keys) { return (keys + T::kKeys - 1) / T::kKeys; };

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      InitBarrier(&full[stage], 1);
      InitBarrier(&empty[stage], T::kGroups);
    }
    for (int i = 0; i < T::kAhead; ++i) {
      InitBarrier(&queries_full[i], 1);
      InitBarrier(&queries_empty[i], T::kGroups);
    }
    FenceBarrierInit();
  }
  __syncthreads();

  PipelineState<T::kStages> state;

  if (group == T::kGroups) {
    if constexpr (T::kGroups > 1) DecreaseRegisters<T::kProducerRegisters>();
    if (warp == T::kGroups * 4 && ElectOne()) {
      PrefetchTensorMap(&params.q);
      PrefetchTensorMap(&params.k);
      PrefetchTensorMap(&params.v);
      // Consumers wait for the loads. With sets of keys, the first are loaded while the predecessor
      // runs: AttentionArgs says why they are there. Every CTA has a first step, so it waits.
      if (!T::kSelects) WaitForPredecessors();
      struct Keys {
        int set, count;
      };
      const auto keys_of = [&](const Step& step) -> Keys {
        if constexpr (T::kSelects) {
          const int64_t set = KeySet(attention, step.image);
          return {static_cast<int>(set), KeyCount(attention, set)};
        }
        return {step.image, attention.key_tokens};
      };
      Step step = StepAt<T>(attention, params, 0), next;
      Keys keys = keys_of(step), next_keys;
      for (int turn = 0; step.active > 0; ++turn, step = next, keys = next_keys) {
        next = StepAt<T>(attention, params, turn + 1);
        next_keys = keys_of(next);  // prefetched: it takes as long as several loads
        const int ahead = turn % T::kAhead, key_tiles = tiles_of(keys.count);
        const auto copy = [&](unsigned char* to, const CUtensorMap* map, uint64_t* barrier,
                              int rows, int first, int head, int token, int image) {
#pragma unroll
          for (int line = 0; line < T::kLines; ++line) {
            TmaLoad(to + line * rows * kLine * 2, map, barrier, first + line * kLine, head, token,
                    image);
          }
        };
        const auto load = [&](const CUtensorMap* map, int key_tile, int part) {
          uint64_t* const barrier = &full[state.stage];
          Wait(&empty[state.stage], state.EmptyParity());
          ArriveExpectTx(barrier, T::kStageBytes);
          copy(ring + state.stage * T::kStageBytes, map, barrier, T::kKeys,
               step.head * attention.dim + part * T::kLines * kLine, 0, key_tile * T::kKeys,
               keys.set);
          state.Advance(1);
        };
        const auto load_keys = [&](int key_tile) {
          for (int part = 0; part < T::kParts; ++part) load(&params.k, key_tile, part);
        };
        load_keys(0);
        if (T::kSelects && turn == 0) WaitForPredecessors();
        Wait(&queries_empty[ahead], (turn / T::kAhead & 1) ^ 1);
        if (T::kSelects) key_counts[ahead] = keys.count;
        ArriveExpectTx(&queries_full[ahead], step.active * T::kUnitBytes);
        for (int i = 0; i < step.active; ++i) {
          for (int part = 0; part < T::kParts; ++part) {
            copy(queries + ahead * T::kStepBytes + i * T::kUnitBytes +
                     part * T::kUnitBytes / T::kParts,
                 &params.q, &queries_full[ahead], kQueryTile, part * T::kLines * kLine, step.head,
                 step.query + i * kQueryTile, step.image);
          }
        }
        for (int i = 0; i < key_tiles; ++i) {  // in the order of use
          const bool more = i + 1 < key_tiles;
          if (T::kOverlaps && more) load_keys(i + 1);
          load(&params.v, i, step.part);
          if (!T::kOverlaps && more) load_keys(i + 1);
        }
      }
      ReleaseDependents();
    }
    return;
  }

  if constexpr (T::kGroups > 1) IncreaseRegisters<T::kConsumerRegisters>();
  const bool signals = threadIdx.x % 128 == 0;
  const float scale_log2 = attention.scale * 1.4426950408889634f;  // exp(x) = exp2(x log₂ e)
  float scores[T::kKeys / 2], output[T::kPart / 2];
  uint32_t weights[T::kKeys / 4];

  const auto multiply_keys = [&](int ahead) {
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
      Wait(&full[state.stage], state.FullParity());
      WgmmaFence();
      const uint64_t q = MatrixDescriptor(queries + ahead * T::kStepBytes + group * T::kUnitBytes +
                                          part * T::kUnitBytes / T::kParts);
      const uint64_t k = MatrixDescriptor(ring + state.stage * T::kStageBytes);
#pragma unroll
      for (int d = 0; d < T::kPart; d += 16) {
        Wgmma(scores, q + d / kLine * (kQueryTile * kLine * 2 >> 4) + d % kLine / 8,
              k + d / kLine * (T::kKeys * kLine * 2 >> 4) + d % kLine / 8, part + d > 0);
      }
      state.Advance(1);
    }
    WgmmaCommit();
  };
  const auto multiply_values = [&] {
    Wait(&full[state.stage], state.FullParity());
    WgmmaFence();
    const uint64_t v =
        TransposedDescriptor(ring + state.stage * T::kStageBytes, T::kKeys * kLine * 2);
#pragma unroll
    for (int key = 0; key < T::kKeys; key += 16) {
      Wgmma(output, weights + key / 4, v + key * 8);
    }
    WgmmaCommit();
    state.Advance(1);
  };
  // Values after a set's last key may be anything, and 0 · NaN is NaN, so they are set to zero
  // before the last tile is multiplied. All warpgroups write the same, so none has to wait.
  const auto clear_values_from = [&](int valid) {
    Wait(&full[state.stage], state.FullParity());
#pragma unroll 1
    for (int line = 0; line < T::kLines; ++line) {
      auto* const rows = reinterpret_cast<uint4*>(ring + state.stage * T::kStageBytes +
                                                  line * T::kKeys * kLine * 2);
      for (int i = valid * 8 + threadIdx.x % 128; i < T::kKeys * 8; i += 128) rows[i] = uint4();
    }
    FenceProxyAsync();
    NamedBarrierSync(1 + T::kGroups + group, 128);
  };
  // Releases `stages` stages, the first of them `back` stages before state.stage.
  const auto release = [&](int back, int stages) {
    for (int i = 0; i < stages; ++i) {
      if (signals) Arrive(&empty[(state.stage + T::kStages - back + i) % T::kStages]);
    }
  };
  const auto pack = [&] {
#pragma unroll
    for (int i = 0; i < T::kKeys / 4; ++i) {
      weights[i] = PackBf16(scores[2 * i], scores[2 * i + 1]);
    }
  };

  // Named barrier 1 + i: warpgroup i may start its products. The warpgroup before it arrives there.
  // Between steps it is the turn of the first.
  constexpr bool kPingPong = T::kOverlaps && T::kGroups > 1;
  const auto await_turn = [&](int active) {
    if (kPingPong && active > 1) NamedBarrierSync(1 + group, 256);
  };
  const auto pass_turn = [&](int active) {
    if (kPingPong && active > 1) NamedBarrierArrive(group + 1 == active ? 1 : 2 + group, 256);
  };
  if (kPingPong && group == 1) NamedBarrierArrive(1, 256);

  Step step;
  for (int turn = 0; (step = StepAt<T>(attention, params, turn)).active > 0; ++turn) {
    const int ahead = turn % T::kAhead;
    Wait(&queries_full[ahead], turn / T::kAhead & 1);
    const int keys = T::kSelects ? key_counts[ahead] : attention.key_tokens;
    const int key_tiles = tiles_of(keys);
    const int valid = keys - (key_tiles - 1) * T::kKeys;  // of the last tile
    if (group >= step.active) {                           // idle: it only releases stages
      // An mbarrier distinguishes two phases only: do not fall behind.
      NamedBarrierSync(1 + T::kGroups + group, 128);
      const int stages = key_tiles * (T::kParts + 1);
      if (warp % 4 == 0) {
        for (int i = 0; i < stages; ++i) {
          auto at = state;
          at.Advance(i);
          Wait(&full[at.stage], at.FullParity());
          if (signals) Arrive(&empty[at.stage]);
        }
        if (signals) Arrive(&queries_empty[ahead]);
        __syncwarp();
      }
      state.Advance(stages);
      continue;
    }

    Softmax softmax;
#pragma unroll
    for (int i = 0; i < T::kPart / 2; ++i) output[i] = 0;
    const auto shrink_output = [&] {
      if (__any_sync(~0u, softmax.shrink[0] != 1 || softmax.shrink[1] != 1)) {
#pragma unroll
        for (int j = 0; j < T::kPart / 2; ++j) output[j] *= softmax.shrink[j / 2 % 2];
      }
    };
    if constexpr (T::kOverlaps) {
      multiply_keys(ahead);
      WgmmaWait<0>();
      PinAccumulators(scores);
      release(T::kParts, T::kParts);
      // Only scores read queries, so those of the next step may be loaded during the last values.
      if (signals && key_tiles == 1) Arrive(&queries_empty[ahead]);
      if (key_tiles == 1) Mask(valid, scores);
      softmax.Add(scores, scale_log2);
      pack();
      const auto add_tile = [&](auto last) {
        constexpr bool kLast = decltype(last)::value;
        await_turn(step.active);
        multiply_keys(ahead);
        multiply_values();  // of the previous tile
        pass_turn(step.active);
        WgmmaWait<1>();  // for the scores
        PinAccumulators(scores);
        release(T::kParts + 1, T::kParts);
        if (kLast && signals) Arrive(&queries_empty[ahead]);
        if constexpr (kLast) Mask(valid, scores);
        softmax.Add(scores, scale_log2);
        PinAccumulators(scores);  // keeps the compiler from moving the wait before the softmax
        WgmmaWait<0>();
        PinAccumulators(output);
        release(1, 1);
        shrink_output();
        pack();
      };
#pragma unroll 1
      for (int i = 1; i < key_tiles - 1; ++i) add_tile(std::false_type());
      if (key_tiles > 1) add_tile(std::true_type());
      if (T::kSelects && keys < attention.key_tokens) clear_values_from(valid);
      multiply_values();
      WgmmaWait<0>();
      PinAccumulators(output);
      release(1, 1);
    } else {
#pragma unroll 1
      for (int i = 1; i <= key_tiles; ++i) {
        multiply_keys(ahead);
        WgmmaWait<0>();
        PinAccumulators(scores);
        release(1, 1);
        if (i == key_tiles && signals) Arrive(&queries_empty[ahead]);
        if (i == key_tiles && valid < T::kKeys) Mask(valid, scores);
        softmax.Add(scores, scale_log2);
        shrink_output();
        pack();
        if (i == key_tiles && T::kSelects && keys < attention.key_tokens) clear_values_from(valid);
        multiply_values();
        WgmmaWait<0>();
        PinAccumulators(output);
        release(1, 1);
      }
    }
    WriteOutput<T>(attention, step, step.query + warp * 16, softmax, output);
  }
  if (kPingPong && group == 0) NamedBarrierSync(1, 256);  // consumes the last arrival
#endif
}

using Dim40 = Tile<40, 128, 8, 4, 1, kMaxPart, false, /*kOverlaps=*/false>;
using Dim64 = Tile<64, 128, 4, 3, 1>;
using Dim64Short = Tile<64, 64, 4, 1, 3>;
using Dim64Whole = Tile<64, 64, 16, 4, 1>;
using Dim80 = Tile<80, 128, 4, 2, 1>;
using Dim128 = Tile<128, 128, 4, 2, 1>;
using Dim160 = Tile<160, 64, 4, 2, 1>;
using Dim256 = Tile<256, 64, 4, 2, 1>;
using Dim256Halves = Tile<256, 64, 8, 1, 1, 128>;
using Dim256Quarters = Tile<256, 64, 16, 1, 1, 64>;
using Dim512 = Tile<512, 64, 5, 1, 1>;
template <int kDim, int kGroups>
using Selecting = Tile<kDim, 80, 4, kGroups, 1, kMaxPart, /*kSelects=*/true, kGroups != 4>;
using Dim40Selecting = Selecting<40, 4>;
using Dim64Selecting = Selecting<64, 4>;
using Dim80Selecting = Selecting<80, 2>;
using Dim160Selecting = Selecting<160, 2>;
constexpr int kMaxSelectingDim = 160;

/// Wide steps are the fastest per query tile, but may leave the last wave nearly empty. So some
/// heads, or all, or what is left of them after a few wide steps, are divided into narrower ones,
/// by the cost of the waves. The last step of a head may be partly filled. To give each CTA its
/// share of these, its place in a head shifts from wave to wave.
void CutIntoSteps(int heads, int groups, int blocks, Params* params) {
  const auto up = [](int value, int by) { return (value + by - 1) / by; };
  const auto cost = [](double width) { return 6 + 5 * width; };  // per step, measured on an H200
  const int tiles = params->query_tiles, all_wide = up(tiles, groups);
  while (std::gcd(blocks + params->shift, all_wide) != 1) ++params->shift;
  double least = INFINITY;
  for (int wide_steps = all_wide; wide_steps > std::max(0, all_wide - groups); --wide_steps) {
    const double mean_cost =
        cost(std::min<double>(groups, static_cast<double>(tiles) / wide_steps));
    const int left = std::max(0, tiles - wide_steps * groups);
    const int full_waves = static_cast<int>(int64_t{heads} * wide_steps / blocks);
    for (int wide_heads : {heads, static_cast<int>(int64_t{full_waves} * blocks / wide_steps), 0}) {
      for (int narrow = groups; narrow > 0; --narrow) {
        const int wide = wide_heads * wide_steps;
        const int steps =
            wide + wide_heads * up(left, narrow) + (heads - wide_heads) * up(tiles, narrow);
        const double total = (wide > 0 ? (up(wide, blocks) - 1) * mean_cost + cost(groups) : 0) +
                             (up(steps, blocks) - up(wide, blocks)) * cost(narrow);
        if (total < least) {
          least = total;
          params->wide_heads = wide_heads, params->narrow = narrow, params->steps = steps;
          params->wide_steps = FastDivmod(wide_steps);
          params->left_steps = FastDivmod(up(left, narrow));
          params->narrow_steps = FastDivmod(up(tiles, narrow));
        }
      }
    }
  }
}

template <typename T>
cudaError_t LaunchTile(const AttentionLaunch& attention, const Queue& queue) {
  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  Params params;
  // What fills the last line of a head's keys and values does not matter, and TMA takes half as
  // long for the columns of the next head as for zeros (H200). The queries' zeros cancel those of
  // keys.
  const auto encode_keys = [&](CUtensorMap* map, const Rows& rows) {
    return EncodeHeads(map, rows, attention.key_sets, attention.key_tokens, 1,
                       attention.heads * attention.dim, T::kKeys);
  };
  for (CUresult result :
       {EncodeHeads(&params.q, attention.q, attention.images, attention.tokens, attention.heads,
                    attention.dim, kQueryTile),
        encode_keys(&params.k, attention.k), encode_keys(&params.v, attention.v)}) {
    if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  }
  params.query_tiles = (attention.tokens + kQueryTile - 1) / kQueryTile;
  if (int64_t{attention.images} * attention.heads * T::kParts * params.query_tiles > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const int blocks = queue.multiprocessors * T::kBlocks;
  CutIntoSteps(attention.images * attention.heads * T::kParts, T::kGroups, blocks, &params);
  const int grid = std::min(params.steps, blocks);
  params.heads = FastDivmod(attention.heads), params.blocks = FastDivmod(grid);
  return LaunchDependent(AttentionHopperKernel<T>,
                         {static_cast<unsigned>(grid), T::kThreads, T::kSharedBytes}, queue,
                         attention, params);
}

template <typename... T>
cudaError_t LoadTiles() {
  cudaError_t result = GetTensorMapEncoders().error;
  for (cudaError_t error : {LoadKernel(AttentionHopperKernel<T>, T::kSharedBytes)...}) {
    if (result == cudaSuccess) result = error;
  }
  return result;
}

}  // namespace

bool SuitsHopper(const AttentionLayer& attention) {
  // If the scale is not positive, the largest score does not have the largest weight.
  const auto suits = [](const Rows& rows) { return rows.element == Element::kBf16 && rows.vector; };
  return !attention.fp32 && attention.dim % 8 == 0 && !attention.causal &&
         (!SelectsKeys(attention) || attention.dim <= kMaxSelectingDim) &&
         attention.dim <= kMaxHeadDim && attention.scale > 0 && suits(attention.q) &&
         suits(attention.k) && suits(attention.v) &&
         (attention.out.element == Element::kE4m3x2
              ? attention.heads * attention.dim % kE4m3Vector == 0
              : suits(attention.out));
}

cudaError_t LaunchAttentionHopper(const AttentionLaunch& attention, const Queue& queue) {
  const int dim = attention.dim;
  if (SelectsKeys(attention)) {
    if (dim <= 40) return LaunchTile<Dim40Selecting>(attention, queue);
    if (dim <= 64) return LaunchTile<Dim64Selecting>(attention, queue);
    if (dim <= 80) return LaunchTile<Dim80Selecting>(attention, queue);
    return LaunchTile<Dim160Selecting>(attention, queue);
  }
  if (dim <= 40) return LaunchTile<Dim40>(attention, queue);
  // Short heads are bound by latency. Several small blocks per SM hide it; so does one block whose
  // steps are whole heads, with room for the keys and values of two. The bits depend on the tile of
  // keys, hence on the row's shape alone.
  static_assert(Dim64Whole::kKeys == Dim64Short::kKeys);
  static_assert(Dim256Halves::kKeys == Dim256::kKeys && Dim256Quarters::kKeys == Dim256::kKeys);
  if (dim <= 64 && attention.tokens <= 256) {
    const bool whole = attention.tokens > 3 * kQueryTile &&
                       int64_t{attention.images} * attention.heads >= 2 * queue.multiprocessors;
    return whole ? LaunchTile<Dim64Whole>(attention, queue)
                 : LaunchTile<Dim64Short>(attention, queue);
  }
  if (dim <= 64) return LaunchTile<Dim64>(attention, queue);
  if (dim <= 80) return LaunchTile<Dim80>(attention, queue);
  if (dim <= 128) return LaunchTile<Dim128>(attention, queue);
  if (dim <= 160) return LaunchTile<Dim160>(attention, queue);
  if (dim <= 256) {
    // Few query tiles would leave most of the device idle, so each is split by columns.
    const int64_t query_tiles = int64_t{attention.images} * attention.heads *
                                ((attention.tokens + kQueryTile - 1) / kQueryTile);
    if (query_tiles * 4 <= queue.multiprocessors)
      return LaunchTile<Dim256Quarters>(attention, queue);
    if (query_tiles * 2 <= queue.multiprocessors) return LaunchTile<Dim256Halves>(attention, queue);
    return LaunchTile<Dim256>(attention, queue);
  }
  return LaunchTile<Dim512>(attention, queue);
}

cudaError_t LoadAttentionHopperKernels() {
  return LoadTiles<Dim40, Dim64, Dim64Short, Dim64Whole, Dim80, Dim128, Dim160, Dim256,
                   Dim256Halves, Dim256Quarters, Dim512, Dim40Selecting, Dim64Selecting,
                   Dim80Selecting, Dim160Selecting>();
}

}  // namespace denoised::cuda
