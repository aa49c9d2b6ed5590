// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "engine/backend/activation.h"

/// The innermost loops of the CPU backend: plain, without threads, compiled for several instruction
/// sets and chosen when the program starts. No loop lets the compiler reorder a sum, and none
/// contracts into FMA (CMakeLists.txt), so the bits are the same on all of them, for any alignment.

namespace denoised::cpu {

/// y = act(y). Exponentials are accurate to 2e-7 relative, GELU to 6e-8·|x|; tanh is the C
/// library's.
void Activate(Activation activation, float* y, int64_t count);

/// y = (y + residual) · scale; `residual` may be null.
void AddScale(float* y, const float* residual, float scale, int64_t count);

/// out = a · scale + b + shift; `b` may be null. `out` may be a or b.
void Axpb(const float* a, float scale, const float* b, float shift, float* out, int64_t count);

/// Σ x·w over `count` in an order that depends on `count` alone.
float Dot(const float* x, const float* w, int64_t count);

/// sum[c] = Σ x, square[c] = Σ x² over `pixels` rows of `channels`.
void Moments(const float* x, int64_t pixels, int64_t channels, double* sum, double* square);

/// y = (x − mean[c]) · slope[c] + offset[c] for `pixels` rows of `channels`; the rows of y lie
/// `y_stride` apart.
void Normalize(const float* x, int64_t pixels, int64_t channels, const float* mean,
               const float* slope, const float* offset, float* y, int64_t y_stride);

/// LayerNorm of one token: y = (x − mean) / √(variance + eps) · gamma + beta. `y` may be x. The
/// sums' order depends on `count` alone.
void NormalizeToken(const float* x, int64_t count, const float* gamma, const float* beta, float eps,
                    float* y);

/// x = exp(x − max x), and returns 1 / Σ x. The sum's order depends on `count` alone.
float Exponentiate(float* x, int64_t count);

/// to = from as bfloat16, with the bits of FloatToBFloat16().
void RoundToBf16(const float* from, uint16_t* to, int64_t count);

/// to = RoundToE4m3(from · factor), also as bfloat16, which holds it exactly.
void ScaleAndRoundToE4m3(const float* from, float factor, float* to, int64_t count);
void ScaleAndRoundToE4m3(const float* from, float factor, uint16_t* to, int64_t count);

/// x = x · scale
void Scale(float* x, float scale, int64_t count);

}  // namespace denoised::cpu
