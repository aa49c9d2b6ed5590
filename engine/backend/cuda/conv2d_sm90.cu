// Convolution and linear for Hopper: the implicit GEMM of conv2d.cu with the copy engine, wgmma and
// barriers in shared memory. See docs/kernels.md for a picture.
//
// Policy. A block has one producer warp and one or two consumer warpgroups. The producer asks the
// copy engine for a step of 64 elements along k, 64 channels under one tap, for a tile's pixels
// (im2col mode: padding, stride and the ends of rows and images are the engine's business) and for
// its outputs' weights. Steps pass through a ring in shared memory; consumers multiply them into
// registers. Two consumers either share a tile, half of the pixels each, or take tiles in turn, so
// that one finishes its tile while the other multiplies.
//
// k may be cut into `splits` runs of steps whose sums are added in order. How many is decided by
// the layer's shape alone; who adds them is decided by the size of the grid: one block in registers
// (kFold), or a cluster of as many blocks, each of which receives everyone's sums of some pixels.
// Both give the same bits. Nearest-neighbour doubling before a 3×3 convolution is four 2×2
// convolutions, one for each parity of the output's row and column (weights.cc adds up the taps
// that see the same pixel).

#include <algorithm>

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/conv_sm90.cuh"
#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/implicit_gemm.cuh"

namespace denoised::cuda {
namespace {

enum class Share {
  kPixels,   // consumers share a tile
  kTurns,    // consumers take tiles in turn
  kCluster,  // kPixels, and a cluster may share the splits of a tile
};

/// Tiles of kM pixels and kN outputs for kGroups consumer warpgroups. kShared blocks of a cluster,
/// neighbours along m, share their weights: each loads a part for all.
template <int kM_, int kN_, int kGroups_, Share kShare_, int kStages_, int kShared_, bool kFold_>
struct Tile {
  static constexpr int kM = kM_, kN = kN_, kGroups = kGroups_, kStages = kStages_;
  static constexpr int kShared = kShared_;
  static constexpr bool kTurns = kShare_ == Share::kTurns, kCluster = kShare_ == Share::kCluster;
  static constexpr bool kFold = kFold_;
  static constexpr int kRows = kM / 64 / (kTurns ? 1 : kGroups);  // of 64 pixels, a consumer
  static constexpr int kSums = kN / 2;                            // a thread, of 64 pixels
  static constexpr int kInputBytes = kM * kStepBytes, kWeightBytes = kN * kStepBytes;
  static constexpr int kStageBytes = kInputBytes + kWeightBytes;
  static constexpr int kReduceBytes = kCluster ? kM * kN * 4 : 0;
  // Wide tiles leave through shared memory and the copy engine, in boxes of 64 pixels.
  static constexpr bool kStaged = kN > 64;
  static constexpr int kBox = kN % 64 == 0 ? 64 : 32;  // outputs: 128 or 64 bytes, swizzled
  static constexpr int kBoxes = kStaged ? kRows * (kN / kBox) : 0;  // of a consumer
  static constexpr int kBoxBytes = 64 * kBox * 2;
  static constexpr int kStagingBytes = kGroups * kBoxes * kBoxBytes;
  static constexpr int kThreads = 128 * kGroups + (kGroups > 1 ? 128 : 32);
  static constexpr int kBarriers = 2 * kStages + 5;
  static constexpr int kSharedBytes =
      kStages * kStageBytes + kReduceBytes + kStagingBytes + kBarriers * 8;
  static_assert(kN % (8 * kShared) == 0 && kN % 32 == 0 && (!kCluster || kShared == 1));
  static_assert(kSharedBytes <= 232448);
};

/// What the kernel knows besides the epilogue's Conv2dLaunch.
struct Work {
  CUtensorMap x, x2, weight;
  CUtensorMap residual, out;            // when staged
  int grid_width = 0, grid_pixels = 0;  // output pixels of an image, as the copy engine walks them
  int chunks = 0, chunks2 = 0;          // steps under one tap, of x and of x2
  int taps_x = 0, steps = 0;
  int stride = 1, pad_top = 0, pad_left = 0;
  int phases = 1;
  int m_tiles = 0, n_tiles = 0;  // m_tiles is a multiple of kShared
  int pixels = 0;                // of a phase, all images
  int splits = 1;
  bool clustered = false;  // one split per block of a cluster
  const float* bias = nullptr;
  Rows add;                // per image
  bool add_pairs = false;  // in pairs of bf16
  int image_pixels = 0;    // of a phase
  bool vectors = false;    // bf16 in vectors of eight throughout, no activation but SiLU
  bool flat = false;       // one tap, over pixels that follow each other in memory
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
__device__ inline void AddPerImage(const Conv2dLaunch& conv, const Work& work, int m, int n0,
                                   float (&sums)[kSums]) {
  const int first = n0 + threadIdx.x % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int image = min(m + 8 * h, work.pixels - 1) / work.image_pixels;
    if (work.add_pairs) {
      const __nv_bfloat16* const from = static_cast<const __nv_bfloat16*>(work.add.data) +
                                        static_cast<int64_t>(image) * work.add.stride + first;
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j) {
        const uint32_t pair =
            first + j * 8 < conv.outputs ? *reinterpret_cast<const uint32_t*>(from + j * 8) : 0;
        AddPair(pair, sums[4 * j + 2 * h], sums[4 * j + 2 * h + 1]);
      }
    } else if constexpr (kSums <= 32) {
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i) {
        const int n = first + i / 2 * 8 + i % 2;
        if (n < conv.outputs) sums[4 * (i / 2) + 2 * h + i % 2] += Load(work.add, image, n);
      }
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

/// The output pixel of pixel m of a phase.
__device__ inline int64_t OutputPixel(const Conv2dLaunch& conv, const Work& work, int m,
                                      int phase) {
  if (work.phases == 1) return m;
  const int image = m / work.grid_pixels, pixel = m % work.grid_pixels;
  const int y = pixel / work.grid_width, x = pixel % work.grid_width;
  return (static_cast<int64_t>(image) * conv.out_height + 2 * y + phase / 2) * conv.out_width +
         2 * x + phase % 2;
}

/// Eight outputs from their sums: act((sum + residual) · scale).
__device__ inline uint4 FinishVector(const Conv2dLaunch& conv, uint4 residual, float (&v)[8]) {
  if (conv.residual.data != nullptr) {
    AddPair(residual.x, v[0], v[1]);
    AddPair(residual.y, v[2], v[3]);
    AddPair(residual.z, v[4], v[5]);
    AddPair(residual.w, v[6], v[7]);
  }
  FinishSums(conv, v);
  return PackBf16(v);
}
__device__ inline uint4 LoadResidual(const Conv2dLaunch& conv, int64_t pixel, int n) {
  return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(conv.residual.data) +
                                         pixel * conv.residual.stride + n);
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
    return m < work.pixels ? OutputPixel(conv, work, m, phase) : -1;
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

/// The same for any dtype, alignment, activation and number of outputs.
template <int kRows, int kN>
__device__ inline void FinishElements(const Conv2dLaunch& conv, const Work& work, int phase, int m0,
                                      int n0, const float (&sums)[kRows][kN / 2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) {
    const int m = m0 + i / 2 * 64 + threadIdx.x / 32 % 4 * 16 + i % 2 * 8 + lane / 4;
    const int64_t pixel = OutputPixel(conv, work, m, phase);
#pragma unroll
    for (int group = 0; group < kN / 32; ++group) {
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[j] = sums[i / 2][4 * (group * 4 + j / 2) + 2 * (i % 2) + j % 2];
      }
      ExchangeInQuad(v);
      const int n = n0 + (group * 4 + lane % 4) * 8;
      if (m < work.pixels && n < conv.outputs) FinishOutputs(conv, pixel, n, v);
    }
  }
}

/// A tile whose splits lie in the blocks of a cluster: block r of them receives everyone's sums of
/// the r-th part of the pixels, in `mine` [splits, pixels of a part, kN], adds them in order and
/// finishes. `sums`: this thread's, of 64 pixels.
template <typename T>
__device__ inline void FinishInCluster(const Conv2dLaunch& conv, const Work& work,
                                       const TileAt& tile, int rank, float* mine,
                                       uint64_t* received, const float (&sums)[T::kSums]) {
  constexpr int kVectors = T::kN / 8;
  const int rows = T::kM / work.splits;
  WaitForCluster();  // its blocks have begun
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h;
    const uint32_t owner = row / rows;
    const uint32_t barrier = AddressAt(received, owner);
    const uint32_t to =
        AddressAt(mine + (rank * rows + row % rows) * T::kN + threadIdx.x % 4 * 2, owner);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      StoreAt(to + j * 32, barrier, sums[4 * j + 2 * h], sums[4 * j + 2 * h + 1]);
    }
  }

  for (int i = threadIdx.x; i < rows * kVectors; i += T::kGroups * 128) {
    const int row = i / kVectors, column = i % kVectors * 8;
    const int m = tile.m0 + rank * rows + row, n = tile.n0 + column;
    const bool valid = m < work.pixels && n < conv.outputs;
    const int64_t pixel = valid ? OutputPixel(conv, work, m, tile.phase) : 0;
    uint4 residual = {};
    if (work.vectors && valid && conv.residual.data != nullptr) {
      residual = LoadResidual(conv, pixel, n);
    }
    WaitForStores(received, 0);
    float v[8];
    for (int split = 0; split < work.splits; ++split) {
      const float4* from =
          reinterpret_cast<const float4*>(mine + (split * rows + row) * T::kN + column);
      const float4 a = from[0], b = from[1];
      const float part[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = split == 0 ? part[j] : v[j] + part[j];
    }
    if (!valid) continue;
    if (work.vectors) {
      const uint4 packed = FinishVector(conv, residual, v);
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(conv.out.data) +
                                pixel * conv.out.stride + n) = packed;
    } else {
      FinishOutputs(conv, pixel, n, v);
    }
  }
  WaitForStores(received, 0);  // nobody leaves while stores to it are under way
}

template <typename T, bool kShortcut>
__global__ void __launch_bounds__(T::kThreads, 1)
    Conv2dHopperKernel(const __grid_constant__ Conv2dLaunch conv,
                       const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char ring[];  // as the swizzle wants it
  float* const sums_received = reinterpret_cast<float*>(ring + T::kStages * T::kStageBytes);
  unsigned char* const staging = ring + T::kStages * T::kStageBytes + T::kReduceBytes;
  uint64_t* const full = reinterpret_cast<uint64_t*>(staging + T::kStagingBytes);
  uint64_t* const empty = full + T::kStages;
  uint64_t* const received = empty + T::kStages;
  uint64_t* const turn = received + 1;  // [2]: a consumer's turn to multiply
  uint64_t* const staged = turn + 2;    // [2]: a consumer's staging is free, its residual there
  const auto inputs_of = [&](int stage) { return ring + stage * T::kStageBytes; };
  const auto weights_of = [&](int stage) { return inputs_of(stage) + T::kInputBytes; };

  // The same in all lanes, and known to be, so that descriptors live in uniform registers.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), group = warp / 4;
  const bool clustered = T::kCluster && work.clustered;
  const bool in_cluster = T::kShared > 1 || clustered;
  const int rank = in_cluster ? static_cast<int>(ClusterRank()) : 0;
  const int share = T::kShared > 1 ? rank : 0;  // which of the tiles that share weights
  const int first_split = clustered ? rank : 0;
  const int end_split = clustered ? rank + 1 : work.splits;
  const int first_step = FirstStep(work, first_split), end_step = FirstStep(work, end_split);
  const int blocks_per_tile = clustered ? work.splits : T::kShared;
  const int tiles = work.phases * (work.m_tiles / T::kShared) * work.n_tiles;
  const int first_tile = blockIdx.x / blocks_per_tile, stride = gridDim.x / blocks_per_tile;

  const int taps = work.taps_x * work.taps_x, windowed = work.chunks + work.chunks2;
  const auto copy_weights = [&](const TileAt& tile, const StepAt& step, int at) {
    const ChunkAt chunk = ChunkOf<kShortcut>(conv, work, step.chunk);
    if constexpr (T::kShared == 1) {
      CopyBox(weights_of(at), chunk.weight, &full[at], chunk.weight_channel, step.tap, tile.n0,
              tile.phase);
    } else {
      constexpr int kPart = T::kN / T::kShared;
      CopyBoxTo(weights_of(at) + share * kPart * kStepBytes, chunk.weight, &full[at],
                chunk.weight_channel, step.tap, tile.n0 + share * kPart, tile.phase,
                static_cast<uint16_t>((1 << T::kShared) - 1));
    }
  };
  // Weights are nobody's output: the first ones travel while the predecessor still runs.
  int early = 0;
  const auto copy_early = [&] {
    const TileAt tile = TileOf<T>(work, first_tile, share);
    StepAt at = StepOf<kShortcut>(first_step, windowed, taps);
    for (; early < min(T::kStages, end_step - first_step); ++early) {
      ArriveExpecting(&full[early], T::kStageBytes);
      copy_weights(tile, at, early);
      Advance<kShortcut>(at, windowed, taps);
    }
  };

  ReleaseDependents();
  const bool producer = group == T::kGroups;
  const bool copies = producer && warp == T::kGroups * 4 && ElectOne();
  if (copies) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      InitBarrier(&full[stage], 1);
      InitBarrier(&empty[stage], (T::kTurns ? 1 : T::kGroups) * T::kShared);
    }
    InitBarrier(received, 1);
    for (int i = 0; i < 2; ++i) {
      InitBarrier(&turn[i], 4);  // a lane of each warp
      InitBarrier(&staged[i], 1);
    }
    FenceBarrierInit();
    if (T::kCluster) ArriveExpecting(received, clustered ? T::kReduceBytes : 0);
    if constexpr (T::kShared == 1) copy_early();
  }
  __syncthreads();
  if (in_cluster) ArriveAtCluster();

  if (producer) {
    if constexpr (T::kGroups > 1) KeepRegisters<40>();
    if (in_cluster) WaitForCluster();
    if (copies) {
      if constexpr (T::kShared > 1) copy_early();
      int stage = 0, round = 0;
      WaitForPredecessors();
      for (int index = first_tile; index < tiles; index += stride) {
        const TileAt tile = TileOf<T>(work, index, share);
        const int image = tile.m0 / work.grid_pixels, pixel = tile.m0 % work.grid_pixels;
        const int y = pixel / work.grid_width * work.stride - work.pad_top;
        const int x = pixel % work.grid_width * work.stride - work.pad_left;
        StepAt at = StepOf<kShortcut>(first_step, windowed, taps);
        for (int step = first_step; step < end_step; ++step) {
          if (early > 0) {
            --early;
          } else {
            Wait(&empty[stage], (round & 1) ^ 1);
            ArriveExpecting(&full[stage], T::kStageBytes);
            copy_weights(tile, at, stage);
          }
          const ChunkAt chunk = ChunkOf<kShortcut>(conv, work, at.chunk);
          if (work.flat || (kShortcut && at.chunk >= windowed)) {
            CopyBox(inputs_of(stage), chunk.source, &full[stage], chunk.channel, tile.m0);
          } else {
            const int tap_y = at.tap / work.taps_x, tap_x = at.tap - tap_y * work.taps_x;
            CopyPixels(inputs_of(stage), chunk.source, &full[stage], chunk.channel, x, y, image,
                       static_cast<uint16_t>(tap_x + tile.phase % 2),
                       static_cast<uint16_t>(tap_y + tile.phase / 2));
          }
          Advance<kShortcut>(at, windowed, taps);
          if (++stage == T::kStages) stage = 0, ++round;
        }
      }
    }
  } else {
    if constexpr (T::kGroups > 1) TakeRegisters<232>();
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
        if (m < work.pixels && n < conv.outputs) {
          what(my_staging + box * T::kBoxBytes, n, m);
        }
      }
    };

    constexpr int kTakers = T::kTurns ? T::kGroups : 1;
    const int steps_per_tile = end_step - first_step;
    int position = T::kTurns ? group * steps_per_tile : 0;  // in the sequence of steps
    int tiles_done = 0;
    const int my_row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;

    WaitForPredecessors();  // whose output is read and overwritten from here on
    for (int index = first_tile + (T::kTurns ? group * stride : 0); index < tiles;
         index += kTakers * stride, ++tiles_done) {
      const TileAt tile = TileOf<T>(work, index, share);
      const int m0 = tile.m0 + (T::kTurns ? 0 : group * T::kRows * 64);
      int stage = position % T::kStages, round = position / T::kStages;
      position += kTakers * steps_per_tile;
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
      for (int split = first_split; split < end_split; ++split) {
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) {
          BeginSums(conv, split == 0 ? work.bias : nullptr, tile.n0, sums[i]);
        }
        if (kEarlyTurns > 0 && split == first_split) {
          if (work.vectors && !clustered) {
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
        if (T::kTurns && split == first_split) Wait(&turn[group], (tiles_done + group + 1) & 1);
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
        if (T::kTurns && split == end_split - 1 && threadIdx.x % 32 == 0) Arrive(&turn[1 - group]);
        WaitProducts<0>();
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) PinSums(sums[i]);
        release(previous);
        if (work.add.data != nullptr && split == 0) {
#pragma unroll
          for (int i = 0; i < T::kRows; ++i) {
            AddPerImage(conv, work, m0 + i * 64 + my_row, tile.n0, sums[i]);
          }
        }
        if constexpr (T::kFold) {
#pragma unroll
          for (int i = 0; i < T::kRows; ++i) {
#pragma unroll
            for (int j = 0; j < T::kSums; ++j) {
              total[i][j] = split == first_split ? sums[i][j] : total[i][j] + sums[i][j];
            }
          }
        }
      }

      if constexpr (T::kCluster) {
        if (clustered) {
          FinishInCluster<T>(conv, work, tile, rank, sums_received, received, total[0]);
          break;
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
        } else if constexpr (T::kN <= 64) {
          FinishElements<T::kRows, T::kN>(conv, work, tile.phase, m0, tile.n0, from);
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

using Tile64x64 = Tile<64, 64, 1, Share::kCluster, 6, 1, true>;  // two a multiprocessor
using Tile128x32 = Tile<128, 32, 2, Share::kPixels, 8, 1, false>;
using Tile128x128 = Tile<128, 128, 2, Share::kPixels, 6, 2, true>;
using Tile128x128Turns = Tile<128, 128, 2, Share::kTurns, 5, 2, false>;
using Tile128x160 = Tile<128, 160, 2, Share::kPixels, 5, 2, true>;
using Tile128x192 = Tile<128, 192, 2, Share::kPixels, 4, 2, true>;
using Tile128x256 = Tile<128, 256, 2, Share::kPixels, 3, 2, false>;

template <typename Do>
cudaError_t WithTile(HopperTile tile, const Do& what) {
  switch (tile) {
    case HopperTile::k64x64:
      return what(Tile64x64());
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

constexpr int kSharedBytesOfTwo = 115 * 1024;  // two blocks fit a multiprocessor's 228 KiB

/// Pixels of [images, height, width, channels] for the outputs of `conv`, `pixels` at a time.
CUresult EncodePixels(CUtensorMap* map, const Rows& rows, int channels, int images, int height,
                      int width, const Work& work, int out_height, int out_width, int pixels) {
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(width),
                              static_cast<cuuint64_t>(height), static_cast<cuuint64_t>(images)};
  const cuuint64_t pixel_bytes = static_cast<cuuint64_t>(rows.stride) * 2;
  const cuuint64_t strides[3] = {pixel_bytes, pixel_bytes * width, pixel_bytes * width * height};
  const int lower[2] = {-work.pad_left, -work.pad_top};  // width before height
  const int upper[2] = {(out_width - 1) * work.stride - work.pad_left + 1 - width,
                        (out_height - 1) * work.stride - work.pad_top + 1 - height};
  const cuuint32_t stride = static_cast<cuuint32_t>(work.stride);
  const cuuint32_t element_strides[4] = {1, stride, stride, 1};
  const CUresult result = GetTensorMapEncoders().im2col(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, rows.data, dims, strides, lower, upper, kStep,
      static_cast<cuuint32_t>(pixels), element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  // Drivers up to 13.0 set a bit that is wrong for tensors below 128 KiB (as CUTLASS found).
  constexpr cuuint64_t kSmall = 131072;
  if (result == CUDA_SUCCESS && dims[3] * strides[2] < kSmall) {
    reinterpret_cast<uint64_t*>(map)[1] &= ~(uint64_t{1} << 21);
  }
  return result;
}

/// [pixels, channels] in boxes of `columns` (32 or 64, swizzled) × `rows`.
CUresult EncodeRows(CUtensorMap* map, const Rows& pixels_of, int channels, int64_t pixels,
                    int columns, int rows) {
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(pixels)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(pixels_of.stride) * 2};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(rows)};
  const cuuint32_t element_strides[2] = {1, 1};
  return GetTensorMapEncoders().tiled(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, pixels_of.data, dims, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <typename T>
cudaError_t LaunchWithTile(Conv2dLaunch conv, const HopperPlan& plan, const Queue& queue) {
  const bool doubles = conv.upsample2x;
  Work work;
  work.taps_x = doubles ? 2 : conv.kernel;
  work.phases = doubles ? 4 : 1;
  work.stride = conv.stride;
  work.pad_top = conv.pad_top, work.pad_left = conv.pad_left;
  int images = conv.images, height = conv.height, width = conv.width;
  int out_height = doubles ? height : conv.out_height, out_width = doubles ? width : conv.out_width;
  if (conv.kernel == 1 && conv.stride == 1 && conv.pad_top == 0 && conv.pad_left == 0 &&
      out_height == height && out_width == width) {
    width = out_width = images * height * width;
    images = height = out_height = 1;
    work.flat = true;
  }
  work.grid_width = out_width;
  work.grid_pixels = out_height * out_width;
  work.pixels = images * work.grid_pixels;  // CudaBackend saw to it that it fits
  work.steps = StepsOf(conv);
  const int64_t m_tiles = (work.pixels + T::kM - 1) / T::kM;
  work.m_tiles = static_cast<int>((m_tiles + T::kShared - 1) / T::kShared * T::kShared);
  work.n_tiles = (conv.outputs + T::kN - 1) / T::kN;
  work.splits = plan.splits;
  work.clustered = T::kCluster && plan.clustered && plan.splits > 1;
  if ((plan.splits > 1 || conv.shortcut.x.data != nullptr) && !T::kFold) {
    return cudaErrorInvalidValue;
  }
  work.bias = conv.bias;
  work.add = conv.add;
  work.add_pairs = InVectors(conv.add);
  work.image_pixels = conv.out_height * conv.out_width / work.phases;
  work.vectors = HasVectorOutputs(conv);
  work.staged = T::kStaged && work.vectors && work.phases == 1;
  if (T::kN > 64 && !work.vectors) return cudaErrorInvalidValue;

  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  // The pixels of a tile follow each other in the output, and so in what a shortcut reads.
  const auto encode = [&](CUtensorMap* map, const Rows& rows, int channels, bool shortcut) {
    return work.flat || shortcut ? EncodeRows(map, rows, channels, work.pixels, kStep, T::kM)
                                 : EncodePixels(map, rows, channels, images, height, width, work,
                                                out_height, out_width, T::kM);
  };
  CUresult result =
      EncodeDepth(&work, conv, work.taps_x * work.taps_x, work.phases, T::kN / T::kShared, encode);
  if (result == CUDA_SUCCESS && work.staged) {
    result = EncodeRows(&work.out, conv.out, conv.outputs, work.pixels, T::kBox, 64);
  }
  if (result == CUDA_SUCCESS && work.staged && conv.residual.data != nullptr) {
    result = EncodeRows(&work.residual, conv.residual, conv.outputs, work.pixels, T::kBox, 64);
  }
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;

  const unsigned per_tile = work.clustered ? work.splits : T::kShared;
  const int64_t tiles = int64_t{work.phases} * (work.m_tiles / T::kShared) * work.n_tiles;
  const int per_multiprocessor = T::kSharedBytes <= kSharedBytesOfTwo ? 2 : 1;
  const int64_t at_once =
      work.clustered ? tiles : queue.multiprocessors * per_multiprocessor / per_tile;
  conv.bias = nullptr;  // sums begin with it
  conv.add = {};        // and with this
  const auto launch = [&](auto kernel) {
    return LaunchDependent(kernel,
                           {.grid = static_cast<unsigned>(std::min(tiles, at_once) * per_tile),
                            .block = T::kThreads,
                            .shared_bytes = T::kSharedBytes,
                            .cluster = per_tile},
                           queue, conv, work);
  };
  if constexpr (T::kFold) {
    if (conv.shortcut.x.data != nullptr) return launch(Conv2dHopperKernel<T, true>);
  }
  return launch(Conv2dHopperKernel<T, false>);
}

}  // namespace

bool SuitsHopper(const Conv2dLaunch& conv) {
  return conv.x.element == Element::kBf16 && HasVectorInputs(conv) &&
         conv.input_activation == Activation::kNone && conv.pad_top < 128 && conv.pad_left < 128 &&
         SuitsShortcut(conv);
}

cudaError_t LaunchConv2dHopper(const Conv2dLaunch& conv, const HopperPlan& plan,
                               const Queue& queue) {
  if (IsPatch(plan.tile)) return LaunchConv3x3(conv, plan, queue);
  if (conv.input_factors != nullptr) return cudaErrorInvalidValue;
  return WithTile(plan.tile,
                  [&](auto tile) { return LaunchWithTile<decltype(tile)>(conv, plan, queue); });
}

cudaError_t LoadConv2dHopperKernels() {
  for (int i = 0; i < kHopperTiles; ++i) {
    const HopperTile tile = static_cast<HopperTile>(i);
    if (IsPatch(tile)) continue;
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
