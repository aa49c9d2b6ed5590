// SPDX-License-Identifier: Apache-2.0
// LayerNorm and its gradients. Unlike serving's kernel, the forward pass stores the statistics.
//
// Policy. A warp owns a token and reads it several times, from the L1 cache, instead of keeping it
// in registers. The sums over tokens, dγ = Σ d·x̂ and dβ = Σ d, use strips of channels of each chunk
// (strips.cuh). They come first, because dx may overwrite dout. With x̂ = (x − μ)·rstd and g = d·γ:
//
//   dx = rstd·(g − mean(g) − x̂·mean(g·x̂)), means over a token

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/training/cuda/launch.h"
#include "engine/training/cuda/strips.cuh"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kWarps = 8, kThreads = 32 * kWarps;

__device__ int64_t Token() { return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; }

/// Calls body(c) for this lane's vectors of a token.
template <int V, typename Body>
__device__ void ForChannels(int channels, const Body& body) {
  for (int c = static_cast<int>(threadIdx.x % 32) * V; c < channels; c += 32 * V) body(c);
}

template <int V, Element kElement>
__global__ void __launch_bounds__(kThreads)
    LayerNormKernel(const __grid_constant__ LayerNormLaunch norm) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t token = Token();
  if (token >= norm.tokens) return;
  const auto channels = static_cast<float>(norm.channels);
  float sum = 0, square = 0;
  ForChannels<V>(norm.channels, [&](int c) {
    float x[V];
    LoadChannelsOf<V, kElement>(norm.x, token, c, x);
#pragma unroll
    for (int i = 0; i < V; ++i) sum += x[i];
  });
  const float mean = WarpSum(sum) / channels;
  ForChannels<V>(norm.channels, [&](int c) {
    float x[V];
    LoadChannelsOf<V, kElement>(norm.x, token, c, x);
#pragma unroll
    for (int i = 0; i < V; ++i) square = fmaf(x[i] - mean, x[i] - mean, square);
  });
  const float rstd = 1.0f / sqrtf(WarpSum(square) / channels + norm.eps);
  ForChannels<V>(norm.channels, [&](int c) {
    float x[V];
    LoadChannelsOf<V, kElement>(norm.x, token, c, x);
#pragma unroll
    for (int i = 0; i < V; ++i)
      x[i] = fmaf((x[i] - mean) * rstd, norm.gamma[c + i], norm.beta[c + i]);
    StoreChannels<V>(norm.out, token, c, x);
  });
  if (threadIdx.x % 32 == 0)
    reinterpret_cast<float2*>(norm.statistics)[token] = make_float2(mean, rstd);
}

/// Writes parameters[chunk, part, 2, channels]: the part's share of dγ and dβ.
template <int V, Element kElement>
__global__ void __launch_bounds__(kStripThreads)
    ParametersKernel(const __grid_constant__ LayerNormBackwardLaunch backward) {
  WaitForPredecessors();
  ReleaseDependents();
  using S = Strip<V>;
  __shared__ float shared[2][S::kLines][S::kChannels];
  const LayerNormLaunch& norm = backward.forward;
  const int column = S::Column();
  const Range range = RangeOf(backward.chunk_tokens, gridDim.y, blockIdx.y);
  const int64_t first = blockIdx.z * backward.chunk_tokens;
  float sums[2][V] = {};
  if (column < norm.channels) {
    for (int64_t token = first + range.begin + S::Line(); token < first + range.end;
         token += S::kLines) {
      float x[V], d[V];
      LoadChannelsOf<V, kElement>(norm.x, token, column, x);
      LoadChannelsOf<V, kElement>(backward.dout, token, column, d);
      const float2 statistics = reinterpret_cast<const float2*>(norm.statistics)[token];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        sums[0][i] = fmaf(d[i], (x[i] - statistics.x) * statistics.y, sums[0][i]);
        sums[1][i] += d[i];
      }
    }
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int i = 0; i < V; ++i) shared[s][S::Line()][S::Place() + i] = sums[s][i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * S::kChannels; i += kStripThreads) {
    const int s = i / S::kChannels, at = i % S::kChannels, channel = blockIdx.x * S::kChannels + at;
    if (channel >= norm.channels) continue;
    backward.parameters[((blockIdx.z * gridDim.y + blockIdx.y) * 2 + s) * norm.channels + channel] =
        SumOf<S::kLines>([&](int line) { return shared[s][line][at]; });
  }
}

template <int V, Element kElement>
__global__ void __launch_bounds__(kThreads)
    GradientKernel(const __grid_constant__ LayerNormBackwardLaunch backward) {
  WaitForPredecessors();
  ReleaseDependents();
  const LayerNormLaunch& norm = backward.forward;
  const int64_t token = Token();
  if (token >= norm.tokens) return;
  const float2 statistics = reinterpret_cast<const float2*>(norm.statistics)[token];
  const float mean = statistics.x, rstd = statistics.y;
  float sum = 0, product = 0;
  ForChannels<V>(norm.channels, [&](int c) {
    float x[V], d[V];
    LoadChannelsOf<V, kElement>(norm.x, token, c, x);
    LoadChannelsOf<V, kElement>(backward.dout, token, c, d);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float g = d[i] * norm.gamma[c + i];
      sum += g;
      product = fmaf(g, (x[i] - mean) * rstd, product);
    }
  });
  sum = WarpSum(sum) / static_cast<float>(norm.channels);
  product = WarpSum(product) / static_cast<float>(norm.channels);
  ForChannels<V>(norm.channels, [&](int c) {
    float x[V], d[V], add[V] = {};
    LoadChannelsOf<V, kElement>(norm.x, token, c, x);
    LoadChannelsOf<V, kElement>(backward.dout, token, c, d);
    if (backward.add.data != nullptr) LoadChannelsOf<V, kElement>(backward.add, token, c, add);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float g = d[i] * norm.gamma[c + i], normed = (x[i] - mean) * rstd;
      d[i] = fmaf(rstd, g - sum - normed * product, add[i]);
    }
    StoreChannels<V>(backward.dx, token, c, d);
  });
}

unsigned BlocksFor(int64_t tokens) { return static_cast<unsigned>((tokens + kWarps - 1) / kWarps); }

template <int V, Element kElement>
cudaError_t Forward(const LayerNormLaunch& norm, const Queue& queue) {
  return LaunchDependent(LayerNormKernel<V, kElement>,
                         {.grid = BlocksFor(norm.tokens), .block = kThreads}, queue, norm);
}

template <int V, Element kElement>
cudaError_t Backward(const LayerNormBackwardLaunch& norm, const Queue& queue) {
  const LayerNormLaunch& forward = norm.forward;
  if (norm.parameters != nullptr) {
    const dim3 grid = Strip<V>::Grid(forward.channels, PartsOf(norm.chunk_tokens),
                                     static_cast<unsigned>(forward.tokens / norm.chunk_tokens));
    if (cudaError_t error = LaunchDependent(ParametersKernel<V, kElement>,
                                            {.grid = grid, .block = kStripThreads}, queue, norm);
        error != cudaSuccess) {
      return error;
    }
  }
  return LaunchDependent(GradientKernel<V, kElement>,
                         {.grid = BlocksFor(forward.tokens), .block = kThreads}, queue, norm);
}

template <typename... Operands>
bool AllVectors(int channels, const Operands&... operands) {
  return channels % 8 == 0 && ((operands.data == nullptr || operands.vector) && ...);
}

}  // namespace

cudaError_t LaunchLayerNorm(const LayerNormLaunch& norm, const Queue& queue) {
  const bool vectors = AllVectors(norm.channels, norm.x, norm.out);
  if (norm.x.element == Element::kBf16)
    return vectors ? Forward<8, Element::kBf16>(norm, queue)
                   : Forward<1, Element::kBf16>(norm, queue);
  return vectors ? Forward<8, Element::kF32>(norm, queue) : Forward<1, Element::kF32>(norm, queue);
}

cudaError_t LaunchLayerNormBackward(const LayerNormBackwardLaunch& norm, const Queue& queue) {
  const bool vectors =
      AllVectors(norm.forward.channels, norm.forward.x, norm.dout, norm.add, norm.dx);
  if (norm.forward.x.element == Element::kBf16)
    return vectors ? Backward<8, Element::kBf16>(norm, queue)
                   : Backward<1, Element::kBf16>(norm, queue);
  return vectors ? Backward<8, Element::kF32>(norm, queue)
                 : Backward<1, Element::kF32>(norm, queue);
}

}  // namespace denoised::training::cuda
