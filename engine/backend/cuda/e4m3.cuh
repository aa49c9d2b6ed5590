// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_fp8.h>

#include "engine/backend/cuda/element.cuh"

/// Stores in e4m3 (engine/core/e4m3.h). From sm_89 on, rounding is one instruction for two numbers.

namespace denoised::cuda {

/// Two numbers, in the lower half.
__device__ inline uint32_t PackE4m3(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}
__device__ inline uint32_t PackE4m3(float a, float b, float c, float d) {
  return PackE4m3(a, b) | PackE4m3(c, d) << 16;
}
/// `inverse`: 1 / the scale of the tensor, a power of two.
__device__ inline uint2 PackE4m3(const float (&v)[8], float inverse) {
  return make_uint2(PackE4m3(v[0] * inverse, v[1] * inverse, v[2] * inverse, v[3] * inverse),
                    PackE4m3(v[4] * inverse, v[5] * inverse, v[6] * inverse, v[7] * inverse));
}
/// The same of eight numbers in bf16.
__device__ inline uint2 PackE4m3(const uint4& bf16, float inverse) {
  float v[8];
  UnpackBf16(bf16, v);
  return PackE4m3(v, inverse);
}

/// The address of a number of a matrix in e4m3, whose stride counts pairs.
__device__ inline uint8_t* E4m3At(const Rows& rows, int64_t row, int64_t column) {
  return static_cast<uint8_t*>(rows.data) + 2 * row * rows.stride + column;
}

/// StoreVector(), also in e4m3.
template <Element kOut>
__device__ inline void StoreRounded(const Rows& rows, int64_t row, int64_t column,
                                    const float (&v)[8]) {
  if constexpr (kOut == Element::kE4m3x2) {
    *reinterpret_cast<uint2*>(E4m3At(rows, row, column)) = PackE4m3(v, 1.0f / rows.scale);
  } else {
    StoreVector(rows, row, column, v);
  }
}

}  // namespace denoised::cuda
