// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/nn/layers.h"

namespace denoised::nn {

/// diffusers' Timesteps (sinusoidal, arXiv 1706.03762) or GaussianFourierProjection (2006.10739):
/// numbers become vectors. No trained weights but the Fourier frequencies.
class TimestepProjection {
 public:
  static TimestepProjection Positional(int channels, bool flip_sin_to_cos, double freq_shift);
  /// `weights` holds "weight" [channels]; the output has twice as many.
  static absl::StatusOr<TimestepProjection> Fourier(NetworkOps& ops, const Weights& weights,
                                                    int channels);

  int out_features() const { return out_features_; }
  /// t: F32 [N] → [N, out_features].
  Tensor operator()(Context& context, const Tensor& t) const;

 private:
  int out_features_ = 0;
  bool flip_sin_to_cos_ = false;
  double freq_shift_ = 0;
  Tensor fourier_weight_;
};

/// diffusers' TimestepEmbedding: linear, activation, linear; and the activation that its user
/// applies.
class TimestepEmbedding {
 public:
  /// `inner`: the activation between the two layers.
  static absl::StatusOr<TimestepEmbedding> Load(NetworkOps& ops, const Weights& weights,
                                                int in_features, int out_features,
                                                Activation inner);
  /// [N, in_features] → [N, out_features], plus `residual` when defined, and `then` of that.
  Tensor operator()(Context& context, const Tensor& x, const Tensor& residual,
                    Activation then) const;

 private:
  Linear linear_1_, linear_2_;
  Activation inner_ = Activation::kNone;
};

}  // namespace denoised::nn
