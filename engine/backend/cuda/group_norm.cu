// Group normalisation with scale, shift and activation, over one source or two side by side.
//
// Policy. Two launches. GroupMoments: an image is cut into at most kChunks runs of pixels, by its
// size alone; a block reads one run of all channels, each thread a fixed set of channels, and leaves
// the mean and the sum of squared deviations of every group. GroupApply: every block combines the
// runs of its image in order and normalises some pixels.
//
// Accuracy. A thread sums fp32 deviations from the first pixel of the run, so a mean that is large
// against the spread cancels before it is squared; everything across threads is combined in double by
// M2 = Σ M2ᵢ + nᵢ (meanᵢ − mean)² (Chan, Golub, LeVeque 1979).

#include <algorithm>

#include "engine/backend/cuda/element.cuh"

namespace denoised::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kChunks = 32;
constexpr int kMinChunkPixels = 16;

/// A mean and the sum of squared deviations from it.
using Moments = double2;

int ChunkPixels(int pixels) { return std::max(kMinChunkPixels, (pixels + kChunks - 1) / kChunks); }
int ChunkCount(int pixels) {
  const int chunk_pixels = ChunkPixels(pixels);
  return (pixels + chunk_pixels - 1) / chunk_pixels;
}

/// How threads lie over pixels × channels: `vectors` of V channels, and as many pixels side by side
/// as the block has room for.
struct Layout {
  int channels, vectors, lines;
};
template <int V>
__host__ __device__ Layout LayoutOf(const GroupNormLaunch& norm) {
  const int channels = norm.channels + norm.channels2;
  const int vectors = channels / V;
  return {channels, vectors, vectors < kThreads ? kThreads / vectors : 1};
}

template <int V>
__device__ void LoadSources(const GroupNormLaunch& norm, int64_t pixel, int channel,
                            float (&v)[V]) {
  if (channel < norm.channels) {
    LoadChannels<V>(norm.x, pixel, channel, v);
  } else {
    LoadChannels<V>(norm.x2, pixel, channel - norm.channels, v);
  }
}

/// grid (chunks, images); `chunk_moments` [images][chunks][groups]; shared [lines][channels].
template <int V>
__global__ void __launch_bounds__(kThreads)
    GroupMomentsKernel(const __grid_constant__ GroupNormLaunch norm, int first_image,
                       int chunk_pixels, Moments* chunk_moments) {
  extern __shared__ __align__(16) Moments moments[];
  const Layout layout = LayoutOf<V>(norm);
  const int begin = blockIdx.x * chunk_pixels;
  const int count = min(chunk_pixels, norm.pixels - begin);
  const int64_t first = static_cast<int64_t>(first_image + blockIdx.y) * norm.pixels + begin;
  const auto pixels_of = [&](int line) {
    return line < count ? (count - line + layout.lines - 1) / layout.lines : 0;
  };

  for (int i = threadIdx.x; i < layout.vectors * layout.lines; i += kThreads) {
    const int line = i / layout.vectors, channel = i % layout.vectors * V;
    float origin[V], sum[V] = {}, squares[V] = {};
    LoadSources<V>(norm, first, channel, origin);
    for (int pixel = line; pixel < count; pixel += layout.lines) {
      float v[V];
      LoadSources<V>(norm, first + pixel, channel, v);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float deviation = v[j] - origin[j];
        sum[j] += deviation;
        squares[j] = fmaf(deviation, deviation, squares[j]);
      }
    }
    const double n = pixels_of(line);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const double shift = n > 0 ? sum[j] / n : 0;
      moments[line * layout.channels + channel + j] = {origin[j] + shift,
                                                       squares[j] - shift * sum[j]};
    }
  }
  __syncthreads();

  const int lane = threadIdx.x % 32, group_channels = layout.channels / norm.groups;
  const int parts = layout.lines * group_channels;
  for (int group = threadIdx.x / 32; group < norm.groups; group += kWarps) {
    const auto part = [&](int i) {
      return moments[i / group_channels * layout.channels + group * group_channels +
                     i % group_channels];
    };
    double mean = 0, m2 = 0;
    for (int i = lane; i < parts; i += 32) mean += pixels_of(i / group_channels) * part(i).x;
    mean = WarpSum(mean) / (static_cast<double>(count) * group_channels);
    for (int i = lane; i < parts; i += 32) {
      const double offset = part(i).x - mean;
      m2 += part(i).y + pixels_of(i / group_channels) * offset * offset;
    }
    m2 = WarpSum(m2);
    if (lane == 0) {
      chunk_moments[(static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * norm.groups +
                    group] = {mean, m2};
    }
  }
}

struct Statistics {
  float mean, mean_rest;  // the mean in two floats
  float inverse_deviation;
};

/// grid (blocks of `block_pixels`, images); shared [groups].
template <int V>
__global__ void __launch_bounds__(kThreads)
    GroupApplyKernel(const __grid_constant__ GroupNormLaunch norm, int first_image, int chunks,
                     int chunk_pixels, const Moments* chunk_moments, int block_pixels) {
  extern __shared__ __align__(16) unsigned char shared[];
  Statistics* statistics = reinterpret_cast<Statistics*>(shared);
  const Layout layout = LayoutOf<V>(norm);
  const int group_channels = layout.channels / norm.groups;
  const int64_t image = first_image + blockIdx.y;

  static_assert(kChunks == 32, "a lane combines one chunk");
  const int lane = threadIdx.x % 32;
  const int pixels_of_lane =
      lane < chunks ? min(chunk_pixels, norm.pixels - lane * chunk_pixels) : 0;
  for (int group = threadIdx.x / 32; group < norm.groups; group += kWarps) {
    const Moments part =
        lane < chunks ? chunk_moments[(static_cast<int64_t>(blockIdx.y) * chunks + lane) *
                                          norm.groups + group]
                      : Moments{0, 0};
    const double mean = WarpSum(pixels_of_lane * part.x) / norm.pixels;
    const double offset = part.x - mean;
    const double m2 = WarpSum(
        part.y + static_cast<double>(pixels_of_lane) * group_channels * offset * offset);
    if (lane == 0) {
      const double variance = m2 / (static_cast<double>(norm.pixels) * group_channels);
      const float rounded = static_cast<float>(mean);
      statistics[group] = {rounded, static_cast<float>(mean - rounded),
                           static_cast<float>(rsqrt(variance + norm.eps))};
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
      const Statistics& s = statistics[c / group_channels];
      mean[j] = s.mean;
      factor[j] = s.inverse_deviation * norm.gamma[c];
      offset[j] = norm.beta[c] - s.mean_rest * factor[j];
      if (norm.scale_shift.data != nullptr) {
        const float scale = 1.0f + Load(norm.scale_shift, image, c);
        factor[j] *= scale;
        offset[j] = offset[j] * scale + Load(norm.scale_shift, image, layout.channels + c);
      }
    }
    for (int pixel = begin + line; pixel < end; pixel += layout.lines) {
      const int64_t at = image * norm.pixels + pixel;
      float v[V];
      LoadSources<V>(norm, at, channel, v);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        v[j] = Activate(norm.activation, fmaf(v[j] - mean[j], factor[j], offset[j]));
      }
      StoreChannels<V>(norm.out, at, channel, v);
    }
  }
}

template <int V>
cudaError_t Launch(const GroupNormLaunch& norm, const Queue& queue) {
  const Layout layout = LayoutOf<V>(norm);
  const int chunk_pixels = ChunkPixels(norm.pixels), chunks = ChunkCount(norm.pixels);
  // Long enough that the statistics, which each block combines anew, weigh little.
  const int block_pixels = layout.lines * 16;
  const int blocks = (norm.pixels + block_pixels - 1) / block_pixels;
  const size_t shared_bytes = sizeof(Moments) * layout.lines * layout.channels;
  auto* chunk_moments = static_cast<Moments*>(norm.workspace);

  const size_t image_bytes = GroupNormWorkspaceBytes(1, norm.pixels, norm.groups);
  const int images_at_once =
      static_cast<int>(std::min<size_t>(norm.workspace_bytes / image_bytes, 65535));
  for (int first = 0; first < norm.images; first += images_at_once) {
    const unsigned images = std::min(images_at_once, norm.images - first);
    GroupMomentsKernel<V><<<dim3(chunks, images), kThreads, shared_bytes, queue.stream>>>(
        norm, first, chunk_pixels, chunk_moments);
    GroupApplyKernel<V>
        <<<dim3(blocks, images), kThreads, sizeof(Statistics) * norm.groups, queue.stream>>>(
            norm, first, chunks, chunk_pixels, chunk_moments, block_pixels);
    if (cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Consumer chips of sm_86 and later have 99 KiB of shared memory a block.
constexpr int kSharedLimit = 96 * 1024;
static_assert(kMaxNormChannels * sizeof(Moments) <= kSharedLimit);
static_assert(kMaxNormChannels * sizeof(Statistics) <= kSharedLimit, "one channel a group");

}  // namespace

size_t GroupNormWorkspaceBytes(int images, int pixels, int groups) {
  return sizeof(Moments) * images * ChunkCount(pixels) * groups;
}

cudaError_t LaunchGroupNorm(const GroupNormLaunch& norm, const Queue& queue) {
  const bool vector = norm.x.vector && norm.channels % 8 == 0 && norm.out.vector &&
                      (norm.x2.data == nullptr || (norm.x2.vector && norm.channels2 % 8 == 0));
  return vector ? Launch<8>(norm, queue) : Launch<1>(norm, queue);
}

cudaError_t LoadGroupNormKernels() {
  for (cudaError_t error :
       {LoadKernel(GroupMomentsKernel<8>, kSharedLimit), LoadKernel(GroupApplyKernel<8>, kSharedLimit),
        LoadKernel(GroupMomentsKernel<1>, kSharedLimit),
        LoadKernel(GroupApplyKernel<1>, kSharedLimit)}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace denoised::cuda
