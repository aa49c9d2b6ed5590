// SPDX-License-Identifier: Apache-2.0
#include "engine/nn/transformer.h"

#include <cmath>

namespace denoised::nn {
namespace {

// Not in the config: Transformer2DModel and BasicTransformerBlock have these as their defaults.
constexpr double kGroupNormEps = 1e-6;
constexpr double kLayerNormEps = 1e-5;
constexpr int kFeedForwardFactor = 4;

}  // namespace

absl::StatusOr<Transformer2D> Transformer2D::Load(NetworkOps& ops, const Weights& weights,
                                                  const TransformerOptions& options,
                                                  LinearColumns& key_values) {
  const int channels = options.channels;
  if (options.heads < 1 || channels % options.heads != 0)
    return InvalidArgument(
        "{}: '{}' has {} channels, which {} heads do not divide; correct attention_head_dim (which "
        "is the number of heads) or block_out_channels in the config",
        weights.file(), weights.prefix(), channels, options.heads);
  if (channels / options.heads > kMaxHeadDim)
    return InvalidArgument("{}: '{}' needs heads {} wide; at most {} are supported", weights.file(),
                           weights.prefix(), channels / options.heads, kMaxHeadDim);
  Transformer2D transformer;
  transformer.options_ = options;
  DENOISED_ASSIGN_OR_RETURN(transformer.norm_, GroupNorm::Load(ops, weights / "norm", channels,
                                                               options.groups, kGroupNormEps));
  const auto projection = [&](const char* name) {
    return options.linear_projection
               ? Linear::Load(ops, weights / name, channels, channels, Products::kOfModel)
               : Linear::LoadConv1x1(ops, weights / name, channels, channels, Products::kOfModel);
  };
  DENOISED_ASSIGN_OR_RETURN(transformer.proj_in_, projection("proj_in"));
  for (int i = 0; i < options.depth; ++i) {
    DENOISED_ASSIGN_OR_RETURN(
        Block block, transformer.LoadBlock(ops, weights / "transformer_blocks" / i, key_values));
    transformer.blocks_.push_back(std::move(block));
  }
  DENOISED_ASSIGN_OR_RETURN(transformer.proj_out_, projection("proj_out"));
  return transformer;
}

absl::StatusOr<Transformer2D::Block> Transformer2D::LoadBlock(NetworkOps& ops,
                                                              const Weights& weights,
                                                              LinearColumns& key_values) const {
  const int channels = options_.channels, hidden = kFeedForwardFactor * channels;
  const Weights self = weights / "attn1", cross = weights / "attn2", feed = weights / "ff" / "net";
  Block block;
  for (const auto& [norm, name] :
       {std::pair{&block.norm1, "norm1"}, std::pair{&block.norm2, "norm2"},
        std::pair{&block.norm3, "norm3"}}) {
    DENOISED_ASSIGN_OR_RETURN(*norm, LayerNorm::Load(ops, weights / name, channels, kLayerNormEps));
  }
  DENOISED_ASSIGN_OR_RETURN(
      block.self_qkv,
      Linear::LoadFused(ops, {self / "to_q", self / "to_k", self / "to_v"}, channels,
                        {channels, channels, channels}, Products::kOfModel, Bias::kNo));
  DENOISED_ASSIGN_OR_RETURN(block.self_out, Linear::Load(ops, self / "to_out" / 0, channels,
                                                         channels, Products::kOfModel));
  DENOISED_ASSIGN_OR_RETURN(block.cross_q, Linear::Load(ops, cross / "to_q", channels, channels,
                                                        Products::kOfModel, Bias::kNo));
  block.key_column = key_values.Add(cross / "to_k", options_.text_features, channels);
  key_values.Add(cross / "to_v", options_.text_features, channels);
  DENOISED_ASSIGN_OR_RETURN(block.cross_out, Linear::Load(ops, cross / "to_out" / 0, channels,
                                                          channels, Products::kOfModel));
  DENOISED_ASSIGN_OR_RETURN(block.feed_in, Linear::LoadGated(ops, feed / 0 / "proj", channels,
                                                             hidden, Products::kOfModel));
  DENOISED_ASSIGN_OR_RETURN(block.feed_out,
                            Linear::Load(ops, feed / 2, hidden, channels, Products::kOfModel));
  return block;
}

AttentionArgs Transformer2D::Heads(const Tensor& q, const Tensor& k, const Tensor& v) const {
  const auto head_dim = static_cast<float>(options_.channels / options_.heads);
  return {.q = q, .k = k, .v = v, .heads = options_.heads, .scale = 1.0f / std::sqrt(head_dim)};
}

Tensor Transformer2D::Run(Context& context, const Block& block, Tensor x,
                          const CrossAttentionInput& text) const {
  const int channels = options_.channels;
  {
    const Tensor qkv =
        block.self_qkv(context, {.x = x, .prologue = {.norm = block.norm1.Before()}});
    const Tensor attended = block.self_out.Attend(
        context, Heads(qkv.Columns(0, channels), qkv.Columns(channels, channels),
                       qkv.Columns(2 * channels, channels)));
    x = block.self_out(context, {.x = attended, .epilogue = {.residual = x}});
  }
  {
    const Tensor q = block.cross_q(context, {.x = x, .prologue = {.norm = block.norm2.Before()}});
    AttentionArgs cross = Heads(q, text.keys_values.Columns(block.key_column, channels),
                                text.keys_values.Columns(block.key_column + channels, channels));
    cross.key_set = text.set;
    cross.key_counts = text.key_counts;
    const Tensor attended = block.cross_out.Attend(context, cross);
    x = block.cross_out(context, {.x = attended, .epilogue = {.residual = x}});
  }
  const Tensor hidden =
      block.feed_in(context, {.x = x, .prologue = {.norm = block.norm3.Before()}}, &block.feed_out);
  return block.feed_out(context, {.x = hidden, .epilogue = {.residual = x}});
}

Tensor Transformer2D::operator()(Context& context, const Tensor& x,
                                 const CrossAttentionInput& text) const {
  const Tensor flat = x.Reshape({x.dim(0), x.dim(1) * x.dim(2), x.dim(3)});
  Tensor tokens =
      proj_in_(context, {.x = flat, .prologue = {.norm = norm_.Then(Activation::kNone)}});
  for (const Block& block : blocks_) tokens = Run(context, block, std::move(tokens), text);
  return proj_out_(context, {.x = tokens, .epilogue = {.residual = flat}}).Reshape(x.shape());
}

}  // namespace denoised::nn
