// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/fast_divmod.h"

/// Shared by the convolution kernels: addresses of the implicit im2col matrix, and the epilogue of
/// an output tile. Row m of the matrix is an output pixel, column k one input of its window, in the
/// order (kh, kw, channel), the channels of x before those of x2.
///
/// In an image that is doubled by nearest neighbour, several taps of a 3×3 window read the same
/// input pixel. So outputs have four phases, by the parities of their rows and columns. Each phase
/// is a 2×2 convolution of the input before doubling; its taps are sums of the 3×3 taps that read
/// the same pixel (pack_weight.cu).

namespace denoised::cuda {

constexpr int kPhases = 4;
__host__ __device__ inline int PhasesOf(const Conv2dLaunch& conv) {
  return conv.upsample2x ? kPhases : 1;
}
/// Taps along an edge of a phase's window.
__host__ __device__ inline int EdgeTaps(const Conv2dLaunch& conv) {
  return conv.upsample2x ? 2 : conv.kernel;
}
/// Number of pixels in a phase of an image, and in a row of it.
struct Plane {
  FastDivmod pixels, width;
};
inline Plane PlaneOf(const Conv2dLaunch& conv) {
  const int height = conv.upsample2x ? conv.height : conv.out_height;
  const int width = conv.upsample2x ? conv.width : conv.out_width;
  return {FastDivmod(height * width), FastDivmod(width)};
}

/// A pixel of a phase.
struct PlanePixel {
  int image, y, x;
};
__device__ inline PlanePixel PixelOf(const Plane& plane, int m) {
  const int pixel = m % plane.pixels;
  return {m / plane.pixels, pixel / plane.width, pixel % plane.width};
}
/// Its output pixel.
__device__ inline int OutputOf(const Conv2dLaunch& conv, const PlanePixel& at, int phase) {
  const int y = conv.upsample2x ? 2 * at.y + phase / 2 : at.y;
  const int x = conv.upsample2x ? 2 * at.x + phase % 2 : at.x;
  return (at.image * conv.out_height + y) * conv.out_width + x;
}

/// The first pixel of a window.
struct Window {
  int image_pixel;  // first pixel of its image
  int y, x;         // top left
};
__device__ inline Window WindowOf(const Conv2dLaunch& conv, const Plane& plane, int m, int phase) {
  if (m >= conv.images * plane.pixels.value) return {0, INT32_MIN / 2, 0};  // off the end: padding
  const PlanePixel at = PixelOf(plane, m);
  return {at.image * conv.height * conv.width, at.y * conv.stride - conv.pad_top + phase / 2,
          at.x * conv.stride - conv.pad_left + phase % 2};
}

/// A position along k, advanced without divisions.
struct Tap {
  int kh = 0, kw = 0, channel = 0;

  __device__ void Advance(const Conv2dLaunch& conv, int count) {
    channel += count;
    const int channels = conv.channels + conv.channels2, taps = EdgeTaps(conv);
    while (channel >= channels) {
      channel -= channels;
      if (++kw == taps) kw = 0, ++kh;
    }
  }
};

/// The input pixel under `tap`, or −1 in the padding and beyond the last tap.
__device__ inline int PixelAt(const Conv2dLaunch& conv, const Window& window, const Tap& tap) {
  const int y = window.y + tap.kh, x = window.x + tap.kw;
  const bool inside = static_cast<unsigned>(y) < static_cast<unsigned>(conv.height) &&
                      static_cast<unsigned>(x) < static_cast<unsigned>(conv.width) &&
                      tap.kh < EdgeTaps(conv);
  return inside ? window.image_pixel + y * conv.width + x : -1;
}

/// Eight inputs, starting at `tap`, for any number of channels: they may span taps and sources.
__device__ inline void GatherInputs(const Conv2dLaunch& conv, const Window& window, Tap tap,
                                    float (&v)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int pixel = PixelAt(conv, window, tap);
    v[j] = pixel < 0                     ? 0.0f
           : tap.channel < conv.channels ? Load(conv.x, pixel, tap.channel)
                                         : Load(conv.x2, pixel, tap.channel - conv.channels);
    tap.Advance(conv, 1);
  }
}

/// The same if both sources have a multiple of eight channels, 16-byte aligned.
__device__ inline void LoadInputs(const Conv2dLaunch& conv, const Window& window, const Tap& tap,
                                  float (&v)[8]) {
  const int pixel = PixelAt(conv, window, tap);
  if (pixel < 0) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = 0.0f;
  } else if (tap.channel < conv.channels) {
    LoadVector(conv.x, pixel, tap.channel, v);
  } else {
    LoadVector(conv.x2, pixel, tap.channel - conv.channels, v);
  }
}

/// act(sum · scale), in place. silu: whether that is the activation, else there is none.
template <int kSums>
__device__ inline void ApplyEpilogue(const Conv2dLaunch& conv, bool silu, float (&v)[kSums]) {
#pragma unroll
  for (int j = 0; j < kSums; ++j) v[j] *= conv.scale;
  if (!silu) return;
#pragma unroll
  for (int j = 0; j < kSums; ++j) v[j] = __fdividef(v[j], 1.0f + __expf(-v[j]));
}

/// Finishes the outputs n … n + 7 (those that exist) of an output pixel, from their sums.
__device__ inline void FinishOutputs(const Conv2dLaunch& conv, int64_t pixel, int n,
                                     float (&v)[8]) {
  const int count = min(8, conv.outputs - n);
  const bool whole = count == 8;
  if (conv.bias != nullptr) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] += conv.bias[n + j];
  }
  const auto add_from = [&](const Rows& rows, int64_t r) {
    if (whole && rows.vector) {
      float from[8];
      LoadVector(rows, r, n, from);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] += from[j];
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j < count) v[j] += Load(rows, r, n + j);
      }
    }
  };
  if (conv.add.data != nullptr) add_from(conv.add, pixel / (conv.out_height * conv.out_width));
  if (conv.residual.data != nullptr) add_from(conv.residual, pixel);
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = Activate(conv.activation, v[j] * conv.scale);
  if (whole && conv.out.vector) {
    StoreVector(conv.out, pixel, n, v);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < count) Store(conv.out, pixel, n + j, v[j]);
    }
  }
}

/// The epilogue of an output tile in shared memory, fp32 [kM, kN + 4]. Row 0 is pixel m0 of a
/// phase, column 0 is output n0.
template <int kM, int kN, int kThreads>
__device__ inline void FinishTile(const Conv2dLaunch& conv, const Plane& plane, const float* tile,
                                  int m0, int phase, int n0) {
  const int m_end = min(kM, conv.images * plane.pixels.value - m0);
  for (int i = threadIdx.x; i < kM * kN / 8; i += kThreads) {
    const int row = i / (kN / 8), column = i % (kN / 8) * 8;
    if (row >= m_end || n0 + column >= conv.outputs) continue;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = tile[row * (kN + 4) + column + j];
    FinishOutputs(conv, OutputOf(conv, PixelOf(plane, m0 + row), phase), n0 + column, v);
  }
}

}  // namespace denoised::cuda
