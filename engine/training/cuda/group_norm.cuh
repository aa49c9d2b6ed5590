// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/training/cuda/derivative.cuh"
#include "engine/training/cuda/launch.h"

/// Shared by the group norms in two passes and in one: the arithmetic of a channel.

namespace denoised::training::cuda {

/// kActivation is norm.activation, or kAny. If it is a constant, no element needs a switch, and the
/// arithmetic of a vector's elements overlaps.
constexpr int kAny = -1;
template <int kActivation>
__device__ inline Activation ActivationOf(const NormLaunch& norm) {
  return kActivation == kAny ? norm.activation : static_cast<Activation>(kActivation);
}

/// launch(constant), for kernels with such an argument.
template <typename Launch>
cudaError_t WithActivation(Activation activation, const Launch& launch) {
  constexpr int kSilu = static_cast<int>(Activation::kSilu);
  constexpr int kNone = static_cast<int>(Activation::kNone);
  return denoised::cuda::WithConstant<kSilu, kNone, kAny>(static_cast<int>(activation), launch);
}

/// Of a channel of a row: z = (γx̂ + β)·gain + shift.
struct Parameters {
  float gamma, beta, gain, shift;
};
__device__ inline Parameters ParametersOf(const NormLaunch& norm, int64_t row, int c) {
  Parameters of = {norm.gamma[c], norm.beta[c], 1, 0};
  if (norm.scale_shift.data != nullptr) {
    of.gain += denoised::cuda::Load(norm.scale_shift, row, c);
    of.shift = denoised::cuda::Load(norm.scale_shift, row, norm.channels + c);
  }
  return of;
}

/// The same as z = (x − mean)·slope + offset.
struct Affine {
  float mean, slope, offset;
};
__device__ inline Affine AffineOf(const Parameters& of, float mean, float rstd) {
  return {mean, rstd * of.gamma * of.gain, of.beta * of.gain + of.shift};
}

/// Those of V channels.
template <int V>
struct Line {
  float mean[V], slope[V], offset[V];
};

/// Two sums, or terms of sums. Of a channel over the pixels of a row: A = Σ dz·(x − μ) and
/// B = Σ dz.
struct Pair {
  double a, b;
};
/// A channel's terms of the group's sums Σ dz·γ′·x̂ and Σ dz·γ′.
__device__ inline Pair TermsOf(const Parameters& of, double rstd, const Pair& sums) {
  const double slope = double{of.gamma} * of.gain;
  return {slope * rstd * sums.a, slope * sums.b};
}
/// Writes a channel's shares of dγ and dβ, and its dscale_shift.
__device__ inline void StoreParameterGradients(const NormBackwardLaunch& backward, int64_t row,
                                               int c, const Parameters& of, double rstd,
                                               const Pair& sums) {
  using denoised::cuda::Store;
  const int channels = backward.forward.channels;
  float* const shares = backward.parameters + row * 2 * channels;
  shares[c] = static_cast<float>(rstd * sums.a * of.gain);
  shares[channels + c] = static_cast<float>(sums.b * of.gain);
  if (backward.forward.scale_shift.data == nullptr || backward.dscale_shift.data == nullptr) return;
  Store(backward.dscale_shift, row, c,
        static_cast<float>(of.gamma * rstd * sums.a + of.beta * sums.b));
  Store(backward.dscale_shift, row, channels + c, static_cast<float>(sums.b));
}

}  // namespace denoised::training::cuda
