// SPDX-License-Identifier: Apache-2.0
// Both ends of a pass: noisy samples from pictures, and the loss.
//
// Policy. Samples: a thread makes four elements, as many as Philox draws. Loss: a block owns a row;
// its threads' sums are added in a fixed order, in double.

#include "engine/backend/cuda/element.cuh"
#include "engine/training/cuda/launch.h"
#include "engine/training/random.h"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    SamplesKernel(const __grid_constant__ SamplesLaunch samples) {
  const int64_t n = blockIdx.y;
  const SampleRow& row = samples.rows[n];
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    samples.condition[n] = row.condition;
    if (samples.label != nullptr) samples.label[n] = row.label;
  }
  const int64_t elements = static_cast<int64_t>(samples.height) * samples.width * samples.channels;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (i >= elements) return;
  const uint8_t* image =
      samples.images + row.image * samples.from_height * samples.from_width * samples.channels;
  const Normal4 normal =
      NormalOfBits(Draw(samples.seed, Purpose::kNoise, static_cast<uint32_t>(*samples.step),
                        row.sample, static_cast<uint32_t>(i / 4)));
  for (int j = 0; j < 4 && i + j < elements; ++j) {
    const int64_t pixel = (i + j) / samples.channels;
    const int c = static_cast<int>((i + j) % samples.channels);
    const int w = static_cast<int>(pixel % samples.width);
    const int64_t line = row.top + pixel / samples.width;
    const int column = row.left + (row.flip != 0 ? samples.width - 1 - w : w);
    const float y =
        static_cast<float>(image[(line * samples.from_width + column) * samples.channels + c]) /
            127.5f -
        1.0f;
    Store(samples.x, 0, n * elements + i + j, row.signal * y + row.noise * normal.v[j]);
    samples.target[n * elements + i + j] = row.target_signal * y + row.target_noise * normal.v[j];
  }
}

__global__ void __launch_bounds__(kThreads)
    LossKernel(const float* output, const float* target, const SampleRow* samples, int64_t elements,
               float scale, float* loss, float* doutput) {
  __shared__ double sums[kThreads / 32];
  const int64_t n = blockIdx.x, begin = n * elements;
  const float weight = samples[n].weight;
  const float factor = 2.0f * weight * scale / static_cast<float>(elements);
  double sum = 0;
  for (int64_t i = begin + threadIdx.x; i < begin + elements; i += kThreads) {
    const float difference = output[i] - target[i];
    sum += static_cast<double>(difference) * difference;
    doutput[i] = factor * difference;
  }
  sum = WarpSum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0;
  for (const double part : sums) total += part;
  loss[n] = static_cast<float>(weight * total / static_cast<double>(elements));
}

}  // namespace

cudaError_t LaunchMakeSamples(const SamplesLaunch& samples, cudaStream_t stream) {
  const int64_t elements = static_cast<int64_t>(samples.height) * samples.width * samples.channels;
  const dim3 grid(static_cast<unsigned>((elements + 4 * kThreads - 1) / (4 * kThreads)),
                  static_cast<unsigned>(samples.count));
  SamplesKernel<<<grid, kThreads, 0, stream>>>(samples);
  return cudaGetLastError();
}

cudaError_t LaunchLoss(const float* output, const float* target, const SampleRow* samples,
                       int64_t rows, int64_t elements, float scale, float* loss, float* doutput,
                       cudaStream_t stream) {
  LossKernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(output, target, samples,
                                                                   elements, scale, loss, doutput);
  return cudaGetLastError();
}

}  // namespace denoised::training::cuda
