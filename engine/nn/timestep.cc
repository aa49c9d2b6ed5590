// SPDX-License-Identifier: Apache-2.0
#include "engine/nn/timestep.h"

namespace denoised::nn {

TimestepProjection TimestepProjection::Positional(int channels, bool flip_sin_to_cos,
                                                  double freq_shift) {
  TimestepProjection projection;
  projection.out_features_ = channels;
  projection.flip_sin_to_cos_ = flip_sin_to_cos;
  projection.freq_shift_ = freq_shift;
  return projection;
}

absl::StatusOr<TimestepProjection> TimestepProjection::Fourier(NetworkOps& ops,
                                                               const Weights& weights,
                                                               int channels) {
  DENOISED_ASSIGN_OR_RETURN(Tensor weight, weights.Get("weight", {channels}));
  TimestepProjection projection;
  projection.out_features_ = 2 * channels;
  DENOISED_ASSIGN_OR_RETURN(projection.fourier_weight_, ops.PackVector(weight));
  return projection;
}

Tensor TimestepProjection::operator()(Context& context, const Tensor& t) const {
  Tensor out = context.New({t.dim(0), out_features_});
  if (fourier_weight_) {
    context.ops.FourierEmbedding({.t = t, .weight = fourier_weight_, .out = out});
  } else {
    context.ops.TimestepEmbedding(
        {.t = t, .flip_sin_to_cos = flip_sin_to_cos_, .freq_shift = freq_shift_, .out = out});
  }
  return out;
}

absl::StatusOr<TimestepEmbedding> TimestepEmbedding::Load(NetworkOps& ops, const Weights& weights,
                                                          int in_features, int out_features,
                                                          Activation inner) {
  TimestepEmbedding embedding;
  embedding.inner_ = inner;
  DENOISED_ASSIGN_OR_RETURN(embedding.linear_1_,
                            Linear::Load(ops, weights / "linear_1", in_features, out_features));
  DENOISED_ASSIGN_OR_RETURN(embedding.linear_2_,
                            Linear::Load(ops, weights / "linear_2", out_features, out_features));
  return embedding;
}

Tensor TimestepEmbedding::operator()(Context& context, const Tensor& x, const Tensor& residual,
                                     Activation then) const {
  const Tensor hidden = linear_1_(context, {.x = x, .epilogue = {.activation = inner_}});
  return linear_2_(context, {.x = hidden, .epilogue = {.residual = residual, .activation = then}});
}

}  // namespace denoised::nn
