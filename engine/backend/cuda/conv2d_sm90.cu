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
#include <cmath>

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/hopper.cuh"
#include "engine/backend/cuda/implicit_gemm.cuh"

namespace denoised::cuda {
namespace {

constexpr int kStep = 64;  // elements along k: 128 bytes of bf16, the widest swizzle
constexpr int kStepBytes = kStep * 2;

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
  static constexpr int kThreads = 128 * kGroups + (kGroups > 1 ? 128 : 32);
  static constexpr int kBarriers = 2 * kStages + 3;
  static constexpr int kSharedBytes = kStages * kStageBytes + kReduceBytes + kBarriers * 8;
  static_assert(kN % (8 * kShared) == 0 && kN % 32 == 0 && (!kCluster || kShared == 1));
  static_assert(kSharedBytes <= 232448);
};

/// What the kernel knows besides the epilogue's Conv2dLaunch.
struct Work {
  CUtensorMap x, x2, weight;
  int grid_width = 0, grid_pixels = 0;  // output pixels of an image, as the copy engine walks them
  int chunks = 0, chunks2 = 0;          // steps under one tap, of x and of x2
  int taps_x = 0, steps = 0;
  int stride = 1, pad_top = 0, pad_left = 0;
  int phases = 1;
  int m_tiles = 0, n_tiles = 0;  // m_tiles is a multiple of kShared
  int64_t pixels = 0;            // of a phase, all images
  int splits = 1;
  bool clustered = false;  // one split per block of a cluster
  const float* bias = nullptr;
  Rows beside;             // the residual, or what is added per image
  bool per_image = false;  // of `beside`
  bool vectors = false;    // bf16 in vectors of eight throughout, no activation but SiLU
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

/// Sums begin with the bias of their output, so that it costs nothing at the end.
template <int kSums>
__device__ inline void BeginSums(const Conv2dLaunch& conv, const float* bias, int n0,
                                 float (&sums)[kSums]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    const int n = n0 + j * 8 + lane * 2;
    float2 from = {0, 0};
    if (bias != nullptr && n < conv.outputs)
      from = __ldg(reinterpret_cast<const float2*>(bias + n));
    sums[4 * j] = sums[4 * j + 2] = from.x;
    sums[4 * j + 1] = sums[4 * j + 3] = from.y;
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

/// Where an output pixel's `beside` begins; null without.
__device__ inline const __nv_bfloat16* BesideOf(const Conv2dLaunch& conv, const Work& work,
                                                int64_t pixel) {
  if (work.beside.data == nullptr) return nullptr;
  const int64_t row = work.per_image ? pixel / (conv.out_height * conv.out_width) : pixel;
  return static_cast<const __nv_bfloat16*>(work.beside.data) + row * work.beside.stride;
}

/// Eight outputs from their sums: + beside, · scale, activation.
__device__ inline uint4 FinishVector(const Conv2dLaunch& conv, bool has_beside, uint4 beside,
                                     float (&v)[8]) {
  if (has_beside) {
    const uint32_t words[4] = {beside.x, beside.y, beside.z, beside.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[2 * j] += __uint_as_float(words[j] << 16);
      v[2 * j + 1] += __uint_as_float(words[j] & 0xffff0000u);
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] *= conv.scale;
  if (conv.activation == Activation::kSilu) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __fdividef(v[j], 1.0f + __expf(-v[j]));
  }
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
  uint4 beside[2][kAtOnce];

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
    if (work.beside.data == nullptr) return;
    const int64_t pixel = Pixel(turn);
    if (pixel < 0) return;
    const __nv_bfloat16* from = BesideOf(conv, work, pixel);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = n + (turn * kAtOnce % kGroups + i) * 32;
      if (at < conv.outputs) beside[turn % 2][i] = *reinterpret_cast<const uint4*>(from + at);
    }
  }
  /// `loaded` turns have been loaded.
  __device__ void Finish(const float (&sums)[kRows][kN / 2], int loaded) {
    const bool has_beside = work.beside.data != nullptr;
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
        const uint4 packed = FinishVector(conv, has_beside, beside[turn % 2][i], v);
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
  const bool has_beside = work.beside.data != nullptr;
  for (int i = threadIdx.x; i < rows * kVectors; i += T::kGroups * 128) {
    const int row = i / kVectors, column = i % kVectors * 8;
    const int m = tile.m0 + rank * rows + row, n = tile.n0 + column;
    const bool valid = m < work.pixels && n < conv.outputs;
    const int64_t pixel = valid ? OutputPixel(conv, work, m, tile.phase) : 0;
    uint4 beside = {};
    if (work.vectors && valid && has_beside) {
      beside = *reinterpret_cast<const uint4*>(BesideOf(conv, work, pixel) + n);
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
      const uint4 packed = FinishVector(conv, has_beside, beside, v);
      *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(conv.out.data) +
                                pixel * conv.out.stride + n) = packed;
    } else {
      FinishOutputs(conv, pixel, n, v);
    }
  }
  WaitForStores(received, 0);  // nobody leaves while stores to it are under way
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    Conv2dHopperKernel(const __grid_constant__ Conv2dLaunch conv,
                       const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char ring[];  // as the swizzle wants it
  float* const sums_received = reinterpret_cast<float*>(ring + T::kStages * T::kStageBytes);
  uint64_t* const full =
      reinterpret_cast<uint64_t*>(ring + T::kStages * T::kStageBytes + T::kReduceBytes);
  uint64_t* const empty = full + T::kStages;
  uint64_t* const received = empty + T::kStages;
  uint64_t* const turn = received + 1;  // [2]: a consumer's turn to multiply
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

  const int steps_per_tap = work.chunks + work.chunks2;
  const auto copy_weights = [&](const TileAt& tile, int tap, int chunk, int at) {
    const int channel =
        chunk < work.chunks ? chunk * kStep : conv.channels + (chunk - work.chunks) * kStep;
    if constexpr (T::kShared == 1) {
      CopyBox(weights_of(at), &work.weight, &full[at], channel, tap, tile.n0, tile.phase);
    } else {
      constexpr int kPart = T::kN / T::kShared;
      CopyBoxTo(weights_of(at) + share * kPart * kStepBytes, &work.weight, &full[at], channel, tap,
                tile.n0 + share * kPart, tile.phase, static_cast<uint16_t>((1 << T::kShared) - 1));
    }
  };
  // Weights are nobody's output: the first ones travel while the predecessor still runs.
  int early = 0;
  const auto copy_early = [&] {
    const TileAt tile = TileOf<T>(work, first_tile, share);
    int tap = first_step / steps_per_tap, chunk = first_step % steps_per_tap;
    for (; early < min(T::kStages, end_step - first_step); ++early) {
      ArriveExpecting(&full[early], T::kStageBytes);
      copy_weights(tile, tap, chunk, early);
      if (++chunk == steps_per_tap) chunk = 0, ++tap;
    }
  };

  LetSuccessorStart();
  const bool producer = group == T::kGroups;
  const bool copies = producer && warp == T::kGroups * 4 && ElectOne();
  if (copies) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      InitBarrier(&full[stage], 1);
      InitBarrier(&empty[stage], (T::kTurns ? 1 : T::kGroups) * T::kShared);
    }
    InitBarrier(received, 1);
    for (int i = 0; i < 2; ++i) InitBarrier(&turn[i], 4);  // a lane of each warp
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
      WaitForPredecessor();
      for (int index = first_tile; index < tiles; index += stride) {
        const TileAt tile = TileOf<T>(work, index, share);
        const int image = tile.m0 / work.grid_pixels, pixel = tile.m0 % work.grid_pixels;
        const int y = pixel / work.grid_width * work.stride - work.pad_top;
        const int x = pixel % work.grid_width * work.stride - work.pad_left;
        int tap = first_step / steps_per_tap, chunk = first_step % steps_per_tap;
        for (int step = first_step; step < end_step; ++step) {
          if (early > 0) {
            --early;
          } else {
            Wait(&empty[stage], (round & 1) ^ 1);
            ArriveExpecting(&full[stage], T::kStageBytes);
            copy_weights(tile, tap, chunk, stage);
          }
          const bool from_x = chunk < work.chunks;
          const int tap_y = tap / work.taps_x, tap_x = tap - tap_y * work.taps_x;
          CopyPixels(inputs_of(stage), from_x ? &work.x : &work.x2, &full[stage],
                     (from_x ? chunk : chunk - work.chunks) * kStep, x, y, image,
                     static_cast<uint16_t>(tap_x + tile.phase % 2),
                     static_cast<uint16_t>(tap_y + tile.phase / 2));
          if (++chunk == steps_per_tap) chunk = 0, ++tap;
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

    constexpr int kTakers = T::kTurns ? T::kGroups : 1;
    const int steps_per_tile = end_step - first_step;
    int position = T::kTurns ? group * steps_per_tile : 0;  // in the sequence of steps
    bool waited = false;
    int turns = 0;
    for (int index = first_tile + (T::kTurns ? group * stride : 0); index < tiles;
         index += kTakers * stride) {
      const TileAt tile = TileOf<T>(work, index, share);
      const int m0 = tile.m0 + (T::kTurns ? 0 : group * T::kRows * 64);
      int stage = position % T::kStages, round = position / T::kStages;
      position += kTakers * steps_per_tile;
      Finisher finisher(conv, work, tile.phase, m0, tile.n0);
      float sums[T::kRows][T::kSums], total[T::kRows][T::kFold ? T::kSums : 1];
      for (int split = first_split; split < end_split; ++split) {
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) {
          BeginSums(conv, split == 0 ? work.bias : nullptr, tile.n0, sums[i]);
        }
        if (kEarlyTurns > 0 && split == first_split) {
          if (!waited) WaitForPredecessor();
          waited = true;
          if (work.vectors && !clustered) {
#pragma unroll
            for (int turn = 0; turn < kEarlyTurns; ++turn) finisher.Load(turn);
          }
        }
        const int steps = FirstStep(work, split + 1) - FirstStep(work, split);
        int previous = -1;
        // Also because a barrier tells two phases apart, not three: nobody may wait for a step that
        // is a whole ring away.
        if (T::kTurns && split == first_split) Wait(&turn[group], (turns++ + group + 1) & 1);
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
        release(previous);
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
      if (!waited) WaitForPredecessor();  // whose output is read and overwritten from here on
      waited = true;

      if constexpr (T::kCluster) {
        if (clustered) {
          FinishInCluster<T>(conv, work, tile, rank, sums_received, received, total[0]);
          break;
        }
      }
      const auto finish = [&](const float(&from)[T::kRows][T::kSums]) {
        if (T::kN > 64 || work.vectors) {
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
  }

  if constexpr (T::kShared > 1) {
    ArriveAtCluster();  // no block may go while another signals or copies into its shared memory
    WaitForCluster();
  }
#endif
}

// Shared memory for two blocks of k64x64 on a multiprocessor: the successor's begins early.
using Tile64x64 = Tile<64, 64, 1, Share::kCluster, 6, 1, true>;
using Tile128x32 = Tile<128, 32, 2, Share::kPixels, 8, 1, false>;
using Tile128x128 = Tile<128, 128, 2, Share::kCluster, 5, 1, true>;
using Tile128x128Turns = Tile<128, 128, 2, Share::kTurns, 6, 2, false>;
using Tile64x192Turns = Tile<64, 192, 2, Share::kTurns, 6, 2, true>;
using Tile64x256Turns = Tile<64, 256, 2, Share::kTurns, 5, 2, false>;
using Tile256x128 = Tile<256, 128, 2, Share::kPixels, 4, 2, false>;
using Tile128x160 = Tile<128, 160, 2, Share::kPixels, 6, 2, true>;
using Tile128x192 = Tile<128, 192, 2, Share::kPixels, 5, 2, true>;
using Tile128x256 = Tile<128, 256, 2, Share::kPixels, 4, 2, false>;

template <typename Do>
auto WithTile(HopperTile tile, const Do& what) {
  switch (tile) {
    case HopperTile::k64x64:
      return what(Tile64x64());
    case HopperTile::k128x32:
      return what(Tile128x32());
    case HopperTile::k128x128:
      return what(Tile128x128());
    case HopperTile::k128x128Turns:
      return what(Tile128x128Turns());
    case HopperTile::k64x192Turns:
      return what(Tile64x192Turns());
    case HopperTile::k64x256Turns:
      return what(Tile64x256Turns());
    case HopperTile::k256x128:
      return what(Tile256x128());
    case HopperTile::k128x160:
      return what(Tile128x160());
    case HopperTile::k128x192:
      return what(Tile128x192());
    case HopperTile::k128x256:
      break;
  }
  return what(Tile128x256());
}

/// Microseconds as measured on an H200 over the layers of our models: docs/kernels.md.
struct TileCost {
  HopperTile tile;
  int m, n;
  bool clustered;
  double launch, step, finish, fold;  // a launch; a step along k, an end, an added split of a tile
};
constexpr TileCost kTileCosts[] = {
    {HopperTile::k64x64, 64, 64, false, 0.5, 0.25, 2.0, 0.2},
    {HopperTile::k64x64, 64, 64, true, 0.8, 0.165, 3.0, 0},
    {HopperTile::k128x32, 128, 32, false, 1.3, 0.25, 2.0, 0},
    {HopperTile::k128x128, 128, 128, false, 1.3, 0.39, 2.0, 0.55},
    {HopperTile::k128x128, 128, 128, true, 1.3, 0.33, 6.3, 0},
    {HopperTile::k128x128Turns, 128, 128, false, 3.4, 0.38, 1.8, 0},
    {HopperTile::k256x128, 256, 128, false, 1.4, 0.635, 4.6, 0},
    {HopperTile::k128x160, 128, 160, false, 1.4, 0.43, 2.3, 0.78},
    {HopperTile::k128x192, 128, 192, false, 2.6, 0.49, 3.3, 0.96},
    {HopperTile::k128x256, 128, 256, false, 2.6, 0.64, 4.2, 0},
};
constexpr int kMaxSplits = 8, kMinSplitSteps = 4;
constexpr int kFilledBlocks = 144;  // a little over the 132 multiprocessors: two halves of a wave

int ChunksOf(int channels) { return (channels + kStep - 1) / kStep; }

struct Encoders {
  decltype(&cuTensorMapEncodeTiled) tiled = nullptr;
  decltype(&cuTensorMapEncodeIm2col) im2col = nullptr;
  cudaError_t error = cudaSuccess;
};
/// From the driver that the runtime has loaded anyway: no link to libcuda.
const Encoders& GetEncoders() {
  static const Encoders encoders = [] {
    Encoders found;
    const auto find = [&](const char* name, auto*& function) {
      void* pointer = nullptr;
      cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
      if (found.error == cudaSuccess) {
        found.error =
            cudaGetDriverEntryPointByVersion(name, &pointer, 12000, cudaEnableDefault, &result);
      }
      if (found.error == cudaSuccess && result != cudaDriverEntryPointSuccess) {
        found.error = cudaErrorSymbolNotFound;
      }
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(pointer);
    };
    find("cuTensorMapEncodeTiled", found.tiled);
    find("cuTensorMapEncodeIm2col", found.im2col);
    return found;
  }();
  return encoders;
}

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
  const CUresult result =
      GetEncoders().im2col(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, rows.data, dims, strides,
                           lower, upper, kStep, static_cast<cuuint32_t>(pixels), element_strides,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  // Drivers up to 13.0 set a bit that is wrong for tensors below 128 KiB (as CUTLASS found).
  constexpr cuuint64_t kSmall = 131072;
  if (result == CUDA_SUCCESS && dims[3] * strides[2] < kSmall) {
    reinterpret_cast<uint64_t*>(map)[1] &= ~(uint64_t{1} << 21);
  }
  return result;
}

CUresult EncodeWeight(CUtensorMap* map, const Conv2dLaunch& conv, int taps, int phases,
                      int outputs_at_once) {
  const cuuint64_t channels = static_cast<cuuint64_t>(conv.channels + conv.channels2);
  const cuuint64_t outputs = static_cast<cuuint64_t>(conv.outputs);
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(conv.weight_stride) * 2;
  const cuuint64_t dims[4] = {channels, static_cast<cuuint64_t>(taps), outputs,
                              static_cast<cuuint64_t>(phases)};
  const cuuint64_t strides[3] = {channels * 2, row_bytes, row_bytes * outputs};
  const cuuint32_t box[4] = {kStep, 1, static_cast<cuuint32_t>(outputs_at_once), 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  return GetEncoders().tiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                             const_cast<void*>(conv.weight), dims, strides, box, element_strides,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/// Outputs that FinishVectors can make.
bool HasVectorOutputs(const Conv2dLaunch& conv) {
  const auto suits = [](const Rows& rows) {
    return rows.data == nullptr || (rows.element == Element::kBf16 && rows.vector);
  };
  return conv.outputs % 8 == 0 && suits(conv.out) && suits(conv.add) && suits(conv.residual) &&
         (conv.add.data == nullptr || conv.residual.data == nullptr) &&
         (conv.activation == Activation::kNone || conv.activation == Activation::kSilu);
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
    width = out_width = images * height * width;  // any run of pixels is a run in memory
    images = height = out_height = 1;
  }
  work.grid_width = out_width;
  work.grid_pixels = out_height * out_width;
  work.pixels = static_cast<int64_t>(images) * work.grid_pixels;
  work.chunks = ChunksOf(conv.channels);
  work.chunks2 = ChunksOf(conv.channels2);
  const int taps = work.taps_x * work.taps_x;
  work.steps = taps * (work.chunks + work.chunks2);
  const int64_t m_tiles = (work.pixels + T::kM - 1) / T::kM;
  work.m_tiles = static_cast<int>((m_tiles + T::kShared - 1) / T::kShared * T::kShared);
  work.n_tiles = (conv.outputs + T::kN - 1) / T::kN;
  work.splits = plan.splits;
  work.clustered = T::kCluster && plan.clustered && plan.splits > 1;
  if (plan.splits > 1 && !T::kFold) return cudaErrorInvalidValue;
  work.bias = conv.bias;
  work.beside = conv.residual.data != nullptr ? conv.residual : conv.add;
  work.per_image = conv.residual.data == nullptr;
  work.vectors = HasVectorOutputs(conv);
  if (T::kN > 64 && !work.vectors) return cudaErrorInvalidValue;

  if (GetEncoders().error != cudaSuccess) return GetEncoders().error;
  CUresult result = EncodePixels(&work.x, conv.x, conv.channels, images, height, width, work,
                                 out_height, out_width, T::kM);
  if (result == CUDA_SUCCESS && conv.x2.data != nullptr) {
    result = EncodePixels(&work.x2, conv.x2, conv.channels2, images, height, width, work,
                          out_height, out_width, T::kM);
  }
  if (result == CUDA_SUCCESS) {
    result = EncodeWeight(&work.weight, conv, taps, work.phases, T::kN / T::kShared);
  }
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;

  const unsigned per_tile = work.clustered ? work.splits : T::kShared;
  const int64_t tiles = int64_t{work.phases} * (work.m_tiles / T::kShared) * work.n_tiles;
  const int64_t at_once = work.clustered ? tiles : queue.multiprocessors / per_tile;
  conv.bias = nullptr;  // sums begin with it
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {per_tile, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(std::min(tiles, at_once) * per_tile);
  config.blockDim = T::kThreads;
  config.dynamicSmemBytes = T::kSharedBytes;
  config.stream = queue.stream;
  config.attrs = attributes;
  config.numAttrs = per_tile > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, Conv2dHopperKernel<T>, conv, work);
}

}  // namespace

bool SuitsHopper(const Conv2dLaunch& conv) {
  return conv.x.element == Element::kBf16 && HasVectorInputs(conv) &&
         conv.input_activation == Activation::kNone && conv.pad_top < 128 && conv.pad_left < 128;
}

HopperPlan PlanHopper(const Conv2dLaunch& conv, const Queue& queue) {
  const int phases = conv.upsample2x ? 4 : 1;
  const int taps = conv.upsample2x ? 4 : conv.kernel * conv.kernel;
  const int steps = taps * (ChunksOf(conv.channels) + ChunksOf(conv.channels2));
  const int64_t image_pixels = int64_t{conv.out_height} * conv.out_width / phases;
  const auto tiles = [&](int64_t pixels, int m, int n) {
    return phases * ((pixels + m - 1) / m) * ((conv.outputs + n - 1) / n);
  };

  // As many splits as let one image fill the device, while each has some steps left.
  HopperPlan best;
  const int64_t of_an_image = tiles(image_pixels, 64, 64);
  while (best.splits < kMaxSplits && of_an_image * best.splits * 2 <= kFilledBlocks &&
         steps >= best.splits * 2 * kMinSplitSteps) {
    best.splits *= 2;
  }

  const int64_t pixels = conv.images * image_pixels;
  const bool vectors = HasVectorOutputs(conv);
  double least = 0;
  for (const TileCost& cost : kTileCosts) {
    const bool narrow = cost.n <= 64;
    if ((!narrow && !vectors) || (cost.n == 32 && conv.outputs > 32)) continue;
    if (best.splits > 1 ? !cost.clustered && cost.fold == 0 : cost.clustered) continue;
    const int64_t blocks = tiles(pixels, cost.m, cost.n) * (cost.clustered ? best.splits : 1);
    const double waves =
        std::ceil(static_cast<double>(blocks) / static_cast<double>(queue.multiprocessors));
    const double microseconds =
        cost.launch +
        waves * (static_cast<double>(steps) / (cost.clustered ? best.splits : 1) * cost.step +
                 cost.finish + (best.splits > 1 ? best.splits * cost.fold : 0));
    if (least == 0 || microseconds < least) {
      least = microseconds;
      best.tile = cost.tile;
      best.clustered = cost.clustered;
    }
  }
  return best;
}

cudaError_t LaunchConv2dHopper(const Conv2dLaunch& conv, const HopperPlan& plan,
                               const Queue& queue) {
  return WithTile(plan.tile,
                  [&](auto tile) { return LaunchWithTile<decltype(tile)>(conv, plan, queue); });
}

cudaError_t LoadConv2dHopperKernels() {
  for (int i = 0; i < kHopperTiles; ++i) {
    const HopperTile tile = static_cast<HopperTile>(i);
    const cudaError_t error = WithTile(tile, [](auto chosen) {
      using T = decltype(chosen);
      return LoadKernel(Conv2dHopperKernel<T>, T::kSharedBytes);
    });
    if (error != cudaSuccess) return error;
  }
  return GetEncoders().error;
}

}  // namespace denoised::cuda
