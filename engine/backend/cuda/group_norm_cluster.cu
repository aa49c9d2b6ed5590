// Group normalisation in one pass over memory, for chips with clusters of blocks (sm_90 and later).
//
// Policy. The channels of an image are cut into slices of whole groups, and the pixels of a slice
// among the blocks of a cluster, both by the image's shape alone. A thread keeps eight channels of
// up to kMaxVectors pixels in registers, as they came from memory, from the sums until the store.
// Of each group it makes the mean and the sum of squared deviations from that mean (M2); a warp
// combines the threads of a block, and every block the blocks of its cluster, through shared memory
// and in order, by M2 = Σ M2ᵢ + nᵢ (meanᵢ − mean)² (Chan, Golub, LeVeque 1979). So a mean that is
// large against the spread cancels before anything is squared.

#include <cooperative_groups.h>

#include <algorithm>
#include <numeric>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"

namespace denoised::cuda {
namespace {

constexpr int kVector = 8;  // channels in 16 bytes
constexpr int kMaxThreads = 1024;
constexpr int kSharedLimit = 64 * 1024;

/// How an image lies over blocks.
struct Plan {
  int group_channels = 0;
  int slice_groups = 0, slice_channels = 0;
  int line_vectors = 0;  // threads along the channels of a slice
  int lines = 0;         // and along pixels; together whole warps
  int vectors = 0;       // that a thread keeps: its pixels
  int blocks = 0;        // of a slice: the cluster
  int pixels = 0;        // of a block; the last one may have fewer
};

/// Mean and sum of squared deviations from it.
struct Moments {
  float mean, m2;
};

/// The pieces of a block's shared memory, in bytes from its beginning.
struct Layout {
  int line_stride;  // Moments of a line of threads: odd, so that lines lie in different banks
  int blocks, factors, bytes;

  __host__ __device__ Layout(const Plan& plan, int run)
      : line_stride(plan.slice_channels / run | 1),
        blocks(plan.lines * line_stride * static_cast<int>(sizeof(Moments))),
        factors(
            (blocks + plan.blocks * plan.slice_groups * static_cast<int>(sizeof(Moments)) + 15) /
            16 * 16),
        bytes(factors + 2 * plan.slice_channels * static_cast<int>(sizeof(float))) {}
};

/// The two channels of a word: bf16 is the upper half of an fp32.
__device__ float Low(uint32_t word) { return __uint_as_float(word << 16); }
__device__ float High(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

/// grid (plan.blocks: a cluster, slices, images), block (plan.line_vectors, plan.lines). kRun:
/// neighbouring channels that are of one group wherever in a vector they begin; it divides kVector
/// and plan.group_channels.
template <int kVectors, int kRun>
__global__ void __launch_bounds__(kMaxThreads, 1)
    GroupNormClusterKernel(const __grid_constant__ GroupNormLaunch norm,
                           const __grid_constant__ Plan plan) {
#if __CUDA_ARCH__ >= 900
  constexpr int kWords = kVector / 2, kRunWords = kRun / 2;
  extern __shared__ __align__(16) unsigned char shared[];
  const auto cluster = cooperative_groups::this_cluster();
  const bool alone = plan.blocks == 1;
  if (!alone) cluster.barrier_arrive();  // "I am running": others may write to my shared memory

  const Layout layout(plan, kRun);
  auto* parts = reinterpret_cast<Moments*>(shared);
  auto* of_blocks = reinterpret_cast<Moments*>(shared + layout.blocks);
  auto* factors = reinterpret_cast<float*>(shared + layout.factors);
  float* offsets = factors + plan.slice_channels;

  const int thread = threadIdx.y * plan.line_vectors + threadIdx.x;
  const int threads = plan.line_vectors * plan.lines;
  const int rank = blockIdx.x, image = blockIdx.z;
  const int line = threadIdx.y, slice_channel = threadIdx.x * kVector;
  const int slice_begin = blockIdx.y * plan.slice_channels;
  const int begin = rank * plan.pixels, count = min(plan.pixels, norm.pixels - begin);
  // A line of threads has the pixels line, line + lines, …
  const int least = count / plan.lines, more = count % plan.lines;
  const auto pixels_of = [&](int of_line) { return least + (of_line < more ? 1 : 0); };
  const int held = pixels_of(line);

  // y = (x − mean) / deviation · factor + offset, first of parameters alone.
  for (int c = thread; c < plan.slice_channels; c += threads) {
    factors[c] = norm.gamma[slice_begin + c];
    offsets[c] = norm.beta[slice_begin + c];
  }

  WaitForPredecessors();
  const int channel = slice_begin + slice_channel;
  const bool first_source = channel < norm.channels;
  const Rows& source = first_source ? norm.x : norm.x2;
  const int64_t first_pixel = static_cast<int64_t>(image) * norm.pixels + begin + line;
  const auto* from = static_cast<const __nv_bfloat16*>(source.data) + first_pixel * source.stride +
                     (first_source ? channel : channel - norm.channels);
  const int from_step = plan.lines * static_cast<int>(source.stride);
  uint32_t kept[kVectors][kWords];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint4 vector =
        i < held ? *reinterpret_cast<const uint4*>(from + i * from_step) : make_uint4(0, 0, 0, 0);
    kept[i][0] = vector.x, kept[i][1] = vector.y, kept[i][2] = vector.z, kept[i][3] = vector.w;
  }
  if (norm.scale_shift.data != nullptr) {
    for (int c = thread; c < plan.slice_channels; c += threads) {
      const float scale = 1.0f + Load(norm.scale_shift, image, slice_begin + c);
      factors[c] *= scale;
      offsets[c] =
          fmaf(offsets[c], scale,
               Load(norm.scale_shift, image, norm.channels + norm.channels2 + slice_begin + c));
    }
  }
  ReleaseDependents();

  const float held_inverse = __fdividef(1.0f, static_cast<float>(max(held, 1) * kRun));
#pragma unroll
  for (int run = 0; run < kVector / kRun; ++run) {
    float mean = 0, m2 = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {  // what is not held adds zero
#pragma unroll
      for (int w = run * kRunWords; w < (run + 1) * kRunWords; ++w) {
        mean += Low(kept[i][w]) + High(kept[i][w]);
      }
    }
    mean *= held_inverse;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i >= held) break;
#pragma unroll
      for (int w = run * kRunWords; w < (run + 1) * kRunWords; ++w) {
        const float low = Low(kept[i][w]) - mean, high = High(kept[i][w]) - mean;
        m2 = fmaf(low, low, fmaf(high, high, m2));
      }
    }
    parts[line * layout.line_stride + threadIdx.x * (kVector / kRun) + run] = {mean, m2};
  }
  __syncthreads();

  // The block's moments of a group, to every block of the cluster.
  const int group_runs = plan.group_channels / kRun, lane = thread % 32;
  const float count_inverse = __fdividef(1.0f, static_cast<float>(count * group_runs));
  if (!alone) cluster.barrier_wait();
#pragma unroll 1
  for (int group = thread / 32; group < plan.slice_groups; group += threads / 32) {
    float sum = 0, m2 = 0;
#pragma unroll 1
    for (int l = lane; l < plan.lines; l += 32) {
      const auto weight = static_cast<float>(pixels_of(l));
      const Moments* of_line = parts + l * layout.line_stride + group * group_runs;
#pragma unroll 4
      for (int r = 0; r < group_runs; ++r) sum = fmaf(weight, of_line[r].mean, sum);
    }
    const float mean = WarpSum(sum) * count_inverse;
#pragma unroll 1
    for (int l = lane; l < plan.lines; l += 32) {
      const auto weight = static_cast<float>(pixels_of(l) * kRun);
      const Moments* of_line = parts + l * layout.line_stride + group * group_runs;
#pragma unroll 4
      for (int r = 0; r < group_runs; ++r) {
        const float deviation = of_line[r].mean - mean;
        m2 += fmaf(weight * deviation, deviation, of_line[r].m2);
      }
    }
    m2 = WarpSum(m2);
    if (lane < plan.blocks) {
      Moments* mine = of_blocks + rank * plan.slice_groups + group;
      *(alone ? mine : cluster.map_shared_rank(mine, lane)) = {mean, m2};
    }
  }
  if (alone) {
    __syncthreads();
  } else {
    cluster.sync();
  }

  const float pixels_inverse = __fdividef(1.0f, static_cast<float>(norm.pixels));
  for (int c = thread; c < plan.slice_channels; c += threads) {
    const Moments* of_group = of_blocks + c / plan.group_channels;
    // Blocks weigh by their share of the pixels.
    const float share = static_cast<float>(plan.pixels) * pixels_inverse;
    const float last_share = 1.0f - static_cast<float>(plan.blocks - 1) * share;
    const auto share_of = [&](int block) { return block < plan.blocks - 1 ? share : last_share; };
    float mean = 0, deviations = 0, variance = 0;
#pragma unroll 4
    for (int b = 0; b < plan.blocks; ++b) {
      mean = fmaf(share_of(b), of_group[b * plan.slice_groups].mean, mean);
    }
#pragma unroll 4
    for (int b = 0; b < plan.blocks; ++b) {
      const Moments& of_block = of_group[b * plan.slice_groups];
      const float deviation = of_block.mean - mean;
      variance = fmaf(share_of(b) * deviation, deviation, variance);
      deviations += of_block.m2;
    }
    variance += deviations * pixels_inverse / static_cast<float>(plan.group_channels);
    const float factor = factors[c] * rsqrtf(variance + norm.eps);
    const float offset = fmaf(-mean, factor, offsets[c]);
    if (norm.factors != nullptr) {
      if (rank != 0) continue;
      const int64_t channels = norm.channels + norm.channels2;
      float* const to = norm.factors + image * 2 * channels + slice_begin + c;
      to[0] = factor;
      to[channels] = offset;
      continue;
    }
    factors[c] = factor;  // y = x · factor + offset
    offsets[c] = offset;
  }
  if (norm.factors != nullptr) return;
  __syncthreads();

  // The activation known when compiled, so that the loops have no branches.
  const auto apply = [&](auto activate) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const float2 factor = *reinterpret_cast<const float2*>(factors + slice_channel + 2 * w);
      const float2 offset = *reinterpret_cast<const float2*>(offsets + slice_channel + 2 * w);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        kept[i][w] = PackBf16(activate(fmaf(Low(kept[i][w]), factor.x, offset.x)),
                              activate(fmaf(High(kept[i][w]), factor.y, offset.y)));
      }
    }
  };
  if (norm.activation == Activation::kSilu) {
    apply([](float y) { return Silu(y); });
  } else {
    apply([](float y) { return y; });
  }
  auto* to = static_cast<__nv_bfloat16*>(norm.out.data) + first_pixel * norm.out.stride + channel;
  const int to_step = plan.lines * static_cast<int>(norm.out.stride);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (i >= held) break;
    *reinterpret_cast<uint4*>(to + i * to_step) =
        make_uint4(kept[i][0], kept[i][1], kept[i][2], kept[i][3]);
  }
#endif
}

using Kernel = void(GroupNormLaunch, Plan);

template <int kVectors>
Kernel* KernelOf(int run) {
  switch (run) {
    case 2:
      return GroupNormClusterKernel<kVectors, 2>;
    case 4:
      return GroupNormClusterKernel<kVectors, 4>;
    case 8:
      return GroupNormClusterKernel<kVectors, 8>;
  }
  return nullptr;
}
/// Null when there is none.
Kernel* KernelOf(int vectors, int run) {
  switch (vectors) {
    case 1:
      return KernelOf<1>(run);
    case 2:
      return KernelOf<2>(run);
    case 4:
      return KernelOf<4>(run);
    case 8:
      return KernelOf<8>(run);
  }
  return nullptr;
}

Plan MakePlan(const GroupNormLaunch& norm, int slice_channels, int blocks, int vectors) {
  Plan plan;
  plan.group_channels = (norm.channels + norm.channels2) / norm.groups;
  plan.slice_channels = slice_channels;
  plan.slice_groups = slice_channels / plan.group_channels;
  plan.line_vectors = slice_channels / kVector;
  plan.vectors = vectors;
  plan.pixels = (norm.pixels + blocks - 1) / blocks;
  plan.blocks = (norm.pixels + plan.pixels - 1) / plan.pixels;
  const int whole = 32 / std::gcd(32, plan.line_vectors);
  plan.lines = ((plan.pixels + vectors - 1) / vectors + whole - 1) / whole * whole;
  return plan;
}

/// The fewest channels of whole vectors and groups that cut all of them evenly, from `least` on.
int SliceChannels(const GroupNormLaunch& norm, int least) {
  const int channels = norm.channels + norm.channels2;
  int slice = std::lcm(channels / norm.groups, kVector);
  const int unit = slice;
  while (slice < least || channels % slice != 0) slice += unit;
  return slice;
}

/// By the shape of an image alone. None (no vectors) where it does not fit or has odd channels.
///
/// A piece of a pixel has 64 bytes where it can. One block of up to 288 threads that keep four
/// vectors each is a fair middle of what is soonest alone and of what moves most in a batch; larger
/// images get clusters, then eight vectors, then clusters of sixteen, then larger blocks.
Plan PlanOf(const GroupNormLaunch& norm) {
  const int channels = norm.channels + norm.channels2, group_channels = channels / norm.groups;
  const bool vector =
      norm.x.vector && norm.channels % kVector == 0 && norm.out.vector &&
      (norm.x2.data == nullptr || (norm.x2.vector && norm.channels2 % kVector == 0));
  if (!vector || norm.x.element != Element::kBf16 || norm.out.element != Element::kBf16 ||
      std::gcd(group_channels, kVector) < 2 ||
      (norm.activation != Activation::kNone && norm.activation != Activation::kSilu)) {
    return {};
  }
  for (int least_channels : {32, 16}) {
    const int slice_channels = SliceChannels(norm, std::min(least_channels, channels));
    const int64_t vectors_of_slice = int64_t{norm.pixels} * (slice_channels / kVector);
    int vectors = 1, blocks = 1;
    const auto threads = [&] { return vectors_of_slice / (vectors * blocks); };
    while (vectors < 4 && threads() > 64) vectors *= 2;
    while (blocks < 8 && threads() > 288) blocks *= 2;
    if (threads() > 288) vectors = 8;
    if (threads() > 512) blocks = 16;
    const Plan plan = MakePlan(norm, slice_channels, blocks, vectors);
    if (plan.line_vectors * plan.lines <= kMaxThreads) return plan;
  }
  return {};
}

cudaError_t LaunchPlan(const GroupNormLaunch& norm, const Plan& plan, const Queue& queue) {
  const int run = std::gcd(plan.group_channels, kVector);
  const Layout layout(plan, run);
  const unsigned blocks = plan.blocks;
  const unsigned slices = (norm.channels + norm.channels2) / plan.slice_channels;
  return LaunchDependent(KernelOf(plan.vectors, run),
                         {.grid = dim3(blocks, slices, norm.images),
                          .block = dim3(plan.line_vectors, plan.lines),
                          .shared_bytes = static_cast<size_t>(layout.bytes),
                          .cluster = blocks},
                         queue, norm, plan);
}

}  // namespace

bool SuitsGroupNormCluster(const GroupNormLaunch& norm) { return PlanOf(norm).vectors > 0; }

cudaError_t LaunchGroupNormCluster(const GroupNormLaunch& norm, const Queue& queue) {
  return LaunchPlan(norm, PlanOf(norm), queue);
}

cudaError_t LoadGroupNormClusterKernels() {
  for (int vectors : {1, 2, 4, 8}) {
    for (int run : {2, 4, 8}) {
      Kernel* kernel = KernelOf(vectors, run);
      if (cudaError_t error = LoadKernel(kernel, kSharedLimit); error != cudaSuccess) return error;
      if (cudaError_t error =
              cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
          error != cudaSuccess) {
        return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace denoised::cuda
