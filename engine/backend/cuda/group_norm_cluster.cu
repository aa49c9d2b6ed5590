// SPDX-License-Identifier: Apache-2.0
// Group normalisation in one pass over memory.
//
// Policy. The channels of an image are divided into slices of whole groups, and the pixels of a
// slice among CTAs. A thread keeps eight channels of up to eight pixels in registers from the sums
// until the store, so memory is read and written once. The CTAs of a slice form a cluster and
// exchange their sums through distributed shared memory. Without clusters, a slice belongs to one
// CTA. Larger images: see group_norm.cu.

#include <algorithm>
#include <numeric>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/group_norm.cuh"
#include "engine/backend/cuda/hopper.cuh"

namespace denoised::cuda {
namespace {

constexpr int kMaxVectors = 8;                     // per thread
constexpr int kMaxThreads = 1024, kMaxLines = 64;  // lines: along a block's z
/// Blocks grow to this many. A slice of wide groups may need more: of 42 channels each, 672.
constexpr int kUsualThreads = 512;
constexpr int kSharedLimit = 48 * 1024;

__device__ inline bool HasClusters() {
#if __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}

/// How an image maps to blocks.
struct Plan {
  int group_channels = 0;
  int slice_groups = 0, slice_channels = 0, slices = 0;
  int line_vectors = 0;     // per slice: threads along channels
  int lines = 0;            // threads along pixels, apart from the four of a quad; a power of two
  int vectors = 0;          // per thread, one for each of its pixels
  int leaves = 0;           // per block: lines · vectors / kLeafVectors
  int blocks = 0;           // per slice
  float count_inverse = 0;  // 1 / elements of a group
  SumTree tree;
};

/// Offsets in a block's shared memory, in bytes.
struct Layout {
  const Plan& plan;
  int run;
  int leaf_stride = plan.slice_channels / run | 1;  // Sums of a leaf: odd, so that leaves lie in
                                                    // different banks
  int factors = 16;                                 // a barrier comes first
  int leaves = factors + plan.slice_channels * kAffineBytes;
  int of_blocks = leaves + plan.leaves * leaf_stride * kSumsBytes;
  int statistics = of_blocks + plan.blocks * plan.slice_groups * kSumsBytes;
  int bytes = statistics + plan.slice_channels / run * static_cast<int>(sizeof(Statistics));
};

/// Makes the compiler compute the pointer here, not at its use after the wait for predecessors: a
/// trap depends on it.
__device__ void Pin(const __nv_bfloat16*& pointer) {
  asm volatile("{\n.reg .pred null;\nsetp.eq.u64 null, %0, 0;\n@null trap;\n}" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
}

/// Normalises a thread's vectors. `factors`, `offsets` and `statistics` begin with its channels and
/// their runs.
template <int kVectors, int kRun, Element kOut, typename Activate>
__device__ void Normalise(const float* factors, const float* offsets, const Statistics* statistics,
                          Activate activate, float inverse, uint32_t (&kept)[kVectors][kWords]) {
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const Statistics of_group = statistics[2 * w / kRun];
    const float2 factor = *reinterpret_cast<const float2*>(factors + 2 * w);
    const float2 offset = *reinterpret_cast<const float2*>(offsets + 2 * w);
    const Affine low = Apply({factor.x, offset.x}, of_group);
    const Affine high = Apply({factor.y, offset.y}, of_group);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      kept[i][w] = NormaliseWord<kOut>(kept[i][w], low, high, activate, inverse);
  }
}
/// Stores the first `held` of a thread's vectors, which belong to every fourth pixel, starting at
/// `pixel` of the batch.
template <int kVectors, Element kOut>
__device__ void StoreVectors(const GroupNormLaunch& norm, int64_t pixel, int channel, int held,
                             const uint32_t (&kept)[kVectors][kWords]) {
  auto* const to = static_cast<__nv_bfloat16*>(norm.out.data) + pixel * norm.out.stride + channel;
  const int step = kQuad * static_cast<int>(norm.out.stride);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i >= held) break;
    if constexpr (kOut == Element::kE4m3x2) {
      StoreE4m3(norm.out, pixel + i * kQuad, channel, kept[i]);
    } else {
      *reinterpret_cast<uint4*>(to + i * step) =
          make_uint4(kept[i][0], kept[i][1], kept[i][2], kept[i][3]);
    }
  }
}

/// block (kQuad, plan.line_vectors, plan.lines); grid (plan.blocks: a cluster, slices, images).
/// kRun: aligned runs of this many channels belong to one group; it divides kVector and
/// plan.group_channels. kOut: of `out`, kBf16 or kE4m3x2.
template <int kVectors, int kRun, Element kOut>
__global__ void __launch_bounds__(kMaxThreads, 1)
    GroupNormClusterKernel(const __grid_constant__ GroupNormLaunch norm,
                           const __grid_constant__ Plan plan) {
  constexpr int kRuns = kVector / kRun;
  extern __shared__ __align__(16) unsigned char shared[];
  const Layout layout = {plan, kRun};
  auto* barrier = reinterpret_cast<uint64_t*>(shared);
  auto* factors = reinterpret_cast<float*>(shared + layout.factors);
  float* offsets = factors + plan.slice_channels;
  auto* leaves = reinterpret_cast<Sums*>(shared + layout.leaves);
  auto* of_blocks = reinterpret_cast<Sums*>(shared + layout.of_blocks);
  auto* statistics = reinterpret_cast<Statistics*>(shared + layout.statistics);  // by run

  ReleaseDependents();
  const unsigned line = threadIdx.z;
  const unsigned thread = threadIdx.x + kQuad * (threadIdx.y + plan.line_vectors * line);
  const unsigned threads = kQuad * plan.line_vectors * plan.lines;
  const unsigned warp = thread / 32, lane = thread % 32, warps = threads / 32;
  const bool cluster = HasClusters() && plan.blocks > 1;
  // In reverse order: the previous convolution left the last image in L2.
  const int rank = blockIdx.x, slice = blockIdx.y, image = gridDim.z - 1 - blockIdx.z;
  if (cluster) {
    if (thread == 0) {
      InitBarrier(barrier, 1);
      FenceBarrierInit();
    }
    ArriveAtClusterRelaxed();  // this CTA runs, so others may store into its shared memory
  }
  const int slice_begin = slice * plan.slice_channels, slice_channel = threadIdx.y * kVector;
  const int channel = slice_begin + slice_channel;
  const int begin = rank * plan.leaves * kLeafPixels + line * kVectors * kQuad + threadIdx.x;
  const int held = max(0, min(kVectors, (norm.pixels - begin + kQuad - 1) / kQuad));
  const int runs = plan.group_channels / kRun;  // per group

  // y = (x − mean) / deviation · factor + offset, which depend on parameters alone.
  const bool silu = norm.activation == Activation::kSilu;
  const float unit = silu ? 0.5f : 1.0f;  // SiluOfHalf
  for (int c = thread; c < plan.slice_channels; c += threads) {
    factors[c] = unit * norm.gamma[slice_begin + c];
    offsets[c] = unit * norm.beta[slice_begin + c];
  }

  const __nv_bfloat16* from = ChannelAt(norm, image, begin, channel);
  const int from_step =
      kQuad * static_cast<int>(channel < norm.channels ? norm.x.stride : norm.x2.stride);
  Pin(from);
  WaitForPredecessors();
  uint32_t kept[kVectors][kWords];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    Split(i < held ? *reinterpret_cast<const uint4*>(from + i * from_step) : make_uint4(0, 0, 0, 0),
          kept[i]);
  }
  if (norm.scale_shift.data != nullptr) {
    const auto* scales = static_cast<const __nv_bfloat16*>(norm.scale_shift.data) +
                         image * norm.scale_shift.stride + slice_begin;
    const __nv_bfloat16* shifts = scales + norm.channels + norm.channels2;
    for (int c = thread; c < plan.slice_channels; c += threads) {
      const float scale = 1.0f + __bfloat162float(scales[c]);
      factors[c] *= scale;
      offsets[c] = fmaf(offsets[c], scale, unit * __bfloat162float(shifts[c]));
    }
  }

#pragma unroll
  for (int leaf = 0; leaf < kVectors / kLeafVectors; ++leaf) {
    const int of_block = line * (kVectors / kLeafVectors) + leaf;
    SumLeaf<kRun>(kept + leaf * kLeafVectors, lane, [&](int r, const Sums& sums) {
      if (HoldsSums(lane)) {
        leaves[of_block * layout.leaf_stride + threadIdx.y * kRuns + r] = sums;
      }
    });
  }
  if (cluster) WaitForCluster();
  __syncthreads();
  if (cluster && thread == 0) {
    ArriveExpectTx(barrier, plan.blocks * plan.slice_groups * kSumsBytes);
  }

  const auto finish = [&](const Sums& sums, int group, int part, int parts) {
    const Statistics of_group = StatisticsOf(sums, plan.count_inverse, norm.eps);
    for (int r = part; r < runs; r += parts) statistics[group * runs + r] = of_group;
  };
  SumLeaves(plan.tree, leaves, layout.leaf_stride, runs, plan.slice_groups, warp, warps, lane,
            [&](const Sums& sums, int group, int part) {
              const int parts = 1 << plan.tree.leaf_bits;
              if (!cluster) return finish(sums, group, part, parts);
              for (int to = part; to < plan.blocks; to += parts) {
                StoreAsync(ClusterAddress(of_blocks + rank * plan.slice_groups + group, to),
                           ClusterAddress(barrier, to), sums.x, sums.squares);
              }
            });
  if (cluster) {
    WaitForStores(barrier, 0);
    SumBlocks(plan.tree, of_blocks, plan.blocks, plan.slice_groups, warp, warps, lane,
              [&](const Sums& sums, int group, int part) {
                finish(sums, group, part, 1 << plan.tree.block_bits);
              });
  }
  __syncthreads();

  if (norm.factors != nullptr) {
    const int64_t channels = norm.AllChannels();
    float* const to = norm.factors + image * 2 * channels + slice_begin;
    for (int c = thread; rank == 0 && c < plan.slice_channels; c += threads) {
      const Affine of_image = Apply({factors[c], offsets[c]}, statistics[c / kRun]);
      to[c] = of_image.factor;
      to[channels + c] = of_image.offset;
    }
    return;
  }
  // The activation is a template argument, so that the loops have no branches.
  const auto normalise = [&](auto activate) {
    Normalise<kVectors, kRun, kOut>(factors + slice_channel, offsets + slice_channel,
                                    statistics + threadIdx.y * kRuns, activate,
                                    1.0f / norm.out.scale, kept);
  };
  if (silu) {
    normalise([](float h) { return SiluOfHalf(h); });
  } else {
    normalise([](float y) { return y; });
  }
  StoreVectors<kVectors, kOut>(norm, static_cast<int64_t>(image) * norm.pixels + begin, channel,
                               held, kept);
}

auto* KernelOf(int vectors, int run, Element out) {
  return WithConstant<2, 4, kMaxVectors>(vectors, [&](auto vectors) {
    return WithConstant<2, 4, 8>(run, [&](auto run) {
      return out == Element::kE4m3x2 ? &GroupNormClusterKernel<vectors, run, Element::kE4m3x2>
                                     : &GroupNormClusterKernel<vectors, run, Element::kBf16>;
    });
  });
}

int Threads(const Plan& plan) { return kQuad * plan.line_vectors * plan.lines; }

Plan MakePlan(const NormLayer& norm, int slice_channels, int lines, int vectors) {
  const int channels = norm.AllChannels();
  Plan plan;
  plan.group_channels = norm.GroupChannels();
  plan.slice_channels = slice_channels;
  plan.slice_groups = slice_channels / plan.group_channels;
  plan.slices = channels / slice_channels;
  plan.line_vectors = slice_channels / kVector;
  plan.lines = lines;
  plan.vectors = vectors;
  plan.leaves = lines * vectors / kLeafVectors;
  const int pixels = plan.leaves * kLeafPixels;
  plan.blocks = (norm.pixels + pixels - 1) / pixels;
  plan.count_inverse = 1.0f / (static_cast<float>(norm.pixels) * plan.group_channels);
  plan.tree = MakeSumTree(plan.leaves, plan.blocks);
  return plan;
}

bool Possible(const Plan& plan, int max_blocks) {
  return Threads(plan) % 32 == 0 && Threads(plan) <= kMaxThreads && plan.lines <= kMaxLines &&
         plan.leaves <= kMaxLeaves && plan.blocks <= max_blocks &&
         Layout{plan, RunOf(plan.group_channels)}.bytes <= kSharedLimit;
}

/// The smallest number of channels, at least `least`, of whole vectors and groups, that divides all
/// channels evenly. `sectors`: also of whole sectors of memory (32 bytes) if that is possible.
int SliceChannels(const NormLayer& norm, int least, bool sectors) {
  const int channels = norm.AllChannels(), group_channels = norm.GroupChannels();
  int unit = std::lcm(group_channels, sectors ? 2 * kVector : kVector);
  if (channels % unit != 0) unit = std::lcm(group_channels, kVector);
  int slice = unit;
  while (slice < std::min(least, channels) || channels % slice != 0) slice += unit;
  return slice;
}

/// Blocks of about 128 threads, or larger ones if a cluster could not hold so many blocks.
Plan Fit(const NormLayer& norm, int least_channels, bool sectors, int vectors, int threads,
         int max_blocks) {
  const int slice_channels = SliceChannels(norm, least_channels, sectors);
  Plan plan = MakePlan(norm, slice_channels, 1, vectors);
  const auto grow_while = [&](auto wanted) {
    while (wanted() && 2 * plan.leaves <= kMaxLeaves) {
      plan = MakePlan(norm, slice_channels, 2 * plan.lines, vectors);
    }
  };
  grow_while([&] { return Threads(plan) % 32 != 0 || (Threads(plan) < 128 && plan.blocks > 1); });
  grow_while([&] { return plan.blocks > (max_blocks + 1) / 2 && 2 * Threads(plan) <= 256; });
  grow_while([&] { return plan.blocks > max_blocks && 2 * Threads(plan) <= threads; });
  return plan;
}

/// A plan with `vectors` per thread, or none (vectors == 0).
Plan FitCluster(const NormLayer& norm, int vectors) {
  const bool many = vectors == kMaxVectors;
  for (const Plan& plan : {Fit(norm, many ? 64 : 32, many, vectors, 288, kMaxCluster),
                           Fit(norm, 32, many, vectors, kUsualThreads, kMaxCluster),
                           Fit(norm, 32, false, vectors, kUsualThreads, kMaxCluster)}) {
    if (Possible(plan, kMaxCluster)) return plan;
  }
  return {};
}
/// The same with one block per slice, of `least_channels` or as many as fit.
Plan FitBlock(const NormLayer& norm, int vectors, int least_channels) {
  for (int least = least_channels; least >= kVector; least /= 2) {
    const Plan plan = Fit(norm, least, /*sectors=*/least > kVector, vectors, kUsualThreads, 1);
    if (Possible(plan, 1)) return plan;
  }
  return {};
}

/// The plan for batches that fill the device: eight vectors per thread and slices of 128 bytes move
/// the most. None (vectors == 0) if an image does not fit or has an odd number of channels per
/// group. This kernel then does not support the layer at all: every plan gives the same bits, but
/// another kernel does not.
Plan PlanOfMany(const NormLayer& norm, const Queue& queue) {
  if (!SuitsOnePass(norm)) return {};
  return queue.hopper ? FitCluster(norm, kMaxVectors) : FitBlock(norm, kMaxVectors, 64);
}

/// For few images, many threads that keep little are the fastest.
Plan PlanOf(const GroupNormLaunch& norm, const Queue& queue) {
  const Plan of_many = PlanOfMany(norm, queue);
  if (of_many.vectors == 0) return {};

  const int64_t vectors =
      int64_t{norm.images} * norm.pixels * (norm.AllChannels() / kVector) / queue.multiprocessors;
  const struct {
    int most, of_thread, least_channels;
  } preferences[] = {
      {512, 2, 16}, {queue.hopper ? 1500 : 2000, 2, 32}, {queue.hopper ? 3000 : 4000, 4, 64}};
  for (const auto& preference : preferences) {
    if (vectors > preference.most) continue;
    const Plan plan = queue.hopper
                          ? FitCluster(norm, preference.of_thread)
                          : FitBlock(norm, preference.of_thread, preference.least_channels);
    if (plan.vectors > 0) return plan;
  }
  return of_many;
}

}  // namespace

bool SuitsGroupNormCluster(const NormLayer& norm, const Queue& queue) {
  return PlanOfMany(norm, queue).vectors > 0;
}

cudaError_t LaunchGroupNormCluster(const GroupNormLaunch& norm, const Queue& queue) {
  const Plan plan = PlanOf(norm, queue);
  const int run = RunOf(plan.group_channels);
  const unsigned blocks = plan.blocks, slices = plan.slices, images = norm.images;
  return LaunchDependent(KernelOf(plan.vectors, run, norm.out.element),
                         {.grid = dim3(blocks, slices, images),
                          .block = dim3(kQuad, plan.line_vectors, plan.lines),
                          .shared_bytes = static_cast<size_t>(Layout{plan, run}.bytes),
                          .cluster = blocks},
                         queue, norm, plan);
}

cudaError_t LoadGroupNormClusterKernels(bool clusters) {
  for (int vectors : {2, 4, kMaxVectors}) {
    // Loads in flight occupy L1, so kernels that move much data leave it large. The others share a
    // multiprocessor with kernels that need a small L1, and changing its size takes time.
    const int bytes = vectors == kMaxVectors ? 0 : kSharedLimit;
    for (int run : {2, 4, 8}) {
      for (Element out : {Element::kBf16, Element::kE4m3x2}) {
        auto* const kernel = KernelOf(vectors, run, out);
        const cudaError_t error =
            clusters ? LoadClusterKernel(kernel, bytes) : LoadKernel(kernel, bytes);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace denoised::cuda
