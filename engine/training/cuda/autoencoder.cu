// SPDX-License-Identifier: Apache-2.0
// Ops of autoencoder training: the posterior of latents, and the reconstruction loss.
//
// Policy. Posterior: a block owns a row, because KL is a sum over it. Reconstruction: the
// difference d is halved three times into scratch memory. Then every thread computes elements of
// the gradient, and their part of the loss, from the four scales. All in double, because the
// gradient is the sign of small differences.

#include <algorithm>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/training/cuda/block_sum.cuh"
#include "engine/training/cuda/launch.h"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kThreads = 256;
constexpr double kLowestLogVariance = -30, kHighestLogVariance = 20;  // diffusers' clamp

__device__ double Clamped(double log_variance) {
  return fmin(fmax(log_variance, kLowestLogVariance), kHighestLogVariance);
}

__global__ void __launch_bounds__(kThreads)
    GaussianKernel(const __grid_constant__ GaussianLaunch gaussian) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t n = blockIdx.x, begin = n * gaussian.elements;
  const int channels = gaussian.channels;
  double sum = 0;
  for (int64_t i = begin + threadIdx.x; i < begin + gaussian.elements; i += kThreads) {
    const float* moments = gaussian.moments + i / channels * 2 * channels + i % channels;
    const double mean = moments[0], log_variance = Clamped(moments[channels]),
                 deviation = exp(0.5 * log_variance);
    Store(gaussian.latents, 0, i, static_cast<float>(mean + deviation * gaussian.noise[i]));
    sum += mean * mean + deviation * deviation - 1 - log_variance;
  }
  sum = BlockSum<kThreads>(sum);
  if (threadIdx.x == 0)
    gaussian.kl[n] =
        static_cast<float>(gaussian.weight * 0.5 * sum / static_cast<double>(gaussian.elements));
}

__global__ void __launch_bounds__(kThreads)
    GaussianBackwardKernel(const __grid_constant__ GaussianBackwardLaunch backward) {
  WaitForPredecessors();
  ReleaseDependents();
  const GaussianLaunch& forward = backward.forward;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= forward.rows * forward.elements) return;
  const int channels = forward.channels;
  const int64_t at = i / channels * 2 * channels + i % channels;
  const double factor =
      static_cast<double>(backward.scale) * forward.weight / static_cast<double>(forward.elements);
  const double mean = forward.moments[at], log_variance = forward.moments[at + channels],
               deviation = exp(0.5 * Clamped(log_variance)), d = Load(backward.dlatents, 0, i);
  backward.dmoments[at] = static_cast<float>(d + factor * mean);
  const bool inside = log_variance >= kLowestLogVariance && log_variance <= kHighestLogVariance;
  backward.dmoments[at + channels] =
      inside ? static_cast<float>(0.5 * d * deviation * forward.noise[i] +
                                  0.5 * factor * (deviation * deviation - 1))
             : 0.0f;
}

constexpr int kScales = 4;

/// First element of `scale` in a row of `halved`, which holds scales 1 and up.
__host__ __device__ constexpr int64_t BeginOfScale(int64_t elements, int scale) {
  int64_t begin = 0;
  for (int s = 1; s < scale; ++s) begin += elements >> (2 * s);
  return begin;
}

/// d of a row at scales 0 … 3.
struct Differences {
  const float* output;  // of the row
  const float* target;
  const double* halved;  // scales 1 … 3
  int width, channels;
  int64_t elements;

  __device__ double At(int scale, int y, int x, int c) const {
    const int64_t i = (static_cast<int64_t>(y) * (width >> scale) + x) * channels + c;
    return scale == 0 ? static_cast<double>(output[i]) - target[i]
                      : halved[BeginOfScale(elements, scale) + i];
  }
};
__device__ Differences DifferencesOf(const ReconstructionLaunch& of, int64_t row) {
  const int64_t elements = static_cast<int64_t>(of.height) * of.width * of.channels;
  return {of.output + row * elements,
          of.target + row * elements,
          of.halved + row * BeginOfScale(elements, kScales),
          of.width,
          of.channels,
          elements};
}

/// One thread per element of the smallest scale, which is 64 elements of the largest.
__global__ void __launch_bounds__(kThreads)
    HalveKernel(const __grid_constant__ ReconstructionLaunch of) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t row = blockIdx.y;
  const Differences d = DifferencesOf(of, row);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= d.elements >> (2 * (kScales - 1))) return;
  double* halved = of.halved + row * BeginOfScale(d.elements, kScales);
  const int c = static_cast<int>(i % of.channels), smallest = of.width >> (kScales - 1);
  const int x = static_cast<int>(i / of.channels % smallest);
  const int y = static_cast<int>(i / of.channels / smallest);
  for (int scale = 1; scale < kScales; ++scale) {
    const int edge = 1 << (kScales - 1 - scale);  // of this thread's square
    for (int p = 0; p < edge * edge; ++p) {
      const int at_y = y * edge + p / edge, at_x = x * edge + p % edge;
      const double sum = d.At(scale - 1, 2 * at_y, 2 * at_x, c) +
                         d.At(scale - 1, 2 * at_y, 2 * at_x + 1, c) +
                         d.At(scale - 1, 2 * at_y + 1, 2 * at_x, c) +
                         d.At(scale - 1, 2 * at_y + 1, 2 * at_x + 1, c);
      halved[BeginOfScale(d.elements, scale) +
             (static_cast<int64_t>(at_y) * (of.width >> scale) + at_x) * of.channels + c] =
          0.25 * sum;
    }
  }
}

__device__ double SignOf(double value) { return value > 0 ? 1.0 : value < 0 ? -1.0 : 0.0; }

/// The gradient at an element of its differences from the neighbours along one dimension, `before`
/// and `after` if they exist. Adds the difference from `after` to the loss.
__device__ double Slope(double value, bool has_before, double before, bool has_after, double after,
                        double share, double* loss) {
  double slope = 0;
  if (has_before) slope += share * SignOf(value - before);
  if (has_after) {
    slope -= share * SignOf(after - value);
    *loss += share * fabs(after - value);
  }
  return slope;
}

__global__ void __launch_bounds__(kThreads)
    ReconstructionKernel(const __grid_constant__ ReconstructionLaunch of) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t row = blockIdx.y;
  const Differences d = DifferencesOf(of, row);
  const double share = 1.0 / static_cast<double>(d.elements);
  double loss = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < d.elements;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int c = static_cast<int>(i % of.channels);
    const int x = static_cast<int>(i / of.channels % of.width);
    const int y = static_cast<int>(i / of.channels / of.width);
    const double own = d.At(0, y, x, c);
    double gradient = share * SignOf(own), weight = of.edges;  // weight: quartered at each scale
    loss += share * fabs(own);
    for (int scale = 0; scale < kScales && of.edges != 0; ++scale, weight *= 0.25) {
      const int at_y = y >> scale, at_x = x >> scale;
      const int height = of.height >> scale, width = of.width >> scale;
      const double value = d.At(scale, at_y, at_x, c);
      const auto neighbour = [&](int dy, int dx, bool there) {
        return there ? d.At(scale, at_y + dy, at_x + dx, c) : 0.0;
      };
      const bool left = at_x > 0, right = at_x + 1 < width, above = at_y > 0,
                 below = at_y + 1 < height;
      double edges = 0;
      const double slope =
          Slope(value, left, neighbour(0, -1, left), right, neighbour(0, 1, right),
                1.0 / (static_cast<double>(height) * (width - 1) * of.channels), &edges) +
          Slope(value, above, neighbour(-1, 0, above), below, neighbour(1, 0, below),
                1.0 / (static_cast<double>(width) * (height - 1) * of.channels), &edges);
      gradient += weight * slope;
      // Each difference counts once: at the first of the pixels that it was averaged from.
      if (at_y << scale == y && at_x << scale == x) loss += of.edges * edges;
    }
    of.doutput[row * d.elements + i] = static_cast<float>(of.scale * gradient);
  }
  loss = BlockSum<kThreads>(loss);
  if (threadIdx.x == 0) of.partial[row * gridDim.x + blockIdx.x] = loss;
}

/// loss[row] = Σ partial + add.
__global__ void __launch_bounds__(kThreads)
    RowLossKernel(const double* partial, int parts, const float* add, int64_t rows, float* loss) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  double sum = add != nullptr ? add[row] : 0.0;
  for (int part = 0; part < parts; ++part) sum += partial[row * parts + part];
  loss[row] = static_cast<float>(sum);
}

unsigned BlocksFor(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

}  // namespace

cudaError_t LaunchGaussian(const GaussianLaunch& gaussian, const Queue& queue) {
  return LaunchDependent(GaussianKernel,
                         {.grid = static_cast<unsigned>(gaussian.rows), .block = kThreads}, queue,
                         gaussian);
}

cudaError_t LaunchGaussianBackward(const GaussianBackwardLaunch& backward, const Queue& queue) {
  const int64_t count = backward.forward.rows * backward.forward.elements;
  return LaunchDependent(GaussianBackwardKernel, {.grid = BlocksFor(count), .block = kThreads},
                         queue, backward);
}

ReconstructionScratch ReconstructionScratchOf(int64_t elements) {
  const int64_t parts = std::clamp<int64_t>(elements / (4 * kThreads), 1, 256);
  return {BeginOfScale(elements, kScales), static_cast<int>(parts)};
}

cudaError_t LaunchReconstruction(const ReconstructionLaunch& of, const Queue& queue) {
  const int64_t elements = static_cast<int64_t>(of.height) * of.width * of.channels;
  const int parts = ReconstructionScratchOf(elements).parts;
  const auto rows = static_cast<unsigned>(of.rows);
  if (of.edges != 0) {
    const dim3 grid(BlocksFor(elements >> (2 * (kScales - 1))), rows);
    if (cudaError_t error =
            LaunchDependent(HalveKernel, {.grid = grid, .block = kThreads}, queue, of);
        error != cudaSuccess) {
      return error;
    }
  }
  const dim3 grid(static_cast<unsigned>(parts), rows);
  if (cudaError_t error =
          LaunchDependent(ReconstructionKernel, {.grid = grid, .block = kThreads}, queue, of);
      error != cudaSuccess) {
    return error;
  }
  return LaunchDependent(RowLossKernel, {.grid = BlocksFor(of.rows), .block = kThreads}, queue,
                         of.partial, parts, of.add, of.rows, of.loss);
}

}  // namespace denoised::training::cuda
