// Convolution and linear for Hopper: the implicit GEMM of conv2d.cu with the copy engine, wgmma and
// barriers in shared memory. See docs/kernels.md for a picture.
//
// Policy. A block has one producer warp and two consumer warpgroups. The producer asks the copy
// engine for a step of 64 elements along k, 64 channels under one tap, for a tile's pixels (im2col
// mode: padding, stride and the ends of rows and images are the engine's business) and for its
// outputs' weights. Steps pass through a ring in shared memory; consumers multiply them into
// registers. They either share a tile, half of the pixels each, or take tiles in turn, so that one
// finishes its tile while the other multiplies.
//
// k may be cut into `splits` runs of steps whose sums are added in order: how many is decided by
// the layer's shape alone. Here one block adds them, in registers (kFold); in conv_unit_sm90.cu,
// for few pixels, a cluster of blocks shares them. Both give the same bits. Nearest-neighbour
// doubling before a 3×3 convolution is four 2×2 convolutions, one for each parity of the output's
// row and column (weights.cc adds up the taps that see the same pixel).

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/conv_sm90.cuh"
#include "engine/backend/cuda/implicit_gemm.cuh"

namespace denoised::cuda {
namespace {

enum class Share {
  kPixels,  // consumers share a tile
  kTurns,   // consumers take tiles in turn
};

constexpr int kGroups = 2;  // consumer warpgroups

/// Tiles of kM pixels and kN outputs. kShared blocks of a cluster, neighbours along m, share their
/// weights: each loads a part for all.
template <int kM_, int kN_, Share kShare_, int kStages_, int kShared_, bool kFold_>
struct Tile {
  static constexpr int kM = kM_, kN = kN_, kStages = kStages_;
  static constexpr int kShared = kShared_;
  static constexpr bool kTurns = kShare_ == Share::kTurns, kFold = kFold_;
  static constexpr int kRows = kM / 64 / (kTurns ? 1 : kGroups);  // of 64 pixels, a consumer
  static constexpr int kSums = kN / 2;                            // a thread, of 64 pixels
  static constexpr int kInputBytes = kM * kStepBytes, kWeightBytes = kN * kStepBytes;
  static constexpr int kStageBytes = kInputBytes + kWeightBytes;
  // Wide tiles leave through shared memory and the copy engine, in boxes of 64 pixels.
  static constexpr bool kStaged = kN > 64;
  static constexpr int kBox = kN % 64 == 0 ? 64 : 32;  // outputs: 128 or 64 bytes, swizzled
  static constexpr int kBoxes = kStaged ? kRows * (kN / kBox) : 0;  // of a consumer
  static constexpr int kBoxBytes = 64 * kBox * 2;
  static constexpr int kStagingBytes = kGroups * kBoxes * kBoxBytes;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kBarriers = 2 * kStages + 4;
  static constexpr int kSharedBytes = kStages * kStageBytes + kStagingBytes + kBarriers * 8;
  static_assert(kN % (8 * kShared) == 0 && kN % 32 == 0);
  static_assert(kSharedBytes <= 232448);
};

/// What the kernel knows besides the epilogue's Conv2dLaunch.
struct Work {
  CUtensorMap x, x2, weight;
  CUtensorMap residual, out;  // when staged
  Grid grid;
  int chunks = 0, chunks2 = 0;  // steps under one tap, of x and of x2
  int steps = 0;
  int m_tiles = 0, n_tiles = 0;  // m_tiles is a multiple of kShared
  int splits = 1;
  const float* bias = nullptr;
  Rows add;                // per image
  bool add_pairs = false;  // in pairs of bf16
  bool vectors = false;    // bf16 in vectors of eight throughout, no activation but SiLU
  bool staged = false;     // vectors, and the tile is a run of pixels of the output
  ShortcutWork shortcut;
};

__device__ inline int FirstStep(const Work& work, int split) {
  return static_cast<int>(static_cast<int64_t>(work.steps) * split / work.splits);
}

struct TileAt {
  int phase, m0, n0;
};
template <typename T>
__device__ inline TileAt TileOf(const Work& work, int index, int rank) {
  const int n = index % work.n_tiles;
  const int m_and_phase = index / work.n_tiles;
  const int groups = work.m_tiles / T::kShared;
  return {m_and_phase / groups, (m_and_phase % groups * T::kShared + rank) * T::kM, n * T::kN};
}

/// Adds what is added per image to a thread's 64 pixels' sums, whose first is pixel m and whose
/// other is m + 8; n0 is the tile's first output.
template <int kSums>
__device__ inline void AddToTile(const Conv2dLaunch& conv, const Work& work, int m, int n0,
                                 float (&sums)[kSums]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int image = min(m + 8 * h, work.grid.pixels - 1) / work.grid.image_pixels;
    if (work.add_pairs) {
      uint32_t pairs[kSums / 4];
      LoadPerImage(conv, work.add, image, n0, pairs);
      AddPerImage(pairs, h, sums);
    } else if constexpr (kSums <= 32) {
      AddPerImage(conv, work.add, image, n0, h, sums);
    }
  }
}

/// Four lanes hold, of one pixel, two neighbouring outputs of each of four blocks of eight; after
/// the exchange lane i holds the eight outputs of block i. v[2·j], v[2·j + 1] belong to block j.
__device__ inline void ExchangeInQuad(float (&v)[8]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool high = (lane & bit) != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if ((j & bit) != 0) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low_block = v[2 * j + i], high_block = v[2 * (j + bit) + i];
        const float received = __shfl_xor_sync(~0u, high ? low_block : high_block, bit);
        v[2 * j + i] = high ? received : low_block;
        v[2 * (j + bit) + i] = high ? high_block : received;
      }
    }
  }
}

/// Eight outputs from their sums: act((sum + residual) · scale).
__device__ inline uint4 FinishVector(const Conv2dLaunch& conv, uint4 residual, float (&v)[8]) {
  if (conv.residual.data != nullptr) AddVector(residual, v);
  FinishSums(conv, conv.activation == Activation::kSilu, v);
  return PackBf16(v);
}

/// The tile of a warpgroup: kRows · 64 pixels from m0 on, kN outputs from n0 on. Works in turns of
/// one row of each lane's quad; a turn's loads are under way while the turn before computes.
template <int kRows, int kN>
struct FinishVectors {
  static constexpr int kGroups = kN / 32;  // of four blocks of eight outputs: one vector a lane
  static constexpr int kAtOnce = kGroups == 8 ? 4 : kGroups == 6 ? 3 : kGroups;
  static constexpr int kTurns = 2 * kRows * kGroups / kAtOnce;

  const Conv2dLaunch& conv;
  const Work& work;
  int phase, m0, n;
  uint4 residual[2][kAtOnce];

  __device__ FinishVectors(const Conv2dLaunch& conv, const Work& work, int phase, int m0, int n0)
      : conv(conv), work(work), phase(phase), n(n0 + threadIdx.x % 4 * 8) {
    this->m0 = m0 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  }
  __device__ int64_t Pixel(int turn) const {
    const int row = turn * kAtOnce / kGroups;
    const int m = m0 + row / 2 * 64 + row % 2 * 8;
    return m < work.grid.pixels ? OutputPixel(conv, work.grid, m, phase) : -1;
  }
  __device__ void Load(int turn) {
    if (conv.residual.data == nullptr) return;
    const int64_t pixel = Pixel(turn);
    if (pixel < 0) return;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = n + (turn * kAtOnce % kGroups + i) * 32;
      if (at < conv.outputs) residual[turn % 2][i] = LoadResidual(conv, pixel, at);
    }
  }
  /// `loaded` turns have been loaded.
  __device__ void Finish(const float (&sums)[kRows][kN / 2], int loaded) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (turn == 0 && loaded < 1) Load(0);
      if (turn + 1 < kTurns && loaded < turn + 2) Load(turn + 1);
      const int row = turn * kAtOnce / kGroups;
      const int64_t pixel = Pixel(turn);
      __nv_bfloat16* to = static_cast<__nv_bfloat16*>(conv.out.data) + pixel * conv.out.stride;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int group = turn * kAtOnce % kGroups + i;
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          v[j] = sums[row / 2][4 * (group * 4 + j / 2) + 2 * (row % 2) + j % 2];
        }
        ExchangeInQuad(v);
        const uint4 packed = FinishVector(conv, residual[turn % 2][i], v);
        const int at = n + group * 32;
        if (pixel >= 0 && at < conv.outputs) *reinterpret_cast<uint4*>(to + at) = packed;
      }
    }
  }
};

/// The same for any dtype, alignment, activation and number of outputs: 64 pixels and 32 outputs.
/// One row after the other, for it is much code.
__device__ inline void FinishElements(const Conv2dLaunch& conv, const Work& work, int phase, int m0,
                                      int n0, const float (&sums)[1][16]) {
  const int n = n0 + threadIdx.x % 4 * 8;
#pragma unroll 1
  for (int h = 0; h < 2; ++h) {
    const int m = m0 + threadIdx.x / 32 % 4 * 16 + h * 8 + threadIdx.x % 32 / 4;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int at = 4 * (j / 2) + j % 2;
      v[j] = h == 0 ? sums[0][at] : sums[0][at + 2];
    }
    ExchangeInQuad(v);
    if (m >= work.grid.pixels || n >= conv.outputs) continue;
    FinishOutputs(conv, OutputPixel(conv, work.grid, m, phase), n, v);
  }
}

template <typename T, bool kShortcut>
__global__ void __launch_bounds__(T::kThreads, 1)
    Conv2dHopperKernel(const __grid_constant__ Conv2dLaunch conv,
                       const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char ring[];  // as the swizzle wants it
  unsigned char* const staging = ring + T::kStages * T::kStageBytes;
  uint64_t* const full = reinterpret_cast<uint64_t*>(staging + T::kStagingBytes);
  uint64_t* const empty = full + T::kStages;
  uint64_t* const turn = empty + T::kStages;  // [2]: a consumer's turn to multiply
  uint64_t* const staged = turn + 2;  // [2]: a consumer's staging is free, its residual there
  const auto inputs_of = [&](int stage) { return ring + stage * T::kStageBytes; };
  const auto weights_of = [&](int stage) { return inputs_of(stage) + T::kInputBytes; };

  // The same in all lanes, and known to be, so that descriptors live in uniform registers.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), group = warp / 4;
  const int rank = T::kShared > 1 ? static_cast<int>(ClusterRank()) : 0;
  const int tiles = work.grid.phases * (work.m_tiles / T::kShared) * work.n_tiles;
  const int first_tile = blockIdx.x / T::kShared, stride = gridDim.x / T::kShared;

  const int taps = work.grid.taps_x * work.grid.taps_x, windowed = work.chunks + work.chunks2;
  const auto copy_weights = [&](const TileAt& tile, const StepAt& step, int at) {
    const ChunkAt chunk = ChunkOf<kShortcut>(conv, work, step.chunk);
    if constexpr (T::kShared == 1) {
      CopyWeights(weights_of(at), chunk.weight, &full[at], chunk.weight_channel, step.tap, tile.n0,
                  tile.phase);
    } else {
      constexpr int kPart = T::kN / T::kShared;
      CopyBoxTo(weights_of(at) + rank * kPart * kStepBytes, chunk.weight, &full[at],
                chunk.weight_channel, step.tap, tile.n0 + rank * kPart, tile.phase,
                static_cast<uint16_t>((1 << T::kShared) - 1));
    }
  };
  // Weights are nobody's output: the first ones travel while the predecessor still runs.
  int early = 0;
  const auto copy_early = [&] {
    const TileAt tile = TileOf<T>(work, first_tile, rank);
    StepAt at = {0, 0};
    for (; early < min(T::kStages, work.steps); ++early) {
      ArriveExpecting(&full[early], T::kStageBytes);
      copy_weights(tile, at, early);
      Advance<kShortcut>(at, windowed, taps);
    }
  };

  const bool producer = group == kGroups;
  const bool copies = producer && warp == kGroups * 4 && ElectOne();
  if (copies) {
    PrefetchMaps<kShortcut>(work);
    for (int stage = 0; stage < T::kStages; ++stage) {
      InitBarrier(&full[stage], 1);
      InitBarrier(&empty[stage], (T::kTurns ? 1 : kGroups) * T::kShared);
    }
    for (int i = 0; i < 2; ++i) {
      InitBarrier(&turn[i], 4);  // a lane of each warp
      InitBarrier(&staged[i], 1);
    }
    FenceBarrierInit();
    if constexpr (T::kShared == 1) copy_early();
  }
  __syncthreads();
  if (T::kShared > 1) ArriveAtCluster();

  if (producer) {
    KeepRegisters<40>();
    if (T::kShared > 1) WaitForCluster();
    if (copies) {
      if constexpr (T::kShared > 1) copy_early();
      int stage = 0, round = 0;
      WaitForPredecessors();
      for (int index = first_tile; index < tiles; index += stride) {
        const TileAt tile = TileOf<T>(work, index, rank);
        const StartAt start = StartOf(work.grid, tile.m0);
        StepAt at = {0, 0};
        for (int step = 0; step < work.steps; ++step) {
          if (early > 0) {
            --early;
          } else {
            Wait(&empty[stage], (round & 1) ^ 1);
            ArriveExpecting(&full[stage], T::kStageBytes);
            copy_weights(tile, at, stage);
          }
          const ChunkAt chunk = ChunkOf<kShortcut>(conv, work, at.chunk);
          const bool rows = work.grid.flat || (kShortcut && at.chunk >= windowed);
          CopyInputs(inputs_of(stage), work.grid, chunk, rows, start, tile.m0, tile.phase, at.tap,
                     &full[stage]);
          Advance<kShortcut>(at, windowed, taps);
          if (++stage == T::kStages) stage = 0, ++round;
        }
      }
      ReleaseDependents();
    }
  } else {
    TakeRegisters<232>();
    if (T::kShared > 1) WaitForCluster();
    const bool signals = threadIdx.x % 128 < T::kShared;
    const auto release = [&](int done) {
      if (!signals) return;
      if constexpr (T::kShared > 1) {
        ArriveAt(&empty[done], threadIdx.x % 128);
      } else {
        Arrive(&empty[done]);
      }
    };
    using Finisher = FinishVectors<T::kRows, T::kN>;
    constexpr int kEarlyTurns = T::kN <= 64 ? Finisher::kTurns : 0;
    static_assert(kEarlyTurns <= 2);
    unsigned char* const my_staging = staging + group * T::kBoxes * T::kBoxBytes;
    const auto for_boxes = [&](const TileAt& tile, int m0, const auto& what) {
      for (int box = 0; box < T::kBoxes; ++box) {
        constexpr int kAcross = T::kN / T::kBox;
        const int m = m0 + box / kAcross * 64, n = tile.n0 + box % kAcross * T::kBox;
        if (m < work.grid.pixels && n < conv.outputs) {
          what(my_staging + box * T::kBoxBytes, n, m);
        }
      }
    };

    constexpr int kTakers = T::kTurns ? kGroups : 1;
    int position = T::kTurns ? group * work.steps : 0;  // in the sequence of steps
    int tiles_done = 0;
    const int my_row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;

    WaitForPredecessors();  // whose output is read and overwritten from here on
    for (int index = first_tile + (T::kTurns ? group * stride : 0); index < tiles;
         index += kTakers * stride, ++tiles_done) {
      const TileAt tile = TileOf<T>(work, index, rank);
      const int m0 = tile.m0 + (T::kTurns ? 0 : group * T::kRows * 64);
      int stage = position % T::kStages, round = position / T::kStages;
      position += kTakers * work.steps;
      if (T::kStaged && work.staged && threadIdx.x % 128 == 0) {
        WaitUntilStoresRead();  // the tile before
        uint32_t bytes = 0;
        if (conv.residual.data != nullptr) {
          for_boxes(tile, m0, [&](unsigned char*, int, int) { bytes += T::kBoxBytes; });
        }
        ArriveExpecting(&staged[group], bytes);
        if (bytes > 0) {
          for_boxes(tile, m0, [&](unsigned char* box, int n, int m) {
            CopyBox(box, &work.residual, &staged[group], n, m);
          });
        }
      }
      Finisher finisher(conv, work, tile.phase, m0, tile.n0);

      float sums[T::kRows][T::kSums], total[T::kRows][T::kFold ? T::kSums : 1];
      for (int split = 0; split < work.splits; ++split) {
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) {
          BeginSums(split == 0 ? work.bias : nullptr, tile.n0, sums[i]);
        }
        if (kEarlyTurns > 0 && split == 0) {
          if (work.vectors) {
#pragma unroll
            for (int turn = 0; turn < kEarlyTurns; ++turn) finisher.Load(turn);
          }
        }
        const int steps = FirstStep(work, split + 1) - FirstStep(work, split);
        int previous = -1;
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) PinSums(sums[i]);
        // Also because a barrier tells two phases apart, not three: nobody may wait for a step that
        // is a whole ring away.
        if (T::kTurns && split == 0) Wait(&turn[group], (tiles_done + group + 1) & 1);
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          Wait(&full[stage], round & 1);
          FenceProducts();
          const uint64_t weight = MatrixDescriptor(weights_of(stage));
          const uint64_t input = MatrixDescriptor(
              inputs_of(stage) + (T::kTurns ? 0 : group * T::kRows * 64 * kStepBytes));
#pragma unroll
          for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
            for (int i = 0; i < T::kRows; ++i) {
              MultiplyAdd(sums[i], input + 2 * k + i * (64 * kStepBytes >> 4), weight + 2 * k);
            }
          }
          CommitProducts();
          WaitProducts<1>();  // the previous step's
          if (previous >= 0) release(previous);
          previous = stage;
          if (++stage == T::kStages) stage = 0, ++round;
        }
        if (T::kTurns && split == work.splits - 1 && threadIdx.x % 32 == 0)
          Arrive(&turn[1 - group]);
        WaitProducts<0>();
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) PinSums(sums[i]);
        release(previous);
        if (work.add.data != nullptr && split == 0) {
#pragma unroll
          for (int i = 0; i < T::kRows; ++i) {
            AddToTile(conv, work, m0 + i * 64 + my_row, tile.n0, sums[i]);
          }
        }
        if constexpr (T::kFold) {
#pragma unroll
          for (int i = 0; i < T::kRows; ++i) {
#pragma unroll
            for (int j = 0; j < T::kSums; ++j) {
              total[i][j] = split == 0 ? sums[i][j] : total[i][j] + sums[i][j];
            }
          }
        }
      }

      const auto finish = [&](const float(&from)[T::kRows][T::kSums]) {
        if (T::kStaged && work.staged) {
          Wait(&staged[group], tiles_done & 1);
#pragma unroll
          for (int i = 0; i < T::kRows; ++i) {
            FinishStaged<T::kBox>(conv, my_staging + i * T::kBoxes / T::kRows * T::kBoxBytes,
                                  from[i]);
          }
          FenceForCopies();
          SyncWarpgroup(group);
          if (threadIdx.x % 128 == 0) {
            for_boxes(tile, m0,
                      [&](unsigned char* box, int n, int m) { StoreBox(&work.out, box, n, m); });
            CommitStores();
          }
        } else if (T::kN > 64 || work.vectors) {
          finisher.Finish(from, kEarlyTurns);
        } else if constexpr (T::kN == 32) {
          FinishElements(conv, work, tile.phase, m0, tile.n0, from);
        }
      };
      if constexpr (T::kFold) {
        finish(total);
      } else {
        finish(sums);
      }
    }
    if (T::kStaged && work.staged && threadIdx.x % 128 == 0) WaitUntilStoresRead();
  }

  if constexpr (T::kShared > 1) {
    ArriveAtCluster();  // no block may go while another signals or copies into its shared memory
    WaitForCluster();
  }
#endif
}

using Tile128x32 = Tile<128, 32, Share::kPixels, 5, 1, false>;
using Tile128x128 = Tile<128, 128, Share::kPixels, 6, 2, true>;
using Tile128x128Turns = Tile<128, 128, Share::kTurns, 5, 2, false>;
using Tile128x160 = Tile<128, 160, Share::kPixels, 5, 2, true>;
using Tile128x192 = Tile<128, 192, Share::kPixels, 4, 2, true>;
using Tile128x256 = Tile<128, 256, Share::kPixels, 3, 2, false>;

template <typename Do>
cudaError_t WithTile(HopperTile tile, const Do& what) {
  switch (tile) {
    case HopperTile::k128x32:
      return what(Tile128x32());
    case HopperTile::k128x128:
      return what(Tile128x128());
    case HopperTile::k128x128Turns:
      return what(Tile128x128Turns());
    case HopperTile::k128x160:
      return what(Tile128x160());
    case HopperTile::k128x192:
      return what(Tile128x192());
    case HopperTile::k128x256:
      return what(Tile128x256());
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename T>
cudaError_t LaunchWithTile(const Conv2dLaunch& conv, const HopperPlan& plan, const Queue& queue) {
  if (((plan.splits > 1 || conv.shortcut.x.data != nullptr) && !T::kFold) ||
      (T::kN > 64 && !HasVectorOutputs(conv))) {
    return cudaErrorInvalidValue;
  }
  Work work;
  work.grid = GridOf(conv);
  work.steps = StepsOf(conv);
  const int m_tiles = (work.grid.pixels + T::kM - 1) / T::kM;
  work.m_tiles = (m_tiles + T::kShared - 1) / T::kShared * T::kShared;
  work.n_tiles = (conv.outputs + T::kN - 1) / T::kN;
  work.splits = plan.splits;
  work.bias = conv.bias;
  work.add = conv.add;
  work.add_pairs = InVectors(conv.add);
  work.vectors = HasVectorOutputs(conv);
  work.staged = T::kStaged && work.vectors && work.grid.phases == 1;

  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  // The pixels of a tile follow each other in the output, and so in what a shortcut reads.
  const auto encode = [&](CUtensorMap* map, const Rows& rows, int channels, bool shortcut) {
    return EncodeInputs(map, rows, channels, conv, work.grid, work.grid.flat || shortcut, T::kM);
  };
  CUresult result = EncodeDepth(&work, conv, work.grid.taps_x * work.grid.taps_x, work.grid.phases,
                                T::kN / T::kShared, encode);
  if (result == CUDA_SUCCESS && work.staged) {
    result = EncodeRows(&work.out, conv.out, conv.outputs, work.grid.pixels, T::kBox, 64);
  }
  if (result == CUDA_SUCCESS && work.staged && conv.residual.data != nullptr) {
    result = EncodeRows(&work.residual, conv.residual, conv.outputs, work.grid.pixels, T::kBox, 64);
  }
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;

  const int64_t tiles = int64_t{work.grid.phases} * (work.m_tiles / T::kShared) * work.n_tiles;
  if constexpr (T::kFold) {
    if (conv.shortcut.x.data != nullptr) {
      return LaunchPersistent<T>(Conv2dHopperKernel<T, true>, tiles, conv, work, queue);
    }
  }
  return LaunchPersistent<T>(Conv2dHopperKernel<T, false>, tiles, conv, work, queue);
}

}  // namespace

bool SuitsHopper(const Conv2dLaunch& conv) {
  return conv.x.element == Element::kBf16 && HasVectorInputs(conv) &&
         conv.input_factors == nullptr && conv.pad_top < 128 && conv.pad_left < 128 &&
         SuitsShortcut(conv);
}

cudaError_t LaunchConv2dHopper(const Conv2dLaunch& conv, const HopperPlan& plan,
                               const Queue& queue) {
  if (IsUnit(plan.tile)) return LaunchConvUnit(conv, plan, queue);
  if (IsPatch(plan.tile)) return LaunchConv3x3(conv, plan, queue);
  if (conv.input_factors != nullptr) return cudaErrorInvalidValue;
  return WithTile(plan.tile,
                  [&](auto tile) { return LaunchWithTile<decltype(tile)>(conv, plan, queue); });
}

cudaError_t LoadConv2dHopperKernels() {
  for (int i = 0; i < kHopperTiles; ++i) {
    const HopperTile tile = static_cast<HopperTile>(i);
    if (IsUnit(tile) || IsPatch(tile)) continue;
    const cudaError_t error = WithTile(tile, [](auto chosen) {
      using T = decltype(chosen);
      if constexpr (T::kFold) {
        const cudaError_t loaded = LoadKernel(Conv2dHopperKernel<T, true>, T::kSharedBytes);
        if (loaded != cudaSuccess) return loaded;
      }
      return LoadKernel(Conv2dHopperKernel<T, false>, T::kSharedBytes);
    });
    if (error != cudaSuccess) return error;
  }
  return GetTensorMapEncoders().error;
}

}  // namespace denoised::cuda
