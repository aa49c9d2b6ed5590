// SPDX-License-Identifier: Apache-2.0
// Convolution and linear for Hopper, for few pixels: docs/kernels.md, "Small layers". Which CTA of
// a cluster adds the splits does not affect the bits.
//
// Two producer threads load, one weights and one inputs, because a single one would issue loads
// more slowly than a consumer multiplies. With 64 pixels and halo tiles three more warps normalise
// them, if a group norm comes before.

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/conv_sm90.cuh"
#include "engine/backend/cuda/group_norm.cuh"

namespace denoised::cuda {
namespace {

constexpr int kPixels = 64, kConsumers = 128;  // pixels and threads of a consumer warpgroup
constexpr int kPitch = kSubtileEdge + 2, kHaloTilePixels = kPitch * kPitch;
constexpr int kHaloTileSlot = 13 * 1024, kHaloTileBytes = kHaloTilePixels * kStepBytes;
static_assert(kHaloTileBytes <= kHaloTileSlot);
constexpr int kShortcutSlot = kPixels * kStepBytes;  // bytes of a halo tile without halo

/// The tile of a row of kTiles. Each of kGroups consumer warpgroups has 64 pixels; all share the
/// weights. Inputs are loaded as halo tiles, or as boxes of all pixels, one per step.
template <int kRow, bool kShortcut_>
struct Tile {
  static constexpr HopperTileSpec kSpec = kTiles[kRow];
  static constexpr bool kInHaloTiles = kSpec.loader == Loader::kHaloTile, kShortcut = kShortcut_;
  static constexpr int kGroups = kSpec.kernel.consumers;
  static constexpr int kOutputs = kSpec.n;
  static constexpr int kAccumulators = kPixels * kOutputs / kConsumers;  // per thread
  static constexpr int kLogBlocks = BinaryLogarithm(kOutputs / 8);       // blocks of eight outputs
  static_assert(kSpec.m == kGroups * kPixels);
  using Step = StepAt<kShortcut, /*kE4m3=*/false, kInHaloTiles ? kTaps : 0>;
  static constexpr int kWeightBytes = kOutputs * kStepBytes;
  static constexpr int kInputBytes = kPixels * kStepBytes;  // of a group
  static constexpr int kStageBytes = kWeightBytes + (kInHaloTiles ? 0 : kGroups * kInputBytes);
  static constexpr int kThreads = kSpec.kernel.threads;
  // After the consumers: a warp for weights, one for inputs, and those that normalise.
  static constexpr int kWeightWarp = kGroups * kConsumers / 32, kInputWarp = kWeightWarp + 1;
  static constexpr int kTransformerWarp = kInputWarp + 1;
  static constexpr int kTransformers = kThreads - kTransformerWarp * 32;
  static_assert(kTransformers == 0 || kInHaloTiles);
  static_assert((kTransformers > 0) == kSpec.FusesInputNorm());
  using Halo = HaloRing<kInHaloTiles, kShortcut, kGroups * kHaloTileSlot, kGroups * kShortcutSlot,
                        kTransformers>;
  /// For __launch_bounds__: at most 128 registers if two CTAs share an SM.
  static constexpr int kBoundThreads = kThreads > 256 ? kThreads : 256;
  static constexpr int kStages = kSpec.kernel.stages;  // at most
  static constexpr int kBarriers = (2 * kStages + Halo::kBarriers + 1 + 1) / 2 * 2;
  /// At most. With many steps and an SM to itself, a CTA gains more from a longer pipeline. With
  /// 128 outputs it needs all memory for a pipeline that is long enough.
  static constexpr int kSharedBytes = (kOutputs > 64 ? 227 : 190) * 1024;
};
/// Two CTAs fit on an SM, the second of this launch or the next. The next launch can load its first
/// weights and instructions early only if it fits beside this one.
constexpr int kMostBytes = 228 * 1024 / 2 - 1024;
constexpr int kManySteps = 12;

struct Params : MainloopParams {
  Grid grid;
  FastDivmod m_tiles, n_tiles;      // m_tiles: per phase, or of all images
  FastDivmod subtiles_x, subtiles;  // per image, in halo tiles
  int log_cluster = 0;
  int stages = 0;                // that fit in shared memory
  float norm_count_inverse = 0;  // 1 / elements of a group of conv.output_norm
};

/// Number of partial sums that a group receives: one from the first CTA, which adds its splits in
/// registers, and one for each split of the others.
__host__ __device__ constexpr int SlotsOf(int log_splits, int log_cluster) {
  return 1 + (((1 << log_cluster) - 1) << (log_splits - log_cluster));
}
/// `outputs`: of the tile.
__host__ __device__ constexpr int SlotBytes(int outputs, int log_cluster) {
  return kPixels * outputs * 4 >> log_cluster;
}

struct TileAt {
  int m0, phase;    // of boxes
  int image, y, x;  // of a halo tile; beyond the last image there is nothing
  int n0;
};
/// The part of a group.
template <typename T>
__device__ inline TileAt TileOf(const Params& params, int index, int group) {
  const int m = index / params.n_tiles, n0 = index % params.n_tiles * T::kOutputs;
  if constexpr (T::kInHaloTiles) {
    const int of_all = m * T::kGroups + group, subtile = of_all % params.subtiles;
    const int y = subtile / params.subtiles_x, x = subtile % params.subtiles_x;
    return {0, 0, of_all / params.subtiles, y * kSubtileEdge, x * kSubtileEdge, n0};
  } else {
    return {(m % params.m_tiles * T::kGroups + group) * kPixels, m / params.m_tiles, 0, 0, 0, n0};
  }
}
template <typename T>
__device__ inline int ImageOf(const Conv2dLaunch& conv, const Params& params, const TileAt& tile,
                              int pixel) {
  if (T::kInHaloTiles) return T::kGroups > 1 ? min(tile.image, conv.images - 1) : tile.image;
  return min(tile.m0 + pixel, params.grid.pixels - 1) / params.grid.plane.pixels;
}
/// The output pixel of a pixel of the tile, or -1.
template <typename T>
__device__ inline int64_t RowOf(const Conv2dLaunch& conv, const Params& params, const TileAt& tile,
                                int pixel) {
  if constexpr (T::kInHaloTiles) {
    if (T::kGroups > 1 && tile.image >= conv.images) return -1;
    return (int64_t{tile.image} * conv.height + tile.y + pixel / kSubtileEdge) * conv.width +
           tile.x + pixel % kSubtileEdge;
  }
  const int m = tile.m0 + pixel;
  return m < params.grid.pixels ? OutputPixel(conv, params.grid, m, tile.phase) : -1;
}

/// A CTA's result as input of the group norm; it reuses the memory of the partial sums. For each
/// eight outputs of a warp: its 16 pixels in bf16, then the sums of two leaves.
struct Finished {
  unsigned char* partials_received;
  static constexpr int kWarpBytes = 32 * sizeof(float4), kWarpPixels = 16;
  __device__ unsigned char* WarpAt(int j, int warp) const {
    return partials_received + (j * (kConsumers / 32) + warp) * kWarpBytes;
  }
  /// Eight outputs of a pixel, in bf16.
  __device__ unsigned char* At(int j, int pixel) const {
    return WarpAt(j, pixel / kWarpPixels) + pixel % kWarpPixels * (kVector * 2);
  }
  /// Sums by run of a vector.
  __device__ Sums* LeafAt(int j, int leaf) const {
    return reinterpret_cast<Sums*>(WarpAt(j, leaf / 2) + kWarpPixels * kVector * 2) +
           leaf % 2 * (kVector / 2);
  }
};

/// Writes silu(group norm) of the CTA's result to conv.out: `mine` blocks of eight outputs,
/// starting at `output`. Leaves, trees and arithmetic are those of
/// LaunchGroupNormCluster. Groups have kRun channels. `affine`: halves of gamma and beta of these
/// outputs. `row_of(pixel)`: its row of conv.out, or −1.
template <int kRun, typename RowOf>
__device__ inline void NormaliseOutputs(const Conv2dLaunch& conv, const Finished& finished,
                                        const float2* affine, float count_inverse, int output,
                                        int mine, int warp, RowOf row_of) {
  const int lane = threadIdx.x % 32;
  const int image_pixels = conv.out_height * conv.out_width;  // a power of two

  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < mine; first += 4) {
    // Each quad of lanes sums a leaf: two quads for the two leaves of the warp, in each of two
    // blocks of outputs.
    const int quad = lane / kQuad, j = first + quad / 2, leaf = warp * 2 + quad % 2;
    const bool is = j < mine;
    uint32_t vectors[kLeafVectors][kWords] = {};
    if (is) {
#pragma unroll
      for (int i = 0; i < kLeafVectors; ++i) {
        const uint4 vector = *reinterpret_cast<const uint4*>(
            finished.At(j, leaf * kLeafPixels + i * kQuad + lane % kQuad));
        Split(vector, vectors[i]);
      }
    }
    SumLeaf<kRun>(vectors, lane, [&](int r, const Sums& accumulators) {
      if (is && HoldsSums(lane)) finished.LeafAt(j, leaf)[r] = accumulators;
    });
  }
  SyncWarpgroup(0);

  // Two threads per pixel, four outputs each.
  constexpr int kHalf = kVector / 2, kHalfRuns = kRun < kHalf ? kHalf / kRun : 1;
  const int pixel = threadIdx.x / 2, half = threadIdx.x % 2;
  const int first_leaf = (pixel & -image_pixels) / kLeafPixels, leaves = image_pixels / kLeafPixels;
  const int64_t row = row_of(pixel);
#pragma unroll 1
  for (int j = 0; j < mine; ++j) {
    const int n = output + j * kVector + half * kHalf;
    if (row < 0 || n >= conv.outputs) continue;
    Statistics statistics[kHalfRuns];
#pragma unroll
    for (int i = 0; i < kHalfRuns; ++i) {
      const int r = half * kHalf / kRun + i;
      Sums accumulators[kPixels / kLeafPixels];
#pragma unroll
      for (int l = 0; l < kPixels / kLeafPixels; ++l) {
        accumulators[l] = l < leaves ? finished.LeafAt(j, first_leaf + l)[r] : Sums{0, 0};
      }
      const Sums lower = (accumulators[0] + accumulators[1]) + (accumulators[2] + accumulators[3]);
      const Sums upper = (accumulators[4] + accumulators[5]) + (accumulators[6] + accumulators[7]);
      statistics[i] = StatisticsOf(lower + upper, count_inverse, conv.output_norm.eps);
    }
    const uint2 words = *reinterpret_cast<const uint2*>(finished.At(j, pixel) + half * kHalf * 2);
    const auto of_output = [&](int i) {
      const float2 of = affine[j * kVector + half * kHalf + i];
      return Apply(Affine{of.x, of.y}, statistics[i * kHalfRuns / kHalf]);
    };
    const auto activate = [](float h) { return SiluOfHalf(h); };
    *Bf16At<uint2>(conv.out, row, n) = {
        NormaliseWord<Element::kBf16>(words.x, of_output(0), of_output(1), activate),
        NormaliseWord<Element::kBf16>(words.y, of_output(2), of_output(3), activate)};
  }
}

/// A CTA's shared memory, and its steps along k.
template <typename T>
struct Cta {
  using Halo = typename T::Halo;

  unsigned char* ring;  // of stages: the weights of a step, then its inputs unless in halo tiles
  Pipeline<T::kStages> pipeline;  // of params.stages stages
  Halo halo;
  uint64_t* received;
  float4* partials_received;
  int rank, splits;  // splits: of this CTA
  int first_step, end_step;
  int mine;  // blocks of eight outputs that it finishes

  __device__ Cta(const Params& params, unsigned char* shared, int rank)
      : ring(shared + Halo::kBytes),
        pipeline(reinterpret_cast<uint64_t*>(ring + params.stages * T::kStageBytes)),
        halo(shared, pipeline.End()),
        received(halo.End()),
        partials_received(reinterpret_cast<float4*>(pipeline.full + T::kBarriers)),
        rank(rank),
        splits(1 << (params.depth.log_splits - params.log_cluster)),
        first_step(params.depth.BeginOf(rank * splits)),
        end_step(params.depth.BeginOf((rank + 1) * splits)),
        mine(T::kOutputs / 8 >> params.log_cluster) {}

  __device__ unsigned char* WeightsOf(int stage) const { return ring + stage * T::kStageBytes; }
  __device__ unsigned char* InputsOf(int stage) const { return WeightsOf(stage) + T::kWeightBytes; }
  /// Whether any of its steps, from `first` to `end`, is of the window.
  __device__ bool HasWindowed(const typename T::Step& first, const typename T::Step& end) const {
    return end_step - end.of_shortcut > first_step - first.of_shortcut;
  }
  __device__ void ReleaseStage(int stage) const {
    if (threadIdx.x % kConsumers == 0) pipeline.ConsumerRelease(stage);
  }

  /// Called by one thread.
  __device__ void InitBarriers(const Params& params) const {
#pragma unroll 1
    for (int stage = 0; stage < params.stages; ++stage) pipeline.InitStage(stage, T::kGroups);
    halo.Init(T::kGroups);
    InitBarrier(received, 1);
    FenceBarrierInit();
    if (params.log_cluster > 0) {
      const int own = rank == 0 ? 1 : splits;
      ArriveExpectTx(received, (SlotsOf(params.depth.log_splits, params.log_cluster) - own) *
                                   T::kGroups * SlotBytes(T::kOutputs, params.log_cluster));
    }
  }
};

// Producers. A warp elects a thread for each load, not for the loop: what the loop computes then
// stays in uniform registers, where TMA needs it.

/// Calls load(step, stage) for every step, when its stage is empty.
template <typename T, typename Load>
__device__ inline void ForEachStep(const Cta<T>& cta, const Conv2dLaunch& conv,
                                   const Params& params, const Load& load) {
  typename T::Step at(conv, params, cta.first_step);
  int stage = 0, round = 0;
#pragma unroll 1
  for (int step = cta.first_step; step < cta.end_step; ++step) {
    if (round > 0) cta.pipeline.ProducerAcquire({stage, round});
    if (ElectOne()) load(at, stage);
    at.Advance(conv, params);
    if (++stage == params.stages) stage = 0, ++round;
  }
}

/// Loads the weights of every step. The first loads, one for each stage, overlap the preceding
/// kernel, because no kernel writes weights.
template <typename T>
__device__ inline void LoadWeights(const Cta<T>& cta, const Conv2dLaunch& conv,
                                   const Params& params, const TileAt& tile) {
  ForEachStep(cta, conv, params, [&](const typename T::Step& at, int stage) {
    uint64_t* const full = &cta.pipeline.full[stage];
    ArriveExpectTx(full, T::kStageBytes);  // of the inputs, too
    LoadWeightsByTma(cta.WeightsOf(stage), WeightOf(params, at), full, tile.n0, tile.phase,
                     /*multicast_ctas=*/1, 0, 0);
  });
}

/// Loads the boxes of every step. `index`: of the CTA's tile.
template <typename T>
__device__ inline void LoadBoxes(const Cta<T>& cta, const Conv2dLaunch& conv, const Params& params,
                                 int index) {
  const TileAt tile = TileOf<T>(params, index, 0);
  const PlanePixel start = StartOf(conv, params.grid, tile.m0);
  WaitForPredecessors();
  ForEachStep(cta, conv, params, [&](const typename T::Step& at, int stage) {
    LoadInputsByTma(cta.InputsOf(stage), params, params.grid, at, start, tile.m0, tile.phase,
                    &cta.pipeline.full[stage]);
  });
}
/// Loads halo tiles in the order of the steps that need them.
template <typename T>
__device__ inline void LoadHaloTiles(const Cta<T>& cta, const Conv2dLaunch& conv,
                                     const Params& params, int index) {
  TileAt tiles[T::kGroups];
#pragma unroll
  for (int group = 0; group < T::kGroups; ++group) {
    tiles[group] = TileOf<T>(params, index, group);
  }
  typename T::Step at(conv, params, cta.first_step);
  // `bytes` and `pitch`: of a group.
  const auto load = [&](int slot, int round, int bytes, int pitch, const ChunkAt& from,
                        int around) {
    cta.halo.pipeline.ProducerAcquire({slot, round});
    if (!ElectOne()) return;
    ArriveExpectTx(&cta.halo.pipeline.full[slot], T::kGroups * bytes);
#pragma unroll
    for (int group = 0; group < T::kGroups; ++group) {
      const TileAt& tile = tiles[group];
      TmaLoad(cta.halo.At(slot) + group * pitch, from.map, &cta.halo.pipeline.full[slot],
              from.channel, tile.x - around, tile.y - around, tile.image);
    }
  };
  int next = at.chunk, slot = 0, round = 0, of_shortcut = 0;
  WaitForPredecessors();
#pragma unroll 1
  for (int step = cta.first_step; step < cta.end_step; ++step) {
    if (T::kShortcut && at.IsOfShortcut(params.depth)) {
      load(T::Halo::kWindowed + of_shortcut % 2, of_shortcut / 2, kShortcutSlot, kShortcutSlot,
           ChunkOf(params.shortcut, at.of_shortcut), 0);
      ++of_shortcut;
    } else if (at.chunk == next) {
      load(slot, round, kHaloTileBytes, kHaloTileSlot, ChunkOf(params, at.chunk), 1);
      ++next;
      if (++slot == T::Halo::kWindowed) slot = 0, ++round;
    }
    at.Advance(conv, params);
  }
}

/// kTransformers threads: normalise the halo tiles in shared memory.
template <typename T>
__device__ inline void NormaliseInputs(const Cta<T>& cta, const Conv2dLaunch& conv,
                                       const Params& params, const TileAt& tile, int thread) {
  static_assert(T::kGroups == 1);
  const typename T::Step first(conv, params, cta.first_step), end(conv, params, cta.end_step);
  const int end_chunk =
      cta.HasWindowed(first, end) ? end.chunk + (end.tap > 0 ? 1 : 0) : first.chunk;
  PipelineState<T::Halo::kWindowed> state;
  const uint32_t inside = PixelsInside<T::kTransformers / 8, kHaloTilePixels>(
      conv, kPitch, thread, tile.y - 1, tile.x - 1);
  WaitForPredecessors();
#pragma unroll 1
  for (int chunk = first.chunk; chunk < end_chunk; ++chunk) {
    float factor[8], offset[8];
    const bool has_channels =
        LoadFactors(conv, params.chunks, chunk, thread % 8, tile.image, factor, offset);
    cta.halo.pipeline.ConsumerWait(state.stage, state.FullParity());
    if (has_channels) {
      Normalise<T::kTransformers / 8>(cta.halo.At(state.stage), 0, thread, inside, factor, offset);
    }
    FenceProxyAsync();  // wgmma reads through the async proxy
    Arrive(&cta.halo.normal[state.stage]);
    state.Advance();
  }
}

/// Sends a thread's partial sums of a split to the CTAs that own the outputs: [slots, mine,
/// threads] of four values. `received`: the group's in this CTA.
template <typename T>
__device__ inline void SendPartials(const Cta<T>& cta, const Params& params, float4* received,
                                    int thread, int split, const float (&total)[T::kAccumulators]) {
  const int to_slot = cta.rank == 0 ? 0 : 1 + (cta.rank - 1) * cta.splits + split;
  float4* const to = received + to_slot * cta.mine * kConsumers + thread;
#pragma unroll
  for (int j = 0; j < T::kOutputs / 8; ++j) {
    const int owner = j >> (T::kLogBlocks - params.log_cluster);
    float4* const at = to + (j & (cta.mine - 1)) * kConsumers;
    const float4 four = {total[4 * j], total[4 * j + 1], total[4 * j + 2], total[4 * j + 3]};
    if (owner != cta.rank) {
      StoreAsync(ClusterAddress(at, owner), ClusterAddress(cta.received, owner), four);
    } else {
      *at = four;
    }
  }
}

/// What a thread finishes. The CTA has `mine` blocks of eight outputs. As in a wgmma's
/// accumulators, a thread has two neighbouring outputs of each block, of `pixel` and of pixel + 8.
struct Outputs {
  static constexpr int kAtOnce = 2;  // blocks whose residuals are loaded ahead
  using Residuals = uint32_t[2 * kAtOnce];

  const Conv2dLaunch& conv;
  const float4* partials_received;  // of the group
  int thread;                       // of the group
  int mine, slots;
  int first;        // output of the CTA
  int pixel;        // of the tile
  int64_t rows[2];  // of conv.out, or −1

  __device__ int At(int j) const { return first + j * 8 + static_cast<int>(threadIdx.x) % 4 * 2; }
  __device__ void LoadResiduals(int j, Residuals& residuals) const {
#pragma unroll
    for (int i = 0; i < 2 * kAtOnce; ++i) {
      const int64_t row = rows[i % 2];
      const int output = At(j + i / 2);
      const bool is =
          conv.residual.data != nullptr && j + i / 2 < mine && row >= 0 && output < conv.outputs;
      residuals[i] = is ? *Bf16At<uint32_t>(conv.residual, row, output) : 0;
    }
  }
  /// Adds the splits in order.
  __device__ void Sum(int j, float (&v)[4]) const {
    const float4* const from = partials_received + j * kConsumers + thread;
    float4 sum = *from;
#pragma unroll 1
    for (int slot = 1; slot < slots; ++slot) {
      const float4 part = from[slot * mine * kConsumers];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
  }
  /// `residuals`: of the first blocks.
  __device__ void Store(Residuals& residuals) const {
    const bool silu = conv.activation == Activation::kSilu;
#pragma unroll 1
    for (int block = 0; block < mine; block += kAtOnce) {
      Residuals next;
      LoadResiduals(block + kAtOnce, next);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int j = block + i;
        if (j >= mine) break;
        float v[4];
        Sum(j, v);
        if (conv.residual.data != nullptr) {
          AddPair(residuals[2 * i], v[0], v[1]);
          AddPair(residuals[2 * i + 1], v[2], v[3]);
        }
        ApplyEpilogue(conv, silu, v);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (rows[h] < 0 || At(j) >= conv.outputs) continue;
          *Bf16At<uint32_t>(conv.out, rows[h], At(j)) = PackBf16(v[2 * h], v[2 * h + 1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) residuals[i] = next[i];
    }
  }
  /// Leaves the result in bf16 in shared memory, for NormaliseOutputs().
  __device__ void Keep(const Finished& finished) const {
#pragma unroll 1
    for (int j = 0; j < mine; ++j) {
      float v[4];
      Sum(j, v);
      ApplyEpilogue(conv, /*silu=*/false, v);
      __syncwarp();  // all partial sums have been read
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        reinterpret_cast<uint32_t*>(finished.At(j, pixel + 8 * h))[threadIdx.x % 4] =
            PackBf16(v[2 * h], v[2 * h + 1]);
      }
    }
  }
};

/// The operands of consumer `group`.
template <typename T>
__device__ inline auto OperandsOf(const Cta<T>& cta, const Conv2dLaunch& conv, const Params& params,
                                  int group, bool normalises) {
  if constexpr (T::kInHaloTiles) {
    HaloTileOperands<T, Cta<T>, /*kAhead=*/true> operands{
        .conv = conv,
        .depth = params.depth,
        .cta = cta,
        .halo_tile_ready = cta.halo.Ready(normalises),
        .windowed = {kPitch, group * kHaloTileSlot},
        .shortcut = {kSubtileEdge, group * kShortcutSlot},
        .next_subtile = 0,
        .at = {cta.pipeline, params.stages, cta.ring}};
    const typename T::Step first(conv, params, cta.first_step), end(conv, params, cta.end_step);
    operands.Begin(first, 0, 0);
    if (first.tap > 0 && cta.HasWindowed(first, end)) operands.WaitForHaloTile();
    return operands;
  } else {
    return Im2colOperands<T, Cta<T>>(cta, params.stages, T::kWeightBytes + group * T::kInputBytes,
                                     0);
  }
}

template <typename T, int kNormRun>
__global__ void __launch_bounds__(T::kBoundThreads, T::kGroups == 1 ? 2 : 1)
    FewPixelsKernel(const __grid_constant__ Conv2dLaunch conv,
                    const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];  // the swizzle's alignment
  const int warp = UniformWarp();
  const int rank = static_cast<int>(ClusterRank());
  const Cta<T> cta(params, shared, rank);
  const int index = static_cast<int>(blockIdx.x >> params.log_cluster);
  const bool produces = warp >= T::kWeightWarp;
  const int group = T::kGroups == 1 || produces ? 0 : warp / 4;
  const TileAt tile = TileOf<T>(params, index, group);
  const bool clustered = params.log_cluster > 0;
  const bool normalises = T::kInHaloTiles && conv.input_factors != nullptr;

  if (warp == T::kWeightWarp && ElectOne()) {
    PrefetchTensorMaps<T::kShortcut>(params);
    cta.InitBarriers(params);
  }
  __syncthreads();
  if (clustered) ArriveAtCluster();

  if (produces) {
    if (warp == T::kWeightWarp) {
      LoadWeights(cta, conv, params, tile);
    } else if (warp == T::kInputWarp) {
      if constexpr (T::kInHaloTiles) {
        LoadHaloTiles(cta, conv, params, index);
      } else {
        LoadBoxes(cta, conv, params, index);
      }
    } else if (normalises) {
      if constexpr (T::kTransformers > 0) {
        NormaliseInputs(cta, conv, params, tile, threadIdx.x - T::kTransformerWarp * 32);
      }
    }
    if (clustered) WaitForCluster();
    return;
  }

  const int thread = static_cast<int>(threadIdx.x) - group * kConsumers;
  const int mine = cta.mine;
  const int slots = SlotsOf(params.depth.log_splits, params.log_cluster);
  const int pixel = (warp - group * 4) * 16 + threadIdx.x % 32 / 4;
  const auto row_of = [&](int pixel) { return RowOf<T>(conv, params, tile, pixel); };
  float4* const received = cta.partials_received + group * slots * mine * kConsumers;
  const Outputs outputs = {conv,   received,
                           thread, mine,
                           slots,  tile.n0 + rank * mine * 8,
                           pixel,  {row_of(pixel), row_of(pixel + 8)}};
  float2* const affine =
      reinterpret_cast<float2*>(cta.partials_received + slots * mine * kConsumers);
  static_assert(kNormRun == 0 || T::kGroups == 1);
  if constexpr (kNormRun > 0) {
    const int c = threadIdx.x, n = outputs.first + c;
    if (c < mine * 8 && n < conv.outputs) {
      affine[c] = {0.5f * conv.output_norm.gamma[n], 0.5f * conv.output_norm.beta[n]};
    }
  }

  float sums[1][T::kAccumulators];
  float(&accumulators)[T::kAccumulators] = sums[0];
  float total[1][T::kAccumulators];  // of several splits
  InitAccumulators(rank == 0 ? params.bias : nullptr, tile.n0, accumulators);
  WaitForPredecessors();  // their output is read and overwritten from here on
  // The next convolution can load its weights during the norm.
  if (kNormRun > 0) ReleaseDependents();
  Outputs::Residuals residuals;
  if constexpr (kNormRun == 0) outputs.LoadResiduals(0, residuals);
  constexpr int kAdds = T::kInHaloTiles ? 1 : 2;  // a halo tile is of one image
  uint32_t add[kAdds][T::kAccumulators / 4];
  const bool adds = rank == 0 && conv.add.data != nullptr;
  if (adds) {
#pragma unroll
    for (int h = 0; h < kAdds; ++h) {
      LoadPerImage(conv, conv.add, ImageOf<T>(conv, params, tile, pixel + 8 * h), tile.n0, add[h]);
    }
  }

  auto operands = OperandsOf(cta, conv, params, group, normalises);
#pragma unroll 1
  for (int split = 0; split < cta.splits; ++split) {
    Mainloop<Element::kBf16>(
        operands, params.depth.StepsOf(rank * cta.splits + split), true, sums, [](int) {}, [] {});
    if (adds && split == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) AddPerImage(add[kAdds == 1 ? 0 : h], h, accumulators);
    }
    if (clustered && split == 0) WaitForCluster();  // all its CTAs have started
    if constexpr (T::kSpec.split_k == SplitK::kEach) {
      SendPartials(cta, params, received, thread, split, accumulators);
    } else {
      // The first CTA adds its splits in registers; the others send them one by one.
      const bool continues = rank == 0 && split > 0;
      AddRun(sums, !continues, total);
#pragma unroll
      for (float& sum : accumulators) sum = 0;
      if (rank > 0 || split == cta.splits - 1)
        SendPartials(cta, params, received, thread, split, total[0]);
    }
  }

  if (kNormRun == 0) ReleaseDependents();
  if (clustered) WaitForStores(cta.received, 0);
  if constexpr (kNormRun > 0) {
    const Finished finished{reinterpret_cast<unsigned char*>(received)};
    outputs.Keep(finished);
    NormaliseOutputs<kNormRun>(conv, finished, affine, params.norm_count_inverse, outputs.first,
                               mine, warp, row_of);
  } else {
    outputs.Store(residuals);
  }
#endif
}

/// Channels of a group of conv.output_norm, or 0.
int NormRunOf(const ConvLayer& conv) {
  return conv.output_norm.gamma != nullptr ? conv.outputs / conv.output_norm.groups : 0;
}

/// The layers that a kernel is compiled for. kNormRun: channels of a group of conv.output_norm; 0:
/// no norm.
template <bool kShortcut_, int kNormRun_>
struct Form {
  static constexpr bool kShortcut = kShortcut_;
  static constexpr int kNormRun = kNormRun_;

  static constexpr bool IsOf(const HopperTileSpec& spec) {
    return kNormRun == 0 || spec.FusesOutputNorm();
  }
  static bool Suits(const ConvLayer& conv, const HopperPlan&) {
    return kShortcut == (conv.shortcut.x.data != nullptr) && kNormRun == NormRunOf(conv);
  }
};
constexpr bool IsOfFewPixels(const HopperTileSpec& spec) { return !spec.IsPersistent(); }

template <typename T>
cudaError_t LaunchWithTile(void (*kernel)(Conv2dLaunch, Params), const Conv2dLaunch& conv,
                           const HopperPlan& plan, const Queue& queue) {
  Params params;
  params.grid = GridOf(conv);
  if (T::kInHaloTiles) {
    params.subtiles_x = FastDivmod(conv.width / kSubtileEdge);
    params.subtiles = FastDivmod(params.subtiles_x.value * (conv.height / kSubtileEdge));
    params.m_tiles =
        FastDivmod((conv.images * params.subtiles.value + T::kGroups - 1) / T::kGroups);
  } else {
    params.m_tiles = FastDivmod((params.grid.pixels + T::kSpec.m - 1) / T::kSpec.m);
  }
  params.n_tiles = FastDivmod((conv.outputs + T::kOutputs - 1) / T::kOutputs);
  params.depth.log_splits = BinaryLogarithm(plan.splits);
  params.log_cluster = BinaryLogarithm(plan.cluster);
  const int norm_run = NormRunOf(conv);
  const int of_group = SlotsOf(params.depth.log_splits, params.log_cluster) *
                           SlotBytes(T::kOutputs, params.log_cluster) +
                       (norm_run > 0 ? T::kOutputs * sizeof(float2) >> params.log_cluster : 0);
  const int64_t tiles = int64_t{PhasesOf(conv)} * params.m_tiles.value * params.n_tiles.value;
  // 128 pixels leave no room for a second CTA.
  const bool alone = T::kGroups > 1 || (tiles * plan.cluster <= queue.multiprocessors &&
                                        StepsOf(conv) > kManySteps * plan.cluster);
  const int others = T::Halo::kBytes + T::kBarriers * 8 + T::kGroups * of_group;
  // With one split each, all clusters receive as much; otherwise two CTAs with four splits each
  // receive the most.
  constexpr int kMostReceived = T::kSpec.split_k == SplitK::kEach
                                    ? SlotBytes(T::kOutputs, 0)
                                    : SlotsOf(3, 1) * SlotBytes(T::kOutputs, 1);
  static_assert(kMaxSplits == 8 &&
                (T::kGroups == 1 || T::Halo::kBytes + T::kBarriers * 8 +
                                            T::kGroups * kMostReceived + 2 * T::kStageBytes <=
                                        T::kSharedBytes));
  params.stages =
      std::min(T::kStages, ((alone ? T::kSharedBytes : kMostBytes) - others) / T::kStageBytes);
  if (norm_run > 0) {
    const int image_pixels = conv.out_height * conv.out_width;
    params.norm_count_inverse = 1.0f / (static_cast<float>(image_pixels) * norm_run);
  }

  const auto encode = [&](CUtensorMap* map, const Rows& rows, int channels, bool shortcut) {
    const int edge = shortcut ? kSubtileEdge : kPitch;
    return T::kInHaloTiles
               ? EncodeImages(map, rows, channels, conv, kStep, edge, edge, 1)
               : EncodeInputs(map, rows, channels, conv, params.grid, shortcut, T::kSpec.m);
  };
  if (cudaError_t error = InitMainloop(&params, conv, T::kOutputs, encode); error != cudaSuccess)
    return error;
  return LaunchClusters(kernel, tiles, plan.cluster, T::kThreads,
                        params.stages * T::kStageBytes + others, conv, params, queue);
}

template <int kRow, typename F>
struct Kernel {
  using T = Tile<kRow, F::kShortcut>;
  static constexpr auto* kFunction = FewPixelsKernel<T, F::kNormRun>;
  static constexpr auto* kLaunch = LaunchWithTile<T>;
};
using Kernels = HopperKernels<Kernel, IsOfFewPixels, Form<false, 0>, Form<true, 0>, Form<false, 2>,
                              Form<false, 4>, Form<false, 8>>;

}  // namespace

bool SuitsOutputNorm(const ConvLayer& conv) {
  const int64_t image_pixels = int64_t{conv.out_height} * conv.out_width;
  const int groups = conv.output_norm.groups, split = NormRunOf(conv);
  return HasVectorOutputs(conv) && conv.residual.data == nullptr &&
         conv.shortcut.x.data == nullptr && conv.activation == Activation::kNone &&
         !conv.upsample2x && image_pixels % kLeafPixels == 0 && image_pixels <= kPixels &&
         kPixels % image_pixels == 0 && conv.outputs == groups * split &&
         (split == 2 || split == 4 || split == 8);
}

const HopperKernelSet kConvFewPixelsKernels = Kernels::kSet;

}  // namespace denoised::cuda
