// SPDX-License-Identifier: Apache-2.0
// Gradients of weights for Hopper, by TMA and wgmma: the product of dout and x over all pixels, or
// of dout and x at each tap of a 3×3 window. Both operands are MN-major in shared memory: a pixel
// is a row of 128 bytes, 64 channels.
//
// Policy. CTAs are persistent. A work item is a tile of the weight and one part of a chunk's
// pixels, 64 at a step. Three consumer warpgroups multiply [64 outputs, 192 columns] each; a
// producer warp loads, and is ahead by the whole ring while they store their sums.
//   Window: a tile is 64 outputs × 9 taps × 64 channels. A step covers 8×8 pixels, or 8×4 of two
//   images at most 4 pixels high. It reads dout there and x in a halo tile, which has one more
//   pixel on each side; beyond the image there are zeros. Each warpgroup has one row of the window
//   and reads the halo tile from its first, second or third line. The next tap of a row reads the
//   same lines one pixel later: its 64 columns are one row of 128 bytes away (the descriptor's
//   LBO). Lines: a tile is 192 outputs × 192 channels.
// A halo tile is loaded once for nine taps and 64 outputs, so loads are not the bottleneck.
//
// The gradient of the bias, the sum of dout's pixels, is one more product, with a column of ones.
// Only the tiles of the first channels compute it.
//
// Sums. A chunk is cut into as many parts as suit a GPU when a pass has eight chunks. The sums of
// each part go to memory in the layout of the accumulators, so that stores are coalesced.
// SumPartsKernel adds the parts of a chunk in order and the chunks as a binary tree, and
// transposes. So the bits depend on the layer's shape and the tree alone. A launch has only as many
// tiles of a large weight as keep these sums small enough for L2.

#include <algorithm>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/fast_divmod.h"
#include "engine/backend/cuda/hopper.cuh"
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
constexpr int kEdge = 8, kPitch = kEdge + 2, kTaps = 9;
constexpr int kOnesBytes = 16 * kLineBytes;  // the column of ones, as wide as a swizzled row

template <bool kWindow>
struct Tile {
  static constexpr int kOutputs = kWindow ? kLine : kGroups * kLine;
  static constexpr int kChannels = kWindow ? kLine : kColumns;
  static constexpr int kOutputBytes = kOutputs / kLine * kBlockBytes;
  // Halo tiles have up to 2 · 6 · kPitch pixels.
  static constexpr int kStageBytes = kOutputBytes + (kWindow ? 15 * 1024 : kBlocks * kBlockBytes);
  static constexpr int kStages = kWindow ? 8 : 4;
  static constexpr int kBarriers = 2 * kStages;
  // The operands of a window overlap. compute-sanitizer takes each for 6 KB without gaps. In the
  // last lines of the last stage, they would end 3.5 KB behind it, so the ring is longer.
  static constexpr int kRingBytes = kStages * kStageBytes + (kWindow ? 4096 : 0);
  static constexpr int kSharedBytes = kRingBytes + kOnesBytes + kBarriers * 8;
  static_assert(kStageBytes % 1024 == 0 && kSharedBytes <= 232448);
};

struct Params {
  CUtensorMap dout, x;
  int work = 0;                             // items: parts of all chunks × tiles of the launch
  int first_tile = 0;                       // of the launch
  FastDivmod tiles, channel_tiles, splits;  // splits: parts per chunk
  int output_tiles = 0;
  int steps = 0;  // per chunk
  // With a window:
  FastDivmod steps_x, steps_y;         // per image
  int images_at_once = 1, images = 0;  // per step; per chunk
  float4* sums = nullptr;              // [part, tile, kVectors, kConsumers]
  float* bias_sums = nullptr;          // [part, output tile, kOutputs], or null
};

/// A work item.
struct Item {
  int part, output, channel, chunk, begin, end;  // [begin, end): steps of the chunk
};
template <bool kWindow>
__device__ inline Item ItemOf(const Params& params, int index) {
  using T = Tile<kWindow>;
  Item item;
  item.part = index / params.tiles;
  const int tile = params.first_tile + index % params.tiles;
  item.output = tile / params.channel_tiles * T::kOutputs;
  item.channel = tile % params.channel_tiles * T::kChannels;
  item.chunk = item.part / params.splits;
  const int64_t split = item.part % params.splits, steps = params.steps;
  item.begin = static_cast<int>(steps * split / params.splits.value);
  item.end = static_cast<int>(steps * (split + 1) / params.splits.value);
  return item;
}

/// The columns of the three taps of a window's row: MN-major like TransposedDescriptor(), but lines
/// of 8 pixels are kPitch pixels apart, and each 64 columns are one pixel from the next 64.
__device__ inline uint64_t TapsDescriptor(const void* halo_tile) {
  constexpr uint64_t kLines = uint64_t{kPitch * kLineBytes - 1024} >> 4;
  return TransposedDescriptor(halo_tile, kLineBytes) + (kLines << 32);
}

/// The thread that loads the operands of all steps of this CTA's items.
template <bool kWindow>
__device__ inline void Produce(const Params& params, unsigned char* ring, uint64_t* full,
                               uint64_t* empty) {
  using T = Tile<kWindow>;
  PipelineState<T::kStages> state;
  PrefetchTensorMap(&params.dout);
  PrefetchTensorMap(&params.x);
  WaitForPredecessors();
  for (int index = blockIdx.x; index < params.work; index += gridDim.x) {
    const Item item = ItemOf<kWindow>(params, index);
#pragma unroll 1
    for (int step = item.begin; step < item.end; ++step) {
      unsigned char* const outputs = ring + state.stage * T::kStageBytes;
      unsigned char* const channels = outputs + T::kOutputBytes;
      uint64_t* const barrier = &full[state.stage];
      Wait(&empty[state.stage], state.EmptyParity());
      if constexpr (kWindow) {
        const int height = kEdge / params.images_at_once;  // of the step
        ArriveExpectTx(
            barrier, T::kOutputBytes + params.images_at_once * kPitch * (height + 2) * kLineBytes);
        const int line = step / params.steps_x;
        const int x = step % params.steps_x * kEdge, y = line % params.steps_y * height;
        const int image =
            item.chunk * params.images + line / params.steps_y * params.images_at_once;
        TmaLoad(outputs, &params.dout, barrier, item.output, x, y, image);
        TmaLoad(channels, &params.x, barrier, item.channel, x - 1, y - 1, image);
      } else {
        ArriveExpectTx(barrier, T::kStageBytes);
        const auto load = [&](unsigned char* to, const CUtensorMap* map, int first) {
          for (int i = 0; i < kBlocks; ++i)
            TmaLoad(to + i * kBlockBytes, map, barrier, first + i * kLine, step * kStep, item.chunk,
                    0);
        };
        load(outputs, &params.dout, item.output);
        load(channels, &params.x, item.channel);
      }
      state.Advance();
    }
  }
  ReleaseDependents();
}

/// A consumer warpgroup.
template <bool kWindow>
struct Consumer {
  using T = Tile<kWindow>;
  const Params& params;
  unsigned char* const ring;
  const unsigned char* const ones;
  uint64_t *const full, *const empty;
  const int group;
  PipelineState<T::kStages> state = {};

  /// The main loop of an item. kBias: also the sums of dout.
  template <bool kBias>
  __device__ void Multiply(const Item& item, float (&sums)[kSums], float (&bias)[4]) {
    const bool signals = threadIdx.x % 128 == 0;
    const int lines_gap =  // the halo between the lines of two images
        params.images_at_once == 1 ? 0 : 2 * kPitch * (kLineBytes >> 4);
    const uint64_t column = TransposedDescriptor(ones, kBlockBytes);
    AnyAccumulators(sums);
    AnyAccumulators(bias);
    int last = 0;  // the previous stage
#pragma unroll 1
    for (int step = item.begin; step < item.end; ++step) {
      const unsigned char* const outputs = ring + state.stage * T::kStageBytes;
      const unsigned char* const channels = outputs + T::kOutputBytes;
      const uint64_t a =
          TransposedDescriptor(outputs + (kWindow ? 0 : group * kBlockBytes), kBlockBytes);
      const uint64_t b = kWindow ? TapsDescriptor(channels + group * kPitch * kLineBytes)
                                 : TransposedDescriptor(channels, kBlockBytes);
      Wait(&full[state.stage], state.FullParity());
      WgmmaFence();
#pragma unroll
      for (int k = 0; k < kStep; k += 16) {
        const int lines = k / kEdge;  // of the step
        const int at =
            kWindow ? lines * kPitch * (kLineBytes >> 4) + (lines < kEdge / 2 ? 0 : lines_gap)
                    : k * (kLineBytes >> 4);
        const bool add = k > 0 || step > item.begin;
        WgmmaTransposed(sums, a + k * (kLineBytes >> 4), b + at, add);
        if constexpr (kBias) WgmmaTransposed(bias, a + k * (kLineBytes >> 4), column, add);
      }
      WgmmaCommit();
      WgmmaWait<1>();  // for the previous step
      if (signals && step > item.begin) Arrive(&empty[last]);
      last = state.stage;
      state.Advance();
    }
    WgmmaWait<0>();
    PinAccumulators(sums);
    PinAccumulators(bias);
    if (signals) Arrive(&empty[last]);
  }

  __device__ void Run() {
    WaitForPredecessors();  // SumPartsKernel of the layer before reads the same memory
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32 % 4;
    for (int index = blockIdx.x; index < params.work; index += gridDim.x) {
      const Item item = ItemOf<kWindow>(params, index);
      float sums[kSums], bias[4];
      if (params.bias_sums != nullptr && item.channel == 0 && (!kWindow || group == 0)) {
        Multiply<true>(item, sums, bias);
        if (lane % 4 == 0) {
          float* const to = params.bias_sums +
                            static_cast<int64_t>(item.part) * params.output_tiles * T::kOutputs +
                            item.output + (kWindow ? 0 : group * kLine) + warp * 16 + lane / 4;
          to[0] = bias[0], to[8] = bias[2];
        }
      } else {
        Multiply<false>(item, sums, bias);
      }
      float4* const to = params.sums + static_cast<int64_t>(index) * kTileVectors + thread;
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        to[i * kConsumers] =
            make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    }
  }
};

template <bool kWindow>
__global__ void __launch_bounds__(kThreads, 1)
    WeightGradientKernel(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using T = Tile<kWindow>;
  extern __shared__ __align__(1024) unsigned char ring[];  // the swizzle's alignment
  unsigned char* const ones = ring + T::kRingBytes;
  uint64_t* const full = reinterpret_cast<uint64_t*>(ones + kOnesBytes);
  uint64_t* const empty = full + T::kStages;
  // The shuffle tells the compiler that `warp` is uniform: descriptors live in uniform registers.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), group = warp / 4;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      InitBarrier(&full[stage], 1);
      InitBarrier(&empty[stage], kGroups);
    }
    FenceBarrierInit();
  }
  constexpr uint32_t kOneOne = 0x3f803f80;  // bf16
  for (int i = threadIdx.x; i < kOnesBytes / 4; i += kThreads)
    reinterpret_cast<uint32_t*>(ones)[i] = kOneOne;
  FenceProxyAsync();
  __syncthreads();

  if (group == kGroups) {
    DecreaseRegisters<kProducerRegisters>();
    if (warp == kGroups * 4 && ElectOne()) Produce<kWindow>(params, ring, full, empty);
  } else {
    IncreaseRegisters<kConsumerRegisters>();
    Consumer<kWindow>{params, ring, ones, full, empty, group}.Run();
  }
#endif
}

/// How SumPartsKernel finds and writes its sums.
struct PartSums {
  const float4* sums = nullptr;
  const float* bias_sums = nullptr;
  int first_tile = 0, chunks = 1, splits = 1, output_tiles = 1;
  FastDivmod tiles, channel_tiles;
  int outputs = 0, channels = 0;  // of the result
  float *out = nullptr, *bias = nullptr;
};

struct Vector {
  float4 v;
};
__device__ inline Vector operator+(const Vector& a, const Vector& b) {
  return {{a.v.x + b.v.x, a.v.y + b.v.y, a.v.z + b.v.z, a.v.w + b.v.w}};
}

/// A block has eight channels of each block of columns of a tile, and of each warpgroup's outputs
/// 16: a warp for each warpgroup and block of columns.
constexpr int kSumWarps = 4, kSumThreads = 32 * kGroups * kBlocks;
// A line of the window's result in shared memory: 8 channels × 9 taps.
constexpr int kResultLine = 8 * kTaps, kResultPitch = kResultLine + 4;

/// kSplits: that are loaded at a time. One split needs few registers, so that more blocks share an
/// SM.
template <bool kWindow, int kLeaves, int kSplits>
__global__ void __launch_bounds__(kSumThreads)
    SumPartsKernel(const __grid_constant__ PartSums parts) {
  using T = Tile<kWindow>;
  ReleaseDependents();
  WaitForPredecessors();
  const int quarter = blockIdx.x % kSumWarps, octet = blockIdx.x / kSumWarps % kOctets;
  const int tile_of_launch = blockIdx.x / (kSumWarps * kOctets);
  const int tile = parts.first_tile + tile_of_launch;
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32 % kGroups;
  const int block = threadIdx.x / (32 * kGroups);
  const int first_output = tile / parts.channel_tiles * T::kOutputs;
  const int first_channel = tile % parts.channel_tiles * T::kChannels;

  const int64_t part_vectors = int64_t{parts.tiles.value} * kTileVectors;
  const float4* const from = parts.sums + int64_t{tile_of_launch} * kTileVectors +
                             (block * kOctets + octet) * kConsumers + group * 128 + quarter * 32 +
                             lane;
  const float4 sum =
      SumOfChunks<kLeaves, kSplits, Vector>(parts.chunks, parts.splits, [&](int64_t part) {
        return Vector{from[part * part_vectors]};
      }).v;
  const float v[4] = {sum.x, sum.y, sum.z, sum.w};

  const int row = lane / 4, column = lane % 4 * 2;  // and row + 8, column + 1
  if constexpr (kWindow) {
    __shared__ float results[16 * kResultPitch];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      results[(row + i / 2 * 8) * kResultPitch + (column + i % 2) * kTaps + group * 3 + block] =
          v[i];
    __syncthreads();
    const int channel = first_channel + octet * 8;
    for (int i = threadIdx.x; i < 16 * kResultLine; i += kSumThreads) {
      const int line = i / kResultLine, at = i % kResultLine;
      const int output = first_output + quarter * 16 + line;
      if (output < parts.outputs && channel + at / kTaps < parts.channels)
        parts.out[(static_cast<int64_t>(output) * parts.channels + channel) * kTaps + at] =
            results[line * kResultPitch + at];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int output = first_output + group * kLine + quarter * 16 + row + i / 2 * 8;
      const int channel = first_channel + block * kLine + octet * 8 + column + i % 2;
      if (output < parts.outputs && channel < parts.channels)
        parts.out[static_cast<int64_t>(output) * parts.channels + channel] = v[i];
    }
  }

  if (parts.bias == nullptr || first_channel != 0 || octet != 0 || block > 0) return;
  const int output = first_output + group * kLine + quarter * 16 + lane;
  if (lane >= 16 || (kWindow && group > 0) || output >= parts.outputs) return;
  parts.bias[output] =
      SumOfChunks<kLeaves, kSplits, float>(parts.chunks, parts.splits, [&](int64_t part) {
        return parts.bias_sums[part * parts.output_tiles * T::kOutputs + output];
      });
}

/// A tensor [d3, d2, d1, channels], with boxes of kLine channels.
CUresult Encode(CUtensorMap* map, const Rows& rows, int channels, int64_t d1, int64_t d2,
                int64_t d3, int box1, int box2, int box3) {
  const auto pixel_bytes = static_cast<cuuint64_t>(rows.stride) * 2;
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(d1),
                              static_cast<cuuint64_t>(d2), static_cast<cuuint64_t>(d3)};
  const cuuint64_t strides[3] = {pixel_bytes, pixel_bytes * dims[1],
                                 pixel_bytes * dims[1] * dims[2]};
  const cuuint32_t box[4] = {kLine, static_cast<cuuint32_t>(box1), static_cast<cuuint32_t>(box2),
                             static_cast<cuuint32_t>(box3)};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  return GetTensorMapEncoders().tiled(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, rows.data, dims, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

int64_t CountOf(int64_t count, int64_t size) { return (count + size - 1) / size; }

/// Derived from the shapes.
struct Plan {
  int64_t output_tiles, channel_tiles;
  int64_t steps;           // per chunk
  int images_at_once = 1;  // per step
  int splits = 1;          // per chunk
  int64_t parts;           // of all chunks

  int64_t tiles() const { return output_tiles * channel_tiles; }
  /// Tiles of a launch: their sums take 39 MB, if not a single tile's take more.
  int64_t launch_tiles() const {
    constexpr int64_t kItems = 2 * 132;  // two for each multiprocessor
    return std::clamp<int64_t>(kItems / parts, 1, tiles());
  }
  int64_t sums() const { return parts * launch_tiles() * kTileVectors * 4; }  // floats
};

/// Number of parts per chunk, by estimated clocks. When a pass has eight chunks, a GPU has 132
/// multiprocessors. A step takes kStepClocks at the tensor cores' rate, an item kItemClocks
/// besides, and adding a part of a tile of all chunks kSumClocks. Fitted on an H200.
int SplitsOfSteps(int64_t tiles, int64_t steps) {
  constexpr int64_t kStepClocks = 1152, kItemClocks = 5000, kSumClocks = 700;
  constexpr int64_t kMultiprocessors = 132, kChunks = 8;
  int best = 1;
  int64_t least = INT64_MAX;
  for (int splits = 1; splits <= 64 && splits <= steps; ++splits) {
    const int64_t items = CountOf(tiles * splits * kChunks, kMultiprocessors);  // of a CTA
    const int64_t clocks =
        items * (CountOf(steps, splits) * kStepClocks + kItemClocks) + tiles * splits * kSumClocks;
    if (clocks < least) least = clocks, best = splits;
  }
  return best;
}

template <bool kWindow>
Plan PlanOf(const WeightGradientLaunch& launch) {
  using T = Tile<kWindow>;
  Plan plan;
  plan.output_tiles = CountOf(launch.outputs, T::kOutputs);
  plan.channel_tiles = CountOf(launch.channels, T::kChannels);
  const int64_t images = launch.images / launch.chunks;
  if (kWindow) {
    if (launch.height <= kEdge / 2 && images % 2 == 0) plan.images_at_once = 2;
    plan.steps = images / plan.images_at_once *
                 CountOf(launch.height, kEdge / plan.images_at_once) * CountOf(launch.width, kEdge);
  } else {
    plan.steps = CountOf(images * launch.height * launch.width, kStep);
  }
  plan.splits = SplitsOfSteps(plan.tiles(), plan.steps);
  plan.parts = launch.chunks * plan.splits;
  return plan;
}
Plan PlanOf(const WeightGradientLaunch& launch) {
  return launch.taps == kTaps ? PlanOf<true>(launch) : PlanOf<false>(launch);
}

template <bool kWindow>
cudaError_t ParamsOf(const WeightGradientLaunch& launch, const Plan& plan, float* bias_sums,
                     Params* to) {
  Params& params = *to;
  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  CUresult encoded[2];
  if (kWindow) {
    const int images = plan.images_at_once, height = kEdge / images;
    encoded[0] = Encode(&params.dout, launch.dout, launch.outputs, launch.width, launch.height,
                        launch.images, kEdge, height, images);
    encoded[1] = Encode(&params.x, launch.x, launch.channels, launch.width, launch.height,
                        launch.images, kPitch, height + 2, images);
  } else {
    const int64_t lines = launch.images / launch.chunks * launch.height * launch.width;
    encoded[0] =
        Encode(&params.dout, launch.dout, launch.outputs, lines, launch.chunks, 1, kStep, 1, 1);
    encoded[1] = Encode(&params.x, launch.x, launch.channels, lines, launch.chunks, 1, kStep, 1, 1);
  }
  for (CUresult result : encoded) {
    if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  }
  if (plan.parts * plan.tiles() > INT32_MAX ||
      launch.images * launch.height * launch.width > INT32_MAX)
    return cudaErrorInvalidValue;
  params.channel_tiles = FastDivmod(static_cast<int>(plan.channel_tiles));
  params.splits = FastDivmod(plan.splits);
  params.output_tiles = static_cast<int>(plan.output_tiles);
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

template <bool kWindow, int kSplits>
auto SumKernelFor(int64_t chunks) {
  return chunks >= 8   ? SumPartsKernel<kWindow, 8, kSplits>
         : chunks == 4 ? SumPartsKernel<kWindow, 4, kSplits>
         : chunks == 2 ? SumPartsKernel<kWindow, 2, kSplits>
                       : SumPartsKernel<kWindow, 1, kSplits>;
}

template <bool kWindow>
cudaError_t LaunchTiles(const WeightGradientLaunch& launch, const Plan& plan, const Queue& queue) {
  using T = Tile<kWindow>;
  float* const bias_sums = launch.bias == nullptr ? nullptr : launch.partial + plan.sums();
  Params params;
  if (cudaError_t error = ParamsOf<kWindow>(launch, plan, bias_sums, &params);
      error != cudaSuccess) {
    return error;
  }
  PartSums sums;
  sums.sums = params.sums, sums.bias_sums = bias_sums;
  sums.chunks = static_cast<int>(launch.chunks), sums.splits = plan.splits;
  sums.output_tiles = params.output_tiles, sums.channel_tiles = params.channel_tiles;
  sums.outputs = launch.outputs, sums.channels = launch.channels;
  sums.out = launch.out, sums.bias = launch.bias;
  const auto kernel = WeightGradientKernel<kWindow>;
  const auto sum_kernel = plan.splits > 2 ? SumKernelFor<kWindow, 4>(launch.chunks)
                                          : SumKernelFor<kWindow, 1>(launch.chunks);
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes);
  for (int64_t first = 0; first < plan.tiles() && error == cudaSuccess;
       first += plan.launch_tiles()) {
    const int64_t tiles = std::min(plan.launch_tiles(), plan.tiles() - first);
    params.work = static_cast<int>(plan.parts * tiles);
    params.first_tile = sums.first_tile = static_cast<int>(first);
    params.tiles = sums.tiles = FastDivmod(static_cast<int>(tiles));
    error = LaunchDependent(
        kernel,
        {.grid = static_cast<unsigned>(std::min(params.work, queue.multiprocessors)),
         .block = kThreads,
         .shared_bytes = T::kSharedBytes},
        queue, params);
    if (error != cudaSuccess) break;
    error = LaunchDependent(
        sum_kernel,
        {.grid = static_cast<unsigned>(tiles * kOctets * kSumWarps), .block = kSumThreads}, queue,
        sums);
  }
  return error;
}

}  // namespace

int64_t WeightGradientPartials(const WeightGradientLaunch& launch) {
  const Plan plan = PlanOf(launch);
  const int outputs = launch.taps == kTaps ? Tile<true>::kOutputs : Tile<false>::kOutputs;
  return plan.sums() + plan.parts * plan.output_tiles * outputs;
}

cudaError_t LaunchWeightGradient(const WeightGradientLaunch& launch, const Queue& queue) {
  const Plan plan = PlanOf(launch);
  return launch.taps == kTaps ? LaunchTiles<true>(launch, plan, queue)
                              : LaunchTiles<false>(launch, plan, queue);
}

}  // namespace denoised::training::cuda
