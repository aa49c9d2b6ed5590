// SPDX-License-Identifier: Apache-2.0
// LayerNorm: the normalisation of each token by itself.
//
// Policy. Bound by memory, and by latency where tokens are few. A warp owns a token. In bf16 it
// holds the token in registers, each lane kVectors vectors of eight channels, all loaded at once;
// gamma and beta are copied to shared memory meanwhile, for they are needed later. Other tokens
// (fp32; channels that are not whole aligned vectors, or too many) are read three times, the second
// and third time from the L1 cache. A lane writes only elements that it has read, so the result may
// overwrite the input. The order of the sums depends on the number of channels alone.

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/e4m3.cuh"
#include "engine/backend/cuda/mma.cuh"

namespace denoised::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kVectorChannels = 32 * 8;  // of a warp's lanes, one vector each

struct LayerNormLaunch {
  Rows x;  // [tokens, channels]
  const float* gamma;
  const float* beta;
  float eps;
  int64_t tokens;
  int channels;
  Rows out;
};

__device__ inline int64_t Token() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
}
__device__ inline float Factor(const LayerNormLaunch& norm, float square) {
  return 1.0f / sqrtf(WarpSum(square) / static_cast<float>(norm.channels) + norm.eps);
}

/// kOut: of `out`, kE4m3x2, or any other.
template <int kVectors, Element kOut>
__global__ void __launch_bounds__(kThreads)
    LayerNormInRegistersKernel(const __grid_constant__ LayerNormLaunch norm) {
  constexpr int kMostChannels = kVectors * kVectorChannels;
  __shared__ __align__(16) float gammas[kMostChannels], betas[kMostChannels];
  ReleaseDependents();
  for (int c = static_cast<int>(threadIdx.x) * 4; c < norm.channels; c += kThreads * 4) {
    CopyAsync16(gammas + c, norm.gamma + c, true);
    CopyAsync16(betas + c, norm.beta + c, true);
  }
  CommitCopies();
  WaitForPredecessors();
  const int64_t token = Token();
  const int lane = threadIdx.x % 32;
  const auto channel = [&](int i) { return (i * 32 + lane) * 8; };
  const auto exists = [&](int i) { return token < norm.tokens && channel(i) < norm.channels; };
  float v[kVectors][8] = {};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (!exists(i)) continue;
    LoadVectorOf<Element::kBf16>(norm.x, token * norm.x.stride + channel(i), v[i]);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[i][j];
  }
  const float mean = WarpSum(sum) / static_cast<float>(norm.channels);
  float square = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (!exists(i)) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[i][j] -= mean;
      square = fmaf(v[i][j], v[i][j], square);
    }
  }
  const float factor = Factor(norm, square);
  WaitCopies<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (!exists(i)) continue;
    float gamma[8], beta[8];
    LoadEight(gammas + channel(i), gamma);
    LoadEight(betas + channel(i), beta);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[i][j] = fmaf(v[i][j] * factor, gamma[j], beta[j]);
    StoreRounded<kOut>(norm.out, token, channel(i), v[i]);
  }
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    LayerNormKernel(const __grid_constant__ LayerNormLaunch norm) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t token = Token();
  if (token >= norm.tokens) return;
  const int first = static_cast<int>(threadIdx.x % 32) * V;
  const auto for_each = [&](const auto& body) {
    for (int c = first; c < norm.channels; c += 32 * V) {
      float v[V];
      LoadChannels<V>(norm.x, token, c, v);
      body(c, v);
    }
  };
  float sum = 0;
  for_each([&](int, float(&v)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) sum += v[j];
  });
  const float mean = WarpSum(sum) / static_cast<float>(norm.channels);
  float square = 0;
  for_each([&](int, float(&v)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) square = fmaf(v[j] - mean, v[j] - mean, square);
  });
  const float factor = Factor(norm, square);
  for_each([&](int c, float(&v)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      v[j] = fmaf((v[j] - mean) * factor, norm.gamma[c + j], norm.beta[c + j]);
    }
    StoreChannels<V>(norm.out, token, c, v);
  });
}

using Kernel = void (*)(LayerNormLaunch);
constexpr int kMostVectors = 8;
/// [n − 1]: n vectors per lane, up to 256 · n channels.
template <Element kOut>
constexpr Kernel kInRegisters[kMostVectors] = {
    LayerNormInRegistersKernel<1, kOut>, LayerNormInRegistersKernel<2, kOut>,
    LayerNormInRegistersKernel<3, kOut>, LayerNormInRegistersKernel<4, kOut>,
    LayerNormInRegistersKernel<5, kOut>, LayerNormInRegistersKernel<6, kOut>,
    LayerNormInRegistersKernel<7, kOut>, LayerNormInRegistersKernel<8, kOut>};

int VectorsOf(int channels) { return (channels + kVectorChannels - 1) / kVectorChannels; }
/// Gammas and betas in shared memory.
constexpr int StaticBytes(int vectors) {
  return vectors * kVectorChannels * 2 * static_cast<int>(sizeof(float));
}

constexpr int kMostPerMultiprocessor = 2048 / kThreads;  // by threads; registers may allow fewer
constexpr int kReserved = 1024;                          // bytes of each block, besides its own
constexpr int kSharedOfHopper = 228 * 1024;              // of an SM
constexpr int kMostShared = kSharedOfHopper - kReserved;
/// Dynamic shared memory that no thread uses: with it, an SM has no room for more than its share of
/// the blocks. A linear layer before this may leave some SMs without a tile. These would take as
/// many blocks as fit, start early, and end last (dependent_launch.h). With one block to an SM, no
/// later kernel can start beside it; most could not anyway, since they need the SM's registers.
size_t BytesOfShare(unsigned blocks, int vectors, const Queue& queue) {
  const unsigned multiprocessors = queue.multiprocessors;
  const int share = static_cast<int>((blocks + multiprocessors - 1) / multiprocessors);
  if (!queue.hopper || share < 1 || share >= kMostPerMultiprocessor) return 0;
  constexpr int kUnit = 128;  // in which shared memory is allocated
  const int bytes = kSharedOfHopper / share - kReserved;
  return bytes / kUnit * kUnit - StaticBytes(vectors);
}

bool InWholeVectors(const LayerNormLaunch& norm) {
  return norm.x.vector && norm.out.vector && norm.channels % 8 == 0;
}
/// Whether a token fits into the registers of a warp.
bool HoldsTokens(const LayerNormLaunch& norm) {
  return InWholeVectors(norm) && norm.x.element == Element::kBf16 &&
         VectorsOf(norm.channels) <= kMostVectors;
}

Kernel KernelOf(const LayerNormLaunch& norm) {
  if (!HoldsTokens(norm)) return InWholeVectors(norm) ? LayerNormKernel<8> : LayerNormKernel<1>;
  const auto& kernels = norm.out.element == Element::kE4m3x2 ? kInRegisters<Element::kE4m3x2>
                                                             : kInRegisters<Element::kBf16>;
  return kernels[VectorsOf(norm.channels) - 1];
}

}  // namespace

bool LayerNormRounds(const Rows& x, int channels) {
  return InVectors(x) && channels % kE4m3Vector == 0 && VectorsOf(channels) <= kMostVectors;
}

cudaError_t LaunchLayerNorm(const Rows& x, const float* gamma, const float* beta, float eps,
                            int64_t tokens, int channels, const Rows& out, const Queue& queue) {
  if (out.element == Element::kE4m3x2 && !LayerNormRounds(x, channels)) {
    return cudaErrorInvalidValue;
  }
  const LayerNormLaunch norm = {x, gamma, beta, eps, tokens, channels, out};
  const auto blocks = static_cast<unsigned>((tokens + kWarps - 1) / kWarps);
  const size_t shared = HoldsTokens(norm) ? BytesOfShare(blocks, VectorsOf(channels), queue) : 0;
  const LaunchShape shape = {.grid = dim3(blocks), .block = dim3(kThreads), .shared_bytes = shared};
  return LaunchDependent(KernelOf(norm), shape, queue, norm);
}

cudaError_t LoadLayerNormKernels(bool hopper) {
  for (int i = 0; i < kMostVectors; ++i) {
    const int shared = hopper ? kMostShared - StaticBytes(i + 1) : 0;
    if (cudaError_t error =
            LoadKernels(shared, kInRegisters<Element::kBf16>[i], kInRegisters<Element::kE4m3x2>[i]);
        error != cudaSuccess) {
      return error;
    }
  }
  return LoadKernels(0, LayerNormKernel<8>, LayerNormKernel<1>);
}

}  // namespace denoised::cuda
