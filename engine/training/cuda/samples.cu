// SPDX-License-Identifier: Apache-2.0
// Start and end of a pass: noisy samples, made from images or from posteriors of latents, and the
// losses.
//
// Policy. Samples: a thread computes four elements, as many as one call of Philox draws. Losses: a
// block owns a row and adds the sums of its threads in a fixed order, in double.

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/training/cuda/block_sum.cuh"
#include "engine/training/cuda/launch.h"
#include "engine/training/random.h"
#include "engine/training/variance.h"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kThreads = 256;

__device__ Normal4 NormalOf(uint64_t seed, Purpose purpose, const int32_t* step,
                            const SampleRow& row, int64_t i) {
  return NormalOfBits(
      Draw(seed, purpose, static_cast<uint32_t>(*step), row.sample, static_cast<uint32_t>(i / 4)));
}

/// Elements [i, i + 4) of a row's image y.
template <bool kPosteriors>
__device__ void Images(const SamplesLaunch& samples, const SampleRow& row, int64_t i,
                       int64_t elements, float (&y)[4]) {
  if constexpr (kPosteriors) {
    const float* moments = samples.posteriors + row.image * 2 * elements;
    const Normal4 normal = NormalOf(samples.seed, Purpose::kPosterior, samples.step, row, i);
    for (int j = 0; j < 4 && i + j < elements; ++j) {
      const int64_t pixel = (i + j) / samples.channels, c = (i + j) % samples.channels;
      const float* mean = moments + pixel * 2 * samples.channels + c;
      y[j] = mean[0] + mean[samples.channels] * normal.v[j];
    }
  } else {
    const uint8_t* image =
        samples.images + row.image * samples.from_height * samples.from_width * samples.channels;
    for (int j = 0; j < 4 && i + j < elements; ++j) {
      const int64_t pixel = (i + j) / samples.channels;
      const int c = static_cast<int>((i + j) % samples.channels);
      const int w = static_cast<int>(pixel % samples.width);
      const int64_t line = row.top + pixel / samples.width;
      const int column = row.left + (row.flip != 0 ? samples.width - 1 - w : w);
      y[j] =
          static_cast<float>(image[(line * samples.from_width + column) * samples.channels + c]) /
              127.5f -
          1.0f;
    }
  }
}

template <bool kPosteriors>
__global__ void __launch_bounds__(kThreads)
    SamplesKernel(const __grid_constant__ SamplesLaunch samples) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t n = blockIdx.y;
  const SampleRow& row = samples.rows[n];
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    samples.condition[n] = row.condition;
    if (samples.label != nullptr) samples.label[n] = row.label;
  }
  const int64_t elements = static_cast<int64_t>(samples.height) * samples.width * samples.channels;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (i >= elements) return;
  float y[4];
  Images<kPosteriors>(samples, row, i, elements, y);
  const Normal4 normal = NormalOf(samples.seed, Purpose::kNoise, samples.step, row, i);
  for (int j = 0; j < 4 && i + j < elements; ++j) {
    const int64_t at = n * elements + i + j;
    Store(samples.x, 0, at, row.signal * y[j] + row.noise * normal.v[j] + row.shift);
    samples.target[at] = row.target_signal * y[j] + row.target_noise * normal.v[j];
    if (samples.image != nullptr) samples.image[at] = y[j];
  }
}

__global__ void __launch_bounds__(kThreads)
    NoiseKernel(uint64_t seed, const int32_t* step, const SampleRow* rows, int64_t elements,
                float* out) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t n = blockIdx.y;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (i >= elements) return;
  const Normal4 normal = NormalOf(seed, Purpose::kPosterior, step, rows[n], i);
  for (int j = 0; j < 4 && i + j < elements; ++j) out[n * elements + i + j] = normal.v[j];
}

__global__ void __launch_bounds__(kThreads)
    LossKernel(const float* output, const float* target, const SampleRow* samples, int64_t elements,
               float scale, float* loss, float* doutput) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t n = blockIdx.x, begin = n * elements;
  const float weight = samples[n].weight;
  const float factor = 2.0f * weight * scale / static_cast<float>(elements);
  double sum = 0;
  for (int64_t i = begin + threadIdx.x; i < begin + elements; i += kThreads) {
    const float difference = output[i] - target[i];
    sum += static_cast<double>(difference) * difference;
    doutput[i] = factor * difference;
  }
  sum = BlockSum<kThreads>(sum);
  if (threadIdx.x == 0) loss[n] = static_cast<float>(weight * sum / static_cast<double>(elements));
}

__global__ void __launch_bounds__(kThreads)
    VarianceLossKernel(const __grid_constant__ VarianceLossLaunch of) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t n = blockIdx.x, begin = n * of.elements;
  const SampleRow& row = of.samples[n];
  const float factor = 2.0f * row.weight * of.scale / static_cast<float>(of.elements);
  const double variance_factor =
      static_cast<double>(of.weight) * of.scale / static_cast<double>(of.elements);
  double sum = 0;
  for (int64_t i = threadIdx.x; i < of.elements; i += kThreads) {
    const int64_t at = 2 * begin + i / of.channels * 2 * of.channels + i % of.channels;
    const float difference = of.output[at] - of.target[begin + i];
    of.doutput[at] = factor * difference;
    const Divergence divergence =
        DivergenceOf(row, difference, of.output[at + of.channels], of.image[begin + i]);
    of.doutput[at + of.channels] = static_cast<float>(variance_factor * divergence.slope);
    sum += static_cast<double>(row.weight) * difference * difference +
           static_cast<double>(of.weight) * divergence.value;
  }
  sum = BlockSum<kThreads>(sum);
  if (threadIdx.x == 0) of.loss[n] = static_cast<float>(sum / static_cast<double>(of.elements));
}

/// Four elements per thread.
dim3 RowGrid(int64_t elements, int64_t rows) {
  return dim3(static_cast<unsigned>((elements + 4 * kThreads - 1) / (4 * kThreads)),
              static_cast<unsigned>(rows));
}

}  // namespace

cudaError_t LaunchMakeSamples(const SamplesLaunch& samples, const Queue& queue) {
  const auto kernel = samples.posteriors != nullptr ? SamplesKernel<true> : SamplesKernel<false>;
  const int64_t elements = static_cast<int64_t>(samples.height) * samples.width * samples.channels;
  return LaunchDependent(kernel, {.grid = RowGrid(elements, samples.count), .block = kThreads},
                         queue, samples);
}

cudaError_t LaunchNoise(uint64_t seed, const int32_t* step, const SampleRow* samples, int64_t rows,
                        int64_t elements, float* out, const Queue& queue) {
  return LaunchDependent(NoiseKernel, {.grid = RowGrid(elements, rows), .block = kThreads}, queue,
                         seed, step, samples, elements, out);
}

cudaError_t LaunchLoss(const float* output, const float* target, const SampleRow* samples,
                       int64_t rows, int64_t elements, float scale, float* loss, float* doutput,
                       const Queue& queue) {
  return LaunchDependent(LossKernel, {.grid = static_cast<unsigned>(rows), .block = kThreads},
                         queue, output, target, samples, elements, scale, loss, doutput);
}

cudaError_t LaunchVarianceLoss(const VarianceLossLaunch& of, const Queue& queue) {
  return LaunchDependent(VarianceLossKernel,
                         {.grid = static_cast<unsigned>(of.rows), .block = kThreads}, queue, of);
}

}  // namespace denoised::training::cuda
