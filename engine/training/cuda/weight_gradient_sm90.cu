// SPDX-License-Identifier: Apache-2.0
// Gradients of weights for Hopper, by TMA and wgmma: the product of dout and x over all pixels, or
// of dout and x at each tap of a 3×3 window. Both operands are MN-major in shared memory: a pixel
// is a row of 128 bytes, 64 channels.
//
// Policy. A CTA has a tile of the weight and one part of the pixels, which it reads 64 at a step.
// Three consumer warpgroups multiply [64 outputs, 192 columns] each; a producer warp loads.
//   Window: a tile is 64 outputs × 9 taps × 64 channels. A step covers 8×8 pixels, or 8×4 of two
//   images at most 4 pixels high. It reads dout there and x in a halo tile, which has one more
//   pixel on each side; beyond the image there are zeros. Each warpgroup has one row of the window
//   and reads the halo tile from its first, second or third line. The next tap of a row reads the
//   same lines one pixel later: its 64 columns are one row of 128 bytes away (the descriptor's
//   LBO). Lines: a tile is 192 outputs × 192 channels.
// A halo tile is loaded once for nine taps and 64 outputs, so loads are not the bottleneck.
//
// Sums. The parts are the leaves of a binary tree over the chunks. If there are too few tiles to
// fill the GPU, each chunk is split into a power of two of parts. The CTAs of a cluster have
// neighbouring leaves. Each CTA owns a share of the columns: the others send it theirs by st.async,
// and it adds them in the order of the tree and writes the result. LaunchTreeSum adds the sums of
// the clusters. So the bits depend on the tree alone.

#include <algorithm>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/fast_divmod.h"
#include "engine/backend/cuda/hopper.cuh"
#include "engine/backend/cuda/tensor_map.h"
#include "engine/training/cuda/launch.h"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kGroups = 3, kConsumers = 128 * kGroups, kThreads = kConsumers + 128;
constexpr int kConsumerRegisters = 160, kProducerRegisters = 32;
constexpr int kLine = 64, kLineBytes = kLine * 2;  // channels: the widest swizzle
constexpr int kStep = 64;                          // pixels
constexpr int kBlockBytes = kStep * kLineBytes;
constexpr int kColumns = 192, kBlocks = kColumns / kLine, kOctets = kLine / 8;
constexpr int kSums = kColumns / 2;  // per thread
constexpr int kEdge = 8, kPitch = kEdge + 2, kTaps = 9;
constexpr int kMaxCluster = 8;
constexpr int kVectorsReceived = kBlocks * kOctets;  // per thread, from all CTAs together
constexpr int kReceivedBytes = kVectorsReceived * kConsumers * 16;
// A line of the result in shared memory: 8 channels × 9 taps.
constexpr int kResultLine = 8 * kTaps, kResultPitch = kResultLine + 4;

template <bool kWindow>
struct Tile {
  static constexpr int kOutputs = kWindow ? kLine : kGroups * kLine;
  static constexpr int kChannels = kWindow ? kLine : kColumns;
  static constexpr int kOutputBytes = kOutputs / kLine * kBlockBytes;
  // Halo tiles have up to 2 · 6 · kPitch pixels.
  static constexpr int kStageBytes = kOutputBytes + (kWindow ? 15 * 1024 : kBlocks * kBlockBytes);
  static constexpr int kStages = kWindow ? 8 : 4;
  static constexpr int kBarriers = 2 * kStages + 1;
  // The operands of a window overlap. compute-sanitizer takes each for 6 KB without gaps. In the
  // last lines of the last stage, they would end 3.5 KB behind it, so the ring is longer.
  static constexpr int kRingBytes = kStages * kStageBytes + (kWindow ? 4096 : 0);
  static constexpr int kSharedBytes = kRingBytes + kBarriers * 8;
  static_assert(kStageBytes % 1024 == 0 && kSharedBytes <= 232448);
  // Received sums and the result's layout reuse the memory of the stages.
  static_assert(kReceivedBytes + (kWindow ? kLine * kResultPitch * 4 : 0) <= kStages * kStageBytes);
};

struct Params {
  CUtensorMap dout, x;
  int outputs = 0, channels = 0;  // of the result
  FastDivmod tiles, channel_tiles, splits;
  int log_cluster = 0;
  int steps = 0;  // per chunk
  // With a window:
  FastDivmod steps_x, steps_y;         // per image
  int images_at_once = 1, images = 0;  // per step; per chunk
  float* out = nullptr;
  int64_t out_stride = 0;  // elements from one cluster's sum to the next
};

/// What this CTA computes.
struct Part {
  int group, output, channel, chunk, begin, end;  // [begin, end): steps of the chunk
};
template <bool kWindow>
__device__ inline Part PartOf(const Params& params) {
  using T = Tile<kWindow>;
  const int cluster = static_cast<int>(blockIdx.x) >> params.log_cluster;
  const int tile = cluster % params.tiles;
  Part part;
  part.group = cluster / params.tiles;
  part.output = tile / params.channel_tiles * T::kOutputs;
  part.channel = tile % params.channel_tiles * T::kChannels;
  const int leaf = (part.group << params.log_cluster) + static_cast<int>(ClusterRank());
  part.chunk = leaf / params.splits;
  const int64_t split = leaf % params.splits, steps = params.steps;
  part.begin = static_cast<int>(steps * split / params.splits.value);
  part.end = static_cast<int>(steps * (split + 1) / params.splits.value);
  return part;
}

/// The columns of the three taps of a window's row: MN-major like TransposedDescriptor(), but lines
/// of 8 pixels are kPitch pixels apart, and each 64 columns are one pixel from the next 64.
__device__ inline uint64_t TapsDescriptor(const void* halo_tile) {
  constexpr uint64_t kLines = uint64_t{kPitch * kLineBytes - 1024} >> 4;
  return TransposedDescriptor(halo_tile, kLineBytes) + (kLines << 32);
}

__device__ inline float4 operator+(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
/// Sum of kCount vectors, `stride` apart, as a balanced tree.
template <int kCount>
__device__ inline float4 SumVectors(const float4* from, int stride) {
  if constexpr (kCount == 1) {
    return *from;
  } else {
    return SumVectors<kCount / 2>(from, stride) +
           SumVectors<kCount / 2>(from + kCount / 2 * stride, stride);
  }
}

template <bool kWindow>
__global__ void __launch_bounds__(kThreads, 1)
    WeightGradientKernel(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using T = Tile<kWindow>;
  extern __shared__ __align__(1024) unsigned char ring[];  // the swizzle's alignment
  uint64_t* const full = reinterpret_cast<uint64_t*>(ring + T::kRingBytes);
  uint64_t* const empty = full + T::kStages;
  uint64_t* const received = empty + T::kStages;
  // The shuffle tells the compiler that `warp` is uniform: descriptors live in uniform registers.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), group = warp / 4;
  const Part part = PartOf<kWindow>(params);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < T::kStages; ++stage) {
      InitBarrier(&full[stage], 1);
      InitBarrier(&empty[stage], kGroups);
    }
    InitBarrier(received, 1);
    FenceBarrierInit();
    ArriveExpectTx(received, kReceivedBytes);
  }
  __syncthreads();

  PipelineState<T::kStages> state;

  if (group == kGroups) {
    DecreaseRegisters<kProducerRegisters>();
    if (warp == kGroups * 4 && ElectOne()) {
      PrefetchTensorMap(&params.dout);
      PrefetchTensorMap(&params.x);
#pragma unroll 1
      for (int step = part.begin; step < part.end; ++step) {
        unsigned char* const outputs = ring + state.stage * T::kStageBytes;
        unsigned char* const channels = outputs + T::kOutputBytes;
        uint64_t* const barrier = &full[state.stage];
        Wait(&empty[state.stage], state.EmptyParity());
        if constexpr (kWindow) {
          const int height = kEdge / params.images_at_once;  // of the step
          ArriveExpectTx(barrier, T::kOutputBytes +
                                      params.images_at_once * kPitch * (height + 2) * kLineBytes);
          const int line = step / params.steps_x;
          const int x = step % params.steps_x * kEdge, y = line % params.steps_y * height;
          const int image =
              part.chunk * params.images + line / params.steps_y * params.images_at_once;
          TmaLoad(outputs, &params.dout, barrier, part.output, x, y, image);
          TmaLoad(channels, &params.x, barrier, part.channel, x - 1, y - 1, image);
        } else {
          ArriveExpectTx(barrier, T::kStageBytes);
          const auto load = [&](unsigned char* to, const CUtensorMap* map, int first) {
            for (int i = 0; i < kBlocks; ++i)
              TmaLoad(to + i * kBlockBytes, map, barrier, first + i * kLine, step * kStep,
                      part.chunk, 0);
          };
          load(outputs, &params.dout, part.output);
          load(channels, &params.x, part.channel);
        }
        state.Advance();
      }
    }
    if (params.log_cluster > 0) {
      ArriveAtCluster();
      WaitForCluster();
    }
    return;
  }

  IncreaseRegisters<kConsumerRegisters>();
  const bool signals = threadIdx.x % 128 == 0;
  const int lines_gap =  // the halo between the lines of two images
      params.images_at_once == 1 ? 0 : 2 * kPitch * (kLineBytes >> 4);
  float sums[kSums];
  AnyAccumulators(sums);
  int last = 0;  // the previous stage
#pragma unroll 1
  for (int step = part.begin; step < part.end; ++step) {
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
      const int at = kWindow
                         ? lines * kPitch * (kLineBytes >> 4) + (lines < kEdge / 2 ? 0 : lines_gap)
                         : k * (kLineBytes >> 4);
      WgmmaTransposed(sums, a + k * (kLineBytes >> 4), b + at, k > 0 || step > part.begin);
    }
    WgmmaCommit();
    WgmmaWait<1>();  // for the previous step
    if (signals && step > part.begin) Arrive(&empty[last]);
    last = state.stage;
    state.Advance();
  }
  WgmmaWait<0>();
  HoldRegisters(sums);

  // The CTA adds `mine` of the eight octets of columns of each block of 64. A single CTA is
  // launched without a cluster, where st.async is an illegal instruction; its threads use plain
  // stores.
  const int thread = threadIdx.x, rank = static_cast<int>(ClusterRank());
  const int log_mine = 3 - params.log_cluster, mine = 1 << log_mine;
  auto* const vectors = reinterpret_cast<float4*>(ring);  // [CTA, octet, block, thread]
  const auto vector_of = [&](int octet, int block) {
    const float* v = sums + (block * kOctets + octet) * 4;
    return make_float4(v[0], v[1], v[2], v[3]);
  };
  if (params.log_cluster == 0) {
    NamedBarrierSync(1, kConsumers);  // all stages have been read
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        vectors[(octet * kBlocks + block) * kConsumers + thread] = vector_of(octet, block);
    }
  } else {
    ArriveAtCluster();
    WaitForCluster();  // likewise, in the whole cluster
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      const uint32_t owner = octet >> log_mine;
      const uint32_t to = ClusterAddress(
          vectors + ((rank << log_mine) + octet % mine) * kBlocks * kConsumers + thread, owner);
      const uint32_t barrier = ClusterAddress(received, owner);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        StoreAsync(to + block * kConsumers * 16, barrier, vector_of(octet, block));
    }
    WaitForStores(received, 0);
  }

  float* const out = params.out + part.group * params.out_stride;
  float* const results = reinterpret_cast<float*>(ring + kReceivedBytes);
  const int row = warp % 4 * 16 + thread % 32 / 4;  // and row + 8
  const int column = thread % 4 * 2;                // in an octet; and column + 1
#pragma unroll 1
  for (int octet = 0; octet < mine; ++octet) {
    const int channel = part.channel + (rank * mine + octet) * 8;
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      const float4* from = vectors + (octet * kBlocks + block) * kConsumers + thread;
      const int stride = mine * kBlocks * kConsumers;
      const float4 sum = params.log_cluster == 0   ? SumVectors<1>(from, stride)
                         : params.log_cluster == 1 ? SumVectors<2>(from, stride)
                         : params.log_cluster == 2 ? SumVectors<4>(from, stride)
                                                   : SumVectors<8>(from, stride);
      const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at_row = row + i / 2 * 8, at_column = column + i % 2;
        if constexpr (kWindow) {
          results[at_row * kResultPitch + at_column * kTaps + group * 3 + block] = v[i];
        } else {
          const int output = part.output + group * kLine + at_row;
          const int at = channel + block * kLine + at_column;
          if (output < params.outputs && at < params.channels)
            out[static_cast<int64_t>(output) * params.channels + at] = v[i];
        }
      }
    }
    if constexpr (kWindow) {
      NamedBarrierSync(1, kConsumers);
      for (int i = thread; i < kLine * kResultLine; i += kConsumers) {
        const int line = i / kResultLine, at = i % kResultLine;
        const int output = part.output + line;
        if (output < params.outputs && channel + at / kTaps < params.channels)
          out[(static_cast<int64_t>(output) * params.channels + channel) * kTaps + at] =
              results[line * kResultPitch + at];
      }
      NamedBarrierSync(1, kConsumers);
    }
  }
#endif
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
  int64_t leaves;
  int log_cluster = 0;

  int64_t groups() const { return leaves >> log_cluster; }
};

/// Number of parts per chunk, a power of two, by estimated clocks. When a pass has eight chunks, a
/// GPU holds 16 clusters of 8 at a time (a wave). A step takes kStepClocks at the tensor cores'
/// rate, a CTA kPartClocks besides, and the partial sums of a tile kSumClocks of memory bandwidth.
int SplitsOfSteps(int64_t tiles, int64_t steps) {
  constexpr int64_t kStepClocks = 1152, kPartClocks = 12'000, kSumClocks = 170;
  int best = 1;
  int64_t least = INT64_MAX;
  for (int splits = 1; splits <= 64 && splits <= steps; splits *= 2) {
    const int64_t waves = CountOf(tiles * splits, 16);
    const int64_t clocks = waves * (CountOf(steps, splits) * kStepClocks + kPartClocks) +
                           (splits > 1 ? tiles * splits * kSumClocks : 0);
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
  plan.splits = SplitsOfSteps(plan.output_tiles * plan.channel_tiles, plan.steps);
  plan.leaves = launch.chunks * plan.splits;
  while (1 << plan.log_cluster < kMaxCluster && plan.leaves >> (plan.log_cluster + 1) > 0)
    ++plan.log_cluster;
  return plan;
}
Plan PlanOf(const WeightGradientLaunch& launch) {
  return launch.taps == kTaps ? PlanOf<true>(launch) : PlanOf<false>(launch);
}

template <bool kWindow>
cudaError_t LaunchTiles(const WeightGradientLaunch& launch, const Plan& plan, float* out,
                        cudaStream_t stream) {
  using T = Tile<kWindow>;
  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  Params params;
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
  const int64_t tiles = plan.output_tiles * plan.channel_tiles;
  const int64_t blocks = tiles * plan.leaves;
  if (blocks > INT32_MAX || launch.images * launch.height * launch.width > INT32_MAX)
    return cudaErrorInvalidValue;
  params.outputs = launch.outputs, params.channels = launch.channels;
  params.tiles = FastDivmod(static_cast<int>(tiles));
  params.channel_tiles = FastDivmod(static_cast<int>(plan.channel_tiles));
  params.splits = FastDivmod(plan.splits);
  params.log_cluster = plan.log_cluster;
  params.steps = static_cast<int>(plan.steps);
  params.steps_x = FastDivmod(static_cast<int>(CountOf(launch.width, kEdge)));
  params.steps_y =
      FastDivmod(static_cast<int>(CountOf(launch.height, kEdge / plan.images_at_once)));
  params.images_at_once = plan.images_at_once;
  params.images = static_cast<int>(launch.images / launch.chunks);
  params.out = out;
  params.out_stride = int64_t{launch.outputs} * launch.channels * launch.taps;
  const auto kernel = WeightGradientKernel<kWindow>;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               T::kSharedBytes);
      error != cudaSuccess) {
    return error;
  }
  return LaunchDependent(kernel,
                         {.grid = static_cast<unsigned>(blocks),
                          .block = kThreads,
                          .shared_bytes = T::kSharedBytes,
                          .cluster = 1u << plan.log_cluster},
                         Queue{.stream = stream}, params);
}

}  // namespace

int64_t WeightGradientPartials(const WeightGradientLaunch& launch) {
  const int64_t groups = PlanOf(launch).groups();
  return groups == 1 ? 0 : groups * launch.outputs * launch.channels * launch.taps;
}

cudaError_t LaunchWeightGradient(const WeightGradientLaunch& launch, cudaStream_t stream) {
  const Plan plan = PlanOf(launch);
  float* const out = plan.groups() == 1 ? launch.out : launch.partial;
  if (cudaError_t error = launch.taps == kTaps ? LaunchTiles<true>(launch, plan, out, stream)
                                               : LaunchTiles<false>(launch, plan, out, stream);
      error != cudaSuccess || plan.groups() == 1) {
    return error;
  }
  const int64_t count = int64_t{launch.outputs} * launch.channels * launch.taps;
  return LaunchTreeSum({.in = launch.partial,
                        .in_stride = count,
                        .chunks = plan.groups(),
                        .count = count,
                        .out = launch.out},
                       stream);
}

}  // namespace denoised::training::cuda
