// SPDX-License-Identifier: Apache-2.0
// Pointwise sums and resampling by two without a convolution.
//
// Policy. Bound by memory: a thread computes eight neighbouring channels of one pixel with 16-byte
// accesses, or one channel if their number is not a multiple of eight or they are not aligned.

#include <algorithm>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/e4m3.cuh"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/fast_divmod.h"
#include "engine/core/philox.h"

namespace denoised::cuda {
namespace {

constexpr int kThreads = 256;

/// One thread per vector of V columns. Blocks hold whole rows, so no thread divides.
template <int V>
LaunchShape ShapeOf(int64_t rows, int columns) {
  const unsigned vectors = columns / V, across = std::clamp<unsigned>(vectors, 1, kThreads);
  const unsigned lines = kThreads / across;
  return {.grid = dim3(static_cast<unsigned>((rows + lines - 1) / lines),
                       (vectors + across - 1) / across),
          .block = dim3(across, lines)};
}

/// This thread's position in [rows, columns]; false beyond the end.
template <int V>
__device__ bool Place(int64_t rows, int columns, int64_t* row, int* column) {
  *row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  *column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * V;
  return *row < rows && *column < columns;
}

/// Coordinates of an output pixel.
struct Pixel {
  int64_t image;
  int y, x;
};
struct OutputSize {
  FastDivmod height, width;
  __device__ Pixel At(int64_t row) const {
    const int pixel = static_cast<int>(row), line = pixel / width;
    return {line / height, line % height, pixel % width};
  }
};

template <int V>
__global__ void __launch_bounds__(kThreads)
    AddKernel(Rows a, float scale, Rows b, float shift, Activation activation, int64_t rows,
              int columns, Rows out) {
  WaitForPredecessors();
  ReleaseDependents();
  int64_t row;
  int column;
  if (!Place<V>(rows, columns, &row, &column)) return;
  float v[V], addend[V] = {};
  LoadChannels<V>(a, row, column, v);
  if (b.data != nullptr) LoadChannels<V>(b, row, column, addend);
#pragma unroll
  for (int j = 0; j < V; ++j) v[j] = Activate(activation, v[j] * scale + addend[j] + shift);
  StoreChannels<V>(out, row, column, v);
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    Upsample2xKernel(Rows x, int64_t out_rows, const __grid_constant__ OutputSize size,
                     int channels, Rows out) {
  WaitForPredecessors();
  ReleaseDependents();
  int64_t row;
  int channel;
  if (!Place<V>(out_rows, channels, &row, &channel)) return;
  const Pixel at = size.At(row);
  float v[V];
  LoadChannels<V>(
      x,
      (at.image * ((size.height.value + 1) / 2) + at.y / 2) * ((size.width.value + 1) / 2) +
          at.x / 2,
      channel, v);
  StoreChannels<V>(out, row, channel, v);
}

/// resample.h's Resample::kFirUp and kFirDown. height and width are the input's.
template <int V, bool kUp>
__global__ void __launch_bounds__(kThreads)
    FirKernel(Rows x, int64_t out_rows, const __grid_constant__ OutputSize size, int height,
              int width, int channels, Rows out) {
  WaitForPredecessors();
  ReleaseDependents();
  int64_t row;
  int channel;
  if (!Place<V>(out_rows, channels, &row, &channel)) return;
  const Pixel at = size.At(row);
  constexpr int kTaps = kUp ? 2 : 4;
  const auto first = [](int i) { return kUp ? (i + 1) / 2 - 1 : 2 * i - 1; };
  const auto weight = [](int i, int tap) {
    if (kUp) return (i % 2 == 0) == (tap == 0) ? 0.25f : 0.75f;
    return tap == 0 || tap == 3 ? 0.125f : 0.375f;
  };
  float sum[V] = {};
#pragma unroll
  for (int i = 0; i < kTaps; ++i) {
    const int y = first(at.y) + i;
    if (y < 0 || y >= height) continue;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      const int column = first(at.x) + j;
      if (column < 0 || column >= width) continue;
      float v[V];
      LoadChannels<V>(x, (static_cast<int64_t>(at.image) * height + y) * width + column, channel,
                      v);
      const float scale = weight(at.y, i) * weight(at.x, j);
#pragma unroll
      for (int c = 0; c < V; ++c) sum[c] = fmaf(scale, v[c], sum[c]);
    }
  }
  StoreChannels<V>(out, row, channel, sum);
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    AveragePool2xKernel(Rows x, int64_t out_rows, const __grid_constant__ OutputSize size,
                        int height, int width, int channels, Rows out) {
  WaitForPredecessors();
  ReleaseDependents();
  int64_t row;
  int channel;
  if (!Place<V>(out_rows, channels, &row, &channel)) return;
  const Pixel at = size.At(row);
  const int64_t corner = (at.image * height + at.y * 2) * width + at.x * 2;
  float sum[V] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float v[V];
    LoadChannels<V>(x, corner + i / 2 * width + i % 2, channel, v);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] += v[j];
  }
#pragma unroll
  for (int j = 0; j < V; ++j) sum[j] *= 0.25f;
  StoreChannels<V>(out, row, channel, sum);
}

/// kE4m3: of `out`, which then counts numbers as columns, not pairs.
template <int V, bool kE4m3 = false>
__global__ void __launch_bounds__(kThreads)
    NoiseKernel(Rows out, int64_t rows, int columns, uint64_t seed) {
  WaitForPredecessors();
  ReleaseDependents();
  int64_t row;
  int column;
  if (!Place<V>(rows, columns, &row, &column)) return;
  const uint64_t first = row * columns + column;
  float v[V];
  Normal4 normal;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (j % 4 == 0) normal = PhiloxNormal(seed, 0, first + j);
    v[j] = normal.v[j % 4];
  }
  if constexpr (kE4m3) {
    *reinterpret_cast<uint2*>(E4m3At(out, row, column)) = PackE4m3(v, 1.0f / out.scale);
  } else {
    StoreChannels<V>(out, row, column, v);
  }
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    GegluGateKernel(Rows x, int64_t rows, int features, int block, Rows out) {
  WaitForPredecessors();
  ReleaseDependents();
  int64_t row;
  int column;
  if (!Place<V>(rows, features, &row, &column)) return;
  float v[V], gate[V];
  const int value = static_cast<int>(GatedOutput(column, features, block));
  LoadChannels<V>(x, row, value, v);
  LoadChannels<V>(x, row, value + block, gate);
#pragma unroll
  for (int j = 0; j < V; ++j) v[j] *= Gelu(gate[j]);
  StoreChannels<V>(out, row, column, v);
}

/// One thread per element of the result, which is small (latents).
__global__ void __launch_bounds__(kThreads)
    GaussianKernel(const __grid_constant__ GaussianLaunch gaussian) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= gaussian.pixels * gaussian.channels) return;
  const int64_t pixel = i / gaussian.channels;
  const int c = static_cast<int>(i % gaussian.channels);
  const float* const moments = gaussian.moments + pixel * 2 * gaussian.channels;
  float value = moments[c];
  if (gaussian.noise != nullptr) {
    const float log_variance = fminf(fmaxf(moments[gaussian.channels + c], -30.0f), 20.0f);
    value = fmaf(gaussian.noise[i], expf(0.5f * log_variance), value);
  }
  gaussian.out[i] = fmaf(value, gaussian.scale[c], gaussian.shift[c]);
}

__global__ void __launch_bounds__(kThreads)
    DivideRowsKernel(Rows x, const float* divisor, int64_t elements, Rows out) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= elements) return;
  const int64_t image = blockIdx.y, at = image * elements + i;
  Store(out, 0, at, __fdiv_rn(Load(x, 0, at), divisor[image]));
}

}  // namespace

cudaError_t LaunchUpsample2x(const Rows& x, int images, int height, int width, int channels,
                             const Rows& out, const Queue& queue) {
  const int64_t rows = static_cast<int64_t>(images) * height * width;
  if (rows > INT32_MAX) return cudaErrorInvalidValue;
  const OutputSize size = {FastDivmod(height), FastDivmod(width)};
  if (x.vector && out.vector && channels % 8 == 0) {
    return LaunchDependent(Upsample2xKernel<8>, ShapeOf<8>(rows, channels), queue, x, rows, size,
                           channels, out);
  }
  return LaunchDependent(Upsample2xKernel<1>, ShapeOf<1>(rows, channels), queue, x, rows, size,
                         channels, out);
}

cudaError_t LaunchAveragePool2x(const Rows& x, int images, int height, int width, int channels,
                                const Rows& out, const Queue& queue) {
  const OutputSize size = {FastDivmod(height / 2), FastDivmod(width / 2)};
  const int64_t rows = static_cast<int64_t>(images) * size.height.value * size.width.value;
  if (rows > INT32_MAX) return cudaErrorInvalidValue;
  if (x.vector && out.vector && channels % 8 == 0) {
    return LaunchDependent(AveragePool2xKernel<8>, ShapeOf<8>(rows, channels), queue, x, rows, size,
                           height, width, channels, out);
  }
  return LaunchDependent(AveragePool2xKernel<1>, ShapeOf<1>(rows, channels), queue, x, rows, size,
                         height, width, channels, out);
}

cudaError_t LaunchFir2x(const Rows& x, int images, int height, int width, int channels, bool up,
                        const Rows& out, const Queue& queue) {
  const OutputSize size = {FastDivmod(up ? 2 * height : height / 2),
                           FastDivmod(up ? 2 * width : width / 2)};
  const int64_t rows = static_cast<int64_t>(images) * size.height.value * size.width.value;
  if (rows > INT32_MAX) return cudaErrorInvalidValue;
  if (x.vector && out.vector && channels % 8 == 0) {
    return LaunchDependent(up ? FirKernel<8, true> : FirKernel<8, false>,
                           ShapeOf<8>(rows, channels), queue, x, rows, size, height, width,
                           channels, out);
  }
  return LaunchDependent(up ? FirKernel<1, true> : FirKernel<1, false>, ShapeOf<1>(rows, channels),
                         queue, x, rows, size, height, width, channels, out);
}

cudaError_t LaunchAdd(const Rows& a, float scale, const Rows& b, float shift, Activation activation,
                      int64_t rows, int columns, const Rows& out, const Queue& queue) {
  if (a.vector && out.vector && (b.data == nullptr || b.vector) && columns % 8 == 0) {
    return LaunchDependent(AddKernel<8>, ShapeOf<8>(rows, columns), queue, a, scale, b, shift,
                           activation, rows, columns, out);
  }
  return LaunchDependent(AddKernel<1>, ShapeOf<1>(rows, columns), queue, a, scale, b, shift,
                         activation, rows, columns, out);
}

cudaError_t LaunchGegluGate(const Rows& x, int64_t rows, int features, const Rows& out,
                            const Queue& queue) {
  if (x.vector && out.vector && features % 8 == 0) {
    return LaunchDependent(GegluGateKernel<8>, ShapeOf<8>(rows, features), queue, x, rows, features,
                           GatedBlock(features), out);
  }
  return LaunchDependent(GegluGateKernel<1>, ShapeOf<1>(rows, features), queue, x, rows, features,
                         GatedBlock(features), out);
}

cudaError_t LaunchGaussian(const GaussianLaunch& gaussian, const Queue& queue) {
  const int64_t blocks = (gaussian.pixels * gaussian.channels + kThreads - 1) / kThreads;
  return LaunchDependent(GaussianKernel, {dim3(static_cast<unsigned>(blocks)), kThreads}, queue,
                         gaussian);
}

cudaError_t LaunchNoise(const Rows& out, int64_t rows, int columns, uint64_t seed,
                        const Queue& queue) {
  if (out.element == Element::kE4m3x2) {
    if (!out.vector || columns % 4 != 0) return cudaErrorInvalidValue;
    return LaunchDependent(NoiseKernel<8, true>, ShapeOf<8>(rows, 2 * columns), queue, out, rows,
                           2 * columns, seed);
  }
  if (out.element != Element::kBf16 && out.element != Element::kF32) return cudaErrorInvalidValue;
  if (out.vector && columns % 8 == 0) {
    return LaunchDependent(NoiseKernel<8>, ShapeOf<8>(rows, columns), queue, out, rows, columns,
                           seed);
  }
  return LaunchDependent(NoiseKernel<1>, ShapeOf<1>(rows, columns), queue, out, rows, columns,
                         seed);
}

cudaError_t LaunchDivideRows(const Rows& x, const float* divisor, int images, int64_t elements,
                             const Rows& out, const Queue& queue) {
  const dim3 grid(static_cast<unsigned>((elements + kThreads - 1) / kThreads),
                  static_cast<unsigned>(images));
  return LaunchDependent(DivideRowsKernel, {grid, kThreads}, queue, x, divisor, elements, out);
}

cudaError_t LoadElementwiseKernels() {
  return LoadKernels(0, DivideRowsKernel, AddKernel<8>, AddKernel<1>, Upsample2xKernel<8>,
                     Upsample2xKernel<1>, FirKernel<8, true>, FirKernel<1, true>,
                     FirKernel<8, false>, FirKernel<1, false>, AveragePool2xKernel<8>,
                     AveragePool2xKernel<1>, NoiseKernel<8>, NoiseKernel<8, true>, NoiseKernel<1>,
                     GegluGateKernel<8>, GegluGateKernel<1>, GaussianKernel);
}

}  // namespace denoised::cuda
