// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/e4m3.cuh"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/hopper.cuh"
#include "engine/backend/cuda/implicit_gemm.cuh"
#include "engine/backend/cuda/mma.cuh"

/// The epilogue of Hopper's convolutions, from a warpgroup's accumulators of 64 pixels to outputs
/// in shared memory, and what accumulators start with.

namespace denoised::cuda {

/// Loads conv.add for one row of a thread's accumulators ahead of its use: outputs in pairs,
/// starting at n0. The number of outputs and n0 are multiples of kMultiple.
template <int kMultiple = 8, int kPairs>
__device__ inline void LoadPerImage(const Conv2dLaunch& conv, const Rows& add, int image, int n0,
                                    uint32_t (&pairs)[kPairs]) {
  const auto* const from = Bf16At<__nv_bfloat16>(add, image, n0 + threadIdx.x % 4 * 2);
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
/// outputs in TMA's swizzle: kBlocks blocks of 16 outputs. begin(i) returns the address of box i,
/// which holds the residual if there is one and receives the outputs; end(i) is called when it is
/// complete. pack(block, residual, words) finishes a thread's eight outputs of a block.
template <int kBox, int kBlocks, bool kResidual, typename Begin, typename End, typename Pack>
__device__ inline void StageBlocks(const Begin& begin, const End& end, const Pack& pack) {
  constexpr int kBoxBlocks = kBox / 16;
  static_assert(kBlocks % kBoxBlocks == 0);
  // Several residuals are loaded at a time, to hide their latency.
  constexpr int kAtOnce = kResidual ? 4 : 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  // The lane's row in the four 8×8 matrices: rows 0…7 and 8…15 of eight outputs, then of the next
  // eight.
  const int row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
  const int swizzle = SwizzleOf<kBox>(row);
  uint32_t line = 0;
#pragma unroll
  for (int first = 0; first < kBlocks; first += kAtOnce) {
    uint32_t at[kAtOnce], residual[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce && first + i < kBlocks; ++i) {
      const int box = (first + i) / kBoxBlocks, block = (first + i) % kBoxBlocks;
      if (block == 0) line = SharedAddress(begin(box)) + row * kBox * 2;
      at[i] = line + ((2 * block + lane / 16) ^ swizzle) * 16;
      if (kResidual) LoadMatrices(residual[i], at[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce && first + i < kBlocks; ++i) {
      uint32_t words[4];
      pack(first + i, residual[i], words);
      StoreMatrices(at[i], words);
      if ((first + i) % kBoxBlocks == kBoxBlocks - 1) end((first + i) / kBoxBlocks);
    }
  }
}
/// The same of a layer without a gate. Residual and activation are template parameters, because
/// branches would cost more than the instructions that they skip.
template <int kBox, bool kResidual, bool kSilu, int kAccumulators, typename Begin, typename End>
__device__ inline void StageEpilogueAs(const Conv2dLaunch& conv,
                                       const float (&accumulators)[kAccumulators],
                                       const Begin& begin, const End& end) {
  StageBlocks<kBox, kAccumulators / 8, kResidual>(
      begin, end, [&](int block, const uint32_t(&residual)[4], uint32_t(&words)[4]) {
        float v[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) v[c] = accumulators[8 * block + c];
        if (kResidual) {
#pragma unroll
          for (int c = 0; c < 4; ++c) AddPair(residual[c], v[2 * c], v[2 * c + 1]);
        }
        ApplyEpilogue(conv, kSilu, v);
#pragma unroll
        for (int c = 0; c < 4; ++c) words[c] = PackBf16(v[2 * c], v[2 * c + 1]);
      });
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
/// The epilogue of a warpgroup's 64 pixels, in boxes as StageBlocks() has them.
template <int kBox, Ending kEnding, int kAccumulators, typename Begin, typename End>
__device__ inline void StageEpilogue(const Conv2dLaunch& conv,
                                     const float (&accumulators)[kAccumulators], const Begin& begin,
                                     const End& end) {
  if constexpr (kEnding == Ending::kGate) {
    StageBlocks<kBox, kAccumulators / 16, /*kResidual=*/false>(
        begin, end, [&](int block, const uint32_t(&)[4], uint32_t(&words)[4]) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            words[c] = GatedPair(accumulators, 8 * (2 * block + c / 2) + c % 2 * 2);
          }
        });
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

}  // namespace denoised::cuda
