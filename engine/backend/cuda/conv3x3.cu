// SPDX-License-Identifier: Apache-2.0
// 3×3 convolution from halo tiles on mma.sync, for every architecture from sm_80 on; see
// docs/kernels.md.
//
// Policy. A subtile is 8×8 pixels of an image. Its halo tile, these and the pixel around them, is
// in shared memory once for all nine taps, 32 channels at a time. If images are at most 4×4 pixels,
// a subtile is four quads of 4×4, each with its own halo. A step along k is 32 channels at one
// column of the window, that is, three taps. A line of eight pixels is half of an mma's left
// operand. So a warp that holds its lines and two more in registers uses them for all three taps:
// it reads them once, an implicit GEMM three times.
//
// After doubling by nearest neighbour a window has two columns and rows. A CTA then computes one
// phase (implicit_gemm.cuh), from the same halo tile.
//
// Order of additions, the same for every tile: 32 channels, column of the window, 16 of the
// channels, row of the window. Small images with many channels use split-K with four splits, which
// are added in order: serially by one CTA in a second set of accumulators, or, if few images leave
// the device empty, in parallel by four CTAs, the last of which adds them. The layer's shape alone
// decides whether k is split, so a row's bits do not depend on the batch.

#include <algorithm>
#include <utility>

#include "engine/backend/cuda/conv_mma.cuh"
#include "engine/backend/cuda/dependent_launch.h"

namespace denoised::cuda {
namespace {

constexpr int kSubtileEdge = 8;

/// The CTA tile is kSubtiles subtiles × kN outputs, the warp tile kLines lines of a subtile ×
/// kWarpN outputs. kBlocks CTAs share an SM, which limits the registers per thread. kQuadEdge: the
/// edge of a subtile's quads. kTaps: along an edge of the window; two in a phase.
template <int kSubtiles_, int kN_, int kLines_, int kWarpN_, int kStages_, int kHaloTiles_,
          int kBlocks_, int kQuadEdge_ = kSubtileEdge, int kTaps_ = 3>
struct Tile {
  static constexpr int kSubtiles = kSubtiles_, kN = kN_, kLines = kLines_, kWarpN = kWarpN_;
  static constexpr int kTaps = kTaps_;
  static constexpr int kStages = kStages_, kHaloTiles = kHaloTiles_, kBlocks = kBlocks_;
  static constexpr int kWarpsM = kSubtiles * kSubtileEdge / kLines, kWarpsN = kN / kWarpN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kQuadEdge = kQuadEdge_, kQuads = kSubtileEdge / kQuadEdge;  // along an edge
  static constexpr int kHaloTileEdge = kQuads * (kQuadEdge + 2);
  static constexpr int kLineElements = kHaloTileEdge * kDepth;
  static constexpr int kHaloTileElements = kHaloTileEdge * kLineElements;
  static constexpr int kStageElements = kTaps * kN * kDepth;
  // A step's copies are issued kStages - 1 steps early; kPending steps are in flight when it is
  // needed. A halo tile's copies are spread over kFillSteps of the kTaps steps of the previous one,
  // early enough to be complete by then.
  static constexpr int kPending = kStages - 2;
  static constexpr int kFillSteps = std::min(kTaps, kTaps*(kHaloTiles - 1) - kPending);
  static_assert(kPending >= 0 && kFillSteps > 0);
  static_assert(kHaloTiles == 2 || kHaloTiles - 3 + kTaps >= kPending,
                "the second halo tile has come");
  static constexpr int kSharedBytes =
      2 * (kStages * kStageElements + kHaloTiles * kSubtiles * kHaloTileElements);
  static_assert(kSharedBytes <= 99 * 1024, "what consumer chips have");
};

/// Swizzled() for pixel `x` of a halo tile's line. A load skips the two halo pixels between two
/// quads.
template <typename T>
__device__ inline int SwizzledPixel(int x, int chunk) {
  return Swizzled(x, chunk, T::kQuads == 1 ? x : x - x / (T::kQuadEdge + 2) * 2);
}

/// kSerial: a CTA computes all splits, one after the other. kParallel: each split has a CTA.
enum class SplitK { kNone, kSerial, kParallel };
constexpr int kSplits = 4;

/// kParallel: partial sums [tiles][kSplits][vectors per thread][threads], and for each tile the
/// number of CTAs that have stored theirs, zero before and after a launch.
struct Partials {
  float4* sums;
  int* semaphores;
};

/// Adds the sums of a split to `totals`, and clears them.
template <int kM, int kN>
__device__ __forceinline__ void MoveTo(float (&sums)[kM][kN][4], float (&totals)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM * kN * 4; ++i) {
    float& sum = sums[i / 4 / kN][i / 4 % kN][i % 4];
    totals[i / 4 / kN][i / 4 % kN][i % 4] += sum;
    sum = 0;
  }
}
/// Stores a thread's sums of its split. The last CTA of a tile adds those of all splits, in order,
/// to `totals`, and is told so.
template <typename T, int kM, int kN>
__device__ __forceinline__ bool AddPartials(const Partials& partials, int split,
                                            const float (&sums)[kM][kN][4],
                                            float (&totals)[kM][kN][4]) {
  const auto at = [&](int of_split, int vector) {
    return ((blockIdx.x * kSplits + of_split) * (kM * kN) + vector) * T::kThreads + threadIdx.x;
  };
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const float(&v)[4] = sums[i][j];
      __stcg(partials.sums + at(split, i * kN + j), make_float4(v[0], v[1], v[2], v[3]));
    }
  }
  if (!IsLast(partials.semaphores + blockIdx.x, kSplits)) return false;
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int of_split = 0; of_split < kSplits; ++of_split) {
        const float4 v = __ldcg(partials.sums + at(of_split, i * kN + j));
        totals[i][j][0] += v.x;
        totals[i][j][1] += v.y;
        totals[i][j][2] += v.z;
        totals[i][j][3] += v.w;
      }
    }
  }
  return true;
}

/// The quads of a phase of an image, and where each begins.
struct Quads {
  FastDivmod across, of_image;
};
template <typename T>
__device__ inline PlanePixel QuadAt(const Quads& quads, int quad) {
  const int in_image = quad % quads.of_image;
  return {quad / quads.of_image, in_image / quads.across * T::kQuadEdge,
          in_image % quads.across * T::kQuadEdge};
}

/// What a CTA computes: from subtile first_subtile and output n0 on, the channels of a split.
template <typename T, SplitK kMode>
struct Cta {
  static constexpr int kPhasesOfTile = T::kTaps == 2 ? kPhases : 1;
  int first_subtile, phase, n0, channels, split, begin, end;

  __device__ Cta(const Conv2dLaunch& conv, const FastDivmod& n_tiles)
      : first_subtile(static_cast<int>(blockIdx.x) / n_tiles / kPhasesOfTile * T::kSubtiles),
        phase(static_cast<int>(blockIdx.x) / n_tiles % kPhasesOfTile),
        n0(static_cast<int>(blockIdx.x) % n_tiles * T::kN),
        channels(conv.channels + conv.channels2),
        split(kMode == SplitK::kParallel ? static_cast<int>(blockIdx.y) : 0),
        begin(kMode == SplitK::kParallel ? SplitBegin(split) : 0),
        end(kMode == SplitK::kParallel ? SplitBegin(split + 1) : channels) {}

  __device__ int SplitBegin(int of) const { return channels / kDepth * of / kSplits * kDepth; }
};

/// A thread's copies of weights: chunk `chunk` of rows row, row + kRowsApart, … of a step.
template <typename T>
struct WeightCopies {
  static constexpr int kRowsApart = T::kThreads / kChunks;
  static constexpr int kCount = (T::kTaps * T::kN + kRowsApart - 1) / kRowsApart;
  static constexpr bool kWholeTaps = T::kN % kRowsApart == 0;  // the tap does not depend on `row`

  const Conv2dLaunch& conv;
  __nv_bfloat16* ring;  // [kStages][kTaps][kN][kDepth]
  int chunk, row, n0, channels, end;
  const __nv_bfloat16* weight;

  template <typename Cta>
  __device__ WeightCopies(const Conv2dLaunch& conv, const Cta& cta, __nv_bfloat16* ring)
      : conv(conv),
        ring(ring),
        chunk(threadIdx.x % kChunks),
        row(threadIdx.x / kChunks),
        n0(cta.n0),
        channels(cta.channels),
        end(cta.end),
        weight(static_cast<const __nv_bfloat16*>(conv.weight) + chunk * 8 +
               static_cast<int64_t>(cta.phase * conv.outputs + n0 + (kWholeTaps ? row : 0)) *
                   conv.weight_stride) {}

  __device__ void Copy(int stage, int depth, int column, int i) const {
    const int more = i * kRowsApart, at = kWholeTaps ? more : row + more;
    const int n = at % T::kN, tap = at / T::kN * T::kTaps + column;
    CopyAsync16If(T::kTaps * T::kN % kRowsApart == 0 || row + more < T::kTaps * T::kN,
                  ring + stage * T::kStageElements + Swizzled(row, chunk) + more * kDepth,
                  weight + (n * conv.weight_stride + tap * channels + depth),
                  n0 + n + (kWholeTaps ? row : 0) < conv.outputs && depth < end);
  }
};

/// A thread's copies of halo tiles: chunk `chunk` of column `column` of lines first_line,
/// first_line + kLinesApart, … Threads beyond the last line copy none.
template <typename T>
struct HaloTileCopies {
  static constexpr int kLineChunks = T::kHaloTileEdge * kChunks;
  static constexpr int kLinesApart = T::kThreads / kLineChunks;
  static constexpr int kLines = T::kSubtiles * T::kHaloTileEdge;
  static constexpr int kCount = (kLines + kLinesApart - 1) / kLinesApart;

  const Conv2dLaunch& conv;
  __nv_bfloat16* ring;  // [kHaloTiles][kSubtiles][kHaloTileEdge][kHaloTileEdge][kDepth]
  int chunk, column, first_line, end;
  int pixels[kCount];  // or −1
  const __nv_bfloat16 *x, *x2;
  int x_stride, x2_stride;

  template <typename Cta>
  __device__ HaloTileCopies(const Conv2dLaunch& conv, const Quads& quads, const Cta& cta,
                            __nv_bfloat16* ring)
      : conv(conv),
        ring(ring),
        chunk(threadIdx.x % kChunks),
        column(threadIdx.x % kLineChunks / kChunks),
        first_line(threadIdx.x < kLinesApart * kLineChunks
                       ? static_cast<int>(threadIdx.x) / kLineChunks
                       : kLines),
        end(cta.end) {
    constexpr int kAround = T::kQuadEdge + 2;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int line = first_line + i * kLinesApart;
      const PlanePixel quad =
          QuadAt<T>(quads, (cta.first_subtile + line / T::kHaloTileEdge) * T::kQuads * T::kQuads +
                               line % T::kHaloTileEdge / kAround * T::kQuads + column / kAround);
      const int y = quad.y + line % kAround - 1, x = quad.x + column % kAround - 1;
      const bool inside = quad.image < conv.images &&
                          static_cast<unsigned>(y) < static_cast<unsigned>(conv.height) &&
                          static_cast<unsigned>(x) < static_cast<unsigned>(conv.width);
      pixels[i] = inside ? (quad.image * conv.height + y) * conv.width + x : -1;
    }
    x = static_cast<const __nv_bfloat16*>(conv.x.data) + chunk * 8;
    x2 = static_cast<const __nv_bfloat16*>(conv.x2.data) + chunk * 8 - conv.channels;
    x_stride = static_cast<int>(conv.x.stride);
    x2_stride = static_cast<int>(conv.x2.stride);
  }

  __device__ void Copy(int slot, int depth, int i) const {
    const bool first = depth < conv.channels;
    CopyAsync16If(
        first_line + i * kLinesApart < kLines,
        ring + slot * T::kSubtiles * T::kHaloTileElements +
            (first_line + i * kLinesApart) * T::kLineElements + SwizzledPixel<T>(column, chunk),
        (first ? x : x2) + depth + static_cast<int64_t>(pixels[i]) * (first ? x_stride : x2_stride),
        pixels[i] >= 0 && depth < end);
  }
};

/// Accumulators begin with `bias`, which is conv's; conv.bias itself is null.
template <typename T, SplitK kMode>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    Conv3x3Kernel(const __grid_constant__ Conv2dLaunch conv, const float* bias,
                  const __grid_constant__ Quads quads, const __grid_constant__ FastDivmod n_tiles,
                  Partials partials) {
  constexpr int kStages = T::kStages, kHaloTiles = T::kHaloTiles, kLines = T::kLines;
  constexpr int kTaps = T::kTaps;
  constexpr int kQuadEdge = T::kQuadEdge, kQuads = T::kQuads;
  constexpr int kFragmentsM = kLines / 2, kFragmentsN = T::kWarpN / 8;
  constexpr int kPairs = kFragmentsM + kTaps - 1, kColumnPairs = kFragmentsN / 2;
  // A part of a step is 16 outputs at one row of the window. Copies are issued in the first parts.
  constexpr int kHalfParts = kTaps * kColumnPairs, kParts = 2 * kHalfParts,
                kFillParts = kHalfParts / 2 + 1;
  static_assert(kFragmentsN % 2 == 0 && kLines % 2 == 0);

  extern __shared__ __align__(128) unsigned char shared[];
  auto* const weight_ring = reinterpret_cast<__nv_bfloat16*>(shared);
  auto* const halo_tile_ring = weight_ring + kStages * T::kStageElements;
  const Cta<T, kMode> cta(conv, n_tiles);
  const int phase = cta.phase, n0 = cta.n0, begin = cta.begin, end = cta.end;
  using Weights = WeightCopies<T>;
  using HaloTile = HaloTileCopies<T>;
  const Weights weights(conv, cta, weight_ring);
  const HaloTile halo_tiles(conv, quads, cta, halo_tile_ring);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_n = warp % T::kWarpsN * T::kWarpN;
  const int warp_line = warp / T::kWarpsN * kLines;  // among the lines of all subtiles
  const int warp_subtile = warp_line / kSubtileEdge, subtile_line = warp_line % kSubtileEdge;
  const int weight_at = Swizzled(warp_n + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const auto in_halo_tile = [](int at) { return at + at / kQuadEdge * 2; };  // of a line or column
  const int line_at =
      warp_subtile * T::kHaloTileElements +
      (in_halo_tile(subtile_line + lane / 8 % 2 * kLines / 2) + phase / 2) * T::kLineElements;

  // Left operands are pairs of lines: the first with the one in the middle, and so on. The next row
  // of the window is one pair further, so rows share all pairs but one. Right operands are of 16
  // outputs. While some are multiplied, the next are loaded.
  uint32_t pairs[2][kPairs][4], columns[2][4];
  const auto load_pair = [&](int half, int slot, int window_column, int pair) {
    LoadMatrices(
        pairs[half][pair],
        halo_tile_ring + slot * T::kSubtiles * T::kHaloTileElements + line_at +
            pair * T::kLineElements +
            (SwizzledPixel<T>(window_column + phase % 2 + in_halo_tile(lane % 8), lane / 16) ^
             (half * 16)));
  };
  const auto load_columns = [&](int into, int stage, int part) {
    const int half = part / kHalfParts, row_part = part % kHalfParts;
    LoadMatrices(columns[into],
                 weight_ring + stage * T::kStageElements +
                     (row_part / kColumnPairs * T::kN + row_part % kColumnPairs * 16) * kDepth +
                     (weight_at ^ (half * 16)));
  };

  float sums[kFragmentsM][kFragmentsN][4];
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {  // weights: no kernel writes them
#pragma unroll
    for (int i = 0; i < Weights::kCount; ++i)
      weights.Copy(step, begin + step / kTaps * kDepth, step % kTaps, i);
  }
  InitWithBias(cta.split == 0 ? bias : nullptr, n0 + warp_n, conv.outputs, sums);
  WaitForPredecessors();
#pragma unroll
  for (int halo_tile = 0; halo_tile < kHaloTiles - 1; ++halo_tile) {
#pragma unroll
    for (int i = 0; i < HaloTile::kCount; ++i) {
      halo_tiles.Copy(halo_tile, begin + halo_tile * kDepth, i);
    }
    CommitCopies();
  }
  WaitCopies<kHaloTiles - 2>();
  __syncthreads();
#pragma unroll
  for (int pair = 0; pair < kFragmentsM; ++pair) load_pair(0, 0, 0, pair);
  load_columns(0, 0, 0);

  float totals[kFragmentsM][kFragmentsN][4] = {};
  int splits_done = 0;
  int stage = 0, empty_stage = kStages - 1, slot = 0, empty_slot = kHaloTiles - 1;
#pragma unroll 1
  for (int depth = begin; depth < end; depth += kDepth) {
    const int next_slot = slot + 1 == kHaloTiles ? 0 : slot + 1;
    const int halo_tile_depth = depth + (kHaloTiles - 1) * kDepth;
#pragma unroll
    for (int window_column = 0; window_column < kTaps; ++window_column) {
      const int next_stage = stage + 1 == kStages ? 0 : stage + 1;
      const int later = window_column + kStages - 1;  // the step whose copies are issued
      const int later_depth = depth + later / kTaps * kDepth;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int half = part / kHalfParts, row = part % kHalfParts / kColumnPairs;
        if (part == kParts - 1) {
          // The next step's weights and pixels are complete, and all warps have loaded this one's.
          CommitCopies();
          WaitCopies<T::kPending>();
          __syncthreads();
        }
        // Copies and loads are interleaved with MMAs, which would otherwise wait for them.
        const int now = part % 2;
        if (part + 1 < kParts) {
          load_columns(1 - now, stage, part + 1);
          if (part % kColumnPairs == 0 && row < kTaps - 1) {
            load_pair(half, slot, window_column, kFragmentsM + row);
          }
          if (half == 0 && row == kTaps - 1) {
            Interleave<kFragmentsM, kColumnPairs>(
                part % kColumnPairs, [&](int pair) { load_pair(1, slot, window_column, pair); });
          }
          Interleave<Weights::kCount, kFillParts>(
              part, [&](int i) { weights.Copy(empty_stage, later_depth, later % kTaps, i); });
          Interleave<HaloTile::kCount, kFillParts * T::kFillSteps>(
              part < kFillParts ? window_column * kFillParts + part : -1,
              [&](int i) { halo_tiles.Copy(empty_slot, halo_tile_depth, i); });
        } else {
          load_columns(1 - now, next_stage, 0);
#pragma unroll
          for (int pair = 0; pair < kFragmentsM; ++pair) {
            load_pair(0, window_column == kTaps - 1 ? next_slot : slot, (window_column + 1) % kTaps,
                      pair);
          }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int i = 0; i < kFragmentsM; ++i) {
            Multiply(sums[i][part % kColumnPairs * 2 + j], pairs[half][i + row],
                     columns[now][j * 2], columns[now][j * 2 + 1]);
          }
        }
      }
      empty_stage = stage;
      stage = next_stage;
    }
    empty_slot = slot;
    slot = next_slot;
    if (kMode == SplitK::kSerial && depth + kDepth == cta.SplitBegin(splits_done + 1)) {
      ++splits_done;
      MoveTo(sums, totals);
    }
  }
  WaitCopies<0>();
  __syncthreads();
  ReleaseDependents();
  if constexpr (kMode == SplitK::kParallel) {
    if (!AddPartials<T>(partials, cta.split, sums, totals)) return;
  }

  static_assert(T::kThreads / 32 * kFinishBytes<kFragmentsN> <= T::kSharedBytes);
  const int first_quad = (cta.first_subtile + warp_subtile) * kQuads * kQuads;
  const PlanePixel first = QuadAt<T>(quads, first_quad);
  FinishWarp<true>(
      conv, kMode == SplitK::kNone ? sums : totals,
      reinterpret_cast<float*>(shared) + warp * (kFinishBytes<kFragmentsN> / 4), n0 + warp_n,
      [&](int row) {
        const int line = subtile_line + row / 16 + row / 8 % 2 * kLines / 2, column = row % 8;
        const PlanePixel quad =
            kQuads == 1
                ? first
                : QuadAt<T>(quads, first_quad + line / kQuadEdge * kQuads + column / kQuadEdge);
        const int y = quad.y + line % kQuadEdge, x = quad.x + column % kQuadEdge;
        const bool inside = quad.image < conv.images && y < conv.height && x < conv.width;
        return inside ? OutputOf(conv, {quad.image, y, x}, phase) : -1;
      });
}

Quads QuadsOf(const Conv2dLaunch& conv, int quad) {
  const int across = (conv.width + quad - 1) / quad;
  return {FastDivmod(across), FastDivmod(across * ((conv.height + quad - 1) / quad))};
}

int64_t TilesAcross(const Conv2dLaunch& conv, int n) { return (conv.outputs + n - 1) / n; }

/// Blocks along the pixels of one phase.
int64_t BlocksOf(const Conv2dLaunch& conv, int quad, int subtiles) {
  const int quads = subtiles * (kSubtileEdge / quad) * (kSubtileEdge / quad);  // per block
  return (int64_t{conv.images} * QuadsOf(conv, quad).of_image.value + quads - 1) / quads;
}

/// Few pixels and many channels.
bool HasSplitK(const ConvLayer& conv) {
  return conv.height <= kSubtileEdge && conv.width <= kSubtileEdge && !conv.upsample2x &&
         conv.channels + conv.channels2 >= 2 * kSplits * kDepth;
}

template <typename T, SplitK kMode>
cudaError_t LaunchTile(Conv2dLaunch conv, const Queue& queue) {
  const FastDivmod n_tiles(static_cast<int>(TilesAcross(conv, T::kN)));
  const auto tiles = static_cast<unsigned>(BlocksOf(conv, T::kQuadEdge, T::kSubtiles) *
                                           PhasesOf(conv) * n_tiles.value);
  const Partials partials = {static_cast<float4*>(conv.workspace), conv.semaphores};
  const float* bias = conv.bias;
  conv.bias = nullptr;
  return LaunchDependent(Conv3x3Kernel<T, kMode>,
                         {.grid = dim3(tiles, kMode == SplitK::kParallel ? kSplits : 1),
                          .block = dim3(T::kThreads),
                          .shared_bytes = T::kSharedBytes},
                         queue, conv, bias, QuadsOf(conv, T::kQuadEdge), n_tiles, partials);
}

struct Choice {
  int quad, subtiles, n, taps;
  SplitK split_k;
  TileCost cost;
  TileKernel kernel;
};
template <typename T, SplitK kMode = SplitK::kNone>
constexpr Choice ChoiceOf(double step_alone, double rest_alone, double step_shared,
                          double rest_shared) {
  return {
      T::kQuadEdge,
      T::kSubtiles,
      T::kN,
      T::kTaps,
      kMode,
      {T::kBlocks, step_alone, rest_alone, step_shared, rest_shared},
      {LaunchTile<T, kMode>, [] { return LoadKernel(Conv3x3Kernel<T, kMode>, T::kSharedBytes); }}};
}
using Tile2x64 = Tile<2, 64, 8, 32, 3, 2, 2>;
using Tile1x64 = Tile<1, 64, 4, 32, 3, 2, 4>;
using TileOfQuads = Tile<1, 64, 4, 32, 3, 2, 4, 4>;
using Tile1x32 = Tile<1, 32, 4, 16, 5, 3, 4>;
using QuadTile1x32 = Tile<1, 32, 4, 16, 4, 2, 4, 4>;
/// Fitted to 52 layers that were measured with every tile. On average, the tile with the lowest
/// cost is 1.5 % slower than the fastest.
constexpr Choice kChoices[] = {
    ChoiceOf<Tile<2, 128, 8, 32, 2, 2, 2>>(0.829, 6.96, 1.629, 7.59),
    ChoiceOf<Tile<2, 96, 8, 48, 3, 2, 2>>(0.67, 5.53, 1.223, 7.53),
    ChoiceOf<Tile2x64>(0.526, 4.0, 0.903, 6.33),
    ChoiceOf<Tile1x64>(0.321, 1.63, 0.992, 4.37),
    ChoiceOf<TileOfQuads>(0.36, 2.8, 1.07, 6.5),
    ChoiceOf<Tile1x32>(0.217, 1.28, 0.678, 2.95),
    ChoiceOf<Tile2x64, SplitK::kSerial>(0.476, 4.4, 0.879, 5.71),
    ChoiceOf<Tile1x64, SplitK::kSerial>(0.332, 1.75, 1.008, 5.05),
    ChoiceOf<TileOfQuads, SplitK::kSerial>(0.36, 3.5, 1.09, 6.8),
    ChoiceOf<Tile1x32, SplitK::kSerial>(0.225, 1.6, 0.66, 4.3),
    ChoiceOf<Tile1x32, SplitK::kParallel>(0.258, 2.26, 0.646, 4.9),
    ChoiceOf<QuadTile1x32, SplitK::kSerial>(0.24, 1.7, 0.68, 4.5),
    ChoiceOf<QuadTile1x32, SplitK::kParallel>(0.27, 3.0, 0.646, 4.9),
    ChoiceOf<Tile<2, 128, 8, 32, 3, 2, 2, 8, 2>>(0.7, 5.0, 1.33, 7.59),
    ChoiceOf<Tile<2, 64, 8, 32, 3, 2, 2, 8, 2>>(0.44, 4.0, 0.65, 6.33),
    ChoiceOf<Tile<1, 64, 4, 32, 3, 2, 4, 8, 2>>(0.23, 1.63, 0.69, 5.2),
    ChoiceOf<Tile<1, 64, 4, 32, 3, 2, 4, 4, 2>>(0.27, 3.1, 0.77, 5.5),
    ChoiceOf<Tile<1, 32, 4, 16, 4, 3, 4, 8, 2>>(0.15, 1.28, 0.46, 2.95),
};

int64_t TilesOf(const Choice& choice, const Conv2dLaunch& conv) {
  return BlocksOf(conv, choice.quad, choice.subtiles) * PhasesOf(conv) *
         TilesAcross(conv, choice.n);
}

bool CanCompute(const Choice& choice, const Conv2dLaunch& conv) {
  if (choice.taps != EdgeTaps(conv) || (choice.split_k != SplitK::kNone) != HasSplitK(conv))
    return false;
  if (choice.split_k != SplitK::kParallel) return true;
  const int64_t tiles = TilesOf(choice, conv);
  const int64_t sums = tiles * kSplits * choice.subtiles * kSubtileEdge * kSubtileEdge * choice.n;
  return sums * static_cast<int64_t>(sizeof(float)) <= conv.workspace_bytes && tiles <= kSemaphores;
}

std::string NameOf(const Choice& choice) {
  std::string name = std::to_string(choice.subtiles) + " subtiles of " +
                     std::to_string(choice.quad) + "x" + std::to_string(choice.quad) + " x " +
                     std::to_string(choice.n);
  if (choice.split_k == SplitK::kSerial) name += ", split_k in turn";
  if (choice.split_k == SplitK::kParallel) name += ", split_k by blocks";
  return name;
}

}  // namespace

bool SuitsConv3x3(const ConvLayer& conv) {
  const int up = conv.upsample2x ? 2 : 1;
  return conv.kernel == 3 && conv.stride == 1 && conv.pad_top == 1 && conv.pad_left == 1 &&
         conv.out_height == up * conv.height && conv.out_width == up * conv.width &&
         conv.weight_element == Element::kBf16 && conv.x.element == Element::kBf16 &&
         HasVectorInputs(conv) && conv.channels % kDepth == 0 && conv.channels2 % kDepth == 0 &&
         FinishesInVectors(conv);
}

std::vector<ConvCandidate> Conv3x3Candidates(const Conv2dLaunch& conv, const Queue& queue) {
  std::vector<ConvCandidate> candidates;
  for (const Choice& choice : kChoices) {
    if (!CanCompute(choice, conv)) continue;
    const int split_k = choice.split_k == SplitK::kParallel ? kSplits : 1;
    const int steps = choice.taps * (conv.channels + conv.channels2) / (kDepth * split_k);
    candidates.push_back(
        {NameOf(choice),
         Microseconds(choice.cost, TilesOf(choice, conv) * split_k, steps, queue.multiprocessors),
         choice.kernel.launch});
  }
  return CheapestFirst(std::move(candidates));
}

cudaError_t LoadConv3x3Kernels() { return LoadChoices(kChoices); }

}  // namespace denoised::cuda
