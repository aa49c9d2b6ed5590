// SPDX-License-Identifier: Apache-2.0
// Group normalisation with scale, shift and activation, over one source or two side by side.
//
// Policy. Two launches. GroupMoments: an image is divided into runs of pixels, by its size alone. A
// block reads one run of all channels, each thread a fixed set of channels, and writes the mean and
// the sum of squared deviations of every group. GroupApply: every block combines the runs of its
// image in order and normalises some pixels.
//
// For bf16 in vectors there is another pair: GroupFactors computes a factor and an offset for every
// channel. Each CTA sums a slice of groups of a part of an image, and the last CTA of a slice adds
// the parts in order. A convolution can then fuse the norm of its input; otherwise GroupScale
// applies the factors, with the same bits.
//
// Accuracy. Within a run, fp32 sums are of deviations from an element of the same group, so a mean
// that is large relative to the spread cancels before it is squared. Runs are combined by M2 = Σ
// M2ᵢ + nᵢ (meanᵢ − mean)² (Chan, Golub, LeVeque 1979), means in double.

#include <algorithm>
#include <numeric>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/e4m3.cuh"
#include "engine/backend/cuda/group_norm.cuh"

namespace denoised::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kChunks = 32;   // runs of pixels, at most
constexpr int kUnrolled = 4;  // pixels that a thread loads at once

/// Moments of one group over some pixels.
struct Moments {
  double mean;
  double m2;  // sum of squared deviations from the mean
};

/// How threads map to pixels × channels: `vectors` of V channels, by as many pixels as fit in the
/// block.
struct Layout {
  int channels, vectors, lines;
};
template <int V>
__host__ __device__ Layout LayoutOf(const GroupNormLaunch& norm) {
  const int channels = norm.AllChannels();
  const int vectors = channels / V;
  return {channels, vectors, vectors < kThreads ? kThreads / vectors : 1};
}

/// Both sources have the same element type.
template <int V, Element kElement>
__device__ void LoadSources(const GroupNormLaunch& norm, int64_t pixel, int channel,
                            float (&v)[V]) {
  const bool first = channel < norm.channels;
  LoadChannelsOf<V, kElement>(first ? norm.x : norm.x2, pixel,
                              first ? channel : channel - norm.channels, v);
}
template <Element kElement>
__device__ float LoadSource(const GroupNormLaunch& norm, int64_t pixel, int channel) {
  float v[1];
  LoadSources<1, kElement>(norm, pixel, channel, v);
  return v[0];
}

/// Adds value_of(i) over [0, count) by a warp, in an order that depends on `count` alone.
template <typename ValueOf>
__device__ float2 WarpAdd(int count, const ValueOf& value_of) {
  float2 total = {};
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const float2 value = value_of(i);
    total.x += value.x;
    total.y += value.y;
  }
  return make_float2(WarpSum(total.x), WarpSum(total.y));
}

/// grid (chunks, images); `chunk_moments` [images][chunks][groups]; shared [lines][channels] sums
/// of deviations and of their squares.
template <int V, Element kElement>
__global__ void __launch_bounds__(kThreads)
    GroupMomentsKernel(const __grid_constant__ GroupNormLaunch norm, int first_image,
                       int chunk_pixels, Moments* chunk_moments) {
  WaitForPredecessors();
  ReleaseDependents();
  extern __shared__ __align__(16) float2 sums[];
  const Layout layout = LayoutOf<V>(norm);
  const int group_channels = layout.channels / norm.groups;
  const int begin = blockIdx.x * chunk_pixels;
  const int count = min(chunk_pixels, norm.pixels - begin);
  const int64_t first = static_cast<int64_t>(first_image + blockIdx.y) * norm.pixels + begin;
  // The deviations' origin: the first channel of the group at the first pixel of the run.
  const auto origin_of = [&](int group) {
    return LoadSource<kElement>(norm, first, group * group_channels);
  };

  for (int i = threadIdx.x; i < layout.vectors * layout.lines; i += kThreads) {
    const int line = i / layout.vectors, channel = i % layout.vectors * V;
    float origin[V], sum[V] = {}, squares[V] = {};
#pragma unroll
    for (int j = 0; j < V; ++j) origin[j] = origin_of((channel + j) / group_channels);
#pragma unroll kUnrolled
    for (int pixel = line; pixel < count; pixel += layout.lines) {
      float v[V];
      LoadSources<V, kElement>(norm, first + pixel, channel, v);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float deviation = v[j] - origin[j];
        sum[j] += deviation;
        squares[j] = fmaf(deviation, deviation, squares[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sums[line * layout.channels + channel + j] = make_float2(sum[j], squares[j]);
    }
  }
  __syncthreads();

  const int lane = threadIdx.x % 32, parts = layout.lines * group_channels;
  for (int group = threadIdx.x / 32; group < norm.groups; group += kWarps) {
    const float2 total = WarpAdd(parts, [&](int i) {
      return sums[i / group_channels * layout.channels + group * group_channels +
                  i % group_channels];
    });
    if (lane == 0) {
      const double shift = total.x / (static_cast<double>(count) * group_channels);
      chunk_moments[(static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * norm.groups +
                    group] = {origin_of(group) + shift, total.y - shift * total.x};
    }
  }
}

struct ExactStatistics {
  float mean, mean_rest;  // the mean in two floats
  float inverse_deviation;
};

/// grid (blocks of `block_pixels`, images); shared [groups].
template <int V, Element kElement>
__global__ void __launch_bounds__(kThreads)
    GroupApplyKernel(const __grid_constant__ GroupNormLaunch norm, int first_image, int chunks,
                     int chunk_pixels, const Moments* chunk_moments, int block_pixels) {
  WaitForPredecessors();
  ReleaseDependents();
  extern __shared__ __align__(16) unsigned char shared[];
  ExactStatistics* statistics = reinterpret_cast<ExactStatistics*>(shared);
  const Layout layout = LayoutOf<V>(norm);
  const int group_channels = layout.channels / norm.groups;
  const int64_t image = first_image + blockIdx.y;

  static_assert(kChunks == 32, "a lane combines one chunk");
  const int lane = threadIdx.x % 32;
  const int pixels_of_lane =
      lane < chunks ? min(chunk_pixels, norm.pixels - lane * chunk_pixels) : 0;
  for (int group = threadIdx.x / 32; group < norm.groups; group += kWarps) {
    const Moments* of_image =
        chunk_moments + static_cast<int64_t>(blockIdx.y) * chunks * norm.groups;
    const double origin = of_image[group].mean;
    const Moments part = lane < chunks ? of_image[lane * norm.groups + group] : Moments{origin, 0};
    const float deviation = static_cast<float>(part.mean - origin);
    const float shift = WarpSum(pixels_of_lane * deviation) / norm.pixels;
    const float offset = deviation - shift;
    const float m2 = WarpSum(static_cast<float>(part.m2) +
                             static_cast<float>(pixels_of_lane) * group_channels * offset * offset);
    if (lane == 0) {
      const float variance = m2 / (static_cast<float>(norm.pixels) * group_channels);
      const double mean = origin + shift;
      const float rounded = static_cast<float>(mean);
      statistics[group] = {rounded, static_cast<float>(mean - rounded),
                           1.0f / sqrtf(variance + norm.eps)};
    }
  }
  __syncthreads();

  const int begin = blockIdx.x * block_pixels, end = min(begin + block_pixels, norm.pixels);
  for (int i = threadIdx.x; i < layout.vectors * layout.lines; i += kThreads) {
    const int line = i / layout.vectors, channel = i % layout.vectors * V;
    // y = (x − mean) · factor + offset
    float mean[V], factor[V], offset[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int c = channel + j;
      const ExactStatistics& s = statistics[c / group_channels];
      mean[j] = s.mean;
      factor[j] = s.inverse_deviation * norm.gamma[c];
      offset[j] = norm.beta[c] - s.mean_rest * factor[j];
      if (norm.scale_shift.data != nullptr) {
        const float scale = 1.0f + Load(norm.scale_shift, image, c);
        factor[j] *= scale;
        offset[j] = offset[j] * scale + Load(norm.scale_shift, image, layout.channels + c);
      }
    }
    float v[kUnrolled][V];
    ForPixels<kUnrolled>(
        begin + line, end, layout.lines,
        [&](int u, int pixel) {
          LoadSources<V, kElement>(norm, image * norm.pixels + pixel, channel, v[u]);
        },
        [&](int u, int pixel) {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            v[u][j] = Activate(norm.activation, fmaf(v[u][j] - mean[j], factor[j], offset[j]));
          }
          StoreChannels<V>(norm.out, image * norm.pixels + pixel, channel, v[u]);
        });
  }
}

template <int V, Element kElement>
cudaError_t Launch(const GroupNormLaunch& norm, const Queue& queue) {
  const Layout layout = LayoutOf<V>(norm);
  const int chunk_pixels =
      std::max(layout.lines * kUnrolled, (norm.pixels + kChunks - 1) / kChunks);
  const int chunks = (norm.pixels + chunk_pixels - 1) / chunk_pixels;
  // Each block combines the statistics again, so on large images it has more pixels.
  const int block_pixels = layout.lines * kUnrolled * (norm.pixels > 1024 ? 4 : 1);
  const int blocks = (norm.pixels + block_pixels - 1) / block_pixels;
  const size_t shared_bytes = sizeof(float2) * layout.lines * layout.channels;
  auto* chunk_moments = static_cast<Moments*>(norm.workspace);

  const size_t image_bytes = sizeof(Moments) * kChunks * norm.groups;
  return ForImages(norm.images, norm.workspace_bytes / image_bytes, [&](int first, int images) {
    const cudaError_t error = LaunchDependent(GroupMomentsKernel<V, kElement>,
                                              {dim3(chunks, images), kThreads, shared_bytes}, queue,
                                              norm, first, chunk_pixels, chunk_moments);
    if (error != cudaSuccess) return error;
    return LaunchDependent(GroupApplyKernel<V, kElement>,
                           {dim3(blocks, images), kThreads, sizeof(ExactStatistics) * norm.groups},
                           queue, norm, first, chunks, chunk_pixels, chunk_moments, block_pixels);
  });
}

constexpr int kMaxSliceVectors = 32;
constexpr int kMaxParts = 256;
constexpr int kGoodBytes = 32 * 1024, kGoodSliceChannels = 32;

/// How GroupFactors divides an image; depends on its shape alone. No channels: not supported.
struct Cut {
  int channels = 0, slices = 0;  // a slice: whole groups and whole vectors
  int pixels = 0, parts = 0;
};
/// Chosen so that each CTA reads enough bytes, in rows that are long enough.
Cut CutOf(const NormLayer& norm) {
  const int channels = norm.AllChannels(), group_channels = norm.GroupChannels();
  const int least = std::lcm(group_channels, 8);
  // A group with an odd number of channels has no whole pairs, which the kernel adds.
  if (group_channels % 2 != 0 || channels % least != 0 || least > 8 * kMaxSliceVectors) return {};
  const auto bytes = [&](int slice) { return int64_t{norm.pixels} * slice * 2; };
  int slice = least;
  for (int wider = least; wider <= std::min(channels, 8 * kMaxSliceVectors); wider += least) {
    if (channels % wider != 0) continue;
    if (bytes(slice) >= kGoodBytes && slice >= kGoodSliceChannels) break;
    slice = wider;
  }
  const int parts =
      static_cast<int>(std::min<int64_t>((bytes(slice) + kGoodBytes - 1) / kGoodBytes, kMaxParts));
  const int pixels = (norm.pixels + parts - 1) / parts;
  return {slice, channels / slice, pixels, (norm.pixels + pixels - 1) / pixels};
}

/// grid (slices, parts, images). kRun: aligned runs of this many channels belong to one group. Sums
/// are of x − pivot, an element of the group, so a mean that is large relative to the spread
/// cancels before it is squared. `part_sums`: [images][slices][parts][groups of a slice];
/// `parts_done`: [images][slices], zero before and after.
template <int kRun>
__global__ void __launch_bounds__(kThreads, 3)
    GroupFactorsKernel(const __grid_constant__ GroupNormLaunch norm, int first_image, Cut cut,
                       float2* part_sums, int* parts_done) {
  constexpr int V = 8, kRuns = V / kRun, kAtOnce = 8;  // vectors
  __shared__ float2 sums[kThreads * kRuns];            // [runs of a slice][lines]
  __shared__ float pivots[kMaxSliceVectors * kRuns];
  __shared__ float2 statistics[kMaxSliceVectors * kRuns];  // of groups: mean, 1 / deviation
  const int group_channels = norm.GroupChannels();
  const int vectors = cut.channels / V, lines = kThreads / vectors;
  const int groups = cut.channels / group_channels;
  // In reverse order: the previous convolution left the last image in L2.
  const int64_t image = first_image + gridDim.z - 1 - blockIdx.z;
  const int64_t first_pixel = image * norm.pixels;
  const int first_channel = blockIdx.x * cut.channels;
  const int begin = blockIdx.y * cut.pixels, end = min(begin + cut.pixels, norm.pixels);
  WaitForPredecessors();
  ReleaseDependents();

  static_assert(kThreads == 8 * kMaxSliceVectors);
  Affine affine = {};  // of this thread's channel, loaded early
  if (threadIdx.x < cut.channels) affine = AffineOf(norm, image, first_channel + threadIdx.x);
  const int vector = threadIdx.x % vectors, line = threadIdx.x / vectors;
  if (line < lines) {
    const int channel = first_channel + vector * V;
    const bool first = channel < norm.channels;
    const int64_t stride = first ? norm.x.stride : norm.x2.stride;
    const auto* from = static_cast<const __nv_bfloat16*>(first ? norm.x.data : norm.x2.data) +
                       first_pixel * stride + (first ? channel : channel - norm.channels);
    float pivot[kRuns], sum[kRuns] = {}, squares[kRuns] = {};
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const int first_of_group = (channel + r * kRun) / group_channels * group_channels;
      pivot[r] = LoadSource<Element::kBf16>(norm, first_pixel, first_of_group);
    }
    uint4 bits[kAtOnce];
    ForPixels<kAtOnce>(
        begin + line, end, lines,
        [&](int u, int p) { bits[u] = *reinterpret_cast<const uint4*>(from + p * stride); },
        [&](int u, int) {
          float v[V];
          UnpackBf16(bits[u], v);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            const float deviation = v[j] - pivot[j / kRun];
            sum[j / kRun] += deviation;
            squares[j / kRun] = fmaf(deviation, deviation, squares[j / kRun]);
          }
        });
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      sums[(vector * kRuns + r) * lines + line] = make_float2(sum[r], squares[r]);
      if (line == 0) pivots[vector * kRuns + r] = pivot[r];
    }
  }
  __syncthreads();

  const int lane = threadIdx.x % 32, group_runs = group_channels / kRun;
  const auto finish = [&](int group, const float2& total) {
    const float count = static_cast<float>(norm.pixels) * group_channels;
    const float shift = total.x / count;
    const float variance = fmaxf(0.0f, fmaf(-shift, total.x, total.y) / count);
    statistics[group] =
        make_float2(pivots[group * group_runs] + shift, rsqrtf(variance + norm.eps));
  };
  const int64_t slice = static_cast<int64_t>(blockIdx.z) * gridDim.x + blockIdx.x;
  float2* const of_slice = part_sums + slice * cut.parts * groups;
  for (int group = threadIdx.x / 32; group < groups; group += kWarps) {
    const int count = group_runs * lines;
    const float2 total = WarpAdd(count, [&](int i) { return sums[group * count + i]; });
    if (lane != 0) continue;
    if (cut.parts == 1) {
      finish(group, total);
    } else {
      __stcg(of_slice + blockIdx.y * groups + group, total);
    }
  }
  if (cut.parts > 1) {
    if (!IsLast(parts_done + slice, cut.parts)) return;
    for (int group = threadIdx.x / 32; group < groups; group += kWarps) {
      const float2 total =
          WarpAdd(cut.parts, [&](int i) { return __ldcg(of_slice + i * groups + group); });
      if (lane == 0) finish(group, total);
    }
  }
  __syncthreads();

  if (threadIdx.x < cut.channels) {
    const float2 of_group = statistics[threadIdx.x / group_channels];
    StoreFactors(norm, image, first_channel + threadIdx.x, affine, {of_group.x, of_group.y});
  }
}

constexpr int kScaleUnrolled = 8;

/// grid (blocks of pixels, images): bf16 in vectors of eight, activation none or SiLU. kOut: kBf16,
/// or kE4m3x2.
template <Element kOut>
__global__ void __launch_bounds__(kThreads, 2)
    GroupScaleKernel(const __grid_constant__ GroupNormLaunch norm, int block_pixels) {
  WaitForPredecessors();
  ReleaseDependents();
  constexpr int V = 8;
  const Layout layout = LayoutOf<V>(norm);
  const int64_t image = blockIdx.y;
  const int begin = blockIdx.x * block_pixels, end = min(begin + block_pixels, norm.pixels);
  const bool silu = norm.activation == Activation::kSilu;
  for (int i = threadIdx.x; i < layout.vectors * layout.lines; i += kThreads) {
    const int line = i / layout.vectors, channel = i % layout.vectors * V;
    const float* const from = norm.factors + image * 2 * layout.channels + channel;
    float factor[V], offset[V];
#pragma unroll
    for (int j = 0; j < V; ++j) factor[j] = from[j], offset[j] = from[layout.channels + j];
    const bool first = channel < norm.channels;
    const Rows& rows = first ? norm.x : norm.x2;
    const auto* x = static_cast<const __nv_bfloat16*>(rows.data) +
                    image * norm.pixels * rows.stride + (first ? channel : channel - norm.channels);
    uint4 bits[kScaleUnrolled];
    ForPixels<kScaleUnrolled>(
        begin + line, end, layout.lines,
        [&](int u, int p) { bits[u] = *reinterpret_cast<const uint4*>(x + p * rows.stride); },
        [&](int u, int p) {
          float v[V];
          UnpackBf16(bits[u], v);
#pragma unroll
          for (int j = 0; j < V; ++j) {
            const float h = fmaf(v[j], factor[j], offset[j]);
            v[j] = silu ? SiluOfHalf(h) : h;
          }
          StoreRounded<kOut>(norm.out, image * norm.pixels + p, channel, v);
        });
  }
}

// Consumer GPUs of sm_86 and later have 99 KiB of shared memory per block.
constexpr int kSharedLimit = 96 * 1024;
static_assert(kMaxNormChannels * sizeof(float2) <= kSharedLimit);
static_assert(kMaxNormChannels * sizeof(ExactStatistics) <= kSharedLimit, "one channel a group");

}  // namespace

cudaError_t LaunchGroupNorm(const GroupNormLaunch& norm, const Queue& queue) {
  return WithConstant<8, 1>(HasVectors(norm) ? 8 : 1, [&](auto width) {
    return norm.x.element == Element::kBf16 ? Launch<width, Element::kBf16>(norm, queue)
                                            : Launch<width, Element::kF32>(norm, queue);
  });
}

bool SuitsGroupNormFactors(const NormLayer& norm) {
  return CutOf(norm).channels > 0 && HasVectors(norm) && norm.x.element == Element::kBf16 &&
         norm.out.element == Element::kBf16 &&
         (norm.activation == Activation::kNone || norm.activation == Activation::kSilu);
}

cudaError_t LaunchGroupNormFactors(const GroupNormLaunch& norm, const Queue& queue) {
  const Cut cut = CutOf(norm);
  const auto kernel = WithConstant<2, 4, 8>(RunOf(norm.GroupChannels()),
                                            [](auto run) { return &GroupFactorsKernel<run>; });
  const size_t image_bytes = sizeof(float2) * cut.parts * norm.groups;
  size_t at_once = norm.workspace_bytes / image_bytes;
  if (cut.parts > 1) at_once = std::min<size_t>(at_once, kSemaphores / cut.slices);
  return ForImages(norm.images, at_once, [&](int first, int images) {
    return LaunchDependent(kernel, {dim3(cut.slices, cut.parts, images), kThreads}, queue, norm,
                           first, cut, static_cast<float2*>(norm.workspace), norm.semaphores);
  });
}

cudaError_t LaunchGroupScale(const GroupNormLaunch& norm, const Queue& queue) {
  constexpr int kMost = 2 * kScaleUnrolled;  // pixels per thread; fewer if that fills the device
  const int lines = LayoutOf<8>(norm).lines;
  const int64_t pixels = int64_t{norm.images} * norm.pixels;
  const int block_pixels =
      lines * static_cast<int>(std::clamp<int64_t>(
                  pixels / (int64_t{lines} * 4 * queue.multiprocessors), 1, kMost));
  const unsigned blocks = (norm.pixels + block_pixels - 1) / block_pixels;
  auto* const kernel = norm.out.element == Element::kE4m3x2 ? &GroupScaleKernel<Element::kE4m3x2>
                                                            : &GroupScaleKernel<Element::kBf16>;
  return LaunchDependent(kernel, {dim3(blocks, norm.images), kThreads}, queue, norm, block_pixels);
}

cudaError_t LoadGroupNormKernels() {
  constexpr Element kBf16 = Element::kBf16, kF32 = Element::kF32;
  const cudaError_t error =
      LoadKernels(0, GroupScaleKernel<kBf16>, GroupScaleKernel<Element::kE4m3x2>,
                  GroupFactorsKernel<8>, GroupFactorsKernel<4>, GroupFactorsKernel<2>);
  if (error != cudaSuccess) return error;
  return LoadKernels(kSharedLimit, GroupMomentsKernel<8, kBf16>, GroupApplyKernel<8, kBf16>,
                     GroupMomentsKernel<1, kBf16>, GroupApplyKernel<1, kBf16>,
                     GroupMomentsKernel<8, kF32>, GroupApplyKernel<8, kF32>,
                     GroupMomentsKernel<1, kF32>, GroupApplyKernel<1, kF32>);
}

}  // namespace denoised::cuda
