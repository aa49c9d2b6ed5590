#pragma once

#include "engine/backend/cuda/element.cuh"

/// What the convolution kernels share: where an element of the implicit matrix lies in memory, and
/// what happens to an output tile. Row m of the matrix is an output pixel, column k one input that
/// it sees, in the order (kh, kw, channel), the channels of x before those of x2.

namespace denoised::cuda {

/// One output pixel: where its window begins.
struct Window {
  int image_pixel;  // first pixel of its image
  int y, x;         // top left of the window, in (upsampled) input coordinates
};

__device__ inline Window WindowOf(const Conv2dLaunch& conv, int m) {
  const int out_pixels = conv.out_height * conv.out_width;
  if (m >= conv.images * out_pixels) return {0, INT32_MIN / 2, 0};  // rows off the end see padding
  const int image = m / out_pixels;
  const int pixel = m - image * out_pixels;
  const int y = pixel / conv.out_width;
  const int x = pixel - y * conv.out_width;
  return {image * conv.height * conv.width, y * conv.stride - conv.pad_top,
          x * conv.stride - conv.pad_left};
}

/// A position along k, advanced without divisions.
struct Tap {
  int kh = 0, kw = 0, channel = 0;

  __device__ void Advance(const Conv2dLaunch& conv, int count) {
    channel += count;
    const int channels = conv.channels + conv.channels2;
    while (channel >= channels) {
      channel -= channels;
      if (++kw == conv.kernel) kw = 0, ++kh;
    }
  }
};

/// The input pixel under `tap`, or −1 in the padding and beyond the last tap.
__device__ inline int PixelAt(const Conv2dLaunch& conv, const Window& window, const Tap& tap) {
  const int y = window.y + tap.kh, x = window.x + tap.kw;
  const int up = conv.upsample2x ? 1 : 0;  // nearest neighbour: the doubled image is never made
  const bool inside = static_cast<unsigned>(y) < static_cast<unsigned>(conv.height << up) &&
                      static_cast<unsigned>(x) < static_cast<unsigned>(conv.width << up) &&
                      tap.kh < conv.kernel;
  return inside ? window.image_pixel + (y >> up) * conv.width + (x >> up) : -1;
}

/// Eight inputs from `tap` on, whose channels may be odd in number and straddle taps and sources.
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

/// The same when both sources have a multiple of eight channels, 16-byte aligned.
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

/// Finishes an output tile that lies in shared memory as fp32 [kM, kN + 4], row 0 being pixel m0
/// and column 0 output n0.
template <int kM, int kN, int kThreads>
__device__ inline void FinishTile(const Conv2dLaunch& conv, const float* tile, int m0, int n0) {
  const int m_end = min(kM, conv.images * conv.out_height * conv.out_width - m0);
  for (int i = threadIdx.x; i < kM * kN / 8; i += kThreads) {
    const int row = i / (kN / 8), column = i % (kN / 8) * 8;
    if (row >= m_end || n0 + column >= conv.outputs) continue;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = tile[row * (kN + 4) + column + j];
    FinishOutputs(conv, m0 + row, n0 + column, v);
  }
}

/// Sources that 16-byte loads of eight channels can read.
inline bool HasVectorInputs(const Conv2dLaunch& conv) {
  return conv.x.vector && conv.channels % 8 == 0 &&
         (conv.x2.data == nullptr || (conv.x2.vector && conv.channels2 % 8 == 0));
}

}  // namespace denoised::cuda
