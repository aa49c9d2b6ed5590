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

absl::StatusOr<TimestepProjection> TimestepProjection::Fourier(Backend& backend,
                                                               const Weights& weights,
                                                               int channels) {
  DENOISED_ASSIGN_OR_RETURN(Tensor weight, weights.Get("weight", {channels}));
  TimestepProjection projection;
  projection.out_features_ = 2 * channels;
  DENOISED_ASSIGN_OR_RETURN(projection.fourier_weight_, backend.PackVector(weight));
  return projection;
}

Tensor TimestepProjection::operator()(Context& context, const Tensor& t) const {
  Tensor out = context.New({t.dim(0), out_features_});
  if (fourier_weight_) {
    context.backend.FourierEmbedding({.t = t, .weight = fourier_weight_, .out = out});
  } else {
    context.backend.TimestepEmbedding(
        {.t = t, .flip_sin_to_cos = flip_sin_to_cos_, .freq_shift = freq_shift_, .out = out});
  }
  return out;
}

absl::StatusOr<TimestepEmbedding> TimestepEmbedding::Load(Backend& backend, const Weights& weights,
                                                          int in_features, int out_features) {
  TimestepEmbedding embedding;
  DENOISED_ASSIGN_OR_RETURN(embedding.linear_1_,
                            Linear::Load(backend, weights / "linear_1", in_features, out_features));
  DENOISED_ASSIGN_OR_RETURN(
      embedding.linear_2_, Linear::Load(backend, weights / "linear_2", out_features, out_features));
  return embedding;
}

Tensor TimestepEmbedding::operator()(Context& context, const Tensor& x, const Tensor& residual,
                                     Activation activation) const {
  const Tensor hidden = linear_1_(context, {.x = x, .epilogue = {.activation = Activation::kSilu}});
  return linear_2_(context,
                   {.x = hidden, .epilogue = {.residual = residual, .activation = activation}});
}

absl::StatusOr<int> TimeProjections::Add(const Weights& time_emb_proj, int in_features,
                                         int out_features) {
  DENOISED_CHECK(in_features_ == 0 || in_features_ == in_features);
  in_features_ = in_features;
  layers_.push_back(time_emb_proj);
  out_features_.push_back(out_features);
  const int column = columns_;
  columns_ += out_features;
  return column;
}

absl::Status TimeProjections::Pack(Backend& backend) {
  DENOISED_ASSIGN_OR_RETURN(linear_,
                            Linear::LoadFused(backend, layers_, in_features_, out_features_));
  layers_.clear();
  return absl::OkStatus();
}

Tensor TimeProjections::operator()(Context& context, const Tensor& embedding) const {
  return linear_(context, {.x = embedding});
}

}  // namespace denoised::nn
