// SPDX-License-Identifier: Apache-2.0
#include "engine/nn/attention.h"

#include <cmath>

namespace denoised::nn {

absl::StatusOr<Attention> Attention::Load(NetworkOps& ops, const Weights& weights,
                                          const AttentionOptions& options) {
  if (options.head_dim < 1 || options.channels < options.head_dim)
    return InvalidArgument("{}: '{}' has {} channels, too few for attention_head_dim {}",
                           weights.file(), weights.prefix(), options.channels, options.head_dim);
  if (options.head_dim > kMaxHeadDim)
    return InvalidArgument(
        "{}: '{}' needs heads {} wide; at most {} are supported: set "
        "attention_head_dim in the config if the model has several heads",
        weights.file(), weights.prefix(), options.head_dim, kMaxHeadDim);
  Attention attention;
  attention.options_ = options;
  attention.heads_ = options.channels / options.head_dim;
  if (options.groups) {
    DENOISED_ASSIGN_OR_RETURN(attention.norm_,
                              GroupNorm::Load(ops, weights / "group_norm", options.channels,
                                              *options.groups, options.eps));
  }
  const int channels = options.channels, inner = attention.heads_ * options.head_dim;
  DENOISED_ASSIGN_OR_RETURN(
      attention.qkv_, Linear::LoadFused(ops, {weights / "to_q", weights / "to_k", weights / "to_v"},
                                        channels, {inner, inner, inner}, Products::kOfModel));
  DENOISED_ASSIGN_OR_RETURN(
      attention.out_, Linear::Load(ops, weights / "to_out.0", inner, channels, Products::kOfModel));
  return attention;
}

Tensor Attention::operator()(Context& context, const Tensor& x) const {
  const int64_t rows = x.dim(0), tokens = x.dim(1) * x.dim(2);
  const int64_t inner = int64_t{heads_} * options_.head_dim;
  const Tensor flat = x.Reshape({rows, tokens, options_.channels});
  const Norm norm = norm_ ? norm_->Then(Activation::kNone) : Norm();
  const Tensor qkv = qkv_(context, {.x = flat, .prologue = {.norm = norm}});
  const Tensor attended =
      out_.Attend(context, {.q = qkv.Columns(0, inner),
                            .k = qkv.Columns(inner, inner),
                            .v = qkv.Columns(2 * inner, inner),
                            .heads = heads_,
                            .scale = 1.0f / std::sqrt(static_cast<float>(options_.head_dim))});
  const Tensor out = out_(
      context, {.x = attended,
                .epilogue = {.residual = flat,
                             .scale = static_cast<float>(1.0 / options_.output_scale_factor)}});
  return out.Reshape(x.shape());
}

}  // namespace denoised::nn
