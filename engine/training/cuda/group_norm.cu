// SPDX-License-Identifier: Apache-2.0
// Group norm with an activation, and its gradients, each in two passes over memory. For images that
// fit into the shared memory of a cluster: group_norm_sm90.cu.
//
// Policy. Blocks own strips of channels (strips.cuh). The first pass computes two sums for every
// row, part and channel. One warp per row and group turns them into the coefficients of the second
// pass. Forward, the sums are of x minus the channel's first pixel, so a large mean costs no
// digits. Backward, with sums over a row's pixels:
//
//   x̂ = (x − μ)·rstd     z = (γx̂ + β)(1 + s) + t     dz = dout·act′(z)
//   A = Σ dz·(x − μ)     B = Σ dz
//   dγ = Σ rows rstd·A·(1 + s)     dβ = Σ rows B·(1 + s)     ds = γ·rstd·A + β·B     dt = B
//   dx = rstd·(dz·γ′ − c2 − x̂·c1),   γ′ = γ(1 + s),   c1 = mean of dz·γ′·x̂,   c2 = mean of dz·γ′
//
// where the means are over the group's channels and pixels.

#include <algorithm>

#include "engine/backend/cuda/fast_divmod.h"
#include "engine/training/cuda/group_norm.cuh"
#include "engine/training/cuda/launch.h"
#include "engine/training/cuda/strips.cuh"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kWarps = 4;

template <int V>
__device__ Line<V> LineOf(const NormLaunch& norm, const FastDivmod& group_size, int64_t row,
                          int column) {
  Line<V> line;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const int c = column + i;
    const float* statistics = norm.statistics + (row * norm.groups + c / group_size) * 2;
    const Affine affine = AffineOf(ParametersOf(norm, row, c), statistics[0], statistics[1]);
    line.mean[i] = affine.mean;
    line.slope[i] = affine.slope;
    line.offset[i] = affine.offset;
  }
  return line;
}

template <int V, int kWidth, Element kElement, int kActivation, bool kBackward>
__global__ void __launch_bounds__(kStripThreads)
    MomentsKernel(const __grid_constant__ NormLaunch norm, Rows dout, FastDivmod group_size) {
  using S = Strip<V, kWidth>;
  __shared__ float shared[2][S::kLines][S::kChannels];
  const int column = S::Column();
  const Range range = RangeOf(norm.pixels, gridDim.y, blockIdx.y);
  const int64_t row = blockIdx.z, first = row * norm.pixels;
  float sums[2][V] = {};
  if (column < norm.channels) {
    Line<V> line = {};
    if constexpr (kBackward) {
      line = LineOf<V>(norm, group_size, row, column);
    } else {
      LoadChannelsOf<V, kElement>(norm.x, first, column, line.mean);
    }
    Channels<V, kElement> x[4], d[4];
    ForLines<4, S::kLines>(
        range.begin + S::Line(), range.end,
        [&](int u, int64_t pixel) {
          x[u].Load(norm.x, first + pixel, column);
          if constexpr (kBackward) d[u].Load(dout, first + pixel, column);
        },
        [&](int u, int64_t) {
          float values[V], gradients[V];
          x[u].Get(values);
          if constexpr (kBackward) d[u].Get(gradients);
#pragma unroll
          for (int i = 0; i < V; ++i) {
            const float centered = values[i] - line.mean[i];
            if constexpr (kBackward) {
              const float z = fmaf(centered, line.slope[i], line.offset[i]);
              const float dz = gradients[i] * Derivative(ActivationOf<kActivation>(norm), z);
              sums[0][i] = fmaf(dz, centered, sums[0][i]);
              sums[1][i] += dz;
            } else {
              sums[0][i] += centered;
              sums[1][i] = fmaf(centered, centered, sums[1][i]);
            }
          }
        });
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int i = 0; i < V; ++i) shared[s][S::Line()][S::Place() + i] = sums[s][i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * S::kChannels; i += kStripThreads) {
    const int s = i % 2, channel = blockIdx.x * S::kChannels + i / 2;
    if (channel >= norm.channels) continue;
    norm.partial[((row * gridDim.y + blockIdx.y) * norm.channels + channel) * 2 + s] =
        SumOf<S::kLines>([&](int line) { return shared[s][line][i / 2]; });
  }
}

/// Adds sum `s` of MomentsKernel over the parts of a row.
__device__ double SumOfParts(const NormLaunch& norm, int parts, int64_t row, int channel, int s) {
  double sum = 0;
  for (int part = 0; part < parts; ++part)
    sum += norm.partial[((row * parts + part) * norm.channels + channel) * 2 + s];
  return sum;
}

__global__ void __launch_bounds__(32 * kWarps)
    StatisticsKernel(const __grid_constant__ NormLaunch norm, int parts) {
  const int64_t row = blockIdx.y;
  const int group = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (group >= norm.groups) return;
  const int size = norm.channels / norm.groups, first = group * size;
  const double pixels = static_cast<double>(norm.pixels);
  const auto mean_of = [&](int c) {
    return Load(norm.x, row * norm.pixels, c) + SumOfParts(norm, parts, row, c, 0) / pixels;
  };
  double sum = 0;
  for (int c = first + lane; c < first + size; c += 32) sum += mean_of(c);
  const double mean = WarpSum(sum) / size;
  double squares = 0;  // of the distances from the group's mean
  for (int c = first + lane; c < first + size; c += 32) {
    const double s = SumOfParts(norm, parts, row, c, 0), distance = mean_of(c) - mean;
    squares += SumOfParts(norm, parts, row, c, 1) - s * s / pixels + pixels * distance * distance;
  }
  squares = WarpSum(squares);
  if (lane != 0) return;
  float* statistics = norm.statistics + (row * norm.groups + group) * 2;
  statistics[0] = static_cast<float>(mean);
  statistics[1] = static_cast<float>(1.0 / sqrt(fmax(squares, 0.0) / (pixels * size) + norm.eps));
}

template <int V, int kWidth, Element kElement, int kActivation>
__global__ void __launch_bounds__(kStripThreads)
    NormalizeKernel(const __grid_constant__ NormLaunch norm, FastDivmod group_size) {
  using S = Strip<V, kWidth>;
  const int column = S::Column();
  if (column >= norm.channels) return;
  const Range range = RangeOf(norm.pixels, gridDim.y, blockIdx.y);
  const int64_t row = blockIdx.z, first = row * norm.pixels;
  const Line<V> line = LineOf<V>(norm, group_size, row, column);
  Channels<V, kElement> x[4];
  ForLines<4, S::kLines>(
      range.begin + S::Line(), range.end,
      [&](int u, int64_t pixel) { x[u].Load(norm.x, first + pixel, column); },
      [&](int u, int64_t pixel) {
        float values[V];
        x[u].Get(values);
#pragma unroll
        for (int i = 0; i < V; ++i)
          values[i] = Activate(ActivationOf<kActivation>(norm),
                               fmaf(values[i] - line.mean[i], line.slope[i], line.offset[i]));
        StoreChannelsOf<V, kElement>(norm.out, first + pixel, column, values);
      });
}

/// Computes the coefficients {b, k} of dx = dz·slope + (x − mean)·b + k, a row's share of dγ and
/// dβ, and dscale_shift.
__global__ void __launch_bounds__(32 * kWarps)
    CoefficientsKernel(const __grid_constant__ NormBackwardLaunch backward, int parts) {
  const NormLaunch& norm = backward.forward;
  const int64_t row = blockIdx.y;
  const int group = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (group >= norm.groups) return;
  const int size = norm.channels / norm.groups, first = group * size;
  const double count = static_cast<double>(norm.pixels) * size;
  const double rstd = norm.statistics[(row * norm.groups + group) * 2 + 1];
  double c1 = 0, c2 = 0;
  for (int c = first + lane; c < first + size; c += 32) {
    const Pair sums = {SumOfParts(norm, parts, row, c, 0), SumOfParts(norm, parts, row, c, 1)};
    const Parameters parameters = ParametersOf(norm, row, c);
    const Pair terms = TermsOf(parameters, rstd, sums);
    c1 += terms.a;
    c2 += terms.b;
    StoreParameterGradients(backward, row, c, parameters, rstd, sums);
  }
  c1 = WarpSum(c1) / count;
  c2 = WarpSum(c2) / count;
  for (int c = first + lane; c < first + size; c += 32) {
    float* coefficients = backward.coefficients + (row * norm.channels + c) * 2;
    coefficients[0] = static_cast<float>(-rstd * rstd * c1);
    coefficients[1] = static_cast<float>(-rstd * c2);
  }
}

template <int V, int kWidth, Element kElement, int kActivation, bool kAdds>
__global__ void __launch_bounds__(kStripThreads)
    NormGradientKernel(const __grid_constant__ NormBackwardLaunch backward, FastDivmod group_size) {
  using S = Strip<V, kWidth>;
  const NormLaunch& norm = backward.forward;
  const int column = S::Column();
  if (column >= norm.channels) return;
  const Range range = RangeOf(norm.pixels, gridDim.y, blockIdx.y);
  const int64_t row = blockIdx.z, first = row * norm.pixels;
  const Line<V> line = LineOf<V>(norm, group_size, row, column);
  float b[V], k[V];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const float* coefficients = backward.coefficients + (row * norm.channels + column + i) * 2;
    b[i] = coefficients[0];
    k[i] = coefficients[1];
  }
  const bool is_rest = column >= backward.dx_channels;
  const Rows& out = is_rest ? backward.dx_rest : backward.dx;
  const int out_column = is_rest ? column - backward.dx_channels : column;
  Channels<V, kElement> x[4], d[4], add[4];
  ForLines<4, S::kLines>(
      range.begin + S::Line(), range.end,
      [&](int u, int64_t pixel) {
        x[u].Load(norm.x, first + pixel, column);
        d[u].Load(backward.dout, first + pixel, column);
        if constexpr (kAdds) add[u].Load(backward.add, first + pixel, column);
      },
      [&](int u, int64_t pixel) {
        float values[V], gradients[V], adds[V] = {};
        x[u].Get(values);
        d[u].Get(gradients);
        if constexpr (kAdds) add[u].Get(adds);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const float centered = values[i] - line.mean[i];
          const float z = fmaf(centered, line.slope[i], line.offset[i]);
          const float dz = gradients[i] * Derivative(ActivationOf<kActivation>(norm), z);
          gradients[i] = fmaf(dz, line.slope[i], fmaf(centered, b[i], k[i])) + adds[i];
        }
        StoreChannelsOf<V, kElement>(out, first + pixel, out_column, gradients);
      });
}

bool IsAligned(const Rows& rows) { return rows.data == nullptr || rows.vector; }

dim3 GroupGrid(const NormLaunch& norm) {
  return dim3(static_cast<unsigned>((norm.groups + kWarps - 1) / kWarps),
              static_cast<unsigned>(norm.rows));
}

/// Template arguments of the kernels.
template <int kEach, int kStrip, Element kOf, int kWith>
struct Variant {
  static constexpr int V = kEach, kWidth = kStrip, kActivation = kWith;
  static constexpr Element kElement = kOf;
};

template <typename T>
cudaError_t Forward(const NormLaunch& norm, cudaStream_t stream) {
  const int parts = PartsOf(norm.pixels);
  const dim3 grid =
      Strip<T::V, T::kWidth>::Grid(norm.channels, parts, static_cast<unsigned>(norm.rows));
  const FastDivmod group_size(norm.channels / norm.groups);
  MomentsKernel<T::V, T::kWidth, T::kElement, kAny, false>
      <<<grid, kStripThreads, 0, stream>>>(norm, Rows{}, group_size);
  StatisticsKernel<<<GroupGrid(norm), 32 * kWarps, 0, stream>>>(norm, parts);
  NormalizeKernel<T::V, T::kWidth, T::kElement, T::kActivation>
      <<<grid, kStripThreads, 0, stream>>>(norm, group_size);
  return cudaGetLastError();
}

template <typename T>
cudaError_t Backward(const NormBackwardLaunch& norm, cudaStream_t stream) {
  const NormLaunch& forward = norm.forward;
  const int parts = PartsOf(forward.pixels);
  const dim3 grid =
      Strip<T::V, T::kWidth>::Grid(forward.channels, parts, static_cast<unsigned>(forward.rows));
  const FastDivmod group_size(forward.channels / forward.groups);
  MomentsKernel<T::V, T::kWidth, T::kElement, T::kActivation, true>
      <<<grid, kStripThreads, 0, stream>>>(forward, norm.dout, group_size);
  CoefficientsKernel<<<GroupGrid(forward), 32 * kWarps, 0, stream>>>(norm, parts);
  const auto gradient =
      norm.add.data != nullptr
          ? NormGradientKernel<T::V, T::kWidth, T::kElement, T::kActivation, true>
          : NormGradientKernel<T::V, T::kWidth, T::kElement, T::kActivation, false>;
  gradient<<<grid, kStripThreads, 0, stream>>>(norm, group_size);
  return cudaGetLastError();
}

/// Calls `launch` with the Variant. Only bf16 vectors must be fast: for them, SiLU and no
/// activation have their own kernels.
template <typename Launch>
cudaError_t WithVariant(const NormLaunch& norm, bool vectors, const Launch& launch) {
  if (norm.x.element != Element::kBf16)
    return vectors ? launch(Variant<8, kNarrowStrip, Element::kF32, kAny>())
                   : launch(Variant<1, kNarrowStrip, Element::kF32, kAny>());
  if (!vectors) return launch(Variant<1, kNarrowStrip, Element::kBf16, kAny>());
  return WithConstant<kWideStrip, kNarrowStrip>(
      StripWidth(norm.channels, vectors), [&](auto width) {
        return WithActivation(norm.activation, [&](auto activation) {
          return launch(Variant<8, width, Element::kBf16, activation>());
        });
      });
}

}  // namespace

cudaError_t LaunchNorm(const NormLaunch& norm, const Queue& queue) {
  if (SuitsNormHopper(norm, queue)) return LaunchNormHopper(norm, queue);
  const bool vectors = norm.channels % 8 == 0 && IsAligned(norm.x) && IsAligned(norm.out);
  return WithVariant(norm, vectors,
                     [&](auto variant) { return Forward<decltype(variant)>(norm, queue.stream); });
}

cudaError_t LaunchNormBackward(const NormBackwardLaunch& norm, const Queue& queue) {
  if (SuitsNormBackwardHopper(norm, queue)) return LaunchNormBackwardHopper(norm, queue);
  const bool vectors = norm.forward.channels % 8 == 0 && IsAligned(norm.forward.x) &&
                       IsAligned(norm.dout) && IsAligned(norm.add) && IsAligned(norm.dx) &&
                       IsAligned(norm.dx_rest) && norm.dx_channels % 8 == 0;
  return WithVariant(norm.forward, vectors,
                     [&](auto variant) { return Backward<decltype(variant)>(norm, queue.stream); });
}

}  // namespace denoised::training::cuda
