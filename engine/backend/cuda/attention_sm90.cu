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
#include "engine/backend/cuda/pipeline_sm90.cuh"
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

/// A CTA's shared memory.
template <typename T>
struct Cta {
  unsigned char* const queries;                        // [kAhead][kGroups]: of a step
  unsigned char* const ring;                           // [kStages]: a tile of keys or values
  uint64_t *const full, *const empty;                  // [kStages]
  uint64_t *const queries_full, *const queries_empty;  // [kAhead]
  int* const key_counts;                               // [kAhead]; kSelects

  __device__ explicit Cta(unsigned char* memory)
      : queries(memory),
        ring(queries + T::kAhead * T::kStepBytes),
        full(reinterpret_cast<uint64_t*>(ring + T::kStages * T::kStageBytes)),
        empty(full + T::kStages),
        queries_full(empty + T::kStages),
        queries_empty(queries_full + T::kAhead),
        key_counts(reinterpret_cast<int*>(queries_empty + T::kAhead)) {}

  __device__ unsigned char* Stage(int stage) const { return ring + stage * T::kStageBytes; }
  __device__ unsigned char* Queries(int ahead, int group, int part) const {
    return queries + ahead * T::kStepBytes + group * T::kUnitBytes +
           part * T::kUnitBytes / T::kParts;
  }
  /// Called by one thread.
  __device__ void InitBarriers() const {
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
};

template <typename T>
__device__ inline int TilesOf(int keys) {
  return (keys + T::kKeys - 1) / T::kKeys;
}

/// The thread that loads queries, keys and values.
template <typename T>
struct Producer {
  struct Keys {
    int set, count;
  };

  const AttentionLaunch& attention;
  const Params& params;
  const Cta<T>& cta;
  PipelineState<T::kStages> state = {};

  __device__ Keys KeysOf(const Step& step) const {
    if constexpr (T::kSelects) {
      const int64_t set = KeySet(attention, step.image);
      return {static_cast<int>(set), KeyCount(attention, set)};
    }
    return {step.image, attention.key_tokens};
  }
  /// Loads `rows` tokens, line by line. `at`: column, head, token and image.
  __device__ static void Copy(unsigned char* to, const CUtensorMap* map, uint64_t* barrier,
                              int rows, int column, int head, int token, int image) {
#pragma unroll
    for (int line = 0; line < T::kLines; ++line) {
      TmaLoad(to + line * rows * kLine * 2, map, barrier, column + line * kLine, head, token,
              image);
    }
  }
  /// The next stage: a part of a tile of keys or values.
  __device__ void LoadTile(const CUtensorMap* map, const Step& step, int set, int tile, int part) {
    uint64_t* const barrier = &cta.full[state.stage];
    Wait(&cta.empty[state.stage], state.EmptyParity());
    ArriveExpectTx(barrier, T::kStageBytes);
    Copy(cta.Stage(state.stage), map, barrier, T::kKeys,
         step.head * attention.dim + part * T::kLines * kLine, 0, tile * T::kKeys, set);
    state.Advance(1);
  }
  __device__ void LoadKeys(const Step& step, int set, int tile) {
    for (int part = 0; part < T::kParts; ++part) LoadTile(&params.k, step, set, tile, part);
  }
  __device__ void LoadQueries(const Step& step, int ahead) const {
    ArriveExpectTx(&cta.queries_full[ahead], step.active * T::kUnitBytes);
    for (int i = 0; i < step.active; ++i) {
      for (int part = 0; part < T::kParts; ++part) {
        Copy(cta.Queries(ahead, i, part), &params.q, &cta.queries_full[ahead], kQueryTile,
             part * T::kLines * kLine, step.head, step.query + i * kQueryTile, step.image);
      }
    }
  }

  __device__ void Load() {
    PrefetchTensorMap(&params.q);
    PrefetchTensorMap(&params.k);
    PrefetchTensorMap(&params.v);
    // Consumers wait for the loads. With sets of keys, the first are loaded while the predecessor
    // runs: AttentionArgs says why they are there. Every CTA has a first step, so it waits.
    if (!T::kSelects) WaitForPredecessors();
    Step step = StepAt<T>(attention, params, 0), next;
    Keys keys = KeysOf(step), next_keys;
    for (int turn = 0; step.active > 0; ++turn, step = next, keys = next_keys) {
      next = StepAt<T>(attention, params, turn + 1);
      next_keys = KeysOf(next);  // prefetched: it takes as long as several loads
      const int ahead = turn % T::kAhead, tiles = TilesOf<T>(keys.count);
      LoadKeys(step, keys.set, 0);
      if (T::kSelects && turn == 0) WaitForPredecessors();
      Wait(&cta.queries_empty[ahead], (turn / T::kAhead & 1) ^ 1);
      if (T::kSelects) cta.key_counts[ahead] = keys.count;
      LoadQueries(step, ahead);
      for (int i = 0; i < tiles; ++i) {  // in the order of use
        const bool more = i + 1 < tiles;
        if (T::kOverlaps && more) LoadKeys(step, keys.set, i + 1);
        LoadTile(&params.v, step, keys.set, i, step.part);
        if (!T::kOverlaps && more) LoadKeys(step, keys.set, i + 1);
      }
    }
    ReleaseDependents();
  }
};

/// A consumer warpgroup: one query tile of each step.
template <typename T>
struct Consumer {
  static constexpr bool kPingPong = T::kOverlaps && T::kGroups > 1;
  using Scores = float[T::kKeys / 2];
  using Output = float[T::kPart / 2];
  using Weights = uint32_t[T::kKeys / 4];

  const AttentionLaunch& attention;
  const Params& params;
  const Cta<T>& cta;
  int warp, group;
  bool signals;      // for its warpgroup
  float scale_log2;  // exp(x) = exp2(x log₂ e)
  PipelineState<T::kStages> state = {};

  __device__ Consumer(const AttentionLaunch& attention, const Params& params, const Cta<T>& cta,
                      int warp)
      : attention(attention),
        params(params),
        cta(cta),
        warp(warp),
        group(warp / 4),
        signals(threadIdx.x % 128 == 0),
        scale_log2(attention.scale * 1.4426950408889634f) {}

  __device__ void MultiplyKeys(int ahead, Scores& scores) {
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
      Wait(&cta.full[state.stage], state.FullParity());
      WgmmaFence();
      const uint64_t q = MatrixDescriptor(cta.Queries(ahead, group, part));
      const uint64_t k = MatrixDescriptor(cta.Stage(state.stage));
#pragma unroll
      for (int d = 0; d < T::kPart; d += 16) {
        Wgmma(scores, q + d / kLine * (kQueryTile * kLine * 2 >> 4) + d % kLine / 8,
              k + d / kLine * (T::kKeys * kLine * 2 >> 4) + d % kLine / 8, part + d > 0);
      }
      state.Advance(1);
    }
    WgmmaCommit();
  }
  __device__ void MultiplyValues(const Weights& weights, Output& output) {
    Wait(&cta.full[state.stage], state.FullParity());
    WgmmaFence();
    const uint64_t v = TransposedDescriptor(cta.Stage(state.stage), T::kKeys * kLine * 2);
#pragma unroll
    for (int key = 0; key < T::kKeys; key += 16) {
      Wgmma(output, weights + key / 4, v + key * 8);
    }
    WgmmaCommit();
    state.Advance(1);
  }
  __device__ static void Pack(const Scores& scores, Weights& weights) {
#pragma unroll
    for (int i = 0; i < T::kKeys / 4; ++i) {
      weights[i] = PackBf16(scores[2 * i], scores[2 * i + 1]);
    }
  }
  __device__ static void ShrinkOutput(const Softmax& softmax, Output& output) {
    if (__any_sync(~0u, softmax.shrink[0] != 1 || softmax.shrink[1] != 1)) {
#pragma unroll
      for (int j = 0; j < T::kPart / 2; ++j) output[j] *= softmax.shrink[j / 2 % 2];
    }
  }
  /// Values after a set's last key may be anything, and 0 · NaN is NaN, so they are set to zero
  /// before the last tile is multiplied. All warpgroups write the same, so none has to wait.
  __device__ void ClearValuesFrom(int valid) const {
    Wait(&cta.full[state.stage], state.FullParity());
#pragma unroll 1
    for (int line = 0; line < T::kLines; ++line) {
      auto* const rows =
          reinterpret_cast<uint4*>(cta.Stage(state.stage) + line * T::kKeys * kLine * 2);
      for (int i = valid * 8 + threadIdx.x % 128; i < T::kKeys * 8; i += 128) rows[i] = uint4();
    }
    FenceProxyAsync();
    NamedBarrierSync(1 + T::kGroups + group, 128);
  }
  /// Releases `stages` stages, the first of them `back` stages before state.stage.
  __device__ void Release(int back, int stages) const {
    for (int i = 0; i < stages; ++i) {
      if (signals) Arrive(&cta.empty[(state.stage + T::kStages - back + i) % T::kStages]);
    }
  }

  // Named barrier 1 + i: warpgroup i may start its products. The warpgroup before it arrives there.
  // Between steps it is the turn of the first.
  __device__ void AwaitTurn(int active) const {
    if (kPingPong && active > 1) NamedBarrierSync(1 + group, 256);
  }
  __device__ void PassTurn(int active) const {
    if (kPingPong && active > 1) NamedBarrierArrive(group + 1 == active ? 1 : 2 + group, 256);
  }

  /// A step without a query tile for this warpgroup: it only releases stages.
  __device__ void Skip(int ahead, int stages) {
    // An mbarrier distinguishes two phases only: do not fall behind.
    NamedBarrierSync(1 + T::kGroups + group, 128);
    if (warp % 4 == 0) {
      for (int i = 0; i < stages; ++i) {
        auto at = state;
        at.Advance(i);
        Wait(&cta.full[at.stage], at.FullParity());
        if (signals) Arrive(&cta.empty[at.stage]);
      }
      if (signals) Arrive(&cta.queries_empty[ahead]);
      __syncwarp();
    }
    state.Advance(stages);
  }

  /// The keys and values of a step.
  struct KeyTiles {
    int count;
    int valid;   // keys of the last
    bool clear;  // whether its values must be cleared
  };

  /// The main loop: products of one tile during the softmax of the next.
  __device__ void AttendOverlapped(int ahead, int active, const KeyTiles& tiles, Softmax& softmax,
                                   Output& output) {
    Scores scores;
    Weights weights;
    MultiplyKeys(ahead, scores);
    WgmmaWait<0>();
    PinAccumulators(scores);
    Release(T::kParts, T::kParts);
    // Only scores read queries, so those of the next step may be loaded during the last values.
    if (signals && tiles.count == 1) Arrive(&cta.queries_empty[ahead]);
    if (tiles.count == 1) Mask(tiles.valid, scores);
    softmax.Add(scores, scale_log2);
    Pack(scores, weights);
    const auto add_tile = [&](auto last) {
      constexpr bool kLast = decltype(last)::value;
      AwaitTurn(active);
      MultiplyKeys(ahead, scores);
      MultiplyValues(weights, output);  // of the previous tile
      PassTurn(active);
      WgmmaWait<1>();  // for the scores
      PinAccumulators(scores);
      Release(T::kParts + 1, T::kParts);
      if (kLast && signals) Arrive(&cta.queries_empty[ahead]);
      if constexpr (kLast) Mask(tiles.valid, scores);
      softmax.Add(scores, scale_log2);
      PinAccumulators(scores);  // keeps the compiler from moving the wait before the softmax
      WgmmaWait<0>();
      PinAccumulators(output);
      Release(1, 1);
      ShrinkOutput(softmax, output);
      Pack(scores, weights);
    };
#pragma unroll 1
    for (int i = 1; i < tiles.count - 1; ++i) add_tile(std::false_type());
    if (tiles.count > 1) add_tile(std::true_type());
    if (tiles.clear) ClearValuesFrom(tiles.valid);
    MultiplyValues(weights, output);
    WgmmaWait<0>();
    PinAccumulators(output);
    Release(1, 1);
  }

  /// The same, one tile after the other.
  __device__ void AttendInOrder(int ahead, const KeyTiles& tiles, Softmax& softmax,
                                Output& output) {
    Scores scores;
    Weights weights;
#pragma unroll 1
    for (int i = 1; i <= tiles.count; ++i) {
      MultiplyKeys(ahead, scores);
      WgmmaWait<0>();
      PinAccumulators(scores);
      Release(1, 1);
      if (i == tiles.count && signals) Arrive(&cta.queries_empty[ahead]);
      if (i == tiles.count && tiles.valid < T::kKeys) Mask(tiles.valid, scores);
      softmax.Add(scores, scale_log2);
      ShrinkOutput(softmax, output);
      Pack(scores, weights);
      if (i == tiles.count && tiles.clear) ClearValuesFrom(tiles.valid);
      MultiplyValues(weights, output);
      WgmmaWait<0>();
      PinAccumulators(output);
      Release(1, 1);
    }
  }

  __device__ void Run() {
    if (kPingPong && group == 1) NamedBarrierArrive(1, 256);
    Step step;
    for (int turn = 0; (step = StepAt<T>(attention, params, turn)).active > 0; ++turn) {
      const int ahead = turn % T::kAhead;
      Wait(&cta.queries_full[ahead], turn / T::kAhead & 1);
      const int keys = T::kSelects ? cta.key_counts[ahead] : attention.key_tokens;
      const int count = TilesOf<T>(keys);
      const KeyTiles tiles = {count, keys - (count - 1) * T::kKeys,
                              T::kSelects && keys < attention.key_tokens};
      if (group >= step.active) {
        Skip(ahead, count * (T::kParts + 1));
        continue;
      }
      Softmax softmax;
      Output output;
#pragma unroll
      for (float& sum : output) sum = 0;
      if constexpr (T::kOverlaps) {
        AttendOverlapped(ahead, step.active, tiles, softmax, output);
      } else {
        AttendInOrder(ahead, tiles, softmax, output);
      }
      WriteOutput<T>(attention, step, step.query + warp * 16, softmax, output);
    }
    if (kPingPong && group == 0) NamedBarrierSync(1, 256);  // consumes the last arrival
  }
};

template <typename T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    AttentionHopperKernel(const __grid_constant__ AttentionLaunch attention,
                          const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char block_shared[];  // the swizzle's alignment
  const Cta<T> cta(block_shared);
  const int warp = UniformWarp();
  if (threadIdx.x == 0) cta.InitBarriers();
  __syncthreads();

  if (warp / 4 == T::kGroups) {
    if constexpr (T::kGroups > 1) DecreaseRegisters<T::kProducerRegisters>();
    if (warp == T::kGroups * 4 && ElectOne()) Producer<T>{attention, params, cta}.Load();
  } else {
    if constexpr (T::kGroups > 1) IncreaseRegisters<T::kConsumerRegisters>();
    Consumer<T>(attention, params, cta, warp).Run();
  }
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
