// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

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

/// diffusers' TimestepEmbedding: linear, SiLU, linear; and the activation that its user applies.
class TimestepEmbedding {
 public:
  static absl::StatusOr<TimestepEmbedding> Load(NetworkOps& ops, const Weights& weights,
                                                int in_features, int out_features);
  /// [N, in_features] → [N, out_features], plus `residual` when defined, then `activation`.
  Tensor operator()(Context& context, const Tensor& x, const Tensor& residual,
                    Activation activation) const;

 private:
  Linear linear_1_, linear_2_;
};

/// The time_emb_proj of all resnet blocks of a model, which read the same activated embedding, as
/// one linear layer: blocks register while they load and get their columns of its output.
class TimeProjections {
 public:
  /// Returns the first column of this block's `out_features` outputs.
  absl::StatusOr<int> Add(const Weights& time_emb_proj, int in_features, int out_features);
  /// Call once, after all blocks were loaded.
  absl::Status Pack(NetworkOps& ops);
  /// The activated embedding [N, in_features] → [N, all outputs].
  Tensor operator()(Context& context, const Tensor& embedding) const;

 private:
  std::vector<Weights> layers_;
  std::vector<int> out_features_;
  int in_features_ = 0, columns_ = 0;
  Linear linear_;
};

}  // namespace denoised::nn
