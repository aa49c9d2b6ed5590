// SPDX-License-Identifier: Apache-2.0
// Operations on all weights at once: the norm of the gradient, sums of gradients, AdamW and moving
// averages.
//
// Policy. Flat buffers, one thread per element. Learning rate, step and gradient norm are read on
// the device, so that a training step can be one CUDA graph. The norm is summed over blocks of 8192
// elements on every GPU, so its bits do not depend on the GPU.

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/training/cuda/block_sum.cuh"
#include "engine/training/cuda/launch.h"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kThreads = 256, kNormBlock = 8192;

unsigned BlocksFor(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

__global__ void __launch_bounds__(kThreads)
    SquareSumsKernel(const float* x, int64_t count, float* partial) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kNormBlock;
  const int64_t end = begin + kNormBlock < count ? begin + kNormBlock : count;
  float sum = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) sum = fmaf(x[i], x[i], sum);
  const double total = BlockSum<kThreads>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = static_cast<float>(total);
}

__global__ void __launch_bounds__(kThreads)
    SquareSumKernel(const float* partial, int64_t parts, float* out) {
  WaitForPredecessors();
  ReleaseDependents();
  double sum = 0;
  for (int64_t i = threadIdx.x; i < parts; i += kThreads) sum += partial[i];
  const double total = BlockSum<kThreads>(sum);
  if (threadIdx.x == 0) *out = static_cast<float>(total);
}

__global__ void __launch_bounds__(kThreads)
    AccumulateKernel(float* a, const float* b, int64_t count) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) a[i] += b[i];
}

__global__ void __launch_bounds__(kThreads)
    UpdateKernel(const __grid_constant__ UpdateLaunch update) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const float squared = *update.squared_norm;
  if (i >= update.count || !isfinite(squared)) return;
  const UpdateScalars& scalars = *update.scalars;
  const float factor =
      update.clip > 0.0f ? fminf(1.0f, update.clip / (sqrtf(squared) + 1e-6f)) : 1.0f;
  const float g = update.gradient[i] * factor;
  const float m = update.m[i] + update.m_share * (g - update.m[i]);
  const float v = update.v[i] + update.v_share * (g * g - update.v[i]);
  const float step =
      scalars.rate / scalars.correction1 * m / (sqrtf(v) / sqrtf(scalars.correction2) + update.eps);
  const float master = update.master[i];
  const float w = master - (scalars.rate * update.weight_decay * master + step);
  update.m[i] = m;
  update.v[i] = v;
  update.master[i] = w;
  for (int average = 0; average < update.average_count; ++average) {
    float& value = update.averages[average][i];
    value += scalars.average_share[average] * (w - value);
  }
}

}  // namespace

int64_t SquaredNormParts(int64_t count) { return (count + kNormBlock - 1) / kNormBlock; }

cudaError_t LaunchSquaredNorm(const float* x, int64_t count, float* partial, float* out,
                              const Queue& queue) {
  const int64_t parts = SquaredNormParts(count);
  if (cudaError_t error = LaunchDependent(SquareSumsKernel,
                                          {.grid = static_cast<unsigned>(parts), .block = kThreads},
                                          queue, x, count, partial);
      error != cudaSuccess) {
    return error;
  }
  return LaunchDependent(SquareSumKernel, {.grid = 1, .block = kThreads}, queue, partial, parts,
                         out);
}

cudaError_t LaunchAccumulate(float* a, const float* b, int64_t count, const Queue& queue) {
  return LaunchDependent(AccumulateKernel, {.grid = BlocksFor(count), .block = kThreads}, queue, a,
                         b, count);
}

cudaError_t LaunchUpdate(const UpdateLaunch& update, const Queue& queue) {
  return LaunchDependent(UpdateKernel, {.grid = BlocksFor(update.count), .block = kThreads}, queue,
                         update);
}

}  // namespace denoised::training::cuda
