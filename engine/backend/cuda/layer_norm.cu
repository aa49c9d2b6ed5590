// SPDX-License-Identifier: Apache-2.0
// LayerNorm: the normalisation of each token by itself.
//
// Policy. Bound by memory. A warp owns a token and reads it three times, for the mean, the variance
// and the result; the second and third time from the L1 cache. A lane reads vectors of eight
// channels, or single channels where they are odd or not aligned, and writes only what it has read,
// so the result may lie over the input. The order of the sums follows from the channels alone.

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"

namespace denoised::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

template <int V>
__global__ void __launch_bounds__(kThreads)
    LayerNormKernel(Rows x, const float* gamma, const float* beta, float eps, int64_t tokens,
                    int channels, Rows out) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= tokens) return;
  const int first = static_cast<int>(threadIdx.x % 32) * V;
  float sum = 0;
  for (int c = first; c < channels; c += 32 * V) {
    float v[V];
    LoadChannels<V>(x, token, c, v);
#pragma unroll
    for (int j = 0; j < V; ++j) sum += v[j];
  }
  const float mean = WarpSum(sum) / static_cast<float>(channels);
  float square = 0;
  for (int c = first; c < channels; c += 32 * V) {
    float v[V];
    LoadChannels<V>(x, token, c, v);
#pragma unroll
    for (int j = 0; j < V; ++j) square = fmaf(v[j] - mean, v[j] - mean, square);
  }
  const float factor = 1.0f / sqrtf(WarpSum(square) / static_cast<float>(channels) + eps);
  for (int c = first; c < channels; c += 32 * V) {
    float v[V];
    LoadChannels<V>(x, token, c, v);
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = fmaf((v[j] - mean) * factor, gamma[c + j], beta[c + j]);
    StoreChannels<V>(out, token, c, v);
  }
}

}  // namespace

cudaError_t LaunchLayerNorm(const Rows& x, const float* gamma, const float* beta, float eps,
                            int64_t tokens, int channels, const Rows& out, const Queue& queue) {
  const LaunchShape shape = {.grid = dim3(static_cast<unsigned>((tokens + kWarps - 1) / kWarps)),
                             .block = dim3(kThreads)};
  const bool vector = x.vector && out.vector && channels % 8 == 0;
  return LaunchDependent(vector ? LayerNormKernel<8> : LayerNormKernel<1>, shape, queue, x, gamma,
                         beta, eps, tokens, channels, out);
}

cudaError_t LoadLayerNormKernels() {
  const cudaError_t error = LoadKernel(LayerNormKernel<8>);
  return error != cudaSuccess ? error : LoadKernel(LayerNormKernel<1>);
}

}  // namespace denoised::cuda
