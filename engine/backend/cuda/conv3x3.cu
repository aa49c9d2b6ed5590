// 3×3 convolution from patches, for every chip from sm_80 on; see docs/kernels.md.
//
// Policy. A unit is 8×8 pixels of an image; its patch, they and one pixel around them, is in shared
// memory once for all nine taps, 32 channels at a time. Of images that are smaller a unit may be
// four squares of 4×4, each with its pixels around it. A step along k are these channels under one
// column of the window, three taps. A line of eight pixels is half of an mma's left operand, so a
// warp that holds the lines of its pixels and two more in registers multiplies them with all three
// taps: it reads them once where a matrix product reads them three times.
//
// After doubling by nearest neighbour a window has two columns and rows, and a block makes the
// outputs of one phase (implicit_gemm.cuh), whose patch is the same.
//
// An output is summed in the order (32 channels, column of the window, 16 of the channels, row of
// the window), whatever the tile. Of small images few blocks walk along many channels, so these are
// four runs, whose sums are added in order: by one block in a second set of registers, or, where
// few images leave the chip empty, of four blocks by the one that is done last. Which layers come
// here and have runs follows from their shape alone, so a row's bits are the same in any batch.

#include <algorithm>
#include <utility>

#include "engine/backend/cuda/conv_mma.cuh"
#include "engine/backend/cuda/dependent_launch.h"

namespace denoised::cuda {
namespace {

constexpr int kUnitEdge = 8;
constexpr int kDepth = 32;           // channels of a patch and of a step: two mma
constexpr int kChunks = kDepth / 8;  // of 16 bytes

/// A block makes kUnits units × kN outputs, a warp kLines lines of a unit × kWarpN outputs. kBlocks
/// share a multiprocessor, which caps the registers of a thread. kSquare: the edge of a unit's
/// squares. kTaps: along an edge of the window, two in a phase.
template <int kUnits_, int kN_, int kLines_, int kWarpN_, int kStages_, int kPatches_, int kBlocks_,
          int kSquare_ = kUnitEdge, int kTaps_ = 3>
struct Tile {
  static constexpr int kUnits = kUnits_, kN = kN_, kLines = kLines_, kWarpN = kWarpN_;
  static constexpr int kTaps = kTaps_;
  static constexpr int kStages = kStages_, kPatches = kPatches_, kBlocks = kBlocks_;
  static constexpr int kWarpsM = kUnits * kUnitEdge / kLines, kWarpsN = kN / kWarpN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kSquare = kSquare_, kSquares = kUnitEdge / kSquare;  // along an edge
  static constexpr int kPatchEdge = kSquares * (kSquare + 2);
  static constexpr int kLineElements = kPatchEdge * kDepth;
  static constexpr int kPatchElements = kPatchEdge * kLineElements;
  static constexpr int kStageElements = kTaps * kN * kDepth;
  // A step is asked for kStages - 1 steps early; kPending of them are under way when it is needed.
  // A patch is asked for during kTurns of the kTaps steps of one, so early that it has come by
  // then.
  static constexpr int kPending = kStages - 2;
  static constexpr int kTurns = std::min(kTaps, kTaps*(kPatches - 1) - kPending);
  static_assert(kPending >= 0 && kTurns > 0);
  static_assert(kPatches == 2 || kPatches - 3 + kTaps >= kPending, "the second patch has come");
  static constexpr int kSharedBytes =
      2 * (kStages * kStageElements + kPatches * kUnits * kPatchElements);
  static_assert(kSharedBytes <= 99 * 1024, "what consumer chips have");
};

/// Where chunk `chunk` of a row of weights lies in elements: of the `nth` of neighbours, eight of
/// which ldmatrix reads together and which lie in different banks.
__device__ inline int Swizzled(int row, int chunk, int nth) {
  static_assert(kChunks == 4);  // two rows fill the 128 bytes of all banks
  return row * kDepth + (chunk ^ (nth / 2 % 4)) * 8;
}
__device__ inline int Swizzled(int row, int chunk) { return Swizzled(row, chunk, row); }
/// The same of pixel `x` of a patch's line: eight pixels of two squares have two between them.
template <typename T>
__device__ inline int SwizzledPixel(int x, int chunk) {
  return Swizzled(x, chunk, T::kSquares == 1 ? x : x - x / (T::kSquare + 2) * 2);
}

/// How the runs of channels of a layer are made. kOne: it has one. kInTurn: by each block, one
/// after the other. kByBlocks: by blocks of their own.
enum class Runs { kOne, kInTurn, kByBlocks };
constexpr int kRunCount = 4;

/// kByBlocks: the sums of runs, [tiles][kRunCount][vectors of a thread][threads], and how many of a
/// tile's blocks have stored theirs: zero, before and afterwards.
struct RunSums {
  float4* sums;
  int* stored;
};

/// Squares of a phase of an image, and where one begins.
struct Squares {
  Divisor across, of_image;
};
template <typename T>
__device__ inline PlanePixel SquareAt(const Squares& squares, int square) {
  const int in_image = square % squares.of_image;
  return {square / squares.of_image, in_image / squares.across * T::kSquare,
          in_image % squares.across * T::kSquare};
}

/// `bias` is conv's, whose own is null: sums begin with it.
template <typename T, Runs kRuns>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    Conv3x3Kernel(const __grid_constant__ Conv2dLaunch conv, const float* bias,
                  const __grid_constant__ Squares squares, const __grid_constant__ Divisor n_tiles,
                  RunSums run_sums) {
  constexpr int kStages = T::kStages, kPatches = T::kPatches, kLines = T::kLines;
  constexpr int kTaps = T::kTaps, kPhasesOfTile = kTaps == 2 ? kPhases : 1;
  constexpr int kSquare = T::kSquare, kSquares = T::kSquares;
  constexpr int kPatchEdge = T::kPatchEdge, kLineElements = T::kLineElements;
  constexpr int kFragmentsM = kLines / 2, kFragmentsN = T::kWarpN / 8;
  constexpr int kPairs = kFragmentsM + kTaps - 1, kColumnPairs = kFragmentsN / 2;
  // Of a step, each 16 outputs under one row of the window; copies are asked for in the first of
  // them.
  constexpr int kHalfParts = kTaps * kColumnPairs, kParts = 2 * kHalfParts,
                kFillParts = kHalfParts / 2 + 1;
  static_assert(kFragmentsN % 2 == 0 && kLines % 2 == 0);

  extern __shared__ __align__(128) unsigned char shared[];
  auto* weight_ring = reinterpret_cast<__nv_bfloat16*>(shared);  // [kStages][kTaps][kN][kDepth]
  // [kPatches][kUnits][kPatchEdge][kPatchEdge][kDepth]
  __nv_bfloat16* patch_ring = weight_ring + kStages * T::kStageElements;

  const int first_unit = static_cast<int>(blockIdx.x) / n_tiles / kPhasesOfTile * T::kUnits;
  const int phase = static_cast<int>(blockIdx.x) / n_tiles % kPhasesOfTile;
  const int n0 = static_cast<int>(blockIdx.x) % n_tiles * T::kN;
  const int channels = conv.channels + conv.channels2;
  const auto run_begin = [&](int run) { return channels / kDepth * run / kRunCount * kDepth; };
  const int run = kRuns == Runs::kByBlocks ? static_cast<int>(blockIdx.y) : 0;
  const int begin = kRuns == Runs::kByBlocks ? run_begin(run) : 0;
  const int end = kRuns == Runs::kByBlocks ? run_begin(run + 1) : channels;

  // This thread copies chunk `chunk` of rows row, row + kRowsApart, … of a step's weights,
  const int chunk = threadIdx.x % kChunks, row = threadIdx.x / kChunks;
  constexpr int kRowsApart = T::kThreads / kChunks;
  constexpr int kWeightFills = (kTaps * T::kN + kRowsApart - 1) / kRowsApart;
  constexpr bool kWholeTaps = T::kN % kRowsApart == 0;  // which tap it is does not depend on `row`
  const auto* weight =
      static_cast<const __nv_bfloat16*>(conv.weight) + chunk * 8 +
      static_cast<int64_t>(phase * conv.outputs + n0 + (kWholeTaps ? row : 0)) * conv.weight_stride;
  const auto fill_weights = [&](int stage, int depth, int column, int i) {
    const int more = i * kRowsApart, at = kWholeTaps ? more : row + more;
    const int n = at % T::kN, tap = at / T::kN * kTaps + column;
    CopyAsync16If(kTaps * T::kN % kRowsApart == 0 || row + more < kTaps * T::kN,
                  weight_ring + stage * T::kStageElements + Swizzled(row, chunk) + more * kDepth,
                  weight + (n * conv.weight_stride + tap * channels + depth),
                  n0 + n + (kWholeTaps ? row : 0) < conv.outputs && depth < end);
  };
  // and of column patch_x of every kLinesApart-th line of the patches from patch_line on, whose
  // pixels are in `pixels`, or −1. Threads beyond the last of these lines copy none.
  constexpr int kLineChunks = kPatchEdge * kChunks, kLinesApart = T::kThreads / kLineChunks;
  constexpr int kPatchLines = T::kUnits * kPatchEdge;
  constexpr int kPatchFills = (kPatchLines + kLinesApart - 1) / kLinesApart;
  const int patch_x = threadIdx.x % kLineChunks / kChunks;
  const int patch_line = threadIdx.x < kLinesApart * kLineChunks
                             ? static_cast<int>(threadIdx.x) / kLineChunks
                             : kPatchLines;
  int pixels[kPatchFills];
#pragma unroll
  for (int i = 0; i < kPatchFills; ++i) {
    const int line = patch_line + i * kLinesApart;
    constexpr int kAround = kSquare + 2;
    const PlanePixel square =
        SquareAt<T>(squares, (first_unit + line / kPatchEdge) * kSquares * kSquares +
                                 line % kPatchEdge / kAround * kSquares + patch_x / kAround);
    const int y = square.y + line % kAround - 1, x = square.x + patch_x % kAround - 1;
    const bool inside = square.image < conv.images &&
                        static_cast<unsigned>(y) < static_cast<unsigned>(conv.height) &&
                        static_cast<unsigned>(x) < static_cast<unsigned>(conv.width);
    pixels[i] = inside ? (square.image * conv.height + y) * conv.width + x : -1;
  }
  const auto* const x = static_cast<const __nv_bfloat16*>(conv.x.data) + chunk * 8;
  const auto* const x2 =
      static_cast<const __nv_bfloat16*>(conv.x2.data) + chunk * 8 - conv.channels;
  const int x_stride = static_cast<int>(conv.x.stride);
  const int x2_stride = static_cast<int>(conv.x2.stride);
  const auto fill_patch = [&](int slot, int depth, int i) {
    const bool first = depth < conv.channels;
    CopyAsync16If(
        patch_line + i * kLinesApart < kPatchLines,
        patch_ring + slot * T::kUnits * T::kPatchElements +
            (patch_line + i * kLinesApart) * kLineElements + SwizzledPixel<T>(patch_x, chunk),
        (first ? x : x2) + depth + static_cast<int64_t>(pixels[i]) * (first ? x_stride : x2_stride),
        pixels[i] >= 0 && depth < end);
  };

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_n = warp % T::kWarpsN * T::kWarpN;
  const int warp_line = warp / T::kWarpsN * kLines;  // of all units' pixels
  const int warp_unit = warp_line / kUnitEdge, unit_line = warp_line % kUnitEdge;
  const int weight_at = Swizzled(warp_n + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const auto in_patch = [](int at) { return at + at / kSquare * 2; };  // of a line or column
  const int line_at = warp_unit * T::kPatchElements +
                      (in_patch(unit_line + lane / 8 % 2 * kLines / 2) + phase / 2) * kLineElements;

  // Left operands are pairs of lines: the first with the one in the middle, and so on. A row of the
  // window is one pair further on, so that rows share all pairs but one each. Right operands are
  // of 16 outputs. While some are multiplied, others are loaded.
  uint32_t pairs[2][kPairs][4], columns[2][4];
  const auto load_pair = [&](int half, int slot, int window_column, int pair) {
    LoadMatrices(pairs[half][pair],
                 patch_ring + slot * T::kUnits * T::kPatchElements + line_at +
                     pair * kLineElements +
                     (SwizzledPixel<T>(window_column + phase % 2 + in_patch(lane % 8), lane / 16) ^
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
  for (int step = 0; step < kStages - 1; ++step) {  // no other kernel's output
#pragma unroll
    for (int i = 0; i < kWeightFills; ++i)
      fill_weights(step, begin + step / kTaps * kDepth, step % kTaps, i);
  }
  BeginWithBias(run == 0 ? bias : nullptr, n0 + warp_n, conv.outputs, sums);
  WaitForPredecessors();
#pragma unroll
  for (int patch = 0; patch < kPatches - 1; ++patch) {
#pragma unroll
    for (int i = 0; i < kPatchFills; ++i) {
      fill_patch(patch, begin + patch * kDepth, i);
    }
    CommitCopies();
  }
  WaitCopies<kPatches - 2>();
  __syncthreads();
#pragma unroll
  for (int pair = 0; pair < kFragmentsM; ++pair) load_pair(0, 0, 0, pair);
  load_columns(0, 0, 0);

  float totals[kFragmentsM][kFragmentsN][4] = {};
  int runs_done = 0;
  int stage = 0, empty_stage = kStages - 1, slot = 0, empty_slot = kPatches - 1;
#pragma unroll 1
  for (int depth = begin; depth < end; depth += kDepth) {
    const int next_slot = slot + 1 == kPatches ? 0 : slot + 1;
    const int patch_depth = depth + (kPatches - 1) * kDepth;
#pragma unroll
    for (int window_column = 0; window_column < kTaps; ++window_column) {
      const int next_stage = stage + 1 == kStages ? 0 : stage + 1;
      const int later = window_column + kStages - 1;  // the step that is asked for
      const int later_depth = depth + later / kTaps * kDepth;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int half = part / kHalfParts, row = part % kHalfParts / kColumnPairs;
        if (part == kParts - 1) {
          // The next step's weights and pixels are there, and everyone has loaded this one's.
          CommitCopies();
          WaitCopies<T::kPending>();
          __syncthreads();
        }
        // Copies and loads between the multiplications, which would otherwise wait for them.
        const int now = part % 2;
        if (part + 1 < kParts) {
          load_columns(1 - now, stage, part + 1);
          if (part % kColumnPairs == 0 && row < kTaps - 1) {
            load_pair(half, slot, window_column, kFragmentsM + row);
          }
          if (half == 0 && row == kTaps - 1) {
            Share<kFragmentsM, kColumnPairs>(
                part % kColumnPairs, [&](int pair) { load_pair(1, slot, window_column, pair); });
          }
          Share<kWeightFills, kFillParts>(
              part, [&](int i) { fill_weights(empty_stage, later_depth, later % kTaps, i); });
          Share<kPatchFills, kFillParts * T::kTurns>(
              part < kFillParts ? window_column * kFillParts + part : -1,
              [&](int i) { fill_patch(empty_slot, patch_depth, i); });
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
    if (kRuns == Runs::kInTurn && depth + kDepth == run_begin(runs_done + 1)) {
      ++runs_done;
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            totals[i][j][e] += sums[i][j][e];
            sums[i][j][e] = 0;
          }
        }
      }
    }
  }
  WaitCopies<0>();
  __syncthreads();
  ReleaseDependents();
  if constexpr (kRuns == Runs::kByBlocks) {
    const auto at = [&](int of_run, int vector) {
      return ((blockIdx.x * kRunCount + of_run) * (kFragmentsM * kFragmentsN) + vector) *
                 T::kThreads +
             threadIdx.x;
    };
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        const float(&v)[4] = sums[i][j];
        __stcg(run_sums.sums + at(run, i * kFragmentsN + j), make_float4(v[0], v[1], v[2], v[3]));
      }
    }
    if (!IsLast(run_sums.stored + blockIdx.x, kRunCount)) return;
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
        for (int of_run = 0; of_run < kRunCount; ++of_run) {
          const float4 v = __ldcg(run_sums.sums + at(of_run, i * kFragmentsN + j));
          totals[i][j][0] += v.x;
          totals[i][j][1] += v.y;
          totals[i][j][2] += v.z;
          totals[i][j][3] += v.w;
        }
      }
    }
  }

  static_assert(T::kThreads / 32 * kFinishBytes<kFragmentsN> <= T::kSharedBytes);
  const int first_square = (first_unit + warp_unit) * kSquares * kSquares;
  const PlanePixel first = SquareAt<T>(squares, first_square);
  FinishWarp<true>(
      conv, kRuns == Runs::kOne ? sums : totals,
      reinterpret_cast<float*>(shared) + warp * (kFinishBytes<kFragmentsN> / 4), n0 + warp_n,
      [&](int row) {
        const int line = unit_line + row / 16 + row / 8 % 2 * kLines / 2, column = row % 8;
        const PlanePixel square =
            kSquares == 1
                ? first
                : SquareAt<T>(squares, first_square + line / kSquare * kSquares + column / kSquare);
        const int y = square.y + line % kSquare, x = square.x + column % kSquare;
        const bool inside = square.image < conv.images && y < conv.height && x < conv.width;
        return inside ? OutputOf(conv, {square.image, y, x}, phase) : -1;
      });
}

Squares SquaresOf(const Conv2dLaunch& conv, int square) {
  const int across = (conv.width + square - 1) / square;
  return {Divisor(across), Divisor(across * ((conv.height + square - 1) / square))};
}

int64_t TilesAcross(const Conv2dLaunch& conv, int n) { return (conv.outputs + n - 1) / n; }

/// Blocks along the pixels of a phase.
int64_t BlocksOf(const Conv2dLaunch& conv, int square, int units) {
  const int squares = units * (kUnitEdge / square) * (kUnitEdge / square);  // of a block
  return (int64_t{conv.images} * SquaresOf(conv, square).of_image.value + squares - 1) / squares;
}

/// Of few pixels along many channels.
bool HasRuns(const Conv2dLaunch& conv) {
  return conv.height <= kUnitEdge && conv.width <= kUnitEdge && !conv.upsample2x &&
         conv.channels + conv.channels2 >= 2 * kRunCount * kDepth;
}

template <typename T, Runs kRuns>
cudaError_t LaunchTile(Conv2dLaunch conv, const Queue& queue) {
  const Divisor n_tiles(static_cast<int>(TilesAcross(conv, T::kN)));
  const auto tiles =
      static_cast<unsigned>(BlocksOf(conv, T::kSquare, T::kUnits) * PhasesOf(conv) * n_tiles.value);
  const RunSums run_sums = {static_cast<float4*>(conv.workspace), conv.workspace_zeros};
  const float* bias = conv.bias;
  conv.bias = nullptr;
  return LaunchDependent(Conv3x3Kernel<T, kRuns>,
                         {.grid = dim3(tiles, kRuns == Runs::kByBlocks ? kRunCount : 1),
                          .block = dim3(T::kThreads),
                          .shared_bytes = T::kSharedBytes},
                         queue, conv, bias, SquaresOf(conv, T::kSquare), n_tiles, run_sums);
}

template <typename T, Runs kRuns>
cudaError_t LoadTile() {
  return LoadKernel(Conv3x3Kernel<T, kRuns>, T::kSharedBytes);
}

struct Choice {
  int square, units, n, taps;
  Runs runs;
  TileCost cost;
  cudaError_t (*launch)(Conv2dLaunch conv, const Queue& queue);
  cudaError_t (*load)();
};
template <typename T, Runs kRuns = Runs::kOne>
constexpr Choice ChoiceOf(double step_alone, double rest_alone, double step_shared,
                          double rest_shared) {
  return {T::kSquare,
          T::kUnits,
          T::kN,
          T::kTaps,
          kRuns,
          {T::kBlocks, step_alone, rest_alone, step_shared, rest_shared},
          LaunchTile<T, kRuns>,
          LoadTile<T, kRuns>};
}
using Tile2x64 = Tile<2, 64, 8, 32, 3, 2, 2>;
using Tile1x64 = Tile<1, 64, 4, 32, 3, 2, 4>;
using TileOfSquares = Tile<1, 64, 4, 32, 3, 2, 4, 4>;
using Tile1x32 = Tile<1, 32, 4, 16, 5, 3, 4>;
using SquaresTile1x32 = Tile<1, 32, 4, 16, 4, 2, 4, 4>;
/// Fitted to 52 layers that were measured with every tile: on average the cheapest is 1.5 % slower
/// than the fastest.
constexpr Choice kChoices[] = {
    ChoiceOf<Tile<2, 128, 8, 32, 2, 2, 2>>(0.829, 6.96, 1.629, 7.59),
    ChoiceOf<Tile<2, 96, 8, 48, 3, 2, 2>>(0.67, 5.53, 1.223, 7.53),
    ChoiceOf<Tile2x64>(0.526, 4.0, 0.903, 6.33),
    ChoiceOf<Tile1x64>(0.321, 1.63, 0.992, 4.37),
    ChoiceOf<TileOfSquares>(0.36, 2.8, 1.07, 6.5),
    ChoiceOf<Tile1x32>(0.217, 1.28, 0.678, 2.95),
    ChoiceOf<Tile2x64, Runs::kInTurn>(0.476, 4.4, 0.879, 5.71),
    ChoiceOf<Tile1x64, Runs::kInTurn>(0.332, 1.75, 1.008, 5.05),
    ChoiceOf<TileOfSquares, Runs::kInTurn>(0.36, 3.5, 1.09, 6.8),
    ChoiceOf<Tile1x32, Runs::kInTurn>(0.225, 1.6, 0.66, 4.3),
    ChoiceOf<Tile1x32, Runs::kByBlocks>(0.258, 2.26, 0.646, 4.9),
    ChoiceOf<SquaresTile1x32, Runs::kInTurn>(0.24, 1.7, 0.68, 4.5),
    ChoiceOf<SquaresTile1x32, Runs::kByBlocks>(0.27, 3.0, 0.646, 4.9),
    ChoiceOf<Tile<2, 128, 8, 32, 3, 2, 2, 8, 2>>(0.7, 5.0, 1.33, 7.59),
    ChoiceOf<Tile<2, 64, 8, 32, 3, 2, 2, 8, 2>>(0.44, 4.0, 0.65, 6.33),
    ChoiceOf<Tile<1, 64, 4, 32, 3, 2, 4, 8, 2>>(0.23, 1.63, 0.69, 5.2),
    ChoiceOf<Tile<1, 64, 4, 32, 3, 2, 4, 4, 2>>(0.27, 3.1, 0.77, 5.5),
    ChoiceOf<Tile<1, 32, 4, 16, 4, 3, 4, 8, 2>>(0.15, 1.28, 0.46, 2.95),
};

int64_t TilesOf(const Choice& choice, const Conv2dLaunch& conv) {
  return BlocksOf(conv, choice.square, choice.units) * PhasesOf(conv) * TilesAcross(conv, choice.n);
}

bool CanCompute(const Choice& choice, const Conv2dLaunch& conv) {
  if (choice.taps != EdgeTaps(conv) || (choice.runs != Runs::kOne) != HasRuns(conv)) return false;
  if (choice.runs != Runs::kByBlocks) return true;
  const int64_t tiles = TilesOf(choice, conv);
  const int64_t sums = tiles * kRunCount * choice.units * kUnitEdge * kUnitEdge * choice.n;
  return sums * static_cast<int64_t>(sizeof(float)) <= conv.workspace_bytes &&
         tiles <= kWorkspaceZeros;
}

std::string NameOf(const Choice& choice) {
  std::string name = std::to_string(choice.units) + " units of " + std::to_string(choice.square) +
                     "x" + std::to_string(choice.square) + " x " + std::to_string(choice.n);
  if (choice.runs == Runs::kInTurn) name += ", runs in turn";
  if (choice.runs == Runs::kByBlocks) name += ", runs by blocks";
  return name;
}

}  // namespace

bool SuitsConv3x3(const Conv2dLaunch& conv) {
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
    const int runs = choice.runs == Runs::kByBlocks ? kRunCount : 1;
    const int steps = choice.taps * (conv.channels + conv.channels2) / (kDepth * runs);
    candidates.push_back(
        {NameOf(choice),
         Microseconds(choice.cost, TilesOf(choice, conv) * runs, steps, queue.multiprocessors),
         choice.launch});
  }
  return Sorted(std::move(candidates));
}

cudaError_t LoadConv3x3Kernels() {
  for (const Choice& choice : kChoices) {
    if (cudaError_t error = choice.load(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace denoised::cuda
