// Pointwise sums and resampling by two without a convolution.
//
// Policy. Bound by memory: a thread makes eight neighbouring channels of one pixel with 16-byte
// accesses, or one channel where the channels are odd or not aligned.

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"

namespace denoised::cuda {
namespace {

constexpr int kThreads = 256;

/// Blocks for one thread per vector of V columns.
template <int V>
unsigned Blocks(int64_t rows, int columns) {
  return static_cast<unsigned>((rows * (columns / V) + kThreads - 1) / kThreads);
}

/// This thread's place in [rows, columns], or false beyond the end.
template <int V>
__device__ bool Place(int64_t rows, int columns, int64_t* row, int* column) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  *row = i / (columns / V);
  *column = static_cast<int>(i % (columns / V)) * V;
  return *row < rows;
}

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
    Upsample2xKernel(Rows x, int64_t out_rows, int height, int width, int channels, Rows out) {
  WaitForPredecessors();
  ReleaseDependents();
  int64_t row;
  int channel;
  if (!Place<V>(out_rows, channels, &row, &channel)) return;
  const int64_t line = row / (2 * width);  // image · 2 height + y
  const int64_t image = line / (2 * height);
  const int64_t y = line % (2 * height) / 2, x_column = row % (2 * width) / 2;
  float v[V];
  LoadChannels<V>(x, (image * height + y) * width + x_column, channel, v);
  StoreChannels<V>(out, row, channel, v);
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    AveragePool2xKernel(Rows x, int64_t out_rows, int height, int width, int channels, Rows out) {
  WaitForPredecessors();
  ReleaseDependents();
  int64_t row;
  int channel;
  if (!Place<V>(out_rows, channels, &row, &channel)) return;
  const int out_height = height / 2, out_width = width / 2;
  const int64_t line = row / out_width, image = line / out_height;
  const int64_t corner = (image * height + line % out_height * 2) * width + row % out_width * 2;
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
  const int64_t rows = static_cast<int64_t>(images) * height * width * 4;
  if (x.vector && out.vector && channels % 8 == 0) {
    return LaunchDependent(Upsample2xKernel<8>, {Blocks<8>(rows, channels), kThreads}, queue, x,
                           rows, height, width, channels, out);
  }
  return LaunchDependent(Upsample2xKernel<1>, {Blocks<1>(rows, channels), kThreads}, queue, x, rows,
                         height, width, channels, out);
}

cudaError_t LaunchAveragePool2x(const Rows& x, int images, int height, int width, int channels,
                                const Rows& out, const Queue& queue) {
  const int64_t rows = static_cast<int64_t>(images) * (height / 2) * (width / 2);
  if (x.vector && out.vector && channels % 8 == 0) {
    return LaunchDependent(AveragePool2xKernel<8>, {Blocks<8>(rows, channels), kThreads}, queue, x,
                           rows, height, width, channels, out);
  }
  return LaunchDependent(AveragePool2xKernel<1>, {Blocks<1>(rows, channels), kThreads}, queue, x,
                         rows, height, width, channels, out);
}

cudaError_t LaunchAdd(const Rows& a, float scale, const Rows& b, float shift, Activation activation,
                      int64_t rows, int columns, const Rows& out, const Queue& queue) {
  if (a.vector && out.vector && (b.data == nullptr || b.vector) && columns % 8 == 0) {
    return LaunchDependent(AddKernel<8>, {Blocks<8>(rows, columns), kThreads}, queue, a, scale, b,
                           shift, activation, rows, columns, out);
  }
  return LaunchDependent(AddKernel<1>, {Blocks<1>(rows, columns), kThreads}, queue, a, scale, b,
                         shift, activation, rows, columns, out);
}

cudaError_t LaunchDivideRows(const Rows& x, const float* divisor, int images, int64_t elements,
                             const Rows& out, const Queue& queue) {
  const dim3 grid(static_cast<unsigned>((elements + kThreads - 1) / kThreads),
                  static_cast<unsigned>(images));
  return LaunchDependent(DivideRowsKernel, {grid, kThreads}, queue, x, divisor, elements, out);
}

cudaError_t LoadElementwiseKernels() {
  for (cudaError_t error :
       {LoadKernel(DivideRowsKernel), LoadKernel(AddKernel<8>), LoadKernel(AddKernel<1>),
        LoadKernel(Upsample2xKernel<8>), LoadKernel(Upsample2xKernel<1>),
        LoadKernel(AveragePool2xKernel<8>), LoadKernel(AveragePool2xKernel<1>)}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace denoised::cuda
