// SPDX-License-Identifier: Apache-2.0
// Gradients of weights for Hopper, by TMA and wgmma: the product of dout and x over all pixels, or
// of dout and x at each tap of a 3×3 window with stride 1 or 2. Both operands are MN-major in
// shared memory: a pixel is a row of 128 bytes, 64 channels.
//
// Policy. CTAs are persistent. A work item is a tile of the weight and one part of a chunk's
// pixels, 64 at a step. Three consumer warpgroups multiply [64 outputs, 192 columns] each; a
// producer warp loads, and is ahead by the whole ring while they store their sums.
//   Window: a tile is 64 outputs × 9 taps × 64 channels. A step covers 8×8 pixels, or 8×4 of two
//   images at most 4 pixels high. It reads dout there and x in a halo tile, which has one more
//   pixel on each side; beyond the image there are zeros. Each warpgroup has one row of the window
//   and reads the halo tile from its first, second or third line. The next tap of a row reads the
//   same lines one pixel later: its 64 columns are one row of 128 bytes away (the descriptor's
//   LBO).
//   Strided window: the same with stride 2. The pixels at a tap are every second of every second
//   line, so the halo tile is four planes of 9×9 pixels, by the parities of line and column. Tensor
//   maps describe each plane of x as an image of its own. The taps of a row lie in two planes,
//   which no descriptor spans, so there is a product for each tap.
//   Lines: a tile is 192 outputs × 192 channels. Blocks of 64 beyond the layer's are neither
//   loaded, multiplied (of outputs) nor stored.
// A halo tile is loaded once for nine taps and 64 outputs, so with stride 1 loads are not the
// bottleneck. With stride 2 it has 3.2 times the pixels, and its step takes longer.
//
// The gradient of the bias, the sum of dout's pixels, is one more product, with a column of ones.
// Only the tiles of the first channels compute it.
//
// Sums. A chunk is cut into as many parts as suit a GPU when a pass has eight chunks. The sums of
// each part go to memory in the layout of the accumulators, so that stores are coalesced.
// SumWindowsKernel or SumLinesKernel adds the parts of a chunk in order and the chunks as a binary
// tree, and transposes. So the bits depend on the layer's shape and the tree alone. A launch has
// only some tiles of a large weight, so that these sums do not need much memory (kItems). Once
// added, they are dropped from L2, which would else write them to memory while the next kernel
// reads its operands.
//
// Pairs. A layer of many tiles has few pixels for each of them, and would spend most of its time on
// these sums. An item of a window may therefore be two neighbouring chunks: the sums of the first
// wait in shared memory, in the place of five stages, and are added to those of the second, as the
// tree would. Or it is four: each thread stores its sums of the first pair in the item's place in
// memory, and adds them to those of the second. PairTiles() decides for how many tiles; the bits
// are the same.

#include <algorithm>
#include <type_traits>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/fast_divmod.h"
#include "engine/backend/cuda/hopper.cuh"
#include "engine/backend/cuda/pipeline_sm90.cuh"
#include "engine/backend/cuda/tensor_map.h"
#include "engine/training/cuda/launch.h"
#include "engine/training/cuda/tree_sum.cuh"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kGroups = 3, kConsumers = 128 * kGroups, kThreads = kConsumers + 128;
constexpr int kConsumerRegisters = 160, kProducerRegisters = 32;
constexpr int kLine = 64, kLineBytes = kLine * 2;  // channels: the widest swizzle
constexpr int kStep = 64;                          // pixels
constexpr int kBlockBytes = kStep * kLineBytes;
constexpr int kColumns = 192, kBlocks = kColumns / kLine, kOctets = kLine / 8;
constexpr int kSums = kColumns / 2, kVectors = kSums / 4;  // per thread
constexpr int kTileVectors = kVectors * kConsumers;
constexpr int kEdge = 8, kTaps = 9;
/// Items of a launch, at most: six waves of an H200's multiprocessors, whose sums are 117 MB. With
/// two waves they stay in L2, but the tails of more launches cost as much: kernels-measured.md.
constexpr int64_t kItems = 6 * 132;
constexpr int kOnesBytes = 16 * kLineBytes;  // the column of ones, as wide as a swizzled row

enum class Form : uint8_t { kLines, kWindow, kStridedWindow };

/// kInPairs: an item has two or four chunks, else one.
template <Form kForm, bool kInPairs_ = false>
struct Tile {
  static constexpr bool kInPairs = kInPairs_;
  static constexpr bool kWindow = kForm != Form::kLines;
  static constexpr int kOutputs = kWindow ? kLine : kGroups * kLine;
  static constexpr int kChannels = kWindow ? kLine : kColumns;
  static constexpr int kOutputBytes = kOutputs / kLine * kBlockBytes;
  // Of a window:
  static constexpr int kStride = kForm == Form::kStridedWindow ? 2 : 1;
  static constexpr int kPlanes = kStride * kStride;
  static constexpr int kHalo = 2 / kStride, kPitch = kEdge + kHalo;  // pixels of a plane
  // A plane has up to 2 · (kEdge / 2 + kHalo) · kPitch pixels.
  static constexpr int kPlaneBytes = (kStride == 1 ? 15 : 12) * 1024;
  static constexpr int kStageBytes =
      kOutputBytes + (kWindow ? kPlanes * kPlaneBytes : kBlocks * kBlockBytes);
  static constexpr int kStages = kInPairs ? 3 : kForm == Form::kWindow ? 8 : 4;
  static constexpr int kBarriers = 2 * kStages;
  // The operands of a window overlap. compute-sanitizer takes each for 6 KB without gaps. In the
  // last lines of the last stage, they would end 3.5 KB behind it, so the ring is longer. Those of
  // one tap end inside.
  static constexpr int kRingBytes = kStages * kStageBytes + (kForm == Form::kWindow ? 4096 : 0);
  static constexpr int kEarlierBytes = kInPairs ? kTileVectors * 16 : 0;
  static constexpr int kSharedBytes = kRingBytes + kOnesBytes + kEarlierBytes + kBarriers * 8;
  // Estimated clocks of a step, for SplitsOfSteps().
  static constexpr int64_t kStepClocks = kForm == Form::kStridedWindow ? 2000 : 1152;
  static_assert(kStageBytes % 1024 == 0 && kSharedBytes <= 232448);
  static_assert(2 * (kEdge / 2 + kHalo) * kPitch * kLineBytes <= kPlaneBytes);
};

struct Params {
  CUtensorMap dout, x[4];                  // x: by plane
  int work = 0;                            // items: parts of all chunks × tiles of the launch
  int first_tile = 0;                      // of the launch
  int item_chunks = 1;                     // 2 or 4 in pairs
  FastDivmod tiles, output_tiles, splits;  // splits: parts per chunk
  int channel_tiles = 0;
  int outputs = 0, channels = 0;  // of the layer
  int steps = 0;                  // per chunk
  // With a window:
  FastDivmod steps_x, steps_y;         // per image
  int images_at_once = 1, images = 0;  // per step; per chunk
  // In the planes of even and of odd taps, the line and the column of the image's first output.
  int first_line[2] = {}, first_column[2] = {};
  float4* sums = nullptr;      // [part, tile, kVectors, kConsumers]
  float* bias_sums = nullptr;  // [part, output tile, kOutputs], or null
};

template <typename T>
__device__ inline int ItemChunks(const Params& params) {
  return T::kInPairs ? params.item_chunks : 1;
}

/// A work item.
struct Item {
  int part, output, channel, chunk;
  int begin, end;  // [begin, end): steps of each chunk
};
template <typename T>
__device__ inline Item ItemOf(const Params& params, int index) {
  Item item;
  item.part = index / params.tiles;
  const int tile = params.first_tile + index % params.tiles;
  item.output = tile % params.output_tiles * T::kOutputs;
  // The first channels' tiles, which sum the bias, are the last. They have no pairs of chunks: the
  // code of pairs and bias together would spill.
  item.channel = (params.channel_tiles - 1 - tile / params.output_tiles) * T::kChannels;
  item.chunk = item.part / params.splits * ItemChunks<T>(params);
  const int64_t split = item.part % params.splits, steps = params.steps;
  item.begin = static_cast<int>(steps * split / params.splits.value);
  item.end = static_cast<int>(steps * (split + 1) / params.splits.value);
  return item;
}

/// Blocks of 64 of a tile of lines, from `first` on, that a layer of `count` has.
__device__ inline int BlocksOf(int first, int count) {
  return min(kBlocks, (count - first + kLine - 1) / kLine);
}

/// The columns of the three taps of a window's row: MN-major like TransposedDescriptor(), but lines
/// of 8 pixels are kPitch pixels apart, and each 64 columns are one pixel from the next 64.
template <int kPitch>
__device__ inline uint64_t TapsDescriptor(const void* halo_tile) {
  constexpr uint64_t kLines = uint64_t{kPitch * kLineBytes - 1024} >> 4;
  return TransposedDescriptor(halo_tile, kLineBytes) + (kLines << 32);
}

/// The thread that loads the operands of all steps of this CTA's items.
template <typename T>
__device__ inline void Produce(const Params& params, unsigned char* ring,
                               const Pipeline<T::kStages>& pipeline) {
  PipelineState<T::kStages> state;
  PrefetchTensorMap(&params.dout);
  for (int plane = 0; plane < T::kPlanes; ++plane) PrefetchTensorMap(&params.x[plane]);
  WaitForPredecessors();
  for (int index = blockIdx.x; index < params.work; index += gridDim.x) {
    const Item item = ItemOf<T>(params, index);
    const int end_chunk = item.chunk + ItemChunks<T>(params);
    int step = item.begin, chunk = item.chunk;
    const auto advance = [&] {
      if (++step == item.end) step = item.begin, ++chunk;
    };
#pragma unroll 1
    for (; chunk < end_chunk; advance()) {
      unsigned char* const outputs = ring + state.stage * T::kStageBytes;
      unsigned char* const channels = outputs + T::kOutputBytes;
      uint64_t* const barrier = &pipeline.full[state.stage];
      pipeline.ProducerAcquire(state);
      if constexpr (T::kWindow) {
        const int height = kEdge / params.images_at_once;  // of the step
        ArriveExpectTx(barrier, T::kOutputBytes + T::kPlanes * params.images_at_once * T::kPitch *
                                                      (height + T::kHalo) * kLineBytes);
        const int line = step / params.steps_x;
        const int x = step % params.steps_x * kEdge, y = line % params.steps_y * height;
        const int image = chunk * params.images + line / params.steps_y * params.images_at_once;
        TmaLoad(outputs, &params.dout, barrier, item.output, x, y, image);
#pragma unroll
        for (int plane = 0; plane < T::kPlanes; ++plane)
          TmaLoad(channels + plane * T::kPlaneBytes, &params.x[plane], barrier, item.channel,
                  x + params.first_column[plane % T::kStride],
                  y + params.first_line[plane / T::kStride], image);
      } else {
        const int of_outputs = BlocksOf(item.output, params.outputs);
        const int of_channels = BlocksOf(item.channel, params.channels);
        ArriveExpectTx(barrier, (of_outputs + of_channels) * kBlockBytes);
        const auto load = [&](unsigned char* to, const CUtensorMap* map, int first, int blocks) {
          for (int i = 0; i < blocks; ++i) {
            TmaLoad(to + i * kBlockBytes, map, barrier, first + i * kLine, step * kStep, chunk, 0);
          }
        };
        load(outputs, &params.dout, item.output, of_outputs);
        load(channels, &params.x[0], item.channel, of_channels);
      }
      state.Advance();
    }
  }
  ReleaseDependents();
}

/// A consumer warpgroup.
template <typename T>
struct Consumer {
  const Params& params;
  unsigned char* const ring;
  const unsigned char* const ones;
  float4* const earlier;  // sums of a pair's first chunk; each thread's at its index
  const Pipeline<T::kStages> pipeline;
  const int group;
  PipelineState<T::kStages> state = {};

  /// The first pixels of a window's row, or of one of its taps, in the halo tile.
  __device__ static int PixelsAt(int row, int tap) {
    const int plane = row % T::kStride * T::kStride + tap % T::kStride;
    return plane * T::kPlaneBytes + (row / T::kStride * T::kPitch + tap / T::kStride) * kLineBytes;
  }

  /// sums += a · b, all of them; a strided window's tap by tap.
  __device__ static void MultiplyStep(float (&sums)[kSums], uint64_t a, uint64_t b, bool add) {
    if constexpr (T::kStride == 2) {
      constexpr int kTapSums = kSums / kBlocks;
#pragma unroll
      for (int tap = 0; tap < kBlocks; ++tap)
        WgmmaTransposed(reinterpret_cast<float(&)[kTapSums]>(sums[tap * kTapSums]), a,
                        b + (PixelsAt(0, tap) >> 4), add);
    } else {
      WgmmaTransposed(sums, a, b, add);
    }
  }

  /// The main loop of an item. kBias: also the sums of dout.
  template <bool kBias>
  __device__ void Multiply(const Item& item, float (&sums)[kSums], float (&bias)[4]) {
    const bool signals = threadIdx.x % 128 == 0;
    const int lines_gap =  // the halo between the lines of two images
        params.images_at_once == 1 ? 0 : T::kHalo * T::kPitch * (kLineBytes >> 4);
    const uint64_t column = TransposedDescriptor(ones, kBlockBytes);
    AnyAccumulators(sums);
    AnyAccumulators(bias);
    int last = 0;  // the previous stage
#pragma unroll 1
    for (int step = item.begin; step < item.end; ++step) {
      const unsigned char* const outputs = ring + state.stage * T::kStageBytes;
      const unsigned char* const channels = outputs + T::kOutputBytes;
      const uint64_t a =
          TransposedDescriptor(outputs + (T::kWindow ? 0 : group * kBlockBytes), kBlockBytes);
      const uint64_t b = T::kWindow ? TapsDescriptor<T::kPitch>(channels + PixelsAt(group, 0))
                                    : TransposedDescriptor(channels, kBlockBytes);
      pipeline.ConsumerWait(state);
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < kStep; k += 16) {
        const int lines = k / kEdge;  // of the step
        const int at =
            T::kWindow ? lines * T::kPitch * (kLineBytes >> 4) + (lines < kEdge / 2 ? 0 : lines_gap)
                       : k * (kLineBytes >> 4);
        const bool add = k > 0 || step > item.begin;
        MultiplyStep(sums, a + k * (kLineBytes >> 4), b + at, add);
        if constexpr (kBias) WgmmaTransposed(bias, a + k * (kLineBytes >> 4), column, add);
      }
      WgmmaCommit();
      WgmmaWait<1>();  // for the previous step
      if (signals && step > item.begin) pipeline.ConsumerRelease(last);
      last = state.stage;
      state.Advance();
    }
    WgmmaWait<0>();
    PinAccumulators(sums);
    PinAccumulators(bias);
    if (signals) pipeline.ConsumerRelease(last);
  }

  /// The main loop of an item without outputs of this warpgroup. One thread releases the stages;
  /// the others wait for it, since parities only tell a phase from the next.
  __device__ void Skip(const Item& item) {
    for (int step = item.begin; step < item.end; ++step) {
      if (threadIdx.x % 128 == 0) {
        pipeline.ConsumerWait(state);
        pipeline.ConsumerRelease(state.stage);
      }
      state.Advance();
    }
    __syncwarp();
    NamedBarrierSync(1 + group, 128);
  }

  __device__ static float4 VectorOf(const float (&sums)[kSums], int i) {
    return make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
  }

  /// The vector in shared memory, added to sums. Without asm, nvcc 13.0 loads all vectors before it
  /// adds the first, and spills.
  __device__ static void AddVector(const float4* vector, float (&sums)[kSums], int i) {
    asm volatile(
        "{\n.reg .f32 a, b, c, d;\nld.shared.v4.f32 {a, b, c, d}, [%4];\n"
        "add.f32 %0, a, %0;\nadd.f32 %1, b, %1;\nadd.f32 %2, c, %2;\nadd.f32 %3, d, %3;\n}"
        : "+f"(sums[4 * i]), "+f"(sums[4 * i + 1]), "+f"(sums[4 * i + 2]), "+f"(sums[4 * i + 3])
        : "r"(SharedAddress(vector))
        : "memory");
  }
  /// The same in global memory. ptxas, which knows how many registers are left, loads many at once.
  __device__ static void AddStoredVector(const float4* vector, float (&sums)[kSums], int i) {
    asm volatile(
        "{\n.reg .f32 a, b, c, d;\nld.global.cg.v4.f32 {a, b, c, d}, [%4];\n"
        "add.f32 %0, a, %0;\nadd.f32 %1, b, %1;\nadd.f32 %2, c, %2;\nadd.f32 %3, d, %3;\n}"
        : "+f"(sums[4 * i]), "+f"(sums[4 * i + 1]), "+f"(sums[4 * i + 2]), "+f"(sums[4 * i + 3])
        : "l"(vector)
        : "memory");
  }

  __device__ void Run() {
    WaitForPredecessors();  // the sums of the layer before are in the same memory
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32 % 4;
    for (int index = blockIdx.x; index < params.work; index += gridDim.x) {
      const Item item = ItemOf<T>(params, index);
      if (!T::kWindow && group >= BlocksOf(item.output, params.outputs)) {
        Skip(item);
        continue;
      }
      const int blocks = T::kWindow ? kBlocks : BlocksOf(item.channel, params.channels);
      const bool sums_bias =
          params.bias_sums != nullptr && item.channel == 0 && (!T::kWindow || group == 0);
      float4* const to = params.sums + static_cast<int64_t>(index) * kTileVectors + thread;
      float sums[kSums], bias[4];
#pragma unroll 1
      for (int chunk = 0; chunk < ItemChunks<T>(params); ++chunk) {
        if (!T::kInPairs && sums_bias) {
          Multiply<true>(item, sums, bias);
        } else {
          Multiply<false>(item, sums, bias);
        }
        if constexpr (T::kInPairs) {
          if (chunk % 2 == 0) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) earlier[i * kConsumers + thread] = VectorOf(sums, i);
            continue;
          }
#pragma unroll
          for (int i = 0; i < kVectors; ++i) AddVector(&earlier[i * kConsumers + thread], sums, i);
          if (chunk == 3) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) AddStoredVector(to + i * kConsumers, sums, i);
          }
        }
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if (i / kOctets < blocks) to[i * kConsumers] = VectorOf(sums, i);
        }
      }
      if (!T::kInPairs && sums_bias && lane % 4 == 0) {
        float* const bias_to =
            params.bias_sums +
            static_cast<int64_t>(item.part) * params.output_tiles.value * T::kOutputs +
            item.output + (T::kWindow ? 0 : group * kLine) + warp * 16 + lane / 4;
        bias_to[0] = bias[0], bias_to[8] = bias[2];
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    WeightGradientKernel(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char ring[];  // the swizzle's alignment
  unsigned char* const ones = ring + T::kRingBytes;
  float4* const earlier = reinterpret_cast<float4*>(ones + kOnesBytes);
  const Pipeline<T::kStages> pipeline(
      reinterpret_cast<uint64_t*>(ones + kOnesBytes + T::kEarlierBytes));
  const int warp = UniformWarp(), group = warp / 4;

  if (threadIdx.x == 0) {
    pipeline.Init(kGroups);
    FenceBarrierInit();
  }
  constexpr uint32_t kOneOne = 0x3f803f80;  // bf16
  for (int i = threadIdx.x; i < kOnesBytes / 4; i += kThreads)
    reinterpret_cast<uint32_t*>(ones)[i] = kOneOne;
  FenceProxyAsync();
  __syncthreads();

  if (group == kGroups) {
    DecreaseRegisters<kProducerRegisters>();
    if (warp == kGroups * 4 && ElectOne()) Produce<T>(params, ring, pipeline);
  } else {
    IncreaseRegisters<kConsumerRegisters>();
    Consumer<T>{params, ring, ones, earlier, pipeline, group}.Run();
  }
#endif
}

/// How the sums of parts are found and their sum written.
struct PartSums {
  const float4* sums = nullptr;
  const float* bias_sums = nullptr;
  int first_tile = 0, tiles = 1, chunks = 1, splits = 1, channel_tiles = 1;
  FastDivmod output_tiles;
  FastDivmod groups, blocks;      // of lines: warpgroups and blocks of columns that a tile may have
  int outputs = 0, channels = 0;  // of the result
  float *out = nullptr, *bias = nullptr;
};

/// The first output and channel of a tile.
struct Corner {
  int output, channel;
};
template <typename T>
__device__ inline Corner CornerOf(const PartSums& parts, int tile_of_launch) {
  const int tile = parts.first_tile + tile_of_launch;
  return {tile % parts.output_tiles * T::kOutputs,
          (parts.channel_tiles - 1 - tile / parts.output_tiles) * T::kChannels};
}
/// A warp's vectors of the first part, and their distance to those of the next. octet: of the block
/// of columns; quarter: of the warpgroup.
__device__ inline const float4* VectorsOf(const PartSums& parts, int tile_of_launch, int group,
                                          int block, int octet, int quarter) {
  return parts.sums + int64_t{tile_of_launch} * kTileVectors +
         (block * kOctets + octet) * kConsumers + group * 128 + quarter * 32;
}
__device__ inline int64_t PartVectors(const PartSums& parts) {
  return int64_t{parts.tiles} * kTileVectors;
}

struct Vector {
  float4 v;
};
__device__ inline Vector operator+(const Vector& a, const Vector& b) {
  return {{a.v.x + b.v.x, a.v.y + b.v.y, a.v.z + b.v.z, a.v.w + b.v.w}};
}

/// Drops a warp's vectors of so many parts: what L2 still holds of them is not written to memory.
/// The block has met since they were loaded, and nobody reads them again before they are
/// overwritten.
__device__ inline void DropVectors(const float4* first, int64_t part_vectors, int parts) {
  constexpr int kVectorsOfLine = 128 / 16, kCacheLines = 32 / kVectorsOfLine;
#pragma unroll 2
  for (int i = threadIdx.x % 32; i < parts * kCacheLines; i += 32) {
    const float4* const line =
        first + i / kCacheLines * part_vectors + i % kCacheLines * kVectorsOfLine;
    asm volatile("discard.global.L2 [%0], 128;" ::"l"(line) : "memory");
  }
}

/// A block has eight channels of each tap of a tile, and 16 outputs: a warp for each tap.
constexpr int kSumWarps = 4, kWindowThreads = 32 * kTaps;
// A line of the result in shared memory: 8 channels × 9 taps.
constexpr int kResultLine = 8 * kTaps, kResultPitch = kResultLine + 4;

/// kSplits: that are loaded at a time. One split needs few registers, so that more blocks share an
/// SM.
template <Form kForm, int kLeaves, int kSplits>
__global__ void __launch_bounds__(kWindowThreads)
    SumWindowsKernel(const __grid_constant__ PartSums parts) {
  using T = Tile<kForm>;
  __shared__ float results[16 * kResultPitch];
  ReleaseDependents();
  WaitForPredecessors();
  const int quarter = blockIdx.x % kSumWarps, octet = blockIdx.x / kSumWarps % kOctets;
  const int tile = blockIdx.x / (kSumWarps * kOctets);
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32 % kGroups;
  const int block = threadIdx.x / (32 * kGroups);
  const Corner corner = CornerOf<T>(parts, tile);
  const int64_t part_vectors = PartVectors(parts);
  const float4* const from = VectorsOf(parts, tile, group, block, octet, quarter);
  const float4 sum =
      SumOfChunks<kLeaves, kSplits, Vector>(parts.chunks, parts.splits, [&](int64_t part) {
        return Vector{from[part * part_vectors + lane]};
      }).v;
  const float v[4] = {sum.x, sum.y, sum.z, sum.w};

  const int row = lane / 4, column = lane % 4 * 2;  // and row + 8, column + 1
#pragma unroll
  for (int i = 0; i < 4; ++i)
    results[(row + i / 2 * 8) * kResultPitch + (column + i % 2) * kTaps + group * 3 + block] = v[i];
  __syncthreads();
  const int channel = corner.channel + octet * 8;
  for (int i = threadIdx.x; i < 16 * kResultLine; i += kWindowThreads) {
    const int line = i / kResultLine, at = i % kResultLine;
    const int output = corner.output + quarter * 16 + line;
    if (output < parts.outputs && channel + at / kTaps < parts.channels)
      parts.out[(static_cast<int64_t>(output) * parts.channels + channel) * kTaps + at] =
          results[line * kResultPitch + at];
  }
  DropVectors(from, part_vectors, parts.chunks * parts.splits);

  if (parts.bias == nullptr || channel != 0 || threadIdx.x >= 16) return;
  const int output = corner.output + quarter * 16 + lane;
  if (output >= parts.outputs) return;
  parts.bias[output] =
      SumOfChunks<kLeaves, kSplits, float>(parts.chunks, parts.splits, [&](int64_t part) {
        return parts.bias_sums[part * parts.output_tiles.value * T::kOutputs + output];
      });
}

template <int kLeaves>
constexpr int kShares = std::min(kLeaves, 4);
/// The same for lines, which have few tiles and many parts. A block has 16 outputs × 8 channels,
/// and each of its warps the chunks of a subtree. So there are blocks for all SMs, and most of a
/// warp's loads are in flight together.
template <int kLeaves, int kSplits>
__global__ void __launch_bounds__(32 * kShares<kLeaves>)
    SumLinesKernel(const __grid_constant__ PartSums parts) {
  using T = Tile<Form::kLines>;
  constexpr int kCount = kShares<kLeaves>, kOwnLeaves = kLeaves / kCount;
  __shared__ Vector shares[kCount][32];
  __shared__ float bias_shares[kCount][16];
  ReleaseDependents();
  WaitForPredecessors();
  const int quarter = blockIdx.x % kSumWarps, octet = blockIdx.x / kSumWarps % kOctets;
  const int column_block = blockIdx.x / (kSumWarps * kOctets);
  const int group_of_launch = column_block / parts.blocks, block = column_block % parts.blocks;
  const int tile = group_of_launch / parts.groups, group = group_of_launch % parts.groups;
  const int lane = threadIdx.x % 32, share = threadIdx.x / 32;
  const Corner corner = CornerOf<T>(parts, tile);
  if (group >= BlocksOf(corner.output, parts.outputs) ||
      block >= BlocksOf(corner.channel, parts.channels))
    return;

  const int chunks = parts.chunks / kCount, own_parts = chunks * parts.splits;
  const int64_t first_part = int64_t{share} * own_parts, part_vectors = PartVectors(parts);
  const float4* const from =
      VectorsOf(parts, tile, group, block, octet, quarter) + first_part * part_vectors;
  shares[share][lane] = SumOfChunks<kOwnLeaves, kSplits, Vector>(
      chunks, parts.splits, [&](int64_t part) { return Vector{from[part * part_vectors + lane]}; });
  const int first_output = corner.output + group * kLine + quarter * 16;
  const int first_channel = corner.channel + block * kLine + octet * 8;
  const bool has_bias = parts.bias != nullptr && first_channel == 0 && lane < 16 &&
                        first_output + lane < parts.outputs;
  if (has_bias)
    bias_shares[share][lane] =
        SumOfChunks<kOwnLeaves, kSplits, float>(chunks, parts.splits, [&](int64_t part) {
          return parts.bias_sums[(first_part + part) * parts.output_tiles.value * T::kOutputs +
                                 first_output + lane];
        });
  __syncthreads();
  DropVectors(from, part_vectors, own_parts);
  if (share > 0) return;
  const float4 sum = SumOf<kCount>([&](int i) { return shares[i][lane]; }).v;
  const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int output = first_output + lane / 4 + i / 2 * 8;
    const int channel = first_channel + lane % 4 * 2 + i % 2;
    if (output < parts.outputs && channel < parts.channels)
      parts.out[static_cast<int64_t>(output) * parts.channels + channel] = v[i];
  }
  if (has_bias)
    parts.bias[first_output + lane] = SumOf<kCount>([&](int i) { return bias_shares[i][lane]; });
}

int64_t CountOf(int64_t count, int64_t size) { return (count + size - 1) / size; }

/// Every stride-th line, from `line` on, and of these every stride-th pixel.
struct Plane {
  int stride = 1, line = 0, column = 0;
};
/// A plane of a tensor [d3, d2, d1, channels], with boxes of kLine channels.
CUresult Encode(CUtensorMap* map, const Rows& rows, int channels, int64_t d1, int64_t d2,
                int64_t d3, int box1, int box2, int box3, const Plane& plane = {}) {
  const int64_t pixel = rows.stride, line = pixel * d1;
  const auto* const first =
      static_cast<const uint16_t*>(rows.data) + plane.line * line + plane.column * pixel;
  return EncodeTiled(map,
                     {first,
                      {channels, CountOf(d1 - plane.column, plane.stride),
                       CountOf(d2 - plane.line, plane.stride), d3},
                      {pixel * plane.stride, line * plane.stride, line * d2},
                      {kLine, box1, box2, box3}},
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

/// Derived from the shapes.
struct Plan {
  int64_t output_tiles, channel_tiles;
  int64_t steps;             // per chunk
  int images_at_once = 1;    // per step
  int splits = 1;            // per chunk
  int64_t parts;             // of all chunks
  int64_t paired_tiles = 0;  // the first ones: their items are of pair_chunks chunks, 2 or 4
  int pair_chunks = 2;

  int64_t tiles() const { return output_tiles * channel_tiles; }
  /// Of a launch whose tiles have so many parts.
  int64_t launch_tiles(int64_t tile_parts) const {
    return std::clamp<int64_t>(kItems / tile_parts, 1, tiles());
  }
  int64_t sums() const {  // floats
    const int64_t singles = paired_tiles < tiles() ? parts * launch_tiles(parts) : 0,
                  pair_parts = parts / pair_chunks,
                  pairs = paired_tiles > 0 ? pair_parts * launch_tiles(pair_parts) : 0;
    return std::max(singles, pairs) * kTileVectors * 4;
  }
};

// Estimated clocks, fitted on an H200: of an item besides its steps, and of adding a part of a tile
// in all chunks.
constexpr int64_t kItemClocks = 5000, kSumClocks = 700;
// Plans are for a pass of eight chunks on a GPU of 132 multiprocessors.
constexpr int64_t kMultiprocessors = 132, kChunks = 8;

/// Number of parts per chunk. A step takes step_clocks, at the tensor cores' rate or that of loads.
int SplitsOfSteps(int64_t tiles, int64_t steps, int64_t step_clocks) {
  int best = 1;
  int64_t least = INT64_MAX;
  for (int splits = 1; splits <= 64 && splits <= steps; ++splits) {
    const int64_t items = CountOf(tiles * splits * kChunks, kMultiprocessors);  // of a CTA
    const int64_t clocks =
        items * (CountOf(steps, splits) * step_clocks + kItemClocks) + tiles * splits * kSumClocks;
    if (clocks < least) least = clocks, best = splits;
  }
  return best;
}

/// Of a plan without splits, decides how many tiles, and at most `most`, shall have items of two
/// or of four chunks. Those have fewer sums in memory, but their waves are longer.
void PairTiles(int64_t most, int64_t chunks, int64_t chunk_clocks, Plan* plan) {
  // kLoadClocks: of the sum of a pair that is stored and loaded again; a generous estimate, so that
  // layers that would hardly gain keep eight stages.
  constexpr int64_t kPairClocks = 2500, kLoadClocks = 12000, kLaunchClocks = 5000;
  constexpr double kPairSteps = 1.1;  // factor of a step: three stages instead of eight
  const auto clocks_of = [&](int64_t launch_tiles, int64_t parts, int64_t item_clocks) {
    if (launch_tiles == 0) return int64_t{0};
    return kLaunchClocks + CountOf(launch_tiles * parts, kMultiprocessors) * item_clocks +
           launch_tiles * parts * kSumClocks / kChunks;
  };
  int64_t least = INT64_MAX;
  for (const int pair_chunks : {2, 4}) {
    if (chunks % pair_chunks != 0) break;
    const auto pair_clocks =
        static_cast<int64_t>(kPairSteps * static_cast<double>(pair_chunks * chunk_clocks)) +
        pair_chunks / 2 * kPairClocks + (pair_chunks == 4 ? kLoadClocks : 0) + kItemClocks;
    for (int64_t paired = 0; paired <= most; ++paired) {
      const int64_t clocks = clocks_of(paired, chunks / pair_chunks, pair_clocks) +
                             clocks_of(plan->tiles() - paired, chunks, chunk_clocks + kItemClocks);
      if (clocks < least)
        least = clocks, plan->paired_tiles = paired, plan->pair_chunks = pair_chunks;
    }
  }
}

template <Form kForm>
Plan PlanOf(const WeightGradientLaunch& launch) {
  using T = Tile<kForm>;
  Plan plan;
  plan.output_tiles = CountOf(launch.outputs, T::kOutputs);
  plan.channel_tiles = CountOf(launch.channels, T::kChannels);
  const int64_t images = launch.images / launch.chunks;
  if (T::kWindow) {
    if (launch.height <= kEdge / 2 && images % 2 == 0) plan.images_at_once = 2;
    plan.steps = images / plan.images_at_once *
                 CountOf(launch.height, kEdge / plan.images_at_once) * CountOf(launch.width, kEdge);
  } else {
    plan.steps = CountOf(images * launch.height * launch.width, kStep);
  }
  plan.splits = SplitsOfSteps(plan.tiles(), plan.steps, T::kStepClocks);
  plan.parts = launch.chunks * plan.splits;
  if (kForm == Form::kWindow && plan.splits == 1 && launch.chunks > 1)
    PairTiles(plan.tiles() - (launch.bias ? plan.output_tiles : 0), launch.chunks,
              plan.steps * T::kStepClocks, &plan);
  return plan;
}

/// what(form), a constant.
template <typename What>
auto WithForm(const WeightGradientLaunch& launch, const What& what) {
  return launch.taps != kTaps ? what(std::integral_constant<Form, Form::kLines>())
         : launch.stride == 1 ? what(std::integral_constant<Form, Form::kWindow>())
                              : what(std::integral_constant<Form, Form::kStridedWindow>());
}

template <Form kForm>
cudaError_t ParamsOf(const WeightGradientLaunch& launch, const Plan& plan, float* bias_sums,
                     Params* to) {
  using T = Tile<kForm>;
  Params& params = *to;
  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  CUresult encoded[1 + T::kPlanes];
  if (T::kWindow) {
    const int images = plan.images_at_once, height = kEdge / images;
    encoded[0] = Encode(&params.dout, launch.dout, launch.outputs, launch.width, launch.height,
                        launch.images, kEdge, height, images);
    for (int plane = 0; plane < T::kPlanes; ++plane) {
      const int from_y = plane / T::kStride - launch.pad_top,
                from_x = plane % T::kStride - launch.pad_left;
      // Remainders that are not negative.
      const Plane of = {T::kStride, (from_y + T::kStride * launch.pad_top) % T::kStride,
                        (from_x + T::kStride * launch.pad_left) % T::kStride};
      params.first_line[plane / T::kStride] = (from_y - of.line) / T::kStride;
      params.first_column[plane % T::kStride] = (from_x - of.column) / T::kStride;
      encoded[1 + plane] =
          Encode(&params.x[plane], launch.x, launch.channels, launch.x_width, launch.x_height,
                 launch.images, T::kPitch, height + T::kHalo, images, of);
    }
  } else {
    const int64_t lines = launch.images / launch.chunks * launch.height * launch.width;
    encoded[0] =
        Encode(&params.dout, launch.dout, launch.outputs, lines, launch.chunks, 1, kStep, 1, 1);
    encoded[1] =
        Encode(&params.x[0], launch.x, launch.channels, lines, launch.chunks, 1, kStep, 1, 1);
  }
  for (CUresult result : encoded) {
    if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  }
  if (plan.parts * plan.tiles() > INT32_MAX ||
      launch.images * launch.height * launch.width > INT32_MAX)
    return cudaErrorInvalidValue;
  params.output_tiles = FastDivmod(static_cast<int>(plan.output_tiles));
  params.splits = FastDivmod(plan.splits);
  params.channel_tiles = static_cast<int>(plan.channel_tiles);
  params.outputs = launch.outputs, params.channels = launch.channels;
  params.steps = static_cast<int>(plan.steps);
  params.steps_x = FastDivmod(static_cast<int>(CountOf(launch.width, kEdge)));
  params.steps_y =
      FastDivmod(static_cast<int>(CountOf(launch.height, kEdge / plan.images_at_once)));
  params.images_at_once = plan.images_at_once;
  params.images = static_cast<int>(launch.images / launch.chunks);
  params.sums = reinterpret_cast<float4*>(launch.partial);
  params.bias_sums = bias_sums;
  return cudaSuccess;
}

template <Form kForm, int kLeaves>
cudaError_t LaunchSums(const PartSums& sums, const Queue& queue) {
  const auto start = [&](auto kernel, int blocks, int threads) {
    return LaunchDependent(
        kernel, {.grid = static_cast<unsigned>(blocks), .block = static_cast<unsigned>(threads)},
        queue, sums);
  };
  const int blocks = sums.tiles * kOctets * kSumWarps;
  if constexpr (kForm == Form::kLines) {
    return start(sums.splits > 2 ? SumLinesKernel<kLeaves, 8> : SumLinesKernel<kLeaves, 1>,
                 blocks * sums.groups.value * sums.blocks.value, 32 * kShares<kLeaves>);
  } else {
    return start(
        sums.splits > 2 ? SumWindowsKernel<kForm, kLeaves, 4> : SumWindowsKernel<kForm, kLeaves, 1>,
        blocks, kWindowThreads);
  }
}
template <Form kForm>
cudaError_t LaunchSums(const PartSums& sums, const Queue& queue) {
  return sums.chunks >= 8   ? LaunchSums<kForm, 8>(sums, queue)
         : sums.chunks == 4 ? LaunchSums<kForm, 4>(sums, queue)
         : sums.chunks == 2 ? LaunchSums<kForm, 2>(sums, queue)
                            : LaunchSums<kForm, 1>(sums, queue);
}

/// The tiles of the weight from first to `end`, in launches of at most kItems items.
template <Form kForm, bool kInPairs>
cudaError_t LaunchTiles(const WeightGradientLaunch& launch, const Plan& plan, int64_t first,
                        int64_t end, Params params, const Queue& queue) {
  using T = Tile<kForm, kInPairs>;
  if (first == end) return cudaSuccess;
  params.item_chunks = kInPairs ? plan.pair_chunks : 1;
  const int64_t chunks = launch.chunks / params.item_chunks, parts = chunks * plan.splits;
  PartSums sums;
  sums.sums = params.sums, sums.bias_sums = params.bias_sums;
  sums.chunks = static_cast<int>(chunks), sums.splits = plan.splits;
  sums.output_tiles = params.output_tiles, sums.channel_tiles = params.channel_tiles;
  sums.outputs = launch.outputs, sums.channels = launch.channels;
  const auto blocks_of = [](int count) {
    return std::min<int64_t>(CountOf(count, kLine), kBlocks);
  };
  sums.groups = FastDivmod(static_cast<int>(blocks_of(launch.outputs)));
  sums.blocks = FastDivmod(static_cast<int>(blocks_of(launch.channels)));
  sums.out = launch.out, sums.bias = launch.bias;
  const auto kernel = WeightGradientKernel<T>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes);
  for (int64_t tiles; first < end && error == cudaSuccess; first += tiles) {
    tiles = std::min(plan.launch_tiles(parts), end - first);
    params.work = static_cast<int>(parts * tiles);
    params.first_tile = sums.first_tile = static_cast<int>(first);
    params.tiles = FastDivmod(static_cast<int>(tiles));
    sums.tiles = static_cast<int>(tiles);
    error = LaunchDependent(
        kernel,
        {.grid = static_cast<unsigned>(std::min(params.work, queue.multiprocessors)),
         .block = kThreads,
         .shared_bytes = T::kSharedBytes},
        queue, params);
    if (error == cudaSuccess) error = LaunchSums<kForm>(sums, queue);
  }
  return error;
}

template <Form kForm>
cudaError_t LaunchPlan(const WeightGradientLaunch& launch, const Plan& plan, const Queue& queue) {
  float* const bias_sums = launch.bias == nullptr ? nullptr : launch.partial + plan.sums();
  Params params;
  cudaError_t error = ParamsOf<kForm>(launch, plan, bias_sums, &params);
  if constexpr (kForm == Form::kWindow) {
    if (error == cudaSuccess)
      error = LaunchTiles<kForm, true>(launch, plan, 0, plan.paired_tiles, params, queue);
  }
  if (error == cudaSuccess)
    error = LaunchTiles<kForm, false>(launch, plan, plan.paired_tiles, plan.tiles(), params, queue);
  return error;
}

}  // namespace

int64_t WeightGradientPartials(const WeightGradientLaunch& launch) {
  return WithForm(launch, [&](auto form) {
    constexpr Form kForm = decltype(form)::value;
    const Plan plan = PlanOf<kForm>(launch);
    return plan.sums() + plan.parts * plan.output_tiles * Tile<kForm>::kOutputs;
  });
}

cudaError_t LaunchWeightGradient(const WeightGradientLaunch& launch, const Queue& queue) {
  return WithForm(launch, [&](auto form) {
    constexpr Form kForm = decltype(form)::value;
    return LaunchPlan<kForm>(launch, PlanOf<kForm>(launch), queue);
  });
}

}  // namespace denoised::training::cuda
