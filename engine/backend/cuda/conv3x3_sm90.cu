// SPDX-License-Identifier: Apache-2.0
// 3×3 convolution for Hopper from halo tiles, for images of at least a tile: docs/kernels.md, "Halo
// tiles". TMA writes zeros beyond the image. For each output pixel 1.4 input pixels are loaded,
// instead of nine.
//
// The chunks of a shortcut have one tap and are not normalised. Their halo tiles have no halo, and
// slots of their own, because in bf16 they are interleaved with those that stay for nine taps.
//
// In e4m3 a halo tile has 128 channels and its products are a run. There is no fused norm and no
// split-K; a shortcut, in bf16, is the last run.
//
// Split-K: a consumer adds the accumulators of each later split to those of the first. Two subtiles
// would not leave enough registers for that, so each of the cooperating consumers has one subtile
// of the CTA tile. The second starts some steps after the first, so that one adds or runs its
// epilogue while the other multiplies. Without split-K they may ping-pong.

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/conv_sm90.cuh"

namespace denoised::cuda {
namespace {

constexpr int kHaloTileSlot = 25 * 1024;  // two halo tiles of 10×10 pixels; 18×10 take less
constexpr int kShortcutSlot = 2 * kSubtileEdge * kSubtileEdge * kStepBytes;

/// A row of kTiles, for two consumer warpgroups; its pixels and outputs are arguments so that
/// profilers show them.
template <int kRow, int kM = kTiles[kRow].m, int kN_ = kTiles[kRow].n>
struct Tile {
  static constexpr HopperTileSpec kSpec = kTiles[kRow];
  static constexpr int kN = kN_, kStages = kSpec.kernel.stages;
  static constexpr int kBuffers = kSpec.kernel.epilogue_buffers;  // per consumer
  static constexpr bool kPingPong = kSpec.schedule == Schedule::kPingPong;
  static constexpr bool kSplitK = kSpec.split_k != SplitK::kNone;
  static constexpr bool kE4m3 = kSpec.element == Element::kE4m3x2;
  // Whether k is cut into runs, which are splits or in e4m3 halo tiles: MMAs add the steps of a
  // run, fp32 additions the runs.
  static constexpr bool kAddsRuns = kSplitK || kE4m3;
  // The MMAs of the first split accumulate in the total itself. With 192 outputs, ptxas finds no
  // registers for two sets of 96 accumulators that MMAs write, so the total is a copy.
  static constexpr bool kFirstIsTotal = kPingPong || (kSplitK && kN < 192);
  static constexpr int kLag = kSpec.kernel.lag;
  static constexpr int kCluster = 2;  // CTAs that multicast weights, or have one split of k each
  static constexpr int kSubtiles = kPingPong ? 2 : 1;  // per consumer
  static constexpr int kAccumulators = kN / 2;
  static constexpr int kStageBytes = kN * kStepBytes;
  // Bytes of a box of 64 pixels × kBox outputs.
  static constexpr int kBox = kSpec.BoxOutputs(), kBoxes = kN / kBox;
  static constexpr int kBoxBytes = kSubtileEdge * kSubtileEdge * kBox * 2,
                       kBufferBytes = kBoxes * kBoxBytes;
  static constexpr int kStagingBytes = 2 * kBuffers * kBufferBytes;
  static constexpr int kReceivedBytes =
      kSpec.split_k == SplitK::kCluster ? kSubtileEdge * kSubtileEdge * kN * 4 : 0;
  static constexpr bool kFusesInputNorm = kSpec.FusesInputNorm();
  // conv.add is loaded before the products if there are registers for it.
  static constexpr bool kAddsEarly = kAddsRuns && kN < (kE4m3 ? 160 : 192);
  static constexpr int kThreads = kSpec.kernel.threads;
  static constexpr int kTransformers = kThreads - 256 - 32;  // all but the producer warp
  template <bool kShortcut>
  using Halo = HaloRing<true, kShortcut, kHaloTileSlot, kShortcutSlot, kTransformers>;
  static constexpr int kBarriers = 2 * kStages + Halo<true>::kBarriers + 2 + 2 * kBuffers + 1;
  static constexpr int kAllHaloTileBytes =
      std::max(Halo<false>::kBytes, kAddsRuns ? Halo<true>::kBytes : 0);
  static constexpr int kSharedBytes =
      kAllHaloTileBytes + kStages * kStageBytes + kStagingBytes + kReceivedBytes + kBarriers * 8;
  static_assert(kN % kBox == 0 && kSubtiles % kBuffers == 0 && kLag < kStages);
  static_assert(kStages <= kTaps && kE4m3Run == kTaps);
  static_assert(kM == 2 * kSubtileEdge * kSubtileEdge && kSpec.kernel.consumers == 2);
  static_assert(kPingPong != kAddsRuns, "the consumers that add runs share a tile");
  static_assert(kFirstIsTotal || kE4m3 || kSpec.split_k != SplitK::kCluster,
                "the first run starts with the bias");
  static_assert(kSharedBytes <= 232448 && HasRegisters(kSpec));
};

/// The layers that a kernel is compiled for. kSplitOverCluster: each CTA of the cluster has one
/// split of the same tile, and no other tile. It finishes the subtile of the consumer with its own
/// rank.
template <bool kShortcut_, bool kSplitOverCluster_>
struct Form {
  static constexpr bool kShortcut = kShortcut_, kSplitOverCluster = kSplitOverCluster_;

  static constexpr bool IsOf(const HopperTileSpec& spec) {
    return kSplitOverCluster
               ? spec.split_k == SplitK::kCluster
               : !kShortcut || spec.split_k != SplitK::kNone || spec.element == Element::kE4m3x2;
  }
  static bool Suits(const ConvLayer& conv, const HopperPlan& plan) {
    return kShortcut == (conv.shortcut.x.data != nullptr) && kSplitOverCluster == plan.cluster > 1;
  }
};
constexpr bool IsPersistentHaloTile(const HopperTileSpec& spec) {
  return spec.IsPersistent() && spec.loader == Loader::kHaloTile;
}
struct Params : MainloopParams {
  CUtensorMap residual, out;
  FastDivmod tiles_x, tiles_y;  // per image
  FastDivmod n_tiles;
  int m_tiles = 0;  // a multiple of the CTAs that multicast weights
  int images_at_once = 1;
  FastDivmod pitch;       // pixels per line of a halo tile
  int subtile_pixel = 0;  // where the second subtile of a halo tile begins
  int halo_tile_bytes = 0;
  int shortcut_pitch = 0, shortcut_subtile_pixel = 0;  // of its halo tiles
};

struct TileAt {
  int image, y, x, n0;
};

/// A CTA's shared memory (CUTLASS: SharedStorage), its tiles, and its share of k.
template <typename T, typename F>
struct Cta : TileScheduler<T::kPingPong> {
  using Halo = typename T::template Halo<F::kShortcut>;
  using Step = StepAt<F::kShortcut, T::kE4m3, kTaps>;
  // CTAs of a cluster, if each has its own tile.
  static constexpr int kMulticastCtas = F::kSplitOverCluster ? 1 : T::kCluster;

  const Params& params;
  unsigned char* ring;     // [kStages]: the weights of a step
  unsigned char* staging;  // [2][kBuffers][kBoxes]
  float4* partials_received;
  Pipeline<T::kStages> pipeline;
  Halo halo;
  uint64_t* order;   // [2]: this consumer may multiply
  uint64_t* staged;  // [2][kBuffers]: the epilogue's buffer is free and holds the residual
  uint64_t* received;
  int rank;
  // Of each of its tiles.
  Step begin;
  int steps, end_chunk, end_of_shortcut;
  bool normalises;

  __device__ Cta(const Conv2dLaunch& conv, const Params& params, unsigned char* memory)
      : TileScheduler<T::kPingPong>(params.m_tiles / kMulticastCtas * params.n_tiles.value,
                                    T::kCluster),
        params(params),
        ring(memory + Halo::kBytes),
        staging(ring + T::kStages * T::kStageBytes),
        partials_received(reinterpret_cast<float4*>(staging + T::kStagingBytes)),
        pipeline(reinterpret_cast<uint64_t*>(staging + T::kStagingBytes + T::kReceivedBytes)),
        halo(memory, pipeline.End()),
        order(halo.End()),
        staged(order + 2),
        received(staged + 2 * T::kBuffers),
        rank(static_cast<int>(ClusterRank())),
        begin(conv, params, F::kSplitOverCluster ? params.depth.BeginOf(rank) : 0),
        steps(F::kSplitOverCluster ? params.depth.StepsOf(rank) : params.depth.steps.value),
        end_chunk(params.depth.windowed),
        end_of_shortcut(params.depth.shortcut),
        normalises(T::kFusesInputNorm && conv.input_factors != nullptr) {
    if (!F::kSplitOverCluster) return;
    const Step end(conv, params, params.depth.BeginOf(rank + 1));
    end_chunk = end.chunk + (end.tap > 0 ? 1 : 0), end_of_shortcut = end.of_shortcut;
  }

  __device__ unsigned char* Weights(int stage) const { return ring + stage * T::kStageBytes; }
  __device__ TileAt Tile(int index) const {
    const int m = index / params.n_tiles * kMulticastCtas + rank % kMulticastCtas;
    const int line = m / params.tiles_x;
    return {line / params.tiles_y * params.images_at_once, line % params.tiles_y * kSubtileEdge,
            m % params.tiles_x * 2 * kSubtileEdge, index % params.n_tiles * T::kN};
  }
  /// A thread for each CTA that shares the stage tells it that the stage is free.
  __device__ void ReleaseStage(int stage) const {
    const int thread = threadIdx.x % 128;
    if (thread < kMulticastCtas)
      pipeline.ConsumerRelease(stage, F::kSplitOverCluster ? rank : thread);
  }

  /// Called by one thread.
  __device__ void InitBarriers() const {
    pipeline.Init((T::kPingPong ? 1 : 2) * kMulticastCtas);
    halo.Init(T::kPingPong ? 1 : 2);
    for (int i = 0; i < 2; ++i) InitBarrier(&order[i], 4);  // a lane of each warp
    for (int i = 0; i < 2 * T::kBuffers; ++i) InitBarrier(&staged[i], 1);
    if (F::kSplitOverCluster) InitBarrier(received, 1);
    FenceBarrierInit();
    if (F::kSplitOverCluster) ArriveExpectTx(received, T::kReceivedBytes);
  }
};

/// The thread that loads halo tiles, and the weights of all steps.
template <typename T, typename F>
struct HaloTileLoader {
  using C = Cta<T, F>;
  using Halo = typename C::Halo;
  /// The next halo tile of the window, or of the shortcut.
  struct Next {
    int index, chunk, slot;
    TileAt tile;
    int round = 0;
  };

  const Conv2dLaunch& conv;
  const Params& params;
  const C& cta;

  __device__ void LoadWeights(int n0, const typename C::Step& step, int stage) const {
    ArriveExpectTx(&cta.pipeline.full[stage], T::kStageBytes);
    LoadWeightsByTma(cta.Weights(stage), WeightOf(params, step), &cta.pipeline.full[stage], n0,
                     /*phase=*/0, C::kMulticastCtas, T::kN / C::kMulticastCtas, cta.rank);
  }
  template <bool kOf>
  __device__ void LoadNext(Next& at) const {
    const int end = kOf ? cta.end_of_shortcut : cta.end_chunk;
    if (at.index >= cta.tiles || (F::kSplitOverCluster && at.chunk == end)) return;
    const int around = kOf ? 0 : 1;
    cta.halo.pipeline.ProducerAcquire({at.slot, at.round});
    ArriveExpectTx(&cta.halo.pipeline.full[at.slot], kOf ? kShortcutSlot : params.halo_tile_bytes);
    const ChunkAt from = kOf ? ChunkOf(params.shortcut, at.chunk) : ChunkOf(params, at.chunk);
    TmaLoad(cta.halo.At(at.slot), from.map, &cta.halo.pipeline.full[at.slot], from.channel,
            at.tile.x - around, at.tile.y - around, at.tile.image);
    if (++at.slot == (kOf ? Halo::kSlots : Halo::kWindowed)) {
      at.slot = kOf ? Halo::kWindowed : 0, ++at.round;
    }
    if (++at.chunk == end && !F::kSplitOverCluster) {
      at.chunk = 0, at.index += cta.stride;
      at.tile = cta.Tile(at.index);
    }
  }

  __device__ void Load() const {
    // No kernel writes weights: the first loads overlap the preceding kernel.
    const TileAt its_first = cta.Tile(cta.first_tile);
    auto at = cta.begin;
    for (int stage = 0; stage < T::kStages; ++stage) {
      LoadWeights(its_first.n0, at, stage);
      at.Advance(conv, params);
    }
    WaitForPredecessors();

    Next next = {cta.first_tile, cta.begin.chunk, 0, its_first};
    Next next_of_shortcut = {cta.first_tile, cta.begin.of_shortcut, Halo::kWindowed, its_first};
    const auto load_next = [&] { LoadNext<false>(next); };
    const auto load_next_of_shortcut = [&] {
      if constexpr (F::kShortcut) LoadNext<true>(next_of_shortcut);
    };
    // A split that begins within a halo tile has kLead of its steps among the first stages.
    const int halo_tiles = F::kSplitOverCluster && !F::kShortcut && cta.begin.tap > 0 ? 3 : 2;
    for (int i = 0; i < halo_tiles; ++i) load_next();
    for (int i = 0; i < Halo::kOfShortcut; ++i) load_next_of_shortcut();

    // When this tap's stage is free, the preceding halo tile has been used up.
    constexpr int kLead = T::kStages < 7 ? T::kStages + 1 : 8;
    // With a shortcut the two slots are replaced step by step: when step `released` has freed its
    // stage, and was the last of its halo tile. Waiting for the slot earlier would delay weights.
    auto released = cta.begin;
    const auto replace_released = [&] {
      if (released.IsOfShortcut(params.depth)) {
        load_next_of_shortcut();
      } else if (released.IsLastTap(params.depth)) {
        load_next();
      }
      released.Advance(conv, params);
    };
    PipelineState<T::kStages> state{0, 1};
    int step = T::kStages;
    for (int index = cta.first_tile; index < cta.tiles;
         index += cta.stride, step = 0, at = cta.begin) {
      const int n0 = cta.Tile(index).n0;
#pragma unroll 1
      for (; step < cta.steps; ++step) {
        cta.pipeline.ProducerAcquire(state);
        LoadWeights(n0, at, state.stage);
        if (F::kShortcut) {
          replace_released();
        } else if (at.tap == kLead) {
          load_next();
        }
        at.Advance(conv, params);
        state.Advance();
      }
    }
    for (int i = 0; F::kShortcut && i < T::kStages; ++i) replace_released();
    ReleaseDependents();
  }
};

/// The warps that normalise the window's halo tiles in place. `thread` counts their threads.
template <typename T, typename C>
__device__ inline void NormaliseHaloTiles(const Conv2dLaunch& conv, const Params& params,
                                          const C& cta, int thread) {
  WaitForPredecessors();
  PipelineState<C::Halo::kWindowed> state;
  for (int index = cta.first_tile; index < cta.tiles; index += cta.stride) {
    const TileAt tile = cta.Tile(index);
    const uint32_t inside =
        PixelsInside<T::kTransformers / 8, (2 * kSubtileEdge + 2) * (kSubtileEdge + 2)>(
            conv, params.pitch, thread, tile.y - 1, tile.x - 1);
#pragma unroll 1
    for (int chunk = cta.begin.chunk; chunk < cta.end_chunk; ++chunk) {
#pragma unroll 1
      for (int i = 0; i < params.images_at_once; ++i) {
        float factor[8], offset[8];
        const bool exists =
            tile.image + i < conv.images &&
            LoadFactors(conv, params.chunks, chunk, thread % 8, tile.image + i, factor, offset);
        if (i == 0) cta.halo.pipeline.ConsumerWait(state.stage, state.FullParity());
        if (!exists) continue;
        Normalise<T::kTransformers / 8>(cta.halo.At(state.stage), i * params.subtile_pixel, thread,
                                        inside, factor, offset);
      }
      FenceProxyAsync();  // wgmma reads through the async proxy
      Arrive(&cta.halo.normal[state.stage]);
      state.Advance();
    }
  }
}

/// A consumer warpgroup: multiplies taps of halo tiles.
template <typename T, typename F>
struct Consumer {
  using C = Cta<T, F>;
  using Halo = typename C::Halo;
  // In e4m3, of a tile's first run: sooner, the previous tile's output is still being stored.
  static constexpr int kStagingStep = 3;

  const Conv2dLaunch& conv;
  const Params& params;
  const C& cta;
  const int group;
  const bool leads = threadIdx.x % 128 == 0;
  const bool has_first_run = !F::kSplitOverCluster || cta.rank == 0,
             finishes = !F::kSplitOverCluster || group == cta.rank;
  const bool adds = has_first_run && conv.add.data != nullptr;

  const SubtilesAt windowed = {params.pitch.value,
                               T::kPingPong ? 0 : group* params.subtile_pixel* kStepBytes};
  const SubtilesAt of_shortcut = {params.shortcut_pitch,
                                  group* params.shortcut_subtile_pixel* kStepBytes};
  const int next_subtile = params.subtile_pixel * kStepBytes;
  HaloTileOperands<T, C, /*kAhead=*/false> operands{
      .conv = conv,
      .depth = params.depth,
      .cta = cta,
      .halo_tile_ready = cta.halo.Ready(cta.normalises),
      .windowed = windowed,
      .shortcut = of_shortcut,
      .next_subtile = next_subtile,
      .at = {cta.pipeline, T::kStages, cta.ring}};
  // Of a tile:
  TileAt tile;
  int steps_until_pass;

  __device__ void PassOrder() const {
    if (threadIdx.x % 32 == 0) Arrive(&cta.order[1 - group]);
  }
  /// The epilogue's buffer of a subtile of this consumer, and where that subtile lies.
  __device__ int Buffer(int subtile) const { return group * T::kBuffers + subtile % T::kBuffers; }
  __device__ TileAt Subtile(int subtile) const {
    const int of_tile = T::kPingPong ? subtile : group;
    TileAt at = tile;
    if (params.images_at_once == 2) {
      at.image += of_tile;
    } else {
      at.x += of_tile * kSubtileEdge;
    }
    return at;
  }
  __device__ void LoadAdded(int subtile, uint32_t (&added)[T::kAccumulators / 4]) const {
    const int image = min(Subtile(subtile).image, conv.images - 1);  // that exists
    LoadPerImage<T::kBox>(conv, conv.add, image, tile.n0, added);
  }
  __device__ void BeginStaging(int subtile) const {
    if (!leads) return;
    const bool has_residual = conv.residual.data != nullptr;
    const int buffer = Buffer(subtile);
    ArriveExpectTx(&cta.staged[buffer], has_residual ? T::kBufferBytes : 0);
    if (!has_residual) return;
    const TileAt at = Subtile(subtile);
    for (int box = 0; box < T::kBoxes; ++box) {
      TmaLoad(cta.staging + buffer * T::kBufferBytes + box * T::kBoxBytes, &params.residual,
              &cta.staged[buffer], tile.n0 + box * T::kBox, at.x, at.y, at.image);
    }
  }

  /// Loads the residual into the epilogue's buffers, once the previous tile's output is stored.
  __device__ void BeginStaging() const {
    if (leads) TmaStoreWaitRead();
#pragma unroll
    for (int subtile = 0; subtile < T::kBuffers; ++subtile) BeginStaging(subtile);
  }

  /// Run `run` of k: a split, or in e4m3 a halo tile. The first split adds to `accumulators`,
  /// others overwrite them.
  template <int kSubtiles, int kAccumulators>
  __device__ void Multiply(int run, float (&accumulators)[kSubtiles][kAccumulators]) {
    const int count = T::kE4m3               ? kTaps
                      : F::kSplitOverCluster ? cta.steps
                                             : params.depth.StepsOf(run);
    if (F::kSplitOverCluster) operands.WaitForHaloTile();  // a split may begin inside a halo tile
    Mainloop<T::kSpec.element>(
        operands, count, !T::kE4m3 && run == 0, accumulators,
        [&](int step) {
          if (T::kAddsRuns && --steps_until_pass == 0 && group == 0) PassOrder();
          if (T::kE4m3 && run == 0 && step == kStagingStep) BeginStaging();
        },
        [&] {
          if (T::kPingPong) PassOrder();
        });
  }

  /// With a split for each CTA of the cluster: adds the sums of the other CTA, or sends it these.
  __device__ void Exchange(float (&total)[T::kAccumulators]) const {
    float4* const at = cta.partials_received + threadIdx.x % 128;
    if (finishes) WaitForStores(cta.received, 0);
#pragma unroll
    for (int j = 0; j < T::kAccumulators / 4; ++j) {
      float* const four = &total[4 * j];
      if (finishes) {
        const float4 other = at[j * 128];
        four[0] += other.x, four[1] += other.y, four[2] += other.z, four[3] += other.w;
      } else {
        StoreAsync(ClusterAddress(at + j * 128, group), ClusterAddress(cta.received, group),
                   float4{four[0], four[1], four[2], four[3]});
      }
    }
  }

  __device__ void Finish(int tiles_done,
                         const float (&total)[T::kSubtiles][T::kAccumulators]) const {
#pragma unroll
    for (int subtile = 0; subtile < T::kSubtiles; ++subtile) {
      const int buffer = Buffer(subtile);
      unsigned char* const staging = cta.staging + buffer * T::kBufferBytes;
      Wait(&cta.staged[buffer],
           (tiles_done * (T::kSubtiles / T::kBuffers) + subtile / T::kBuffers) & 1);
      StageEpilogue<T::kBox, Ending::kAny>(
          conv, total[subtile], [&](int box) { return staging + box * T::kBoxBytes; }, [](int) {});
      FenceProxyAsync();
      SyncWarpgroup(group);
      const TileAt at = Subtile(subtile);
      if (leads) {
        for (int box = 0; box < T::kBoxes; ++box) {
          TmaStore(&params.out, staging + box * T::kBoxBytes, tile.n0 + box * T::kBox, at.x, at.y,
                   at.image);
        }
        TmaStoreCommit();
      }
      if (subtile + T::kBuffers < T::kSubtiles) {
        if (leads) TmaStoreWaitRead();
        BeginStaging(subtile + T::kBuffers);
      }
    }
  }

  __device__ void Run() {
    // Counted over all steps and all halo tiles of this CTA.
    int step_at = T::kPingPong ? group * params.depth.steps.value : 0;
    int halo_tile_at = T::kPingPong ? group * params.depth.windowed : 0;
    int tiles_done = 0;
    WaitForPredecessors();  // their output is read and overwritten from here on
    for (int index = cta.FirstTile(group); index < cta.tiles;
         index += cta.StrideOfConsumer(), ++tiles_done) {
      tile = cta.Tile(index);
      operands.Begin(cta.begin, step_at, halo_tile_at);
      step_at += C::kInFlight * params.depth.steps.value;
      halo_tile_at += C::kInFlight * params.depth.windowed;
      // A single tile has no epilogue to hide.
      steps_until_pass = cta.first_tile + cta.stride < cta.tiles ? T::kLag : 1;

      float total[T::kSubtiles][T::kAccumulators],
          accumulators[T::kSubtiles][T::kAddsRuns ? T::kAccumulators : 1];
      uint32_t added[T::kAccumulators / 4];
      const auto add_per_image = [&] {
        if (!adds) return;
#pragma unroll
        for (int i = 0; i < T::kSubtiles; ++i) {
          if (!T::kAddsEarly) LoadAdded(i, added);
          AddPerImage(added, 0, total[i]);
          AddPerImage(added, 1, total[i]);
        }
      };
      if constexpr (T::kFirstIsTotal) {
#pragma unroll
        for (int i = 0; i < T::kSubtiles; ++i) {
          InitAccumulators(has_first_run ? params.bias : nullptr, tile.n0, total[i]);
        }
        AnyAccumulators(accumulators[0]);
      } else if constexpr (T::kE4m3) {
        for (float& sum : total[0]) sum = 0;
        AnyAccumulators(accumulators[0]);
      } else {
        InitAccumulators(params.bias, tile.n0, accumulators[0]);
      }
      if (T::kAddsEarly && adds) LoadAdded(0, added);
      if (T::kPingPong || group == 1) Wait(&cta.order[group], (tiles_done + group + 1) & 1);
      const int last_run = T::kE4m3 ? params.depth.windowed - 1
                           : T::kSplitK && !F::kSplitOverCluster
                               ? (1 << params.depth.log_splits) - 1
                               : 0;
#pragma unroll 1
      for (int run = 0; run <= last_run; ++run) {
        if (!T::kE4m3 && run == last_run && finishes) BeginStaging();
        if (T::kFirstIsTotal && run == 0) {
          Multiply(run, total);
          add_per_image();
          continue;
        }
        if constexpr (T::kAddsRuns) {
          Multiply(run, accumulators);
          if (!T::kFirstIsTotal && !T::kE4m3 && run == 0) {
            AddRun(accumulators, /*is_first=*/true, total);
            add_per_image();
          } else {
            AddRun(accumulators, /*is_first=*/false, total);
          }
        }
      }
      if constexpr (T::kE4m3) {
        ScaleAndAddBias(params.scales, params.bias, tile.n0, total[0]);
        add_per_image();
        if constexpr (F::kShortcut)
          AddShortcut(params.depth.shortcut, operands, accumulators, total);
      }
      if constexpr (F::kSplitOverCluster) {
        Exchange(total[0]);
        if (!finishes) continue;
      }
      Finish(tiles_done, total);
    }
    if (leads) TmaStoreWaitRead();
  }
};

template <typename T, typename F>
__global__ void __launch_bounds__(T::kThreads, 1)
    Conv3x3HopperKernel(const __grid_constant__ Conv2dLaunch conv,
                        const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char block_shared[];  // the swizzle's alignment
  const Cta<T, F> cta(conv, params, UniformShared(block_shared));
  const int warp = UniformWarp(), group = warp / 4;
  constexpr int kProducerWarp = 8;
  if (warp == kProducerWarp && ElectOne()) {
    PrefetchTensorMaps<F::kShortcut>(params);
    cta.InitBarriers();
  }
  __syncthreads();
  ArriveAtCluster();

  if (group >= 2) {
    DecreaseRegisters<T::kSpec.kernel.producer_registers>();
    WaitForCluster();
    if (warp == kProducerWarp && ElectOne()) {
      HaloTileLoader<T, F>{conv, params, cta}.Load();
    } else if (warp > kProducerWarp && cta.normalises) {
      NormaliseHaloTiles<T>(conv, params, cta, threadIdx.x - (kProducerWarp + 1) * 32);
    }
  } else {
    IncreaseRegisters<T::kSpec.kernel.consumer_registers>();
    WaitForCluster();
    Consumer<T, F>{conv, params, cta, group}.Run();
  }

  ArriveAtCluster();  // others may still signal or write into this CTA's shared memory
  WaitForCluster();
#endif
}

template <typename T>
cudaError_t LaunchWithTile(void (*kernel)(Conv2dLaunch, Params), const Conv2dLaunch& conv,
                           const HopperPlan& plan, const Queue& queue) {
  Params params;
  params.depth.log_splits = BinaryLogarithm(plan.splits);
  static_assert(kMaxSplits <= kTaps, "each split has a step");
  const bool two_images = conv.width <= kSubtileEdge;  // in a tile
  const int tile_width = two_images ? kSubtileEdge : 2 * kSubtileEdge;
  params.images_at_once = two_images ? 2 : 1;
  const int tiles_x = (conv.width + tile_width - 1) / tile_width;
  const int tiles_y = (conv.height + kSubtileEdge - 1) / kSubtileEdge;
  const int groups = (conv.images + params.images_at_once - 1) / params.images_at_once;
  const int m_tiles = tiles_x * tiles_y * groups;
  const bool split_over_cluster = plan.cluster > 1;
  static_assert(T::kSpec.split_k != SplitK::kCluster ||
                kMinStepsSplitOverCluster >= 2 * T::kStages);
  const int multicast_ctas = split_over_cluster ? 1 : T::kCluster;
  params.m_tiles = (m_tiles + multicast_ctas - 1) / multicast_ctas * multicast_ctas;
  params.tiles_x = FastDivmod(tiles_x), params.tiles_y = FastDivmod(tiles_y);
  params.n_tiles = FastDivmod((conv.outputs + T::kN - 1) / T::kN);
  const int pitch = tile_width + 2, halo_tile_pixels = pitch * (kSubtileEdge + 2);
  params.pitch = FastDivmod(pitch);
  params.shortcut_pitch = tile_width;
  params.subtile_pixel = two_images ? halo_tile_pixels : kSubtileEdge;
  params.shortcut_subtile_pixel = two_images ? kSubtileEdge * kSubtileEdge : kSubtileEdge;
  params.halo_tile_bytes = halo_tile_pixels * params.images_at_once * kStepBytes;

  const auto encode_halo_tile = [&](CUtensorMap* map, const Rows& rows, int channels,
                                    bool shortcut) {
    return EncodeImages(map, rows, channels, conv, kStep, shortcut ? params.shortcut_pitch : pitch,
                        shortcut ? kSubtileEdge : kSubtileEdge + 2, params.images_at_once);
  };
  if (cudaError_t error = InitMainloop(&params, conv, T::kN / multicast_ctas, encode_halo_tile);
      error != cudaSuccess) {
    return error;
  }
  CUresult result = EncodeImages(&params.out, conv.out, conv.outputs, conv, T::kBox, kSubtileEdge,
                                 kSubtileEdge, 1);
  if (result == CUDA_SUCCESS && conv.residual.data != nullptr) {
    result = EncodeImages(&params.residual, conv.residual, conv.outputs, conv, T::kBox,
                          kSubtileEdge, kSubtileEdge, 1);
  }
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;

  const int64_t tiles = int64_t{params.m_tiles / multicast_ctas} * params.n_tiles.value;
  const int64_t at_once = split_over_cluster ? tiles : queue.multiprocessors / T::kCluster;
  return LaunchClusters(kernel, std::min(tiles, at_once), T::kCluster, T::kThreads, T::kSharedBytes,
                        conv, params, queue);
}

template <int kRow, typename F>
struct Kernel {
  using T = Tile<kRow>;
  static constexpr auto* kFunction = Conv3x3HopperKernel<T, F>;
  static constexpr auto* kLaunch = LaunchWithTile<T>;
};
using Kernels = HopperKernels<Kernel, IsPersistentHaloTile, Form<false, false>, Form<true, false>,
                              Form<false, true>, Form<true, true>>;

}  // namespace

const HopperKernelSet kConv3x3Kernels = Kernels::kSet;

}  // namespace denoised::cuda
