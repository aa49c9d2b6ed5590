// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <type_traits>

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/e4m3.cuh"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/fast_divmod.h"
#include "engine/backend/cuda/implicit_gemm.cuh"
#include "engine/backend/cuda/mainloop_sm90.cuh"
#include "engine/backend/cuda/mma.cuh"
#include "engine/backend/cuda/tensor_map.h"

/// Shared by Hopper's convolution kernels: steps along k, accumulators, epilogue, and tensor maps.
///
/// A step is 64 channels (a chunk; 128 in e4m3, as pairs) at one tap. Steps go chunk by chunk,
/// those of x before those of x2, and in each chunk tap by tap. A chunk of a shortcut is one step.
/// These steps are spread evenly among the window's, and with them the loads of pixels. All kernels
/// add in this order and give the same bits.

namespace denoised::cuda {

/// Whether a CTA starts with at least as many registers as its threads have after setmaxnreg. If
/// not, setmaxnreg would wait forever.
constexpr bool HasRegisters(const HopperTileSpec& spec) {
  const HopperKernelSpec& kernel = spec.kernel;
  const int multiplying = 128 * kernel.consumers;
  return kernel.consumer_registers * multiplying +
             kernel.producer_registers * (kernel.threads - multiplying) <=
         65536 / kernel.threads / 8 * 8 * kernel.threads;
}

/// The kernels of a file, from which launching and loading follow: one for each row of kTiles for
/// which kIsHere holds, and each of the forms that the row has. A form has
///   constexpr bool IsOf(spec): whether a tile has a kernel of this form;
///   bool Suits(conv, plan): whether this kernel computes a launch, if none before it does.
template <bool (*kIsHere)(const HopperTileSpec&), typename... Forms>
struct HopperKernels {
  /// Returns then(row, form) for the kernel of a launch. `row` is a std::integral_constant.
  template <typename Then>
  static cudaError_t Select(const Conv2dLaunch& conv, const HopperPlan& plan, const Then& then) {
    cudaError_t result = cudaErrorInvalidValue;
    Visit([&](auto row, auto form) {
      if (plan.tile != HopperTile(row.value) || !form.Suits(conv, plan)) return false;
      result = then(row, form);
      return true;
    });
    return result;
  }
  /// Calls then(row, form) for every kernel, until one fails.
  template <typename Then>
  static cudaError_t ForEach(const Then& then) {
    cudaError_t result = cudaSuccess;
    Visit([&](auto row, auto form) {
      result = then(row, form);
      return result != cudaSuccess;
    });
    return result;
  }

 private:
  /// Until one call returns true.
  template <int kRow = 0, typename What>
  static bool Visit(const What& what) {
    if constexpr (kRow < kHopperTiles) {
      return (VisitForm<kRow, Forms>(what) || ...) || Visit<kRow + 1>(what);
    } else {
      return false;
    }
  }
  template <int kRow, typename Form, typename What>
  static bool VisitForm(const What& what) {
    constexpr HopperTileSpec kSpec = kTiles[kRow];
    if constexpr (kIsHere(kSpec) && Form::IsOf(kSpec)) {
      return what(std::integral_constant<int, kRow>(), Form());
    } else {
      return false;
    }
  }
};

/// Tensor maps of a shortcut.
struct ShortcutParams {
  CUtensorMap x, x2, weight;
  int chunks = 0;  // of x
};

/// The extent of k.
struct Depth {
  int windowed = 0;  // chunks
  FastDivmod taps;   // per chunk
  int shortcut = 0;  // chunks
  FastDivmod steps;  // per tile
};

/// The source of a chunk's pixels. `of`: a kernel's Params (the window) or its shortcut.
struct ChunkAt {
  const CUtensorMap* map;
  int channel;
};
template <typename Of>
__device__ inline ChunkAt ChunkOf(const Of& of, int chunk) {
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
template <bool kShortcut, int kTaps = 0>
struct StepAt {
  int tap, chunk, channel;                       // of the window's weight
  int of_shortcut = 0, channel_of_shortcut = 0;  // chunk, and channel of the shortcut's weight
  int due =
      0;  // grows by the shortcut's chunks per step; a shortcut's step when it reaches `steps`

  template <typename Params>
  __device__ StepAt(const Conv2dLaunch& conv, const Params& params, int step) {
    const Depth& depth = params.depth;
    if (kShortcut) {
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
    return kShortcut && due >= depth.steps.value;
  }
  __device__ bool IsLastTap(const Depth& depth) const { return tap == Taps(depth) - 1; }
  __device__ static int Taps(const Depth& depth) { return kTaps > 0 ? kTaps : depth.taps.value; }
  template <typename Params>
  __device__ void Advance(const Conv2dLaunch& conv, const Params& params) {
    const Depth& depth = params.depth;
    if (IsOfShortcut(depth)) {
      ++of_shortcut, due -= depth.steps.value;
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
template <bool kShortcut, int kTaps, typename Params>
__device__ inline WeightAt WeightOf(const Params& params, const StepAt<kShortcut, kTaps>& step) {
  if (step.IsOfShortcut(params.depth))
    return {&params.shortcut.weight, step.channel_of_shortcut, 0};
  return {&params.weight, step.channel, step.tap};
}

/// Loads a step's weights of the outputs from n0 on. Each CTA of a cluster of `shared` loads those
/// of `part` outputs for all of them.
__device__ inline void LoadWeightsByTma(unsigned char* to, const WeightAt& from, uint64_t* barrier,
                                        int n0, int phase, int shared, int part, int rank) {
  if (shared == 1) {
    TmaLoadWeights(to, from.map, barrier, from.channel, from.tap, n0, phase);
  } else {
    TmaLoadMulticast(to + rank * part * kStepBytes, from.map, barrier, from.channel, from.tap,
                     n0 + rank * part, phase, static_cast<uint16_t>((1 << shared) - 1));
  }
}

/// What a consumer multiplies if a stage holds a step's pixels and weights (Mainloop()). A
/// consumer's part of either begins `input` and `weight` bytes after the stage. `cta` has the ring
/// of stages and releases them.
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

/// Prefetches the tensor maps; otherwise TMA would fetch them at their first use. Called by the
/// producer before its first wait.
template <bool kShortcut, typename Params>
__device__ inline void PrefetchTensorMaps(const Params& params) {
  PrefetchTensorMap(&params.weight);
  PrefetchTensorMap(&params.x);
  if (params.depth.windowed > params.chunks) PrefetchTensorMap(&params.x2);
  if (!kShortcut) return;
  PrefetchTensorMap(&params.shortcut.weight);
  PrefetchTensorMap(&params.shortcut.x);
  if (params.depth.shortcut > params.shortcut.chunks) PrefetchTensorMap(&params.shortcut.x2);
}

/// The output pixels of a phase, image after image, in the order of TMA's im2col mode. A doubled
/// image has four phases: the parities of the output's rows and columns.
struct Grid {
  FastDivmod taps_x;
  int stride = 1, pad_top = 0, pad_left = 0;
  int phases = 1;
  int pixels = 0;                  // per phase
  FastDivmod width, image_pixels;  // per image and phase
  bool flat = false;               // 1×1: inputs have the layout of the outputs
};

/// The input of a tile's first pixel under the window's first tap.
struct StartAt {
  int image, y, x;
};
__device__ inline StartAt StartOf(const Grid& grid, int m0) {
  const int pixel = m0 % grid.image_pixels;
  return {m0 / grid.image_pixels, pixel / grid.width * grid.stride - grid.pad_top,
          pixel % grid.width * grid.stride - grid.pad_left};
}
/// Loads a step's 64 channels at its tap, for the tile's pixels, starting at m0. A shortcut's
/// pixels have the layout of the outputs.
template <bool kShortcut, typename Params>
__device__ inline void LoadInputsByTma(void* to, const Params& params,
                                       const StepAt<kShortcut>& step, const StartAt& start, int m0,
                                       int phase, uint64_t* barrier) {
  const Grid& grid = params.grid;
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
__device__ inline int64_t OutputPixel(const Conv2dLaunch& conv, const Grid& grid, int m,
                                      int phase) {
  if (grid.phases == 1) return m;
  const int image = m / grid.image_pixels, pixel = m % grid.image_pixels;
  const int y = pixel / grid.width, x = pixel % grid.width;
  return (static_cast<int64_t>(image) * conv.out_height + 2 * y + phase / 2) * conv.out_width +
         2 * x + phase % 2;
}

/// Loads conv.add for one row of a thread's accumulators ahead of its use: outputs in pairs,
/// starting at n0. The number of outputs and n0 are multiples of kMultiple.
template <int kMultiple = 8, int kPairs>
__device__ inline void LoadPerImage(const Conv2dLaunch& conv, const Rows& add, int image, int n0,
                                    uint32_t (&pairs)[kPairs]) {
  const int first = n0 + threadIdx.x % 4 * 2;
  const __nv_bfloat16* const from = static_cast<const __nv_bfloat16*>(add.data) +
                                    static_cast<int64_t>(image) * add.stride + first;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const bool exists = n0 + j * 8 / kMultiple * kMultiple < conv.outputs;
    pairs[j] = exists ? *reinterpret_cast<const uint32_t*>(from + j * 8) : 0;
  }
}
/// Adds it to row h of the thread's two.
template <int kPairs, int kAccumulators>
__device__ inline void AddPerImage(const uint32_t (&pairs)[kPairs], int h,
                                   float (&accumulators)[kAccumulators]) {
  static_assert(kAccumulators == 4 * kPairs);
#pragma unroll
  for (int j = 0; j < kPairs; ++j)
    AddPair(pairs[j], accumulators[4 * j + 2 * h], accumulators[4 * j + 2 * h + 1]);
}
/// Loads and adds, one by one, for any dtype and alignment.
template <int kAccumulators>
__device__ inline void AddPerImage(const Conv2dLaunch& conv, const Rows& add, int image, int n0,
                                   int h, float (&accumulators)[kAccumulators]) {
#pragma unroll
  for (int i = 0; i < kAccumulators / 2; ++i) {
    const int n = n0 + threadIdx.x % 4 * 2 + i / 2 * 8 + i % 2;
    if (n < conv.outputs) accumulators[4 * (i / 2) + 2 * h + i % 2] += Load(add, image, n);
  }
}

/// Accumulators start with the bias, so the epilogue does not add it; those of a later split (bias
/// null) start with zero. No branches, because wgmma is asynchronous and reads the registers later
/// than its place in the code.
__device__ const float kNoBias[kBiasPadding] = {};
template <int kAccumulators>
__device__ inline void InitAccumulators(const float* bias, int n0,
                                        float (&accumulators)[kAccumulators]) {
  static_assert(kAccumulators <= kBiasPadding / 2);
  const float* const from = (bias != nullptr ? bias + n0 : kNoBias) + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < kAccumulators / 4; ++j) {
    const float2 pair = __ldg(reinterpret_cast<const float2*>(from + j * 8));
    accumulators[4 * j] = accumulators[4 * j + 2] = pair.x;
    accumulators[4 * j + 1] = accumulators[4 * j + 3] = pair.y;
  }
}

/// In e4m3, where accumulators start with zero: sum · scale + bias, in place. The scale is a power
/// of two, so this rounds once.
template <int kAccumulators>
__device__ inline void ScaleAndAddBias(const float* scales, const float* bias, int n0,
                                       float (&sums)[kAccumulators]) {
  const int first = threadIdx.x % 4 * 2;
  const float* const biases = (bias != nullptr ? bias + n0 : kNoBias) + first;
#pragma unroll
  for (int j = 0; j < kAccumulators / 4; ++j) {
    const float2 scale = __ldg(reinterpret_cast<const float2*>(scales + n0 + first + j * 8));
    const float2 pair = __ldg(reinterpret_cast<const float2*>(biases + j * 8));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[4 * j + 2 * h] = fmaf(sums[4 * j + 2 * h], scale.x, pair.x);
      sums[4 * j + 2 * h + 1] = fmaf(sums[4 * j + 2 * h + 1], scale.y, pair.y);
    }
  }
}

/// act(accumulator · scale), in place.
template <int kAccumulators>
__device__ inline void ApplyEpilogue(const Conv2dLaunch& conv, bool silu,
                                     float (&v)[kAccumulators]) {
#pragma unroll
  for (int j = 0; j < kAccumulators; ++j) v[j] *= conv.scale;
  if (!silu) return;
#pragma unroll
  for (int j = 0; j < kAccumulators; ++j) v[j] = __fdividef(v[j], 1.0f + __expf(-v[j]));
}

/// Eight outputs of the residual.
__device__ inline uint4 LoadResidual(const Conv2dLaunch& conv, int64_t pixel, int n) {
  return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(conv.residual.data) +
                                         pixel * conv.residual.stride + n);
}

/// The swizzle of rows of kBox (16, 32 or 64) bf16: vector v is stored at v ^ SwizzleOf(row).
template <int kBox>
__device__ inline int SwizzleOf(int row) {
  return kBox == 64 ? row % 8 : kBox == 32 ? row / 2 % 4 : row / 4 % 2;
}

/// What a layer does with its sums.
enum class Ending : uint8_t {
  kPlain,     // scales and rounds them
  kResidual,  // adds the residual first
  kGate,      // Conv2dLaunch::gated
  kGateE4m3,  // and Conv2dLaunch::rounded_out
  kAny,       // decided at run time; no gate
};
/// The ending that does no more than the layer needs.
inline Ending EndingOf(const ConvLayer& conv) {
  if (conv.gated) return conv.rounded_out.data != nullptr ? Ending::kGateE4m3 : Ending::kGate;
  if (conv.activation != Activation::kNone || conv.add.data != nullptr) return Ending::kAny;
  return conv.residual.data != nullptr ? Ending::kResidual : Ending::kPlain;
}
/// The epilogue of a warpgroup's 64 pixels through shared memory, in boxes of 64 pixels × kBox
/// outputs in TMA's swizzle. begin(i) returns the address of box i, which holds the residual if
/// there is one and receives the outputs; end(i) is called when it is complete. Residual and
/// activation are template parameters, because branches would cost more than the instructions that
/// they skip.
template <int kBox, bool kResidual, bool kSilu, int kAccumulators, typename Begin, typename End>
__device__ inline void StageEpilogueAs(const Conv2dLaunch& conv,
                                       const float (&accumulators)[kAccumulators],
                                       const Begin& begin, const End& end) {
  constexpr int kLine = kBox * 2;  // bytes
  constexpr int kChunks = kBox / 8;
  // Several residuals are loaded at a time, to hide their latency.
  constexpr int kAtOnce = kResidual ? 4 : 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  // The lane's row in the four 8×8 matrices: rows 0…7 and 8…15 of eight outputs, then of the next
  // eight.
  const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
  const int swizzle = SwizzleOf<kBox>(row);
  uint32_t line = 0;
#pragma unroll
  for (int first = 0; first < kAccumulators / 8; first += kAtOnce) {
    uint32_t at[kAtOnce], residual[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce && first + i < kAccumulators / 8; ++i) {
      const int chunk = 2 * (first + i);
      if (chunk % kChunks == 0) line = SharedAddress(begin(chunk / kChunks)) + row * kLine;
      at[i] = line + ((chunk % kChunks + lane / 16) ^ swizzle) * 16;
      if (kResidual) LoadMatrices(residual[i], at[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce && first + i < kAccumulators / 8; ++i) {
      const int chunk = 2 * (first + i);
      float v[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) v[c] = accumulators[4 * chunk + c];
      if (kResidual) {
#pragma unroll
        for (int c = 0; c < 4; ++c) AddPair(residual[i][c], v[2 * c], v[2 * c + 1]);
      }
      ApplyEpilogue(conv, kSilu, v);
      uint32_t packed[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) packed[c] = PackBf16(v[2 * c], v[2 * c + 1]);
      StoreMatrices(at[i], packed);
      if (chunk % kChunks == kChunks - 2) end(chunk / kChunks);
    }
  }
}
/// Two outputs of a gated layer in bf16. Accumulators are eight values, their eight gates, the next
/// eight values, and so on. Values and gates are rounded before the product, as they are if the
/// gate is a separate kernel.
template <int kAccumulators>
__device__ inline uint32_t GatedPair(const float (&accumulators)[kAccumulators], int value) {
  const int gate = value + 4;
  float v[2] = {}, g[2] = {};
  AddPair(PackBf16(accumulators[value], accumulators[value + 1]), v[0], v[1]);
  AddPair(PackBf16(accumulators[gate], accumulators[gate + 1]), g[0], g[1]);
  return PackBf16(v[0] * Gelu(g[0]), v[1] * Gelu(g[1]));
}

/// The same for a gated layer, which has half as many outputs.
template <int kBox, int kAccumulators, typename Begin, typename End>
__device__ inline void StageGatedEpilogue(const float (&accumulators)[kAccumulators],
                                          const Begin& begin, const End& end) {
  constexpr int kLine = kBox * 2;  // bytes
  constexpr int kChunks = kBox / 8;
  static_assert(kAccumulators / 8 % kChunks == 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
  const int swizzle = SwizzleOf<kBox>(row);
  uint32_t line = 0;
#pragma unroll
  for (int chunk = 0; chunk < kAccumulators / 8; chunk += 2) {  // of eight outputs, two at a time
    if (chunk % kChunks == 0) line = SharedAddress(begin(chunk / kChunks)) + row * kLine;
    uint32_t packed[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      packed[c] = GatedPair(accumulators, 8 * (chunk + c / 2) + c % 2 * 2);
    }
    StoreMatrices(line + ((chunk % kChunks + lane / 16) ^ swizzle) * 16, packed);
    if (chunk % kChunks == kChunks - 2) end(chunk / kChunks);
  }
}
/// The epilogue for Ending::kGateE4m3. A quad stores up to 32 neighbouring outputs of a pixel at a
/// time, so they are not staged. Pixels begin at m0, outputs at n0.
template <int kAccumulators>
__device__ inline void StoreGatedE4m3(const Conv2dLaunch& conv, int pixels, int m0, int n0,
                                      const float (&accumulators)[kAccumulators]) {
  constexpr int kVectors = kAccumulators / 8;  // of eight outputs
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const float inverse = 1.0f / conv.rounded_out.scale;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = m0 + warp * 16 + half * 8 + lane / 4;
#pragma unroll
    for (int first = 0; first < kVectors; first += 4) {
      uint32_t words[4] = {};
#pragma unroll
      for (int i = 0; i < 4 && first + i < kVectors; ++i) {
        words[i] = GatedPair(accumulators, 8 * (first + i) + 2 * half);
      }
      ExchangeInQuad(words);
      const int vector = first + lane % 4, n = n0 + vector * 8;
      if (m < pixels && vector < kVectors && n < conv.outputs / 2) {
        *reinterpret_cast<uint2*>(E4m3At(conv.rounded_out, m, n)) =
            PackE4m3(make_uint4(words[0], words[1], words[2], words[3]), inverse);
      }
    }
  }
}
template <int kBox, Ending kEnding, int kAccumulators, typename Begin, typename End>
__device__ inline void StageEpilogue(const Conv2dLaunch& conv,
                                     const float (&accumulators)[kAccumulators], const Begin& begin,
                                     const End& end) {
  if constexpr (kEnding == Ending::kGate) {
    StageGatedEpilogue<kBox>(accumulators, begin, end);
  } else if constexpr (kEnding != Ending::kAny) {
    StageEpilogueAs<kBox, kEnding == Ending::kResidual, /*kSilu=*/false>(conv, accumulators, begin,
                                                                         end);
  } else {
    const auto known = [](bool flag, const auto& then) {
      if (flag) {
        then(std::true_type());
      } else {
        then(std::false_type());
      }
    };
    known(conv.residual.data != nullptr, [&](auto residual) {
      known(conv.activation == Activation::kSilu, [&](auto silu) {
        StageEpilogueAs<kBox, decltype(residual)::value, decltype(silu)::value>(conv, accumulators,
                                                                                begin, end);
      });
    });
  }
}

inline Grid GridOf(const Conv2dLaunch& conv) {
  Grid grid;
  grid.taps_x = FastDivmod(EdgeTaps(conv));
  grid.phases = PhasesOf(conv);
  grid.stride = conv.stride;
  grid.pad_top = conv.pad_top, grid.pad_left = conv.pad_left;
  grid.width = PlaneOf(conv).width;
  grid.image_pixels = PlaneOf(conv).pixels;
  grid.pixels = conv.images * grid.image_pixels.value;  // checked by CudaBackend
  grid.flat = conv.kernel == 1 && conv.stride == 1 && conv.pad_top == 0 && conv.pad_left == 0 &&
              conv.out_height == conv.height && conv.out_width == conv.width;
  return grid;
}

/// [pixels, channels] in boxes of `columns` × `rows`.
inline CUresult EncodeRows(CUtensorMap* map, const Rows& pixels_of, int channels, int64_t pixels,
                           int columns, int rows) {
  return EncodeTiled(map, {pixels_of.data, {channels, pixels}, {pixels_of.stride}, {columns, rows}},
                     SwizzleOfBox(columns), CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

/// For LoadInputsByTma(), `pixels` at a time. `rows`: pixels have the layout of the outputs.
inline CUresult EncodeInputs(CUtensorMap* map, const Rows& rows_of, int channels,
                             const Conv2dLaunch& conv, const Grid& grid, bool rows, int pixels) {
  if (rows) return EncodeRows(map, rows_of, channels, grid.pixels, kStep, pixels);
  const int width = conv.width, height = conv.height;
  const int out_height = grid.image_pixels.value / grid.width;
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(width),
                              static_cast<cuuint64_t>(height),
                              static_cast<cuuint64_t>(conv.images)};
  const cuuint64_t pixel_bytes = static_cast<cuuint64_t>(rows_of.stride) * 2;
  const cuuint64_t strides[3] = {pixel_bytes, pixel_bytes * width, pixel_bytes * width * height};
  const int lower[2] = {-grid.pad_left, -grid.pad_top};  // width before height
  const int upper[2] = {(grid.width.value - 1) * grid.stride - grid.pad_left + 1 - width,
                        (out_height - 1) * grid.stride - grid.pad_top + 1 - height};
  const cuuint32_t stride = static_cast<cuuint32_t>(grid.stride);
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

/// Sets the fields of `params` about k: chunks, sources and weights, the latter in boxes of
/// `outputs_at_once`. `encode(map, rows, channels, shortcut)` makes the tensor map of a source.
template <typename Params, typename Encode>
CUresult EncodeDepth(Params* params, const Conv2dLaunch& conv, int outputs_at_once,
                     const Encode& encode) {
  params->chunks = ChunksOf(conv.channels);
  params->depth.windowed = params->chunks + ChunksOf(conv.channels2);
  const int taps = EdgeTaps(conv) * EdgeTaps(conv);
  params->depth.taps = FastDivmod(taps);
  params->depth.steps = FastDivmod(StepsOf(conv));
  CUresult result = encode(&params->x, conv.x, conv.channels, false);
  if (result == CUDA_SUCCESS && conv.x2.data != nullptr) {
    result = encode(&params->x2, conv.x2, conv.channels2, false);
  }
  if (result == CUDA_SUCCESS) {
    result = EncodeWeight(&params->weight, conv.weight, conv.weight_stride,
                          conv.channels + conv.channels2, taps, conv.outputs, PhasesOf(conv),
                          outputs_at_once);
  }
  const ShortcutLaunch& from = conv.shortcut;
  if (result != CUDA_SUCCESS || from.x.data == nullptr) return result;
  ShortcutParams& shortcut = params->shortcut;
  shortcut.chunks = ChunksOf(from.channels);
  params->depth.shortcut = shortcut.chunks + ChunksOf(from.channels2);
  result = encode(&shortcut.x, from.x, from.channels, true);
  if (result == CUDA_SUCCESS && from.x2.data != nullptr) {
    result = encode(&shortcut.x2, from.x2, from.channels2, true);
  }
  if (result != CUDA_SUCCESS) return result;
  return EncodeWeight(&shortcut.weight, from.weight, from.weight_stride,
                      from.channels + from.channels2, /*taps=*/1, conv.outputs, /*phases=*/1,
                      outputs_at_once);
}

/// The epilogue's arguments, without bias and add, which are in Params.
inline Conv2dLaunch EpilogueOf(Conv2dLaunch conv) {
  conv.bias = nullptr;
  conv.add = {};
  return conv;
}

/// Launches persistent CTAs in clusters of `shared`: as many clusters as the device holds, at most
/// one per tile.
template <typename T, typename Params>
cudaError_t LaunchPersistent(void (*kernel)(Conv2dLaunch, Params), int64_t tiles, int shared,
                             const Conv2dLaunch& conv, const Params& params, const Queue& queue) {
  const int64_t at_once = queue.multiprocessors / shared;
  return LaunchDependent(kernel,
                         {.grid = static_cast<unsigned>(std::min(tiles, at_once) * shared),
                          .block = T::kThreads,
                          .shared_bytes = T::kSharedBytes,
                          .cluster = static_cast<unsigned>(shared)},
                         queue, EpilogueOf(conv), params);
}

}  // namespace denoised::cuda
