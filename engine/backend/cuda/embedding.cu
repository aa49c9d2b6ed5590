// SPDX-License-Identifier: Apache-2.0
// Embeddings of noise levels and labels: a few thousand elements, one thread each.
//
// Policy. Angles reach a thousand radians, where fp32 loses four digits of the sine. So the angle
// and its sine are computed in double and rounded once.

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"

namespace denoised::cuda {
namespace {

constexpr int kThreads = 128;

dim3 Grid(int rows, int dim) { return dim3((dim + kThreads - 1) / kThreads, rows); }

/// Column `i` of [sin, cos] or, flipped, [cos, sin], with an odd last column zero.
__device__ void StoreSineOrCosine(const Rows& out, int row, int i, int half, bool flip,
                                  double angle) {
  const bool first_half = i < half;
  const double value = first_half != flip ? sin(angle) : cos(angle);
  Store(out, row, i, i < 2 * half ? static_cast<float>(value) : 0.0f);
}

// diffusers' get_timestep_embedding: t · scale · max_period^(−i / (half − freq_shift)).
__global__ void TimestepEmbeddingKernel(const __grid_constant__ TimestepEmbeddingLaunch embedding) {
  ReleaseDependents();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  const int half = embedding.dim / 2, k = i < half ? i : i - half;
  const double frequency = exp(-log(embedding.max_period) * k / (half - embedding.freq_shift));
  WaitForPredecessors();  // most of the work is done before
  if (i >= embedding.dim) return;
  const double angle = embedding.t[row] * frequency * embedding.scale;
  StoreSineOrCosine(embedding.out, row, i, half, embedding.flip_sin_to_cos, angle);
}

// diffusers' GaussianFourierProjection: 2π · weight · t, or of ln t.
__global__ void FourierEmbeddingKernel(const __grid_constant__ FourierEmbeddingLaunch embedding) {
  ReleaseDependents();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  const int half = embedding.dim / 2, k = i < half ? i : i - half;
  const double frequency = i < 2 * half ? 6.283185307179586 * embedding.weight[k] : 0.0;
  WaitForPredecessors();
  if (i >= embedding.dim) return;
  const double t = embedding.log ? log(static_cast<double>(embedding.t[row])) : embedding.t[row];
  StoreSineOrCosine(embedding.out, row, i, half, embedding.flip_sin_to_cos, frequency * t);
}

__global__ void EmbeddingKernel(Rows table, int entries, int dim, const int32_t* index,
                                const float* number, Rows out) {
  ReleaseDependents();
  WaitForPredecessors();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= dim) return;
  const int wanted = number != nullptr ? __float2int_rn(number[row]) : index[row];
  const int entry = max(0, min(wanted, entries - 1));
  Store(out, row, i, Load(table, entry, i));
}

}  // namespace

cudaError_t LaunchTimestepEmbedding(const TimestepEmbeddingLaunch& embedding, const Queue& queue) {
  return LaunchDependent(TimestepEmbeddingKernel, {Grid(embedding.rows, embedding.dim), kThreads},
                         queue, embedding);
}

cudaError_t LaunchFourierEmbedding(const FourierEmbeddingLaunch& embedding, const Queue& queue) {
  return LaunchDependent(FourierEmbeddingKernel, {Grid(embedding.rows, embedding.dim), kThreads},
                         queue, embedding);
}

cudaError_t LaunchEmbedding(const Rows& table, int entries, int dim, const int32_t* index,
                            const float* number, int rows, const Rows& out, const Queue& queue) {
  return LaunchDependent(EmbeddingKernel, {Grid(rows, dim), kThreads}, queue, table, entries, dim,
                         index, number, out);
}

cudaError_t LoadEmbeddingKernels() {
  return LoadKernels(0, TimestepEmbeddingKernel, FourierEmbeddingKernel, EmbeddingKernel);
}

}  // namespace denoised::cuda
