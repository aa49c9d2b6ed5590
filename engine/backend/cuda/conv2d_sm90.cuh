// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/conv_sm90.cuh"

/// Convolution and linear for Hopper from im2col: what docs/kernels.md says under "Convolution on
/// Hopper", persistent, with two or three consumer warpgroups. Consumers never wait for a copy: a
/// warp for each of them stores what its epilogue leaves in shared memory. Only results in e4m3 are
/// stored by the consumers themselves.

namespace denoised::cuda::im2col {

constexpr int kBoxPixels = 64;  // of the epilogue's boxes

/// A row of kTiles; its pixels and outputs are arguments so that profilers show them.
template <int kRow, int kM_ = kTiles[kRow].m, int kN_ = kTiles[kRow].n>
struct Tile {
  static constexpr HopperTileSpec kSpec = kTiles[kRow];
  static constexpr int kM = kM_, kN = kN_, kStages = kSpec.kernel.stages;
  static constexpr int kGroups = kSpec.kernel.consumers;  // warpgroups
  static constexpr bool kPingPong = kSpec.schedule == Schedule::kPingPong;
  static constexpr bool kSplitK = kSpec.split_k != SplitK::kNone;
  static constexpr bool kE4m3 = kSpec.element == Element::kE4m3x2;
  static constexpr int kTilesInFlight = TileScheduler<kPingPong>::kInFlight;
  static constexpr int kSubtiles = kM / 64 * kTilesInFlight / kGroups;  // 64 pixels, per consumer
  static constexpr int kAccumulators = kN / 2;                          // per thread and subtile
  static constexpr int kInputBytes = kM * kStepBytes, kWeightBytes = kN * kStepBytes;
  static constexpr int kStageBytes = kInputBytes + kWeightBytes;
  // Staged tiles are stored through shared memory, in boxes of kBoxPixels.
  static constexpr bool kStaged = !kSpec.StoresOneByOne();
  static constexpr int kBox = kSpec.BoxOutputs();  // outputs: 128 or 64 bytes, swizzled
  static constexpr int kAcross = kN / kBox, kBoxes = kSubtiles * kAcross;  // per consumer
  // Gated layers have half as many outputs: half as many boxes across, or boxes of half the width.
  static constexpr int kGatedBox = kAcross % 2 == 0 ? kBox : kBox / 2;
  static constexpr int kGatedAcross = kN / 2 / kGatedBox;
  static constexpr int kBoxBytes = kBoxPixels * kBox * 2;
  static constexpr int kStagingBytes = kStaged ? kGroups * kBoxes * kBoxBytes : 0;
  static constexpr int kThreads = kSpec.kernel.threads;
  static constexpr int kBarriers = 2 * kStages + kGroups * (2 + kBoxes);
  static constexpr int kSharedBytes = kStages * kStageBytes + kStagingBytes + kBarriers * 8;
  static_assert(kN % 32 == 0 && kThreads == 128 * (kGroups + 1) && kSharedBytes <= 232448);
  static_assert(HasRegisters(kSpec));
  static_assert(!kPingPong || kGroups == 2);
  static_assert(!kE4m3 || (!kPingPong && !kSplitK));
  static_assert(kStaged || (kSubtiles == 1 && kN == 32), "FinishElements()");
};

/// The layers that a kernel is compiled for. kSplitK: k has several splits, as it has in bf16 where
/// there is a shortcut. kDoubled: the image is doubled, so there are four phases. The code for what
/// other layers need is left out: all endings together are two to four times as long, which makes
/// short launches slower (docs/kernels-measured.md).
template <Ending kEnding_, bool kSplitK_ = false, bool kShortcut_ = false, bool kDoubled_ = false>
struct Form {
  static constexpr Ending kEnding = kEnding_;
  static constexpr bool kSplitK = kSplitK_, kShortcut = kShortcut_, kDoubled = kDoubled_;

  static constexpr bool IsOf(const HopperTileSpec& spec) {
    const bool e4m3 = spec.element == Element::kE4m3x2;
    return ((kEnding == Ending::kAny && !kShortcut) || !spec.StoresOneByOne()) &&
           (kEnding != Ending::kGate || spec.FusesGate()) &&
           (kEnding != Ending::kGateE4m3 || (spec.FusesGate() && e4m3)) &&
           (!kSplitK || spec.split_k != SplitK::kNone) && (!kShortcut || kSplitK != e4m3);
  }
  static bool Suits(const ConvLayer& conv, const HopperPlan& plan) {
    const bool shortcut = conv.shortcut.x.data != nullptr;
    return (kEnding == Ending::kAny || kEnding == EndingOf(conv)) &&
           kSplitK == (plan.splits > 1 || (shortcut && !IsE4m3(conv))) && kShortcut == shortcut &&
           kDoubled == conv.upsample2x;
  }
};
template <Element kElement>
constexpr bool IsIm2col(const HopperTileSpec& spec) {
  return spec.IsPersistent() && spec.loader == Loader::kIm2col && spec.element == kElement;
}
struct Params : MainloopParams {
  CUtensorMap residual, out;       // if kStaged
  int copied_pixels = kBoxPixels;  // kDoubled: by each TMA copy of a box, whose pixels are then
                                   // whole lines or lie in one line
  Grid grid;
  int steps[kPhases] = {};       // kDoubled: of a tile of each phase, without zero_taps
  uint32_t zero_taps = 0;        // ConvLayer's
  int multicast_ctas = 1;        // of a cluster, neighbours along m, that multicast weights
  int part = 0;                  // outputs whose weights each of them loads for all of them
  int m_tiles = 0, n_tiles = 0;  // m_tiles is a multiple of `multicast_ctas`
  // Rasterisation, counted in clusters: along n first; or band by band, and along m first in each.
  FastDivmod band, last_band;  // clusters along m
  FastDivmod band_tiles;
  int bands = 0;        // whole bands per phase
  int phase_tiles = 0;  // in clusters
};

struct TileAt {
  int phase, m0, n0;
};

/// The epilogue for outputs of any dtype, alignment, activation and number: 64 pixels and 32
/// outputs. One row after the other, to keep the code small.
__device__ inline void FinishElements(const Conv2dLaunch& conv, const Params& params, int phase,
                                      int m0, int n0, const float (&accumulators)[1][16]) {
  const int n = n0 + threadIdx.x % 4 * 8;
#pragma unroll 1
  for (int h = 0; h < 2; ++h) {
    const int m = m0 + threadIdx.x / 32 % 4 * 16 + h * 8 + threadIdx.x % 32 / 4;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int at = 4 * (j / 2) + j % 2;
      v[j] = h == 0 ? accumulators[0][at] : accumulators[0][at + 2];
    }
    ExchangeInQuad(v);  // from two outputs of each block of eight to the eight of one
    if (m >= params.grid.pixels || n >= conv.outputs) continue;
    FinishOutputs(conv, OutputPixel(conv, params.grid, m, phase), n, v);
  }
}

/// A CTA's shared memory (CUTLASS: SharedStorage) and its tiles.
template <typename T, bool kDoubled>
struct Cta : TileScheduler<T::kPingPong> {
  const Params& params;
  unsigned char* ring;     // [kStages]: the pixels of a step, then its weights
  unsigned char* staging;  // [kGroups][kBoxes]: boxes of 64 pixels × kBox outputs
  Pipeline<T::kStages> pipeline;
  uint64_t* order;   // [kGroups]; ping-pong: this consumer may multiply
  uint64_t* ready;   // [kGroups]: its boxes may be written; they hold the residual if there is one
  uint64_t* filled;  // [kGroups][kBoxes]: complete, may be stored
  int multicast_ctas, rank;  // CTAs of the cluster; this one

  __device__ Cta(const Params& params, unsigned char* memory)
      : TileScheduler<T::kPingPong>(
            (kDoubled ? kPhases : 1) * (params.m_tiles / params.multicast_ctas) * params.n_tiles,
            params.multicast_ctas),
        params(params),
        ring(memory),
        staging(ring + T::kStages * T::kStageBytes),
        pipeline(reinterpret_cast<uint64_t*>(staging + T::kStagingBytes)),
        order(pipeline.End()),
        ready(order + T::kGroups),
        filled(ready + T::kGroups),
        multicast_ctas(params.multicast_ctas),
        rank(static_cast<int>(ClusterRank())) {}

  __device__ TileAt Tile(int index) const {
    int phase = 0;
    if constexpr (kDoubled) {
      while (index >= params.phase_tiles) index -= params.phase_tiles, ++phase;
    }
    const int band = index / params.band_tiles, in_band = index % params.band_tiles;
    const FastDivmod& height = band < params.bands ? params.band : params.last_band;
    const int m = band * params.band.value + in_band % height;
    return {phase, (m * params.multicast_ctas + rank) * T::kM, in_band / height * T::kN};
  }
  /// Steps of a tile. In doubled images 0 beyond the last.
  __device__ int Steps(int index) const {
    if constexpr (!kDoubled) return params.depth.steps.value;
    int phase = 0;
    for (; index >= params.phase_tiles; index -= params.phase_tiles) ++phase;
    return phase < kPhases ? params.steps[phase] : 0;
  }
  __device__ unsigned char* Inputs(int stage) const { return ring + stage * T::kStageBytes; }
  __device__ unsigned char* Weights(int stage) const { return Inputs(stage) + T::kInputBytes; }
  __device__ unsigned char* Box(int group, int box) const {
    return staging + (group * T::kBoxes + box) * T::kBoxBytes;
  }
  __device__ uint64_t* Filled(int group, int box) const { return &filled[group * T::kBoxes + box]; }
  /// A thread for each CTA that shares the stage tells it that the stage is free.
  __device__ void ReleaseStage(int stage) const {
    if (threadIdx.x % 128 < multicast_ctas) pipeline.ConsumerRelease(stage, threadIdx.x % 128);
  }
  /// The first pixel of a consumer's part of its tiles.
  __device__ static int FirstPixel(int group) {
    return T::kPingPong ? 0 : group * T::kSubtiles * 64;
  }

  /// Called by one thread.
  __device__ void InitBarriers() const {
    pipeline.Init(T::kGroups / T::kTilesInFlight * multicast_ctas);
    for (int i = 0; i < T::kGroups; ++i) {
      InitBarrier(&order[i], 4);  // a lane of each warp
      InitBarrier(&ready[i], 1);
    }
    for (int i = 0; i < T::kGroups * T::kBoxes; ++i) InitBarrier(&filled[i], 4);
    FenceBarrierInit();
  }
};

/// Run by one thread per consumer, so that consumers never wait for a copy. Stores boxes by TMA as
/// soon as they are filled, then loads the next tile's residual into them.
template <typename T, typename F>
__device__ inline void StoreEpilogue(const Conv2dLaunch& conv, const Params& params,
                                     const Cta<T, F::kDoubled>& cta, int group) {
  constexpr bool kDoubled = F::kDoubled, kGated = F::kEnding == Ending::kGate;
  constexpr int kPerOutput = kGated ? 2 : 1;  // columns of the product
  uint32_t parity = 0;
  for (int index = cta.FirstTile(group); index < cta.tiles;
       index += cta.StrideOfConsumer(), parity ^= 1) {
    const TileAt tile = cta.Tile(index);
    const auto for_boxes = [&](const auto& what) {
#pragma unroll 1
      for (int box = 0; box < T::kBoxes; ++box) {
        const int across = box % T::kAcross;
        if (kGated && across >= T::kGatedAcross) continue;
        const int m = tile.m0 + cta.FirstPixel(group) + box / T::kAcross * 64;
        const int n = tile.n0 / kPerOutput + across * (kGated ? T::kGatedBox : T::kBox);
        what(box, n, m, m < params.grid.pixels && n < conv.outputs / kPerOutput);
      }
    };
    // Calls copy(shared memory, coordinates...) for each of TMA's copies of a box.
    const auto for_copies = [&](int box, int n, int m, const auto& copy) {
      if constexpr (kDoubled) {
        for (int at = 0; at < kBoxPixels; at += params.copied_pixels) {
          const int y = (m + at) / params.grid.plane.width, x = (m + at) % params.grid.plane.width;
          copy(cta.Box(group, box) + at * T::kBox * 2, n, tile.phase % 2, x, tile.phase / 2, y);
        }
      } else {
        copy(cta.Box(group, box), n, m);
      }
    };
    uint32_t bytes = 0;
    if (conv.residual.data != nullptr) {
      for_boxes([&](int, int, int, bool exists) { bytes += exists ? T::kBoxBytes : 0; });
    }
    ArriveExpectTx(&cta.ready[group], bytes);
    if (bytes > 0) {
      for_boxes([&](int box, int n, int m, bool exists) {
        if (!exists) return;
        for_copies(box, n, m, [&](void* to, auto... at) {
          TmaLoad(to, &params.residual, &cta.ready[group], at...);
        });
      });
    }
    for_boxes([&](int box, int n, int m, bool exists) {
      Wait(cta.Filled(group, box), parity);
      if (!exists) return;
      for_copies(box, n, m,
                 [&](const void* from, auto... at) { TmaStore(&params.out, from, at...); });
    });
    TmaStoreCommit();
    TmaStoreWaitRead();
  }
}

/// The thread that loads the stages of all tiles.
template <typename T, typename F>
struct Im2colLoader {
  using Step = StepAt<F::kShortcut, T::kE4m3>;

  const Conv2dLaunch& conv;
  const Params& params;
  const Cta<T, F::kDoubled>& cta;
  int early = 0;  // stages whose weights LoadEarly() has loaded

  __device__ void LoadWeights(const TileAt& tile, const Step& step, int stage) const {
    LoadWeightsByTma(cta.Weights(stage), WeightOf(params, step), &cta.pipeline.full[stage], tile.n0,
                     tile.phase, cta.multicast_ctas, params.part, cta.rank);
  }
  __device__ bool IsZero(const TileAt& tile, const Step& step) const {
    return F::kDoubled && (params.zero_taps >> (4 * tile.phase + step.tap) & 1) != 0;
  }
  __device__ Step Begin(const TileAt& tile) const {
    Step step(conv, params, 0);
    while (IsZero(tile, step)) step.Advance(conv, params);
    return step;
  }
  __device__ void Advance(const TileAt& tile, Step& step) const {
    do {
      step.Advance(conv, params);
    } while (IsZero(tile, step));
  }
  /// No kernel writes weights: the first loads overlap the preceding kernel.
  __device__ void LoadEarly() {
    const TileAt tile = cta.Tile(cta.first_tile);
    const int steps = cta.Steps(cta.first_tile);
    Step at = Begin(tile);
    for (; early < min(T::kStages, steps); ++early) {
      ArriveExpectTx(&cta.pipeline.full[early], T::kStageBytes);
      LoadWeights(tile, at, early);
      Advance(tile, at);
    }
  }
  __device__ void Load() {
    PipelineState<T::kStages> state;
    WaitForPredecessors();
    for (int index = cta.first_tile; index < cta.tiles; index += cta.stride) {
      const TileAt tile = cta.Tile(index);
      const int steps = cta.Steps(index);
      const PlanePixel start =
          params.grid.flat ? PlanePixel() : StartOf(conv, params.grid, tile.m0);
      Step at = Begin(tile);
      for (int step = 0; step < steps; ++step) {
        uint64_t* const full = &cta.pipeline.full[state.stage];
        if (early > 0) {
          --early;
        } else {
          cta.pipeline.ProducerAcquire(state);
          ArriveExpectTx(full, T::kStageBytes);
          LoadWeights(tile, at, state.stage);
        }
        LoadInputsByTma(cta.Inputs(state.stage), params, params.grid, at, start, tile.m0,
                        tile.phase, full);
        Advance(tile, at);
        state.Advance();
      }
    }
    ReleaseDependents();
  }
};

/// A consumer warpgroup: multiplies the stages of its tiles.
template <typename T, typename F>
struct Consumer {
  using Accumulators = float[T::kSubtiles][T::kAccumulators];
  using Operands = Im2colOperands<T, Cta<T, F::kDoubled>>;

  const Conv2dLaunch& conv;
  const Params& params;
  const Cta<T, F::kDoubled>& cta;
  int group;

  /// Adds conv.add, unless FinishElements() does.
  __device__ void AddOfImages(const TileAt& tile, Accumulators& sums) const {
    if (!T::kStaged || F::kEnding != Ending::kAny || conv.add.data == nullptr) return;
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2 * T::kSubtiles; ++i) {
      const int m = tile.m0 + cta.FirstPixel(group) + i / 2 * 64 + row + i % 2 * 8;
      if (m >= params.grid.pixels) continue;
      uint32_t pairs[T::kAccumulators / 4];
      LoadPerImage(conv, conv.add, m / params.grid.plane.pixels, tile.n0, pairs);
      AddPerImage(pairs, i % 2, sums[i / 2]);
    }
  }
  /// `steps` steps of k: split `run`, or in e4m3, which does not look at `run` and `is_last`, at
  /// most kE4m3Run. In bf16 the sums of the first split start with the bias, others with zero.
  __device__ void Multiply(const TileAt& tile, int run, int steps, bool is_last, int tiles_done,
                           Operands& operands, Accumulators& sums) const {
#pragma unroll
    for (int i = 0; i < T::kSubtiles; ++i) {
      if constexpr (T::kE4m3) {
        AnyAccumulators(sums[i]);
      } else {
        InitAccumulators(run == 0 ? params.bias : nullptr, tile.n0, sums[i]);
      }
    }
    WaitForPredecessors();
    // An mbarrier distinguishes two phases only, so a consumer must not wait for a stage that is a
    // whole round ahead.
    if (T::kPingPong && run == 0) Wait(&cta.order[group], (tiles_done + group + 1) & 1);
    Mainloop<T::kSpec.element>(
        operands, steps, !T::kE4m3, sums, [](int) {},
        [&] {
          if (T::kPingPong && is_last && threadIdx.x % 32 == 0) Arrive(&cta.order[1 - group]);
        });
  }

  /// Hands the outputs of a tile to the warp that stores them, or stores them itself.
  __device__ void Finish(const TileAt& tile, int tiles_done, const Accumulators& sums) const {
    if constexpr (F::kEnding == Ending::kGateE4m3) {
#pragma unroll
      for (int i = 0; i < T::kSubtiles; ++i) {
        StoreGatedE4m3(conv, params.grid.pixels, tile.m0 + cta.FirstPixel(group) + i * 64,
                       tile.n0 / 2, sums[i]);
      }
    } else if constexpr (T::kStaged) {
      Wait(&cta.ready[group], tiles_done & 1);
#pragma unroll
      for (int i = 0; i < T::kSubtiles; ++i) {
        const auto begin = [&](int box) { return cta.Box(group, i * T::kAcross + box); };
        const auto end = [&](int box) {
          FenceProxyAsync();
          __syncwarp();
          if (threadIdx.x % 32 == 0) Arrive(cta.Filled(group, i * T::kAcross + box));
        };
        constexpr int kBox = F::kEnding == Ending::kGate ? T::kGatedBox : T::kBox;
        StageEpilogue<kBox, F::kEnding>(conv, sums[i], begin, end);
      }
    } else {
      FinishElements(conv, params, tile.phase, tile.m0 + cta.FirstPixel(group), tile.n0, sums);
    }
  }

  __device__ void Run() const {
    // Among all steps of this CTA.
    int position = T::kPingPong && group == 1 ? cta.Steps(cta.first_tile) : 0;
    int tiles_done = 0;
    for (int index = cta.FirstTile(group); index < cta.tiles;
         index += cta.StrideOfConsumer(), ++tiles_done) {
      const TileAt tile = cta.Tile(index);
      const int steps = cta.Steps(index);
      Operands operands(cta, T::kStages, cta.FirstPixel(group) * kStepBytes, T::kInputBytes);
      operands.at.Set(position);
      position += steps;
      if (T::kPingPong) position += cta.Steps(index + cta.stride);
      Accumulators sums;
      if constexpr (T::kE4m3) {
        // Nothing keeps the consumers apart, but while one adds, another may multiply.
        Accumulators total = {};
        const int windowed = steps - (F::kShortcut ? params.depth.shortcut : 0);
#pragma unroll 1
        for (int first = 0; first < windowed; first += kE4m3Run) {
          Multiply(tile, 0, min(kE4m3Run, windowed - first), false, tiles_done, operands, sums);
          AddRun(sums, /*is_first=*/false, total);
        }
#pragma unroll
        for (int i = 0; i < T::kSubtiles; ++i)
          ScaleAndAddBias(params.scales, params.bias, tile.n0, total[i]);
        AddOfImages(tile, total);
        if constexpr (F::kShortcut) AddShortcut(params.depth.shortcut, operands, sums, total);
        Finish(tile, tiles_done, total);
      } else if constexpr (F::kSplitK) {
        Accumulators total;
        const int splits = 1 << params.depth.log_splits;
        for (int split = 0; split < splits; ++split) {
          Multiply(tile, split, params.depth.StepsOf(split), split == splits - 1, tiles_done,
                   operands, sums);
          if (split == 0) AddOfImages(tile, sums);
          AddRun(sums, split == 0, total);
        }
        Finish(tile, tiles_done, total);
      } else {
        Multiply(tile, 0, steps, true, tiles_done, operands, sums);
        AddOfImages(tile, sums);
        Finish(tile, tiles_done, sums);
      }
    }
  }
};

template <typename T, typename F>
__global__ void __launch_bounds__(T::kThreads, 1)
    Conv2dHopperKernel(const __grid_constant__ Conv2dLaunch conv,
                       const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char block_shared[];  // the swizzle's alignment
  const Cta<T, F::kDoubled> cta(params, UniformShared(block_shared));
  const int warp = UniformWarp(), group = warp / 4;
  constexpr int kProducerWarp = T::kGroups * 4;
  Im2colLoader<T, F> loader{conv, params, cta};
  // ElectOne() is called in each condition: then ptxas knows that one thread runs, and emits no
  // loop over lanes around each copy.
  if (warp == kProducerWarp && ElectOne()) {
    PrefetchTensorMaps<F::kShortcut>(params);
    cta.InitBarriers();
    if (cta.multicast_ctas == 1) loader.LoadEarly();
  }
  __syncthreads();
  if (cta.multicast_ctas > 1) ArriveAtClusterRelaxed();

  if (group == T::kGroups) {
    DecreaseRegisters<T::kSpec.kernel.producer_registers>();
    if (cta.multicast_ctas > 1) WaitForCluster();
    if (warp == kProducerWarp && ElectOne()) {
      if (cta.multicast_ctas > 1) loader.LoadEarly();
      loader.Load();
    }
    const int of = warp - kProducerWarp - 1;  // one warp per consumer
    constexpr bool kStores = T::kStaged && F::kEnding != Ending::kGateE4m3;
    if (kStores && of >= 0 && of < T::kGroups) {
      WaitForPredecessors();
      if (ElectOne()) StoreEpilogue<T, F>(conv, params, cta, of);
    }
  } else {
    IncreaseRegisters<T::kSpec.kernel.consumer_registers>();
    if (cta.multicast_ctas > 1) WaitForCluster();
    Consumer<T, F>{conv, params, cta, group}.Run();
  }

  if (cta.multicast_ctas > 1) {
    ArriveAtCluster();  // others may still signal or write into this CTA's shared memory
    WaitForCluster();
  }
#endif
}

/// The output of a doubled image, line by line, in TMA boxes of `columns` channels × `pixels`
/// pixels of one phase: [pairs of lines of all images, 2, pairs of pixels, 2, channels].
inline CUresult EncodePhases(CUtensorMap* map, const Rows& pixels_of, int channels,
                             const Conv2dLaunch& conv, int columns, int pixels) {
  const int64_t width = conv.width, pixel = pixels_of.stride;
  const int across = std::min(conv.width, pixels);
  return EncodeTiled(map,
                     {pixels_of.data,
                      {channels, 2, width, 2, int64_t{conv.images} * conv.height},
                      {pixel, 2 * pixel, 2 * width * pixel, 4 * width * pixel},
                      {columns, 1, across, 1, pixels / across}},
                     SwizzleOfBox(columns), CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

/// Along n first, every CTA reads all weights. If these exceed their share of L2, bands are used
/// instead: kBand clusters along m use each weight at the same time. Each order is 2 to 3 % faster
/// where it is used.
constexpr int64_t kWeightsThatStay = int64_t{16} << 20;
constexpr int kBand = 8;

template <typename T>
cudaError_t LaunchWithTile(void (*kernel)(Conv2dLaunch, Params), const Conv2dLaunch& conv,
                           const HopperPlan& plan, const Queue& queue) {
  Params params;
  params.grid = GridOf(conv);
  const int m_tiles = (params.grid.pixels + T::kM - 1) / T::kM;
  params.multicast_ctas = plan.cluster;
  params.part = T::kN / plan.cluster;
  params.m_tiles = (m_tiles + plan.cluster - 1) / plan.cluster * plan.cluster;
  params.n_tiles = (conv.outputs + T::kN - 1) / T::kN;
  const int rows = params.m_tiles / plan.cluster;
  const int64_t weight_bytes = int64_t{2} * conv.outputs * conv.weight_stride;
  params.band = FastDivmod(weight_bytes > kWeightsThatStay ? std::min(rows, kBand) : 1);
  params.bands = rows / params.band.value;
  params.last_band = FastDivmod(std::max(1, rows % params.band.value));
  params.band_tiles = FastDivmod(params.band.value * params.n_tiles);
  params.phase_tiles = rows * params.n_tiles;
  if (int64_t{params.phase_tiles} * params.band_tiles.value >> 32 != 0)
    return cudaErrorInvalidValue;
  params.depth.log_splits = BinaryLogarithm(plan.splits);

  // A tile's pixels are contiguous in the output, and so are the pixels that a shortcut reads.
  const auto encode = [&](CUtensorMap* map, const Rows& rows, int channels, bool shortcut) {
    return EncodeInputs(map, rows, channels, conv, params.grid, shortcut, T::kM);
  };
  if (cudaError_t error = InitMainloop(&params, conv, params.part, encode); error != cudaSuccess)
    return error;
  params.zero_taps = conv.zero_taps;
  for (int phase = 0; phase < kPhases; ++phase) {
    const int zeros = __builtin_popcount(params.zero_taps >> 4 * phase & 15);
    params.steps[phase] = params.depth.steps.value - zeros * params.depth.windowed;
    if (params.steps[phase] < 1) return cudaErrorInvalidValue;
  }
  if (conv.upsample2x && kBoxPixels % conv.width != 0) {
    params.copied_pixels = std::min(conv.width & -conv.width, kBoxPixels);  // a power of two
  }
  const auto encode_boxes = [&](CUtensorMap* map, const Rows& rows, int channels, int columns) {
    return conv.upsample2x
               ? EncodePhases(map, rows, channels, conv, columns, params.copied_pixels)
               : EncodeRows(map, rows, channels, params.grid.pixels, columns, kBoxPixels);
  };
  if (T::kStaged) {
    CUresult result = encode_boxes(&params.out, conv.out, conv.outputs / (conv.gated ? 2 : 1),
                                   conv.gated ? T::kGatedBox : T::kBox);
    if (result == CUDA_SUCCESS && conv.residual.data != nullptr)
      result = encode_boxes(&params.residual, conv.residual, conv.outputs, T::kBox);
    if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  }

  const int64_t tiles = int64_t{PhasesOf(conv)} * rows * params.n_tiles;
  return LaunchClusters(kernel, std::min<int64_t>(tiles, queue.multiprocessors / plan.cluster),
                        plan.cluster, T::kThreads, T::kSharedBytes, conv, params, queue);
}

template <int kRow, typename F>
struct Kernel {
  using T = Tile<kRow>;
  static constexpr auto* kFunction = Conv2dHopperKernel<T, F>;
  static constexpr auto* kLaunch = LaunchWithTile<T>;
};
template <Element kElement>
using Kernels =
    HopperKernels<Kernel, IsIm2col<kElement>, Form<Ending::kPlain>, Form<Ending::kResidual>,
                  Form<Ending::kGate>, Form<Ending::kGateE4m3>, Form<Ending::kAny>,
                  Form<Ending::kAny, true>, Form<Ending::kAny, true, true>,
                  Form<Ending::kAny, false, true>, Form<Ending::kAny, false, false, true>,
                  Form<Ending::kAny, true, false, true>>;

}  // namespace denoised::cuda::im2col
