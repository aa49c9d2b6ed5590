// Convolution and linear for Hopper: the implicit GEMM of conv2d.cu with the copy engine, wgmma and
// barriers in shared memory. See docs/kernels.md for a picture.
//
// Policy. A block has one producer warp and two consumer warpgroups or three. The producer asks the
// copy engine for a step of 64 elements along k, 64 channels under one tap, for a tile's pixels
// (im2col mode: padding, stride and the ends of rows and images are the engine's business) and for
// its outputs' weights. Steps pass through a ring in shared memory; consumers multiply them into
// registers. They either share a tile, a part of the pixels each, or take tiles in turn, so that
// one finishes its tile while the other multiplies. A warp for each of them stores what it leaves
// in shared memory. Blocks may form clusters that share weights.
//
// k may be cut into `splits` runs of steps whose sums are added in order: how many is decided by
// the layer's shape alone. Here one block adds them, in registers (kFold); in conv_unit_sm90.cu,
// for few pixels, a cluster of blocks shares them. Both give the same bits. Nearest-neighbour
// doubling before a 3×3 convolution is four 2×2 convolutions, one for each parity of the output's
// row and column (weights.cc adds up the taps that see the same pixel).

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/conv_sm90.cuh"

namespace denoised::cuda {
namespace {

enum class Share {
  kPixels,  // consumers share a tile
  kTurns,   // consumers take tiles in turn
};

/// Tiles of kM pixels and kN outputs, of kGroups consumer warpgroups.
template <int kM_, int kN_, Share kShare_, int kStages_, bool kFolds_, int kGroups_ = 2>
struct Tile {
  static constexpr int kM = kM_, kN = kN_, kStages = kStages_;
  static constexpr int kGroups = kGroups_;
  static constexpr bool kTurns = kShare_ == Share::kTurns, kFolds = kFolds_;
  static constexpr int kTakers = kTurns ? kGroups : 1;       // of tiles, at a time
  static constexpr int kRows = kM / 64 * kTakers / kGroups;  // of 64 pixels, a consumer
  static constexpr int kSums = kN / 2;                       // a thread, of 64 pixels
  static constexpr int kInputBytes = kM * kStepBytes, kWeightBytes = kN * kStepBytes;
  static constexpr int kStageBytes = kInputBytes + kWeightBytes;
  // Wide tiles leave through shared memory, in boxes of 64 pixels.
  static constexpr bool kStaged = kN > 64;
  static constexpr int kBox = kN % 64 == 0 ? 64 : 32;  // outputs: 128 or 64 bytes, swizzled
  static constexpr int kAcross = kN / kBox, kBoxes = kRows * kAcross;  // of a consumer
  static constexpr int kBoxBytes = 64 * kBox * 2;
  static constexpr int kStagingBytes = kStaged ? kGroups * kBoxes * kBoxBytes : 0;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kFewRegisters = kGroups == 2 ? 40 : 32;
  static constexpr int kManyRegisters = kGroups == 2 ? 232 : 160;
  static constexpr int kBarriers = 2 * kStages + kGroups * (2 + kBoxes);
  static constexpr int kSharedBytes = kStages * kStageBytes + kStagingBytes + kBarriers * 8;
  static_assert(kN % 32 == 0 && kSharedBytes <= 232448);
};

/// What the kernel knows besides the epilogue's Conv2dLaunch.
struct Work {
  CUtensorMap x, x2, weight;
  CUtensorMap residual, out;  // of tiles whose pixels follow each other in the output
  Grid grid;
  int chunks = 0;  // of x
  Depth depth;
  int shared = 1;                // blocks of a cluster, neighbours along m
  int part = 0;                  // outputs whose weights each of them copies for all
  int m_tiles = 0, n_tiles = 0;  // m_tiles is a multiple of `shared`
  // Tiles are counted by clusters, along n first, or band by band: a band's along m, then along n.
  Divisor band, last_band;  // clusters along m
  Divisor band_tiles;
  int bands = 0;        // whole ones, of a phase
  int phase_tiles = 0;  // counted by clusters
  Divisor splits;
  const float* bias = nullptr;
  Rows add;                // per image
  bool add_pairs = false;  // in pairs of bf16
  ShortcutWork shortcut;
};

__device__ inline int FirstStep(const Work& work, int split) {
  return work.depth.steps.value * split / work.splits;
}

struct TileAt {
  int phase, m0, n0;
};
template <typename T>
__device__ inline TileAt TileOf(const Work& work, int index, int rank) {
  int phase = 0;
  while (index >= work.phase_tiles) index -= work.phase_tiles, ++phase;
  const int band = index / work.band_tiles, in_band = index % work.band_tiles;
  const Divisor& height = band < work.bands ? work.band : work.last_band;
  const int m = band * work.band.value + in_band % height;
  return {phase, (m * work.shared + rank) * T::kM, in_band / height * T::kN};
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

/// Outputs of any dtype, alignment, activation and number: 64 pixels and 32 outputs. One row after
/// the other, for it is much code.
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

/// Where a consumer's outputs lie before they leave, in boxes of 64 pixels × kBox outputs.
template <typename T>
struct Outbox {
  unsigned char* boxes;
  uint64_t* ready;   // all boxes may be filled, and hold the residual if there is one
  uint64_t* filled;  // of each box
  bool scatters;  // emptied by ScatterOutbox(): all lanes arrive, for racecheck knows of no order
                  // between what some did before and one told after a __syncwarp()

  __device__ unsigned char* Box(int box) const { return boxes + box * T::kBoxBytes; }
  /// Eight outputs of a pixel of a box.
  __device__ uint4* VectorAt(int box, int row, int vector) const {
    return reinterpret_cast<uint4*>(Box(box) + row * T::kBox * 2) +
           (vector ^ SwizzleOf<T::kBox>(row));
  }
  __device__ void Give(int box) const {
    FenceForCopies();
    __syncwarp();
    if (scatters || threadIdx.x % 32 == 0) Arrive(&filled[box]);
  }
};

/// One thread's work for a consumer, which thus waits for no copy: boxes leave as soon as they are
/// filled, and the next tile's residual takes their place. The tiles are those from `index` on, and
/// the consumer's part of each begins `pixels_on` further on.
template <typename T>
__device__ inline void EmptyOutbox(const Conv2dLaunch& conv, const Work& work,
                                   const Outbox<T>& outbox, int index, int tiles, int stride,
                                   int rank, int pixels_on) {
  for (uint32_t parity = 0; index < tiles; index += stride, parity ^= 1) {
    const TileAt tile = TileOf<T>(work, index, rank);
    const auto for_boxes = [&](const auto& what) {
#pragma unroll 1
      for (int box = 0; box < T::kBoxes; ++box) {
        const int m = tile.m0 + pixels_on + box / T::kAcross * 64;
        const int n = tile.n0 + box % T::kAcross * T::kBox;
        what(box, n, m, m < work.grid.pixels && n < conv.outputs);
      }
    };
    uint32_t bytes = 0;
    if (conv.residual.data != nullptr) {
      for_boxes([&](int, int, int, bool exists) { bytes += exists ? T::kBoxBytes : 0; });
    }
    ArriveExpecting(outbox.ready, bytes);
    if (bytes > 0) {
      for_boxes([&](int box, int n, int m, bool exists) {
        if (exists) CopyBox(outbox.Box(box), &work.residual, outbox.ready, n, m);
      });
    }
    for_boxes([&](int box, int n, int m, bool exists) {
      Wait(&outbox.filled[box], parity);
      if (exists) StoreBox(&work.out, outbox.Box(box), n, m);
    });
    CommitStores();
    WaitUntilStoresRead();
  }
}

/// The same by a warp, for outputs of a doubled image: a tile's are every second of some lines.
template <typename T>
__device__ inline void ScatterOutbox(const Conv2dLaunch& conv, const Work& work,
                                     const Outbox<T>& outbox, int index, int tiles, int stride,
                                     int rank, int pixels_on) {
  constexpr int kLanes = T::kBox / 8, kRows = 32 / kLanes;  // lanes of a pixel, pixels at a time
  const int lane = threadIdx.x % 32, width = work.grid.width.value;
  for (uint32_t parity = 0; index < tiles; index += stride, parity ^= 1) {
    const TileAt tile = TileOf<T>(work, index, rank);
    // what(vector in shared memory, of this output pixel's outputs from n on)
    const auto for_vectors = [&](int box, const auto& what) {
      const int n = tile.n0 + box % T::kAcross * T::kBox + lane % kLanes * 8;
      const int m0 = tile.m0 + pixels_on + box / T::kAcross * 64;
      const int rows = n < conv.outputs ? min(64, work.grid.pixels - m0) : 0;
      int x = (m0 + lane / kLanes) % work.grid.width;
      int pixel = static_cast<int>(OutputPixel(conv, work.grid, m0 + lane / kLanes, tile.phase));
#pragma unroll 1
      for (int row = lane / kLanes; row < rows; row += kRows) {
        what(outbox.VectorAt(box, row, lane % kLanes), pixel, n);
        x += kRows, pixel += 2 * kRows;
        for (; x >= width; x -= width) pixel += 2 * width;  // a line is left out
      }
    };
    if (conv.residual.data != nullptr) {
      for (int box = 0; box < T::kBoxes; ++box) {
        for_vectors(
            box, [&](uint4* vector, int pixel, int n) { *vector = LoadResidual(conv, pixel, n); });
      }
    }
    Arrive(outbox.ready);
    for (int box = 0; box < T::kBoxes; ++box) {
      Wait(&outbox.filled[box], parity);
      for_vectors(box, [&](const uint4* vector, int pixel, int n) {
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(conv.out.data) +
                                  int64_t{pixel} * conv.out.stride + n) = *vector;
      });
    }
  }
}

/// kFold: of several runs of k; else what adds them up is left out.
template <typename T, bool kFold, bool kShortcut>
__global__ void __launch_bounds__(T::kThreads, 1)
    Conv2dHopperKernel(const __grid_constant__ Conv2dLaunch conv,
                       const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char block_shared[];  // as the swizzle wants it
  // Through a shuffle, or every step would ask again where it lies.
  auto* const ring = static_cast<unsigned char*>(
      __cvta_shared_to_generic(__shfl_sync(~0u, SharedAddress(block_shared), 0)));
  unsigned char* const staging = ring + T::kStages * T::kStageBytes;
  uint64_t* const full = reinterpret_cast<uint64_t*>(staging + T::kStagingBytes);
  uint64_t* const empty = full + T::kStages;
  uint64_t* const turn = empty + T::kStages;  // a consumer's turn to multiply
  uint64_t* const ready = turn + T::kGroups;
  uint64_t* const filled = ready + T::kGroups;
  const auto inputs_of = [&](int stage) { return ring + stage * T::kStageBytes; };
  const auto weights_of = [&](int stage) { return inputs_of(stage) + T::kInputBytes; };

  // The same in all lanes, and known to be, so that descriptors live in uniform registers.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), group = warp / 4;
  const int shared = work.shared, rank = static_cast<int>(ClusterRank());
  const int tiles = work.grid.phases * (work.m_tiles / shared) * work.n_tiles;
  const int first_tile = blockIdx.x / shared, stride = gridDim.x / shared;

  using Step = StepAt<kShortcut>;
  const auto copy_weights = [&](const TileAt& tile, const Step& step, int at) {
    const WeightAt from = WeightOf(work, step);
    if (shared == 1) {
      CopyWeights(weights_of(at), from.map, &full[at], from.channel, from.tap, tile.n0, tile.phase);
    } else {
      CopyBoxTo(weights_of(at) + rank * work.part * kStepBytes, from.map, &full[at], from.channel,
                from.tap, tile.n0 + rank * work.part, tile.phase,
                static_cast<uint16_t>((1 << shared) - 1));
    }
  };
  // Weights are nobody's output: the first ones travel while the predecessor still runs.
  int early = 0;
  const auto copy_early = [&] {
    const TileAt tile = TileOf<T>(work, first_tile, rank);
    Step at(conv, work, 0);
    for (; early < min(T::kStages, work.depth.steps.value); ++early) {
      ArriveExpecting(&full[early], T::kStageBytes);
      copy_weights(tile, at, early);
      at.Advance(conv, work);
    }
  };

  const bool scatters = work.grid.phases > 1;
  const auto pixels_on = [](int group) { return T::kTurns ? 0 : group * T::kRows * 64; };
  const auto my_first_tile = [&](int group) {
    return first_tile + (T::kTurns ? group * stride : 0);
  };
  const auto outbox_of = [&](int group) {
    return Outbox<T>{staging + group * T::kBoxes * T::kBoxBytes, ready + group,
                     filled + group * T::kBoxes, scatters};
  };
  // Asked for at each place: ptxas then sees that one thread is meant, and spares each copy a loop
  // over lanes.
  constexpr int kCopies = T::kGroups * 4;  // the warp
  if (warp == kCopies && ElectOne()) {
    PrefetchMaps<kShortcut>(work);
    for (int stage = 0; stage < T::kStages; ++stage) {
      InitBarrier(&full[stage], 1);
      InitBarrier(&empty[stage], T::kGroups / T::kTakers * shared);
    }
    for (int i = 0; i < T::kGroups; ++i) {
      InitBarrier(&turn[i], 4);  // a lane of each warp
      InitBarrier(&ready[i], scatters ? 32 : 1);
    }
    for (int i = 0; i < T::kGroups * T::kBoxes; ++i) InitBarrier(&filled[i], scatters ? 128 : 4);
    FenceBarrierInit();
    if (shared == 1) copy_early();
  }
  __syncthreads();
  if (shared > 1) ArriveAtClusterRelaxed();

  if (group == T::kGroups) {
    KeepRegisters<T::kFewRegisters>();
    if (shared > 1) WaitForCluster();
    if (warp == kCopies && ElectOne()) {
      if (shared > 1) copy_early();
      int stage = 0, round = 0;
      WaitForPredecessors();
      for (int index = first_tile; index < tiles; index += stride) {
        const TileAt tile = TileOf<T>(work, index, rank);
        const StartAt start = work.grid.flat ? StartAt() : StartOf(work.grid, tile.m0);
        Step at(conv, work, 0);
        for (int step = 0; step < work.depth.steps.value; ++step) {
          if (early > 0) {
            --early;
          } else {
            Wait(&empty[stage], (round & 1) ^ 1);
            ArriveExpecting(&full[stage], T::kStageBytes);
            copy_weights(tile, at, stage);
          }
          CopyInputs(inputs_of(stage), work, at, start, tile.m0, tile.phase, &full[stage]);
          at.Advance(conv, work);
          if (++stage == T::kStages) stage = 0, ++round;
        }
      }
      ReleaseDependents();
    }
    const int of = warp - kCopies - 1;  // a warp for each consumer
    if (T::kStaged && of >= 0 && of < T::kGroups) {
      WaitForPredecessors();
      if (scatters) {
        ScatterOutbox<T>(conv, work, outbox_of(of), my_first_tile(of), tiles, T::kTakers * stride,
                         rank, pixels_on(of));
      } else if (ElectOne()) {
        EmptyOutbox<T>(conv, work, outbox_of(of), my_first_tile(of), tiles, T::kTakers * stride,
                       rank, pixels_on(of));
      }
    }
  } else {
    TakeRegisters<T::kManyRegisters>();
    if (shared > 1) WaitForCluster();
    const bool signals = threadIdx.x % 128 < shared;
    const auto release = [&](int done) {
      if (signals) ArriveAt(&empty[done], threadIdx.x % 128);
    };
    const Outbox<T> outbox = outbox_of(group);
    const int splits = kFold ? work.splits.value : 1;

    int position = T::kTurns ? group * work.depth.steps.value : 0;  // in the sequence of steps
    int tiles_done = 0;
    const int my_row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    for (int index = my_first_tile(group); index < tiles;
         index += T::kTakers * stride, ++tiles_done) {
      const TileAt tile = TileOf<T>(work, index, rank);
      const int m0 = tile.m0 + pixels_on(group);
      int stage = position % T::kStages, round = position / T::kStages;
      position += T::kTakers * work.depth.steps.value;

      float sums[T::kRows][T::kSums], total[T::kRows][kFold ? T::kSums : 1];
      for (int split = 0; split < splits; ++split) {
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) {
          BeginSums(split == 0 ? work.bias : nullptr, tile.n0, sums[i]);
        }
        const int steps =
            kFold ? FirstStep(work, split + 1) - FirstStep(work, split) : work.depth.steps.value;
        int previous = -1;
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) PinSums(sums[i]);
        WaitForPredecessors();
        // Also because a barrier tells two phases apart, not three: nobody may wait for a step that
        // is a whole ring away.
        if (T::kTurns && split == 0) Wait(&turn[group], (tiles_done + group + 1) & 1);
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          Wait(&full[stage], round & 1);
          FenceProducts();
          const uint64_t weight = MatrixDescriptor(weights_of(stage));
          const uint64_t input = MatrixDescriptor(inputs_of(stage) + pixels_on(group) * kStepBytes);
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
        if (T::kTurns && split == splits - 1 && threadIdx.x % 32 == 0) Arrive(&turn[1 - group]);
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
        if constexpr (kFold) {
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
        if constexpr (T::kStaged) {
          Wait(outbox.ready, tiles_done & 1);
#pragma unroll
          for (int i = 0; i < T::kRows; ++i) {
            FinishStaged<T::kBox>(
                conv, from[i], [&](int box) { return outbox.Box(i * T::kAcross + box); },
                [&](int box) { outbox.Give(i * T::kAcross + box); });
          }
        } else {
          FinishElements(conv, work, tile.phase, m0, tile.n0, from);
        }
      };
      if constexpr (kFold) {
        finish(total);
      } else {
        finish(sums);
      }
    }
  }

  if (shared > 1) {
    ArriveAtCluster();  // no block may go while another signals or copies into its shared memory
    WaitForCluster();
  }
#endif
}

using Tile128x32 = Tile<128, 32, Share::kPixels, 5, false>;
using Tile128x128 = Tile<128, 128, Share::kPixels, 6, true>;
using Tile128x128Turns = Tile<128, 128, Share::kTurns, 5, false>;
using Tile128x160 = Tile<128, 160, Share::kPixels, 5, true>;
using Tile128x160Turns = Tile<128, 160, Share::kTurns, 4, false>;
using Tile128x192 = Tile<128, 192, Share::kPixels, 4, true>;
using Tile128x256 = Tile<128, 256, Share::kPixels, 3, false>;
using Tile192x192 = Tile<192, 192, Share::kPixels, 3, false, 3>;

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
    case HopperTile::k128x160Turns:
      return what(Tile128x160Turns());
    case HopperTile::k128x192:
      return what(Tile128x192());
    case HopperTile::k128x256:
      return what(Tile128x256());
    case HopperTile::k192x192:
      return what(Tile192x192());
    default:
      return cudaErrorInvalidValue;
  }
}

/// Along n first, all weights pass by while blocks go on along m. Where the L2 cannot keep as many,
/// so many clusters along m take each of them at the same time. Either is faster where it is done,
/// by 2 to 3 %.
constexpr int64_t kWeightsThatStay = int64_t{16} << 20;
constexpr int kBand = 8;

template <typename T>
cudaError_t LaunchWithTile(const Conv2dLaunch& conv, const HopperPlan& plan, const Queue& queue) {
  if (((plan.splits > 1 || conv.shortcut.x.data != nullptr) && !T::kFolds) ||
      (T::kN > 64 && !HasVectorOutputs(conv))) {
    return cudaErrorInvalidValue;
  }
  Work work;
  work.grid = GridOf(conv);
  const int m_tiles = (work.grid.pixels + T::kM - 1) / T::kM;
  work.shared = plan.cluster;
  work.part = T::kN / plan.cluster;
  work.m_tiles = (m_tiles + work.shared - 1) / work.shared * work.shared;
  work.n_tiles = (conv.outputs + T::kN - 1) / T::kN;
  const int rows = work.m_tiles / work.shared;
  const int64_t weight_bytes = int64_t{2} * conv.outputs * conv.weight_stride;
  work.band = Divisor(weight_bytes > kWeightsThatStay ? std::min(rows, kBand) : 1);
  work.bands = rows / work.band.value;
  work.last_band = Divisor(std::max(1, rows % work.band.value));
  work.band_tiles = Divisor(work.band.value * work.n_tiles);
  work.phase_tiles = rows * work.n_tiles;
  if (int64_t{work.phase_tiles} * work.band_tiles.value >> 32 != 0) return cudaErrorInvalidValue;
  work.splits = Divisor(plan.splits);
  work.bias = conv.bias;
  work.add = conv.add;
  work.add_pairs = InVectors(conv.add);

  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  // The pixels of a tile follow each other in the output, and so in what a shortcut reads.
  const auto encode = [&](CUtensorMap* map, const Rows& rows, int channels, bool shortcut) {
    return EncodeInputs(map, rows, channels, conv, work.grid, work.grid.flat || shortcut, T::kM);
  };
  CUresult result = EncodeDepth(&work, conv, work.part, encode);
  const bool in_boxes = T::kStaged && work.grid.phases == 1;
  if (result == CUDA_SUCCESS && in_boxes) {
    result = EncodeRows(&work.out, conv.out, conv.outputs, work.grid.pixels, T::kBox, 64);
  }
  if (result == CUDA_SUCCESS && in_boxes && conv.residual.data != nullptr) {
    result = EncodeRows(&work.residual, conv.residual, conv.outputs, work.grid.pixels, T::kBox, 64);
  }
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;

  const int64_t tiles = int64_t{work.grid.phases} * (work.m_tiles / work.shared) * work.n_tiles;
  if constexpr (T::kFolds) {
    if (conv.shortcut.x.data != nullptr) {
      return LaunchPersistent<T>(Conv2dHopperKernel<T, true, true>, tiles, work.shared, conv, work,
                                 queue);
    }
    if (work.splits.value > 1) {
      return LaunchPersistent<T>(Conv2dHopperKernel<T, true, false>, tiles, work.shared, conv, work,
                                 queue);
    }
  }
  return LaunchPersistent<T>(Conv2dHopperKernel<T, false, false>, tiles, work.shared, conv, work,
                             queue);
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
  if (conv.output_norm.gamma != nullptr) return cudaErrorInvalidValue;
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
      cudaError_t loaded = LoadKernel(Conv2dHopperKernel<T, false, false>, T::kSharedBytes);
      if constexpr (T::kFolds) {
        if (loaded == cudaSuccess) {
          loaded = LoadKernel(Conv2dHopperKernel<T, true, false>, T::kSharedBytes);
        }
        if (loaded == cudaSuccess) {
          loaded = LoadKernel(Conv2dHopperKernel<T, true, true>, T::kSharedBytes);
        }
      }
      return loaded;
    });
    if (error != cudaSuccess) return error;
  }
  return GetTensorMapEncoders().error;
}

}  // namespace denoised::cuda
