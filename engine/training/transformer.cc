// SPDX-License-Identifier: Apache-2.0
#include "engine/training/transformer.h"

#include <cmath>

namespace denoised::training {
namespace {

// Not in the config: the defaults of Transformer2DModel and BasicTransformerBlock.
constexpr double kGroupNormEps = 1e-6;
constexpr double kLayerNormEps = 1e-5;
constexpr int kFeedForwardFactor = 4;
constexpr LinearOptions kNoBias{.bias = false, .deviation = {}};

}  // namespace

TransformerBlock::TransformerBlock(const Declare& declare, int channels, int heads,
                                   int text_features)
    : channels_(channels), attention_{.heads = heads} {
  const int c = channels, hidden = kFeedForwardFactor * channels;
  const Declare self = declare / "attn1", cross = declare / "attn2", feed = declare / "ff" / "net";
  norm1_ = LayerNorm(declare / "norm1", c, kLayerNormEps);
  self_qkv_ = Linear({self / "to_q", self / "to_k", self / "to_v"}, c, {c, c, c}, kNoBias);
  self_out_ = Linear({self / "to_out" / 0}, c, {c});
  norm2_ = LayerNorm(declare / "norm2", c, kLayerNormEps);
  cross_q_ = Linear({cross / "to_q"}, c, {c}, kNoBias);
  cross_kv_ = Linear({cross / "to_k", cross / "to_v"}, text_features, {c, c}, kNoBias);
  cross_out_ = Linear({cross / "to_out" / 0}, c, {c});
  norm3_ = LayerNorm(declare / "norm3", c, kLayerNormEps);
  feed_in_ = Linear({feed / 0 / "proj"}, c, {2 * hidden});
  feed_out_ = Linear({feed / 2}, hidden, {c});
}

void TransformerBlock::Pack(const Masters& masters) const {
  for (const Linear* linear :
       {&self_qkv_, &self_out_, &cross_q_, &cross_kv_, &cross_out_, &feed_in_, &feed_out_})
    linear->Pack(masters);
}

Tensor TransformerBlock::Forward(Pass& pass, const Tensor& x, const Tensor& states,
                                 Kept* kept) const {
  const int c = channels_;
  Tensor normed = norm1_.Forward(pass, x, &kept->norm1);
  if (!pass.recompute_norms) kept->normed1 = normed;
  const Tensor qkv = self_qkv_.Forward(pass, normed);
  Tensor attended = attention_.Forward(pass, qkv.Columns(0, c), qkv.Columns(c, c),
                                       qkv.Columns(2 * c, c), &kept->self);
  const Tensor after_self = self_out_.Forward(pass, attended, x);

  normed = norm2_.Forward(pass, after_self, &kept->norm2);
  if (!pass.recompute_norms) kept->normed2 = normed;
  const Tensor q = cross_q_.Forward(pass, normed), kv = cross_kv_.Forward(pass, states);
  attended = attention_.Forward(pass, q, kv.Columns(0, c), kv.Columns(c, c), &kept->cross);
  const Tensor after_cross = cross_out_.Forward(pass, attended, after_self);

  normed = norm3_.Forward(pass, after_cross, &kept->norm3);
  if (!pass.recompute_norms) kept->normed3 = normed;
  kept->hidden = feed_in_.Forward(pass, normed);
  kept->gated = pass.New({x.dim(0), x.dim(1), kFeedForwardFactor * c});
  pass.backend.Geglu(kept->hidden, kept->gated);
  return feed_out_.Forward(pass, kept->gated, after_cross);
}

Tensor TransformerBlock::Backward(Pass& pass, const Kept& kept, const Tensor& states,
                                  const Tensor& dout, Tensor* dstates) const {
  const int c = channels_;
  const auto normed = [&](const LayerNorm& norm, const LayerNorm::Kept& of, const Tensor& whole) {
    return whole ? whole : norm.Again(pass, of);
  };
  Tensor d;
  {
    const Tensor dgated = feed_out_.Backward(pass, kept.gated, dout);
    Tensor dhidden = pass.New(kept.hidden.shape());
    pass.backend.GegluBackward(kept.hidden, dgated, dhidden);
    d = feed_in_.Backward(pass, normed(norm3_, kept.norm3, kept.normed3), dhidden);
    d = norm3_.Backward(pass, kept.norm3, d, dout);
  }
  {
    const Tensor dattended = cross_out_.Backward(pass, kept.cross.out, d);
    const Tensor dq = pass.New(dattended.shape()),
                 dkv = pass.New({states.dim(0), states.dim(1), 2 * c});
    attention_.Backward(pass, kept.cross, dattended, dq, dkv.Columns(0, c), dkv.Columns(c, c));
    const Tensor sum =
        cross_kv_.Backward(pass, states, dkv, dstates != nullptr, dstates ? *dstates : Tensor());
    if (dstates != nullptr) *dstates = sum;
    const Tensor dnormed = cross_q_.Backward(pass, normed(norm2_, kept.norm2, kept.normed2), dq);
    d = norm2_.Backward(pass, kept.norm2, dnormed, d);
  }
  const Tensor dattended = self_out_.Backward(pass, kept.self.out, d);
  const Tensor dqkv = pass.New({dout.dim(0), dout.dim(1), 3 * c});
  attention_.Backward(pass, kept.self, dattended, dqkv.Columns(0, c), dqkv.Columns(c, c),
                      dqkv.Columns(2 * c, c));
  const Tensor dnormed = self_qkv_.Backward(pass, normed(norm1_, kept.norm1, kept.normed1), dqkv);
  return norm1_.Backward(pass, kept.norm1, dnormed, d);
}

Transformer2D::Transformer2D(const Declare& declare, const Options& options) {
  const int c = options.channels;
  CheckHeads(declare, c, options.heads, c / options.heads);
  const auto projection = [&](const char* name) {
    return options.linear_projection ? Linear({declare / name}, c, {c})
                                     : Linear::Conv1x1(declare / name, c, c);
  };
  norm_ = GroupNorm(declare / "norm", c, options.groups, kGroupNormEps, Activation::kNone);
  proj_in_ = projection("proj_in");
  for (int i = 0; i < options.depth; ++i)
    blocks_.emplace_back(declare / "transformer_blocks" / i, c, options.heads,
                         options.text_features);
  proj_out_ = projection("proj_out");
}

void Transformer2D::Pack(const Masters& masters) const {
  proj_in_.Pack(masters);
  for (const TransformerBlock& block : blocks_) block.Pack(masters);
  proj_out_.Pack(masters);
}

Tensor Transformer2D::Forward(Pass& pass, const Tensor& x, const Tensor& states, Kept* kept) const {
  const Tensor flat = x.Reshape({x.dim(0), x.dim(1) * x.dim(2), x.dim(3)});
  Tensor normed = norm_.Forward(pass, flat, {}, &kept->norm);
  if (!pass.recompute_norms) kept->normed = normed;
  Tensor tokens = proj_in_.Forward(pass, normed);
  kept->blocks.resize(blocks_.size());
  for (size_t i = 0; i < blocks_.size(); ++i)
    tokens = blocks_[i].Forward(pass, tokens, states, &kept->blocks[i]);
  kept->tokens = tokens;
  return proj_out_.Forward(pass, tokens, flat).Reshape(x.shape());
}

Tensor Transformer2D::Backward(Pass& pass, const Kept& kept, const Tensor& states,
                               const Tensor& dout, Tensor* dstates) const {
  const Tensor flat = dout.Reshape(kept.norm.x.shape());
  Tensor d = proj_out_.Backward(pass, kept.tokens, flat);
  for (size_t i = blocks_.size(); i-- > 0;)
    d = blocks_[i].Backward(pass, kept.blocks[i], states, d, dstates);
  const Tensor normed = kept.normed ? kept.normed : norm_.Again(pass, kept.norm);
  const Tensor dnormed = proj_in_.Backward(pass, normed, d);
  return norm_.Backward(pass, kept.norm, dnormed, flat).Reshape(dout.shape());
}

}  // namespace denoised::training
