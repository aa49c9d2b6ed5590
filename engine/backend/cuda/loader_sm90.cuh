// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/fast_divmod.h"
#include "engine/backend/cuda/implicit_gemm.cuh"
#include "engine/backend/cuda/mainloop_sm90.cuh"
#include "engine/backend/cuda/tensor_map.h"

/// What the loaders and consumers of Hopper's convolutions share: what TMA brings into shared
/// memory for a step along k, and as which operands a consumer multiplies it. The loaders stand
/// beside their kernels. im2col: the pixels of a CTA tile at one tap in each step. Halo tiles: the
/// pixels at all taps of a 3×3 window at once.
///
/// A step is 64 channels (a chunk; 128 in e4m3, as pairs) at one tap. Steps go chunk by chunk,
/// those of x before those of x2, and in each chunk tap by tap. A chunk of a shortcut is one step,
/// always in bf16. In bf16 these steps are spread evenly among the window's, and with them the
/// loads of pixels. In e4m3 they are the last, because the window's sums must be scaled before
/// them. All kernels add in this order and give the same bits.

namespace denoised::cuda {

/// The extent of k.
struct Depth {
  int windowed = 0;  // chunks
  FastDivmod taps;   // per chunk
  int shortcut = 0;  // chunks
  FastDivmod steps;  // per tile
  int log_splits = 0;

  /// The first step of a split, and how many it has.
  __device__ int BeginOf(int split) const { return steps.value * split >> log_splits; }
  __device__ int StepsOf(int split) const { return BeginOf(split + 1) - BeginOf(split); }
};

/// The window's operands, or a shortcut's.
struct SourceParams {
  CUtensorMap x, x2, weight;
  int chunks = 0;  // of x
};
/// Arguments of every kernel besides the epilogue's Conv2dLaunch.
struct MainloopParams : SourceParams {
  Depth depth;
  SourceParams shortcut;
  const float* bias = nullptr;
  const float* scales = nullptr;  // in e4m3
};

/// The source of a chunk's pixels.
struct ChunkAt {
  const CUtensorMap* map;
  int channel;
};
__device__ inline ChunkAt ChunkOf(const SourceParams& of, int chunk) {
  const int of_x2 = chunk - of.chunks;
  return {of_x2 < 0 ? &of.x : &of.x2, (of_x2 < 0 ? chunk : of_x2) * kStep};
}

/// A chunk's first channel of concat(x, x2), as in the weight. x has `chunks` chunks of its
/// `channels` channels.
__device__ inline int ChannelOf(int chunk, int chunks, int channels) {
  return chunk < chunks ? chunk * kStep : channels + (chunk - chunks) * kStep;
}

/// A step along k: the window's next chunk and tap, or a shortcut's next chunk. Values are updated
/// only when they change, because producers are bound by their instructions. kTaps: of the window,
/// if known at compile time.
template <bool kShortcut, bool kE4m3, int kTaps = 0>
struct StepAt {
  int tap, chunk, channel;                       // of the window's weight
  int of_shortcut = 0, channel_of_shortcut = 0;  // chunk, and channel of the shortcut's weight
  // In bf16: grows by the shortcut's chunks per step; a shortcut's step when it reaches `steps`.
  int due = 0;

  __device__ StepAt(const Conv2dLaunch& conv, const MainloopParams& params, int step) {
    const Depth& depth = params.depth;
    if (kShortcut && kE4m3) {
      of_shortcut = max(0, step - depth.windowed * Taps(depth));
      channel_of_shortcut = ChannelOf(of_shortcut, params.shortcut.chunks, conv.shortcut.channels);
    } else if (kShortcut) {
      of_shortcut = step * depth.shortcut / depth.steps;
      due = step * depth.shortcut % depth.steps + depth.shortcut;
      channel_of_shortcut = ChannelOf(of_shortcut, params.shortcut.chunks, conv.shortcut.channels);
    }
    const int windowed = step - of_shortcut;
    if constexpr (kTaps > 0) {
      chunk = windowed / kTaps, tap = windowed % kTaps;
    } else {
      chunk = windowed / depth.taps, tap = windowed % depth.taps;
    }
    channel = ChannelOf(chunk, params.chunks, conv.channels);
  }
  __device__ bool IsOfShortcut(const Depth& depth) const {
    return kShortcut && (kE4m3 ? chunk == depth.windowed : due >= depth.steps.value);
  }
  __device__ bool IsLastTap(const Depth& depth) const { return tap == Taps(depth) - 1; }
  __device__ static int Taps(const Depth& depth) { return kTaps > 0 ? kTaps : depth.taps.value; }
  __device__ void Advance(const Conv2dLaunch& conv, const MainloopParams& params) {
    const Depth& depth = params.depth;
    if (IsOfShortcut(depth)) {
      ++of_shortcut, due -= depth.steps.value;
      if (kE4m3 && of_shortcut == depth.shortcut) of_shortcut = chunk = channel = 0;  // next tile
      channel_of_shortcut = ChannelOf(of_shortcut, params.shortcut.chunks, conv.shortcut.channels);
    } else if (++tap == Taps(depth)) {
      tap = 0, ++chunk;
      channel = ChannelOf(chunk, params.chunks, conv.channels);
    }
    if (kShortcut) due += depth.shortcut;
  }
};

/// The place of a step's weights.
struct WeightAt {
  const CUtensorMap* map;
  int channel, tap;
};
template <typename Step>
__device__ inline WeightAt WeightOf(const MainloopParams& params, const Step& step) {
  if (step.IsOfShortcut(params.depth))
    return {&params.shortcut.weight, step.channel_of_shortcut, 0};
  return {&params.weight, step.channel, step.tap};
}

/// Loads a step's weights of the outputs from n0 on. Each CTA of a cluster of `multicast_ctas`
/// loads those of `part` outputs for all of them.
__device__ inline void LoadWeightsByTma(unsigned char* to, const WeightAt& from, uint64_t* barrier,
                                        int n0, int phase, int multicast_ctas, int part, int rank) {
  if (multicast_ctas == 1) {
    TmaLoadWeights(to, from.map, barrier, from.channel, from.tap, n0, phase);
  } else {
    TmaLoadMulticast(to + rank * part * kStepBytes, from.map, barrier, from.channel, from.tap,
                     n0 + rank * part, phase, static_cast<uint16_t>((1 << multicast_ctas) - 1));
  }
}

/// Prefetches the tensor maps; otherwise TMA would fetch them at their first use. Called by the
/// producer before its first wait.
template <bool kShortcut>
__device__ inline void PrefetchTensorMaps(const MainloopParams& params) {
  PrefetchTensorMap(&params.weight);
  PrefetchTensorMap(&params.x);
  if (params.depth.windowed > params.chunks) PrefetchTensorMap(&params.x2);
  if (!kShortcut) return;
  PrefetchTensorMap(&params.shortcut.weight);
  PrefetchTensorMap(&params.shortcut.x);
  if (params.depth.shortcut > params.shortcut.chunks) PrefetchTensorMap(&params.shortcut.x2);
}

// im2col.

/// The output pixels of a phase, image after image, in the order of TMA's im2col mode. A doubled
/// image has four phases: the parities of the output's rows and columns.
struct Grid {
  FastDivmod taps_x;
  Plane plane;
  int pixels = 0;     // per phase
  bool flat = false;  // 1×1: inputs have the layout of the outputs
};

/// The input of a tile's first pixel under the window's first tap.
__device__ inline PlanePixel StartOf(const Conv2dLaunch& conv, const Grid& grid, int m0) {
  const PlanePixel at = PixelOf(grid.plane, m0);
  return {at.image, at.y * conv.stride - conv.pad_top, at.x * conv.stride - conv.pad_left};
}
/// Loads a step's 64 channels at its tap, for the tile's pixels, starting at m0. A shortcut's
/// pixels have the layout of the outputs.
template <typename Step>
__device__ inline void LoadInputsByTma(void* to, const MainloopParams& params, const Grid& grid,
                                       const Step& step, const PlanePixel& start, int m0, int phase,
                                       uint64_t* barrier) {
  const bool of_shortcut = step.IsOfShortcut(params.depth);
  const ChunkAt chunk =
      of_shortcut ? ChunkOf(params.shortcut, step.of_shortcut) : ChunkOf(params, step.chunk);
  if (grid.flat || of_shortcut) {
    TmaLoad(to, chunk.map, barrier, chunk.channel, m0);
    return;
  }
  const int tap_y = step.tap / grid.taps_x, tap_x = step.tap % grid.taps_x;
  TmaLoadIm2col(to, chunk.map, barrier, chunk.channel, start.x, start.y, start.image,
                static_cast<uint16_t>(tap_x + phase % 2), static_cast<uint16_t>(tap_y + phase / 2));
}
/// The output pixel of pixel m of a phase.
__device__ inline int OutputPixel(const Conv2dLaunch& conv, const Grid& grid, int m, int phase) {
  return conv.upsample2x ? OutputOf(conv, PixelOf(grid.plane, m), phase) : m;
}

/// The operands of a consumer, where a stage holds a step's pixels and weights. Its part of them
/// begins `input` and `weight` bytes after the stage. `cta` has the ring and releases stages.
template <typename T, typename Cta>
struct Im2colOperands {
  struct Used {
    int stage = -1;
  };

  const Cta& cta;
  int input, weight;
  StageAt<T::kStages, T::kStageBytes> at;

  __device__ Im2colOperands(const Cta& cta, int stages, int input, int weight)
      : cta(cta), input(input), weight(weight), at(cta.pipeline, stages, cta.ring) {}
  __device__ void Wait() const { at.Wait(); }
  __device__ uint64_t Input() const { return at.Descriptor(input); }
  __device__ static constexpr int NextSubtile() { return 64 * kStepBytes >> 4; }
  __device__ uint64_t Weight() const { return at.Descriptor(weight); }
  __device__ static constexpr bool IsHalf() { return false; }
  __device__ Used Advance() {
    const Used used{at.stage};
    at.Advance();
    return used;
  }
  __device__ void Release(Used used) const {
    if (used.stage >= 0) cta.ReleaseStage(used.stage);
  }
};

// Halo tiles. A subtile is 8×8 pixels of an image: M = 64 of one wgmma. A halo tile is one or two
// subtiles and the pixel around them, 128 bytes (64 channels) per pixel, swizzled, `pitch` pixels
// per line. The left operand of a tap is the halo tile from another pixel on.

constexpr int kTaps = 9;

/// A CTA's ring of halo tiles: slots of the window, then those of a shortcut; without kExists it is
/// empty. kTransformers: threads that normalise the window's.
template <bool kExists, bool kShortcut, int kSlotBytes, int kShortcutSlotBytes, int kTransformers>
struct HaloRing {
  static constexpr int kWindowed = !kExists ? 0 : kShortcut ? 2 : 3;
  static constexpr int kOfShortcut = kExists && kShortcut ? 2 : 0;
  static constexpr int kSlots = kWindowed + kOfShortcut, kBarriers = 2 * kSlots + kWindowed;
  static constexpr int kBytes = kWindowed * kSlotBytes + kOfShortcut * kShortcutSlotBytes;

  unsigned char* tiles;
  Pipeline<kSlots> pipeline;
  uint64_t* normal;  // [kWindowed]: normalised

  __device__ HaloRing(unsigned char* tiles, uint64_t* barriers)
      : tiles(tiles), pipeline(barriers), normal(pipeline.End()) {}
  __device__ uint64_t* End() const { return normal + kWindowed; }
  __device__ uint64_t* Ready(bool normalises) const { return normalises ? normal : pipeline.full; }
  __device__ unsigned char* At(int slot) const {
    return !kShortcut || slot < kWindowed
               ? tiles + slot * kSlotBytes
               : tiles + kWindowed * kSlotBytes + (slot - kWindowed) * kShortcutSlotBytes;
  }
  __device__ void Init(int consumers) const {
    pipeline.Init(consumers);
    for (int slot = 0; kTransformers > 0 && slot < kWindowed; ++slot) {
      InitBarrier(&normal[slot], kTransformers);
    }
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
/// descriptor of the next step's pixels is computed while a step is multiplied, because a step of
/// few outputs is bound by instructions. That takes registers.
template <typename T, typename Cta, bool kAhead>
struct HaloTileOperands {
  using Halo = typename Cta::Halo;
  static constexpr bool kShortcut = Halo::kOfShortcut > 0;
  static constexpr bool kE4m3 = T::kSpec.element == Element::kE4m3x2;
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

  PipelineState<Halo::kWindowed> halo_tile;
  int shortcut_at = 0;  // halo tiles of the shortcut, counted over all of this CTA's
  int chunk, tap, tap_x, tap_pixel, due;
  uint64_t input;  // kAhead

  /// Begins at `step`. Positions in the rings are counted over all of this CTA's tiles.
  template <typename Step>
  __device__ void Begin(const Step& step, int stage_at, int halo_tile_at) {
    at.Set(stage_at);
    halo_tile = PipelineState<Halo::kWindowed>::After(halo_tile_at);
    chunk = step.chunk, due = step.due, tap = step.tap, tap_x = tap % 3;
    tap_pixel = tap / 3 * windowed.pitch + tap_x;
    if (kAhead) input = FindInput();
  }
  /// A step's halo tile is the window's current one or the shortcut's next one.
  __device__ bool IsOfShortcut() const {
    return kShortcut && (kE4m3 ? chunk == depth.windowed : due >= depth.steps.value);
  }
  __device__ int ShortcutSlot() const { return Halo::kWindowed + shortcut_at % 2; }
  __device__ uint64_t FindInput() const {
    const bool of_shortcut = IsOfShortcut();
    const int pitch = of_shortcut ? shortcut.pitch : windowed.pitch;
    const int first = of_shortcut ? shortcut.first : windowed.first + tap_pixel * kStepBytes;
    return HaloTileDescriptor(cta.halo.At(of_shortcut ? ShortcutSlot() : halo_tile.stage), pitch) +
           (first >> 4);
  }
  /// Also called before the first step of a run that may begin inside a halo tile.
  __device__ void WaitForHaloTile() const {
    cuda::Wait(&halo_tile_ready[halo_tile.stage], halo_tile.FullParity());
  }

  __device__ void Wait() const {
    if (IsOfShortcut()) {
      cta.halo.pipeline.ConsumerWait(ShortcutSlot(), shortcut_at / 2 & 1);
    } else if (tap == 0) {
      WaitForHaloTile();
    }
    at.Wait();
  }
  __device__ uint64_t Input() const { return kAhead ? input : FindInput(); }
  __device__ int NextSubtile() const { return next_subtile >> 4; }
  __device__ uint64_t Weight() const { return at.Descriptor(0); }
  /// Without channels for it, the second half of a chunk in e4m3 is zero.
  __device__ bool IsHalf() const { return conv.channels - chunk * kStep <= kStep / 2; }
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
    if (used.slot >= 0 && threadIdx.x % 128 == 0) cta.halo.pipeline.ConsumerRelease(used.slot);
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

/// Loads a thread's factors and offsets of an image: those of vector `vector` of a chunk's
/// channels. False if the chunk has no such channels. `chunks`: of x.
__device__ inline bool LoadFactors(const Conv2dLaunch& conv, int chunks, int chunk, int vector,
                                   int image, float (&factor)[8], float (&offset)[8]) {
  const int channels = conv.channels + conv.channels2;
  const int channel = ChannelOf(chunk, chunks, conv.channels) + vector * 8;
  if (channel >= (chunk < chunks ? conv.channels : channels)) return false;
  const float* const from = conv.input_factors + int64_t{image} * 2 * channels + channel;
  LoadEight(from, factor);
  LoadEight(from + channels, offset);
  return true;
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

// Tensor maps.

inline Grid GridOf(const Conv2dLaunch& conv) {
  const Plane plane = PlaneOf(conv);
  const bool flat = conv.kernel == 1 && conv.stride == 1 && conv.pad_top == 0 &&
                    conv.pad_left == 0 && conv.out_height == conv.height &&
                    conv.out_width == conv.width;
  // CudaBackend checks that the pixels of all outputs fit an int; OutputPixel() relies on it, too.
  return {FastDivmod(EdgeTaps(conv)), plane, conv.images * plane.pixels.value, flat};
}

/// [pixels, channels] in boxes of `columns` × `rows`.
inline CUresult EncodeRows(CUtensorMap* map, const Rows& pixels_of, int channels, int64_t pixels,
                           int columns, int rows) {
  return EncodeTiled(map, {pixels_of.data, {channels, pixels}, {pixels_of.stride}, {columns, rows}},
                     SwizzleOfBox(columns), CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

/// For LoadInputsByTma(), `pixels` at a time.
inline CUresult EncodeInputs(CUtensorMap* map, const Rows& rows_of, int channels,
                             const Conv2dLaunch& conv, const Grid& grid, bool shortcut,
                             int pixels) {
  if (grid.flat || shortcut) return EncodeRows(map, rows_of, channels, grid.pixels, kStep, pixels);
  const int width = conv.width, height = conv.height;
  const int out_width = grid.plane.width.value, out_height = grid.plane.pixels.value / out_width;
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(width),
                              static_cast<cuuint64_t>(height),
                              static_cast<cuuint64_t>(conv.images)};
  const cuuint64_t pixel_bytes = static_cast<cuuint64_t>(rows_of.stride) * 2;
  const cuuint64_t strides[3] = {pixel_bytes, pixel_bytes * width, pixel_bytes * width * height};
  const int lower[2] = {-conv.pad_left, -conv.pad_top};  // width before height
  const int upper[2] = {(out_width - 1) * conv.stride - conv.pad_left + 1 - width,
                        (out_height - 1) * conv.stride - conv.pad_top + 1 - height};
  const cuuint32_t stride = static_cast<cuuint32_t>(conv.stride);
  const cuuint32_t element_strides[4] = {1, stride, stride, 1};
  const CUresult result = GetTensorMapEncoders().im2col(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, rows_of.data, dims, strides, lower, upper, kStep,
      static_cast<cuuint32_t>(pixels), element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  // Drivers up to 13.0 set a bit that is wrong for tensors below 128 KiB (as CUTLASS found).
  constexpr cuuint64_t kSmall = 131072;
  if (result == CUDA_SUCCESS && dims[3] * strides[2] < kSmall) {
    reinterpret_cast<uint64_t*>(map)[1] &= ~(uint64_t{1} << 21);
  }
  return result;
}

/// A weight [phases, outputs, taps, channels] in boxes of one step × `outputs_at_once`. `stride`:
/// elements from one output to the next. They come from memory 128 bytes at a time: with 256, few
/// pixels wait longer for them, in 3×3 layers 6 to 13 % (docs/kernels-measured.md).
inline CUresult EncodeWeight(CUtensorMap* map, const void* weight, int stride, int channels,
                             int taps, int outputs, int phases, int outputs_at_once) {
  return EncodeTiled(map,
                     {weight,
                      {channels, taps, outputs, phases},
                      {channels, stride, int64_t{stride} * outputs},
                      {kStep, 1, outputs_at_once, 1}},
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
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

/// Sets `params`; weights in boxes of `outputs_at_once`. encode(map, rows, channels, shortcut)
/// makes the tensor map of a source's pixels.
template <typename Encode>
cudaError_t InitMainloop(MainloopParams* params, const Conv2dLaunch& conv, int outputs_at_once,
                         const Encode& encode) {
  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  params->bias = conv.bias;
  params->scales = conv.scales;
  const int taps = EdgeTaps(conv) * EdgeTaps(conv);
  params->depth.windowed = ChunksOf(conv.channels) + ChunksOf(conv.channels2);
  params->depth.taps = FastDivmod(taps);
  params->depth.steps = FastDivmod(StepsOf(conv));
  const auto encode_source = [&](SourceParams* source, const auto& of, bool shortcut) {
    source->chunks = ChunksOf(of.channels);
    CUresult result = encode(&source->x, of.x, of.channels, shortcut);
    if (result == CUDA_SUCCESS && of.x2.data != nullptr)
      result = encode(&source->x2, of.x2, of.channels2, shortcut);
    return result == CUDA_SUCCESS &&
           EncodeWeight(&source->weight, of.weight, of.weight_stride, of.channels + of.channels2,
                        shortcut ? 1 : taps, conv.outputs, shortcut ? 1 : PhasesOf(conv),
                        outputs_at_once) == CUDA_SUCCESS;
  };
  if (!encode_source(params, conv, false)) return cudaErrorInvalidValue;
  const ShortcutLaunch& shortcut = conv.shortcut;
  if (shortcut.x.data == nullptr) return cudaSuccess;
  params->depth.shortcut = ChunksOf(shortcut.channels) + ChunksOf(shortcut.channels2);
  return encode_source(&params->shortcut, shortcut, true) ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace denoised::cuda
