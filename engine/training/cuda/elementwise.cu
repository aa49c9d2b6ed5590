// SPDX-License-Identifier: Apache-2.0
// Elementwise ops, resampling and copies. A thread owns one element or vector of the result; for
// dropout four elements, as many as one call of Philox draws. All tensors are contiguous.

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/training/cuda/derivative.cuh"
#include "engine/training/cuda/launch.h"
#include "engine/training/random.h"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kThreads = 256;

unsigned BlocksFor(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

/// One thread per element, or per vector of eight.
LaunchShape ShapeOf(int64_t count, bool vectors) {
  return {.grid = BlocksFor(vectors ? count / 8 : count), .block = kThreads};
}

/// Calls each(i) for this thread's vector, elements [i, i + V), after waiting for earlier kernels.
template <int V, typename Each>
__device__ void ForEach(int64_t count, const Each& each) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (i < count) each(i);
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    ActivateBackwardKernel(Activation activation, Rows x, Rows dout, int64_t count, Rows dx) {
  ForEach<V>(count, [&](int64_t i) {
    float z[V], d[V];
    LoadChannels<V>(x, 0, i, z);
    LoadChannels<V>(dout, 0, i, d);
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] *= Derivative(activation, z[j]);
    StoreChannels<V>(dx, 0, i, d);
  });
}

/// A line of x holds the values, then the gates.
template <int V>
__global__ void __launch_bounds__(kThreads)
    GegluKernel(Rows x, int width, int64_t count, Rows out) {
  ForEach<V>(count, [&](int64_t i) {
    const int64_t line = i / width, c = i % width;
    float value[V], gate[V];
    LoadChannels<V>(x, line, c, value);
    LoadChannels<V>(x, line, width + c, gate);
#pragma unroll
    for (int j = 0; j < V; ++j) value[j] *= Gelu(gate[j]);
    StoreChannels<V>(out, 0, i, value);
  });
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    GegluBackwardKernel(Rows x, Rows dout, int width, int64_t count, Rows dx) {
  ForEach<V>(count, [&](int64_t i) {
    const int64_t line = i / width, c = i % width;
    float value[V], gate[V], d[V];
    LoadChannels<V>(x, line, c, value);
    LoadChannels<V>(x, line, width + c, gate);
    LoadChannels<V>(dout, 0, i, d);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float z = gate[j];
      gate[j] = d[j] * value[j] * Derivative(Activation::kGelu, z);
      value[j] = d[j] * Gelu(z);
    }
    StoreChannels<V>(dx, line, c, value);
    StoreChannels<V>(dx, line, width + c, gate);
  });
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    ScaledSumKernel(Rows a, float scale_a, Rows b, float scale_b, float shift, int64_t count,
                    Rows out) {
  ForEach<V>(count, [&](int64_t i) {
    float x[V], y[V] = {};
    LoadChannels<V>(a, 0, i, x);
    if (b.data != nullptr) LoadChannels<V>(b, 0, i, y);
#pragma unroll
    for (int j = 0; j < V; ++j) x[j] = fmaf(x[j], scale_a, fmaf(y[j], scale_b, shift));
    StoreChannels<V>(out, 0, i, x);
  });
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    CopyColumnsKernel(Rows from, int columns, int64_t count, Rows to, int to_columns) {
  ForEach<V>(count, [&](int64_t i) {
    const int64_t line = i / to_columns, c = i % to_columns;
    float v[V] = {};
    if (c < columns) LoadChannels<V>(from, line, c, v);
    StoreChannels<V>(to, line, c, v);
  });
}

/// Coordinates of element i of [.., height, width, channels].
struct Pixel {
  int64_t image;
  int h, w, c;
};
__device__ Pixel PixelOf(int64_t i, int height, int width, int channels) {
  const int64_t pixel = i / channels;
  return {pixel / width / height, static_cast<int>(pixel / width % height),
          static_cast<int>(pixel % width), static_cast<int>(i % channels)};
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    PoolKernel(Rows large, int64_t count, int height, int width, int channels, float scale,
               Rows small) {
  ForEach<V>(count, [&](int64_t i) {
    const Pixel p = PixelOf(i, height, width, channels);
    const int64_t line = 2 * static_cast<int64_t>(width) * channels;
    const int64_t top = (p.image * height + p.h) * 2 * line + 2 * p.w * channels + p.c;
    float a[V], b[V], c[V], d[V];
    LoadChannels<V>(large, 0, top, a);
    LoadChannels<V>(large, 0, top + channels, b);
    LoadChannels<V>(large, 0, top + line, c);
    LoadChannels<V>(large, 0, top + line + channels, d);
#pragma unroll
    for (int j = 0; j < V; ++j) a[j] = ((a[j] + b[j]) + (c[j] + d[j])) * scale;
    StoreChannels<V>(small, 0, i, a);
  });
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    SpreadKernel(Rows small, int64_t count, int height, int width, int channels, float scale,
                 Rows large) {
  ForEach<V>(count, [&](int64_t i) {
    const Pixel p = PixelOf(i, 2 * height, 2 * width, channels);
    float v[V];
    LoadChannels<V>(small, 0, ((p.image * height + p.h / 2) * width + p.w / 2) * channels + p.c, v);
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] *= scale;
    StoreChannels<V>(large, 0, i, v);
  });
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    DilateKernel(const __grid_constant__ DilateLaunch dilate, int64_t count) {
  ForEach<V>(count, [&](int64_t i) {
    const Pixel p = PixelOf(i, dilate.height, dilate.width, dilate.channels);
    const int h = p.h - dilate.offset_top, w = p.w - dilate.offset_left;
    float v[V] = {};
    if (h >= 0 && w >= 0 && h % dilate.stride == 0 && w % dilate.stride == 0 &&
        h / dilate.stride < dilate.in_height && w / dilate.stride < dilate.in_width) {
      const int64_t line = p.image * dilate.in_height + h / dilate.stride;
      LoadChannels<V>(dilate.x, 0,
                      (line * dilate.in_width + w / dilate.stride) * dilate.channels + p.c, v);
    }
    StoreChannels<V>(dilate.out, 0, i, v);
  });
}

__global__ void __launch_bounds__(kThreads)
    DropoutKernel(Rows x, int64_t elements, float probability, uint64_t seed, const int32_t* step,
                  const SampleRow* samples, uint32_t layer, Rows out) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  const int64_t row = blockIdx.y;
  if (i >= elements) return;
  const float keep = 1.0f / (1.0f - probability);
  const Philox4 bits = Draw(seed, Purpose::kDropout, static_cast<uint32_t>(*step),
                            samples[row].sample, static_cast<uint32_t>(i / 4), layer);
  for (int j = 0; j < 4 && i + j < elements; ++j) {
    const int64_t at = row * elements + i + j;
    Store(out, 0, at, UniformOf(bits.v[j]) >= probability ? Load(x, 0, at) * keep : 0.0f);
  }
}

template <typename... Operands>
bool AllVectors(int64_t line, const Operands&... operands) {
  return line % 8 == 0 && ((operands.data == nullptr || operands.vector) && ...);
}

}  // namespace

cudaError_t LaunchActivateBackward(Activation activation, const Rows& x, const Rows& dout,
                                   int64_t count, const Rows& dx, const Queue& queue) {
  const bool vectors = AllVectors(count, x, dout, dx);
  const auto kernel = vectors ? ActivateBackwardKernel<8> : ActivateBackwardKernel<1>;
  return LaunchDependent(kernel, ShapeOf(count, vectors), queue, activation, x, dout, count, dx);
}

cudaError_t LaunchGeglu(const Rows& x, int64_t lines, int width, const Rows& out,
                        const Queue& queue) {
  const int64_t count = lines * width;
  const bool vectors = AllVectors(width, x, out);
  const auto kernel = vectors ? GegluKernel<8> : GegluKernel<1>;
  return LaunchDependent(kernel, ShapeOf(count, vectors), queue, x, width, count, out);
}

cudaError_t LaunchGegluBackward(const Rows& x, const Rows& dout, int64_t lines, int width,
                                const Rows& dx, const Queue& queue) {
  const int64_t count = lines * width;
  const bool vectors = AllVectors(width, x, dout, dx);
  const auto kernel = vectors ? GegluBackwardKernel<8> : GegluBackwardKernel<1>;
  return LaunchDependent(kernel, ShapeOf(count, vectors), queue, x, dout, width, count, dx);
}

cudaError_t LaunchScaledSum(const Rows& a, float scale_a, const Rows& b, float scale_b, float shift,
                            int64_t count, const Rows& out, const Queue& queue) {
  const bool vectors = AllVectors(count, a, b, out);
  const auto kernel = vectors ? ScaledSumKernel<8> : ScaledSumKernel<1>;
  return LaunchDependent(kernel, ShapeOf(count, vectors), queue, a, scale_a, b, scale_b, shift,
                         count, out);
}

cudaError_t LaunchCopyColumns(const Rows& from, int columns, int64_t lines, const Rows& to,
                              int to_columns, const Queue& queue) {
  const int64_t count = lines * to_columns;
  const bool vectors = columns % 8 == 0 && AllVectors(to_columns, from, to);
  const auto kernel = vectors ? CopyColumnsKernel<8> : CopyColumnsKernel<1>;
  return LaunchDependent(kernel, ShapeOf(count, vectors), queue, from, columns, count, to,
                         to_columns);
}

cudaError_t LaunchPool(const Rows& large, int64_t images, int height, int width, int channels,
                       float scale, const Rows& small, const Queue& queue) {
  const int64_t count = images * height * width * channels;
  const bool vectors = AllVectors(channels, large, small);
  const auto kernel = vectors ? PoolKernel<8> : PoolKernel<1>;
  return LaunchDependent(kernel, ShapeOf(count, vectors), queue, large, count, height, width,
                         channels, scale, small);
}

cudaError_t LaunchSpread(const Rows& small, int64_t images, int height, int width, int channels,
                         float scale, const Rows& large, const Queue& queue) {
  const int64_t count = images * 4 * height * width * channels;
  const bool vectors = AllVectors(channels, large, small);
  const auto kernel = vectors ? SpreadKernel<8> : SpreadKernel<1>;
  return LaunchDependent(kernel, ShapeOf(count, vectors), queue, small, count, height, width,
                         channels, scale, large);
}

cudaError_t LaunchDilate(const DilateLaunch& dilate, const Queue& queue) {
  const int64_t count = dilate.images * dilate.height * dilate.width * dilate.channels;
  const bool vectors = AllVectors(dilate.channels, dilate.x, dilate.out);
  const auto kernel = vectors ? DilateKernel<8> : DilateKernel<1>;
  return LaunchDependent(kernel, ShapeOf(count, vectors), queue, dilate, count);
}

cudaError_t LaunchDropout(const Rows& x, int64_t rows, int64_t elements, float probability,
                          uint64_t seed, const int32_t* step, const SampleRow* samples,
                          uint32_t layer, const Rows& out, const Queue& queue) {
  const dim3 grid(BlocksFor((elements + 3) / 4), static_cast<unsigned>(rows));
  return LaunchDependent(DropoutKernel, {.grid = grid, .block = kThreads}, queue, x, elements,
                         probability, seed, step, samples, layer, out);
}

}  // namespace denoised::training::cuda
