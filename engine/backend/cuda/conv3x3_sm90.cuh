// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/cuda/conv_sm90.cuh"

/// Shared by the 3×3 convolutions from halo tiles: conv3x3_sm90.cu, conv_few_pixels_sm90.cu.
///
/// A subtile is 8×8 pixels of an image: M = 64 of one wgmma. A halo tile is one or two subtiles and
/// the pixel around them, 128 bytes (64 channels) per pixel, swizzled, `pitch` pixels per line. The
/// left operand of a tap is the halo tile from another pixel on.

namespace denoised::cuda {

constexpr int kTaps = 9;

/// Slots for halo tiles: those of the window, then those of a shortcut.
template <bool kShortcut, int kSlotBytes, int kShortcutSlotBytes>
struct HaloTiles {
  static constexpr int kWindowed = kShortcut ? 2 : 3, kOfShortcut = kShortcut ? 2 : 0;
  static constexpr int kSlots = kWindowed + kOfShortcut;
  static constexpr int kBytes = kWindowed * kSlotBytes + kOfShortcut * kShortcutSlotBytes;
  __device__ static unsigned char* At(unsigned char* halo_tiles, int slot) {
    return !kShortcut || slot < kWindowed
               ? halo_tiles + slot * kSlotBytes
               : halo_tiles + kWindowed * kSlotBytes + (slot - kWindowed) * kShortcutSlotBytes;
  }
};

/// The left operand of a wgmma: 8 lines of 8 pixels of a halo tile, `pitch` pixels from line to
/// line.
__device__ inline uint64_t HaloTileDescriptor(const void* halo_tile, int pitch) {
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return MatrixDescriptor(halo_tile) - kEightRows + (uint64_t(pitch * kStepBytes >> 4) << 32);
}

/// A consumer's subtiles of a halo tile: pixels per line, bytes before the first subtile.
struct SubtilesAt {
  int pitch, first;
};

/// The operands of a consumer of halo tiles: the halo tile of a step from the pixel of its tap on,
/// and the stage with the step's weights. `cta` has the rings and releases stages. kAhead: the
/// descriptor of the next step's pixels is computed while a step is multiplied; where a step has
/// many outputs, that gains nothing and takes registers.
template <typename T, typename Cta, bool kAhead>
struct HaloTileOperands {
  using Slots = typename Cta::Slots;
  static constexpr bool kShortcut = Slots::kOfShortcut > 0;
  struct Used {
    int stage = -1, slot = -1;  // slot: of a halo tile whose last step this was
  };

  const Conv2dLaunch& conv;
  const Depth& depth;
  const Cta& cta;
  uint64_t* const halo_tile_ready;  // full, or normalised
  const SubtilesAt windowed, shortcut;
  const int next_subtile;  // bytes
  StageAt<T::kStages, T::kStageBytes> at;

  PipelineState<Slots::kWindowed> halo_tile;
  int shortcut_at = 0;  // halo tiles of the shortcut, counted over all of this CTA's
  int chunk, tap, tap_x, tap_pixel, due;
  uint64_t input;  // kAhead

  /// Begins at `step`. Positions in the rings are counted over all of this CTA's tiles.
  template <typename Step>
  __device__ void Begin(const Step& step, int stage_at, int halo_tile_at) {
    at.Set(stage_at);
    halo_tile = PipelineState<Slots::kWindowed>::After(halo_tile_at);
    chunk = step.chunk, due = step.due, tap = step.tap, tap_x = tap % 3;
    tap_pixel = tap / 3 * windowed.pitch + tap_x;
    if (kAhead) input = FindInput();
  }
  /// A step's halo tile is the window's current one or the shortcut's next one.
  __device__ bool IsOfShortcut() const { return kShortcut && due >= depth.steps.value; }
  __device__ int ShortcutSlot() const { return Slots::kWindowed + shortcut_at % 2; }
  __device__ uint64_t FindInput() const {
    const bool of_shortcut = IsOfShortcut();
    const int pitch = of_shortcut ? shortcut.pitch : windowed.pitch;
    const int first = of_shortcut ? shortcut.first : windowed.first + tap_pixel * kStepBytes;
    return HaloTileDescriptor(cta.HaloTile(of_shortcut ? ShortcutSlot() : halo_tile.stage), pitch) +
           (first >> 4);
  }
  /// Also called before the first step of a run that may begin inside a halo tile.
  __device__ void WaitForHaloTile() const {
    cuda::Wait(&halo_tile_ready[halo_tile.stage], halo_tile.FullParity());
  }

  __device__ void Wait() const {
    if (IsOfShortcut()) {
      cuda::Wait(&cta.halo_pipeline.full[ShortcutSlot()], shortcut_at / 2 & 1);
    } else if (tap == 0) {
      WaitForHaloTile();
    }
    at.Wait();
  }
  __device__ uint64_t Input() const { return kAhead ? input : FindInput(); }
  __device__ int NextSubtile() const { return next_subtile >> 4; }
  __device__ uint64_t Weight() const { return at.Descriptor(0); }
  /// Without channels for it, the second half of a chunk in e4m3 is zero.
  __device__ bool IsHalf() const {
    return T::kSpec.element == Element::kE4m3x2 && conv.channels - chunk * kStep <= kStep / 2;
  }
  __device__ Used Advance() {
    const bool of_shortcut = IsOfShortcut();
    const int slot = of_shortcut ? ShortcutSlot() : tap == kTaps - 1 ? halo_tile.stage : -1;
    const Used used{at.stage, slot};
    due += depth.shortcut;
    if (of_shortcut) {
      due -= depth.steps.value, ++shortcut_at;
    } else {
      ++tap, ++tap_x, ++tap_pixel;
      if (tap_x == 3) tap_x = 0, tap_pixel += windowed.pitch - 3;
      if (slot >= 0) {
        tap = tap_x = tap_pixel = 0, ++chunk;
        halo_tile.Advance();
      }
    }
    at.Advance();
    if (kAhead) input = FindInput();
    return used;
  }
  __device__ void Release(Used used) const {
    if (used.stage >= 0) cta.ReleaseStage(used.stage);
    if (used.slot >= 0 && threadIdx.x % 128 == 0) cta.halo_pipeline.ConsumerRelease(used.slot);
  }
};

/// The pixels that a thread normalises: it takes eight channels of every kPixelStride-th pixel of a
/// halo tile of at most kPixels. Bit i: the i-th of them lies in the image; the others stay zero.
/// `pitch`: a constant, or a FastDivmod.
template <int kPixelStride, int kPixels, typename Pitch>
__device__ inline uint32_t PixelsInside(const Conv2dLaunch& conv, Pitch pitch, int thread, int y0,
                                        int x0) {
  uint32_t inside = 0;
  for (int i = 0; i < (kPixels + kPixelStride - 1) / kPixelStride; ++i) {
    const int pixel = thread / 8 + i * kPixelStride;
    const int line = pixel / pitch, column = pixel % pitch;
    const bool is = line < kSubtileEdge + 2 &&
                    static_cast<unsigned>(y0 + line) < static_cast<unsigned>(conv.height) &&
                    static_cast<unsigned>(x0 + column) < static_cast<unsigned>(conv.width);
    inside |= static_cast<uint32_t>(is) << i;
  }
  return inside;
}

/// SiluOfHalf() of each, with the same instructions, but all eight tanh come first. The compiler
/// would evaluate one value at a time, and each would wait for the special function unit.
__device__ inline void SiluOfHalf(float (&h)[8]) {
  float tanh[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) asm volatile("tanh.approx.f32 %0, %1;" : "=f"(tanh[j]) : "f"(h[j]));
#pragma unroll
  for (int j = 0; j < 8; ++j) h[j] = fmaf(h[j], tanh[j], h[j]);
}

/// silu(2 · (x · factor + offset)) in place for every kPixelStride-th pixel, starting at
/// first_pixel.
template <int kPixelStride>
__device__ inline void Normalise(unsigned char* halo_tile, int first_pixel, int thread,
                                 uint32_t inside, const float (&factor)[8],
                                 const float (&offset)[8]) {
  constexpr int kAtOnce = 2;
  // One bit of the swizzle alternates from pixel to pixel.
  static_assert(kPixelStride % 8 == 4);
  const int first = first_pixel + thread / 8, chunk = thread % 8 ^ first % 8;
  unsigned char* even = halo_tile + first * kStepBytes + chunk * 16;
  unsigned char* odd = halo_tile + first * kStepBytes + (chunk ^ 4) * 16;
#pragma unroll 1
  for (; inside != 0; inside >>= kAtOnce) {
    const auto at = [&](int i) {
      return reinterpret_cast<uint4*>((i % 2 == 0 ? even : odd) + i * kPixelStride * kStepBytes);
    };
    uint4 bits[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (inside >> i & 1) bits[i] = *at(i);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t words[4] = {bits[i].x, bits[i].y, bits[i].z, bits[i].w};
      float v[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v[2 * j] = fmaf(Low(words[j]), factor[2 * j], offset[2 * j]);
        v[2 * j + 1] = fmaf(High(words[j]), factor[2 * j + 1], offset[2 * j + 1]);
      }
      SiluOfHalf(v);
      bits[i] = PackBf16(v);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (inside >> i & 1) *at(i) = bits[i];
    }
    even += kAtOnce * kPixelStride * kStepBytes;
    odd += kAtOnce * kPixelStride * kStepBytes;
  }
}

/// TMA boxes of `columns` channels × width × height × images, swizzled by SwizzleOfBox().
inline CUresult EncodeImages(CUtensorMap* map, const Rows& rows, int channels,
                             const Conv2dLaunch& conv, int columns, int width, int height,
                             int images) {
  const int64_t line = rows.stride * conv.width;
  return EncodeTiled(map,
                     {rows.data,
                      {channels, conv.width, conv.height, conv.images},
                      {rows.stride, line, line * conv.height},
                      {columns, width, height, images}},
                     SwizzleOfBox(columns), CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

}  // namespace denoised::cuda
