// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "engine/backend/cuda/launch.h"

/// Loads, stores and pointwise functions shared by all kernels. Arithmetic is fp32; bf16 is rounded
/// to nearest even once, at the store.

namespace denoised::cuda {

/// Binary logarithm, rounded up.
constexpr int BinaryLogarithm(int value) {
  int bits = 0;
  while (1 << bits < value) ++bits;
  return bits;
}

__device__ inline float Load(const Rows& rows, int64_t row, int64_t column) {
  const int64_t i = row * rows.stride + column;
  return rows.element == Element::kBf16
             ? __bfloat162float(static_cast<const __nv_bfloat16*>(rows.data)[i])
             : static_cast<const float*>(rows.data)[i];
}

__device__ inline void Store(const Rows& rows, int64_t row, int64_t column, float value) {
  const int64_t i = row * rows.stride + column;
  if (rows.element == Element::kBf16) {
    static_cast<__nv_bfloat16*>(rows.data)[i] = __float2bfloat16_rn(value);
  } else {
    static_cast<float*>(rows.data)[i] = value;
  }
}

/// The address of a word (uint32_t, uint2 or uint4) of a matrix in bf16.
template <typename Word>
__device__ inline Word* Bf16At(const Rows& rows, int64_t row, int64_t column) {
  return reinterpret_cast<Word*>(static_cast<__nv_bfloat16*>(rows.data) + row * rows.stride +
                                 column);
}

__device__ inline uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/// The two elements of a word. bf16 is the upper half of an fp32.
__device__ inline float Low(uint32_t word) { return __uint_as_float(word << 16); }
__device__ inline float High(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

__device__ inline void AddPair(uint32_t pair, float& a, float& b) {
  a += Low(pair), b += High(pair);
}

__device__ inline void UnpackBf16(const uint4& bits, float (&v)[8]) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // not Low() and High(): FirKernel would become another one
    v[2 * j] = __uint_as_float(words[j] << 16);
    v[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
  }
}

/// Eight neighbouring elements as fp32. `i` is a multiple of 8, and `rows.vector` is true.
template <Element kElement>
__device__ inline void LoadVectorOf(const Rows& rows, int64_t i, float (&v)[8]) {
  if constexpr (kElement == Element::kBf16) {
    UnpackBf16(*reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(rows.data) + i),
               v);
  } else {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(rows.data) + i);
    const float4 a = from[0], b = from[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
}

__device__ inline void LoadVector(const Rows& rows, int64_t row, int64_t column, float (&v)[8]) {
  const int64_t i = row * rows.stride + column;
  if (rows.element == Element::kBf16) {
    LoadVectorOf<Element::kBf16>(rows, i, v);
  } else {
    LoadVectorOf<Element::kF32>(rows, i, v);
  }
}

__device__ inline uint4 PackBf16(const float (&v)[8]) {
  return make_uint4(PackBf16(v[0], v[1]), PackBf16(v[2], v[3]), PackBf16(v[4], v[5]),
                    PackBf16(v[6], v[7]));
}

__device__ inline void StoreVector(const Rows& rows, int64_t row, int64_t column,
                                   const float (&v)[8]) {
  const int64_t i = row * rows.stride + column;
  if (rows.element == Element::kBf16) {
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(rows.data) + i) = PackBf16(v);
  } else {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(rows.data) + i);
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    to[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}

/// V = 8: one vector; V = 1: one element. For kernels that exist in both widths.
template <int V>
__device__ inline void LoadChannels(const Rows& rows, int64_t row, int64_t column, float (&v)[V]) {
  if constexpr (V == 8) {
    LoadVector(rows, row, column, v);
  } else {
    v[0] = Load(rows, row, column);
  }
}
/// The same for an element type known at compile time: without a branch on it, several loads can be
/// in flight at once.
template <int V, Element kElement>
__device__ inline void LoadChannelsOf(const Rows& rows, int64_t row, int64_t column,
                                      float (&v)[V]) {
  const int64_t i = row * rows.stride + column;
  if constexpr (V == 8) {
    LoadVectorOf<kElement>(rows, i, v);
  } else if constexpr (kElement == Element::kBf16) {
    v[0] = __bfloat162float(static_cast<const __nv_bfloat16*>(rows.data)[i]);
  } else {
    v[0] = static_cast<const float*>(rows.data)[i];
  }
}

template <int V>
__device__ inline void StoreChannels(const Rows& rows, int64_t row, int64_t column,
                                     const float (&v)[V]) {
  if constexpr (V == 8) {
    StoreVector(rows, row, column, v);
  } else {
    Store(rows, row, column, v[0]);
  }
}

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / (1 + exp(−x)) to a relative error of 1e-6, in four instructions.
__device__ inline float Sigmoid(float x) {
  const float power = Exp2(x * -1.4426950408889634f);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return inverse;
}
__device__ inline float Silu(float x) { return x * Sigmoid(x); }

/// Silu(2h) = h + h · tanh(h), to 1e-5 on Hopper, in two instructions.
__device__ inline float SiluOfHalf(float h) {
  float tanh;
  asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(h));
  return fmaf(h, tanh, h);
}

/// x · Φ(x) = max(x, 0) − |x| · Φ(−|x|), to 6e-7. log₂ Φ(−|x|) is nearly a parabola: this
/// polynomial, fitted on [0, 6], has a relative error of Φ of 6e-6 there, and falls beyond. It has
/// few instructions, because it runs in epilogues.
__device__ inline float Gelu(float x) {
  const float z = fabsf(x);
  float power = fmaf(z, -1.8348100467510734e-6f, 6.159825326684795e-5f);
  power = fmaf(z, power, -9.305244096836514e-4f);
  power = fmaf(z, power, 8.507888617503248e-3f);
  power = fmaf(z, power, -5.396006288645466e-2f);
  power = fmaf(z, power, -4.5846440177158954e-1f);
  power = fmaf(z, power, -1.1512510401478169f);
  power = fmaf(z, power, -0.9999952953195468f);
  return fmaf(-z, Exp2(power), fmaxf(x, 0.0f));
}

__device__ inline float Activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kSilu:
      return Silu(x);
    case Activation::kMish: {
      // x · tanh(softplus(x)); with e = exp(x): tanh(ln(1 + e)) = (e² + 2e) / (e² + 2e + 2). Above
      // 20 the quotient is 1 in fp32, and e² would soon overflow.
      if (x > 20.0f) return x;
      const float e = expf(x);
      const float n = e * (e + 2.0f);
      return x * (n / (n + 2.0f));
    }
    case Activation::kGelu:
      return Gelu(x);
    case Activation::kRelu:
      return fmaxf(x, 0.0f);
    case Activation::kQuickGelu:
      return x * Sigmoid(1.702f * x);
    case Activation::kTanh:
      return tanhf(x);
  }
  return x;
}

/// From an aligned address.
__device__ inline void LoadEight(const float* from, float (&v)[8]) {
  const float4 a = *reinterpret_cast<const float4*>(from);
  const float4 b = *reinterpret_cast<const float4*>(from + 4);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

__device__ inline float WarpSum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}
__device__ inline double WarpSum(double value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}
__device__ inline float WarpMax(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  }
  return value;
}

/// Returns then(constant) for the one of these values that equals `value`, else for the last of
/// them: a template argument that is known when a kernel is launched.
template <int kValue, int... kRest, typename Then>
auto WithConstant(int value, const Then& then) {
  const std::integral_constant<int, kValue> constant;
  if constexpr (sizeof...(kRest) == 0) {
    return then(constant);
  } else {
    return value == kValue ? then(constant) : WithConstant<kRest...>(value, then);
  }
}

template <typename Kernel>
cudaError_t LoadKernel(Kernel* kernel, int shared_bytes = 0) {
  cudaFuncAttributes attributes;
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess) {
    return error;
  }
  if (shared_bytes == 0) return cudaSuccess;
  // The largest shared memory carve-out, so that several blocks fit.
  if (cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
      error != cudaSuccess) {
    return error;
  }
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}
/// Each of them, until one fails.
template <typename... Kernels>
cudaError_t LoadKernels(int shared_bytes, Kernels*... kernels) {
  cudaError_t error = cudaSuccess;
  static_cast<void>((((error = LoadKernel(kernels, shared_bytes)) == cudaSuccess) && ...));
  return error;
}

}  // namespace denoised::cuda
