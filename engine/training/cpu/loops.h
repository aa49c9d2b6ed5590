// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "engine/backend/activation.h"

/// The innermost loops of training on the CPU, as far as serving (engine/backend/cpu/vector_ops.h)
/// lacks them. They are plain and use no threads. In none may the compiler reorder a sum.

namespace denoised::training::cpu {

/// d[i] = d[i] · act′(z[i])
void MultiplyByDerivative(Activation activation, const float* z, float* d, int64_t count);

/// product[c] += Σ d·(x − mean[c]), sum[c] += Σ d over `pixels` rows of `channels`.
void CenteredMoments(const float* d, const float* x, const float* mean, int64_t pixels,
                     int64_t channels, double* product, double* sum);

/// dx = d·a[c] + (x − mean[c])·b[c] + k[c] (+ add) over `pixels` rows of `channels`; dx may be d or
/// add.
void NormGradient(const float* d, const float* x, const float* mean, const float* a, const float* b,
                  const float* k, const float* add, int64_t pixels, int64_t channels, float* dx);

/// out[c] += Σ x over `pixels` rows of `channels`, `stride` apart.
void SumColumns(const float* x, int64_t pixels, int64_t channels, int64_t stride, double* out);

/// y[p, c] = (y[p, c] + add[c] + residual[p, c]) · scale; add and residual may be null.
void Finish(float* y, const float* add, const float* residual, float scale, int64_t pixels,
            int64_t channels);

/// large = scale · small, doubled by nearest neighbour. small has `lines` lines of [width,
/// channels], those of all pictures together.
void Double(const float* small, float scale, int64_t lines, int64_t width, int64_t channels,
            float* large);

/// Its backward op: small = scale · the sum of each group of four pixels of large.
void SumFours(const float* large, float scale, int64_t lines, int64_t width, int64_t channels,
              float* small);

/// a += b
void AddTo(float* a, const float* b, int64_t count);

/// Σ x², in an order that depends on `count` alone.
double SquareSum(const float* x, int64_t count);

struct AdamW {
  float gradient_scale, decay /* rate·decay */, m_share /* 1 − β₁ */, v_share, step_size,
      root_correction2, eps;
};
/// One update of `count` weights; see UpdateArgs.
void UpdateWeights(const AdamW& adamw, const float* gradient, float* master, float* m, float* v,
                   int64_t count);

/// average += share·(w − average)
void MoveAverage(float share, const float* w, float* average, int64_t count);

}  // namespace denoised::training::cpu
