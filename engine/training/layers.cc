// SPDX-License-Identifier: Apache-2.0
#include "engine/training/layers.h"

#include <cmath>

#include "engine/backend/network_ops.h"

namespace denoised::training {
namespace {

Shape WithLast(const Shape& shape, int64_t last) {
  int64_t dims[Shape::kMaxRank];
  for (int i = 0; i < shape.rank(); ++i) dims[i] = shape[i];
  dims[shape.rank() - 1] = last;
  return Shape(std::span<const int64_t>(dims, shape.rank()));
}

}  // namespace

Tensor Pass::Scaled(const Tensor& a, float scale) {
  if (scale == 1) return a;
  Tensor out = New(a.shape());
  backend.Add(a, scale, Tensor(), 0, 0, out);
  return out;
}

Tensor Pass::Resampled(Resample kind, const Tensor& x) {
  const int64_t h = x.dim(1), w = x.dim(2);
  Tensor out = Doubles(kind) ? New({x.dim(0), 2 * h, 2 * w, x.dim(3)})
                             : New({x.dim(0), h / 2, w / 2, x.dim(3)});
  backend.Resample2x(kind, x, 1, out);
  return out;
}

Tensor Pass::ResampledBackward(Resample kind, const Tensor& dout) {
  const int64_t h = dout.dim(1), w = dout.dim(2);
  Tensor dx = Doubles(kind) ? New({dout.dim(0), h / 2, w / 2, dout.dim(3)})
                            : New({dout.dim(0), 2 * h, 2 * w, dout.dim(3)});
  backend.Resample2xBackward(kind, dout, dx);
  return dx;
}

Tensor Pass::Converted(const Tensor& a, DType dtype) {
  if (a.dtype() == dtype) return a;
  Tensor out = arena.New(a.shape(), dtype);
  backend.Add(a, 1, Tensor(), 0, 0, out);
  return out;
}

Declare Declare::operator/(std::string_view name) const {
  Declare below = *this;
  below.prefix_ += std::string(name) + ".";
  return below;
}

void Declare::Complain(std::string_view what) const {
  const std::string_view name(prefix_.data(), prefix_.empty() ? 0 : prefix_.size() - 1);
  parameters_->Complain(fmt::format("'{}' {}", name, what));
}

Conv2d::Conv2d(const Declare& declare, int in_channels, int out_channels, int kernel,
               bool upsample2x, const std::optional<Conv2dGeometry>& geometry)
    : pad_(kernel / 2),
      packed_(declare.backend().NewConv2d(in_channels, out_channels, kernel, upsample2x,
                                          geometry.value_or(Same()))) {
  const Initial initial = Initial::Uniform(int64_t{in_channels} * kernel * kernel);
  weight_ = declare.Add("weight", {out_channels, in_channels, kernel, kernel}, initial);
  bias_ = declare.Add("bias", {out_channels}, initial);
}

void Conv2d::Pack(const Masters& masters) const {
  masters.backend.PackConv2d(masters(weight_), masters(bias_), packed_.get());
}

Tensor Conv2d::Forward(Pass& pass, Conv2dArgs args) const {
  args.weight = packed_.get();
  if (!args.out) {
    const int up = packed_->upsample2x ? 2 : 1;
    const Conv2dGeometry& g = args.geometry;
    const auto extent = [&](int64_t in, int before, int after) {
      return (in * up + before + after - packed_->kernel) / g.stride + 1;
    };
    args.out = pass.New({args.x.dim(0), extent(args.x.dim(1), g.pad_top, g.pad_bottom),
                         extent(args.x.dim(2), g.pad_left, g.pad_right), packed_->out_channels});
  }
  pass.backend.Conv2d(args);
  return args.out;
}

Tensor Conv2d::Backward(Pass& pass, const Tensor& x, const Conv2dGeometry& geometry,
                        const Tensor& dout, bool wants_dx) const {
  Tensor dx;
  if (wants_dx) dx = pass.New(x.shape());
  pass.backend.Conv2dBackward({.x = x,
                               .weight = packed_.get(),
                               .geometry = geometry,
                               .dout = dout,
                               .dx = dx,
                               .dweight = pass.Gradient(weight_),
                               .dbias = pass.Gradient(bias_)});
  return dx;
}

Linear::Linear(const std::vector<Declare>& parts, int in_features,
               const std::vector<int>& out_features, const LinearOptions& options)
    : packed_(parts[0].backend().NewLinear(in_features, out_features)) {
  const bool normal = options.deviation.has_value();
  const Initial initial =
      normal ? Initial::Normal(*options.deviation) : Initial::Uniform(in_features);
  for (size_t i = 0; i < parts.size(); ++i) {
    weights_.push_back(parts[i].Add("weight", {out_features[i], in_features}, initial));
    if (!options.bias) continue;
    biases_.push_back(
        parts[i].Add("bias", {out_features[i]}, normal ? Initial::Constant(0) : initial));
  }
}

Linear Linear::Conv1x1(const Declare& declare, int in_channels, int out_channels) {
  Linear linear;
  linear.packed_ = declare.backend().NewLinear(in_channels, {out_channels});
  const Initial initial = Initial::Uniform(in_channels);
  linear.weights_ = {declare.Add("weight", {out_channels, in_channels, 1, 1}, initial)};
  linear.biases_ = {declare.Add("bias", {out_channels}, initial)};
  return linear;
}

Linear Linear::OfTrainingAlone(const Declare& declare, int in_features, int out_features) {
  Linear linear;
  linear.packed_ = declare.backend().NewLinear(in_features, {out_features});
  linear.weights_ = {declare.Add("weight", {out_features, in_features},
                                 Initial::Uniform(in_features), /*trained=*/true,
                                 /*served=*/false)};
  return linear;
}

void Linear::Pack(const Masters& masters) const {
  std::vector<Tensor> weights, biases;
  for (const int weight : weights_) weights.push_back(masters(weight));
  for (const int bias : biases_) biases.push_back(masters(bias));
  masters.backend.PackLinear(weights, biases, packed_.get());
}

Tensor Linear::Forward(Pass& pass, const Tensor& x, const Tensor& residual, float scale) const {
  Tensor out = pass.New(WithLast(x.shape(), packed_->out_features));
  pass.backend.Linear(
      {.x = x, .weight = packed_.get(), .residual = residual, .scale = scale, .out = out});
  return out;
}

Tensor Linear::Backward(Pass& pass, const Tensor& x, const Tensor& dout, bool wants_dx,
                        const Tensor& add) const {
  Tensor dx;
  if (wants_dx) dx = add ? add : pass.New(x.shape());
  std::vector<Tensor> dweights, dbiases;
  for (const int weight : weights_) dweights.push_back(pass.Gradient(weight));
  for (const int bias : biases_) dbiases.push_back(pass.Gradient(bias));
  pass.backend.LinearBackward({.x = x,
                               .weight = packed_.get(),
                               .dout = dout,
                               .add = add,
                               .dx = dx,
                               .dweights = dweights,
                               .dbiases = dbiases});
  return dx;
}

GroupNorm::GroupNorm(const Declare& declare, int channels, int groups, double eps,
                     Activation activation)
    : gamma_(declare.Add("weight", {channels}, Initial::Constant(1))),
      beta_(declare.Add("bias", {channels}, Initial::Constant(0))),
      groups_(groups),
      eps_(static_cast<float>(eps)),
      activation_(activation) {
  if (channels % groups != 0)
    declare.Complain(
        fmt::format("has {} channels, which {} groups do not divide; change norm_num_groups (or "
                    "attn_norm_num_groups) or block_out_channels",
                    channels, groups));
  if (channels > kMaxNormChannels)
    declare.Complain(
        fmt::format("normalises {} channels; at most {} can be served: change block_out_channels",
                    channels, kMaxNormChannels));
}

GroupNormArgs GroupNorm::Args(Pass& pass, const Kept& kept) const {
  return {.x = kept.x,
          .gamma = pass.Weight(gamma_),
          .beta = pass.Weight(beta_),
          .groups = groups_,
          .eps = eps_,
          .scale_shift = kept.scale_shift,
          .activation = activation_,
          .statistics = kept.statistics};
}

Tensor GroupNorm::Forward(Pass& pass, const Tensor& x, const Tensor& scale_shift,
                          Kept* kept) const {
  *kept = {x, pass.NewF32({x.dim(0), groups_, 2}), scale_shift};
  return Again(pass, *kept);
}

Tensor GroupNorm::Again(Pass& pass, const Kept& kept) const {
  GroupNormArgs args = Args(pass, kept);
  args.out = pass.New(kept.x.shape());
  pass.backend.GroupNorm(args);
  return args.out;
}

GroupNormBackwardArgs GroupNorm::BackwardArgs(Pass& pass, const Kept& kept,
                                              const Tensor& dout) const {
  return {.forward = Args(pass, kept),
          .dout = dout,
          .dx = dout,  // nothing reads dout after this
          .dgamma = pass.Gradient(gamma_),
          .dbeta = pass.Gradient(beta_)};
}

Tensor GroupNorm::Backward(Pass& pass, const Kept& kept, const Tensor& dout,
                           const Tensor& add) const {
  GroupNormBackwardArgs args = BackwardArgs(pass, kept, dout);
  args.add = add;
  pass.backend.GroupNormBackward(args);
  return args.dx;
}

Tensor GroupNorm::BackwardOfColumns(Pass& pass, const Kept& kept, const Tensor& dout,
                                    Tensor* dcolumns) const {
  GroupNormBackwardArgs args = BackwardArgs(pass, kept, dout);
  if (kept.scale_shift) {
    args.dscale_shift = *dcolumns = pass.New(kept.scale_shift.shape());
  } else {
    args.dx_sums = *dcolumns = pass.New({dout.dim(0), dout.dim(-1)});
  }
  pass.backend.GroupNormBackward(args);
  return args.dx;
}

Tensor GroupNorm::BackwardOfConcat(Pass& pass, const Kept& kept, const Tensor& dout,
                                   const Tensor& add, int64_t skip_channels, Tensor* dskip) const {
  GroupNormBackwardArgs args = BackwardArgs(pass, kept, dout);
  args.add = add;
  const int64_t n = dout.dim(0), h = dout.dim(1), w = dout.dim(2), c = dout.dim(3);
  args.dx = pass.New({n, h, w, c - skip_channels});
  args.dx_rest = *dskip = pass.New({n, h, w, skip_channels});
  pass.backend.GroupNormBackward(args);
  return args.dx;
}

LayerNorm::LayerNorm(const Declare& declare, int channels, double eps)
    : gamma_(declare.Add("weight", {channels}, Initial::Constant(1))),
      beta_(declare.Add("bias", {channels}, Initial::Constant(0))),
      eps_(static_cast<float>(eps)) {}

LayerNormArgs LayerNorm::Args(Pass& pass, const Kept& kept) const {
  return {.x = kept.x,
          .gamma = pass.Weight(gamma_),
          .beta = pass.Weight(beta_),
          .eps = eps_,
          .statistics = kept.statistics};
}

Tensor LayerNorm::Forward(Pass& pass, const Tensor& x, Kept* kept) const {
  *kept = {x, pass.NewF32({x.dim(0), x.dim(1), 2})};
  return Again(pass, *kept);
}

Tensor LayerNorm::Again(Pass& pass, const Kept& kept) const {
  LayerNormArgs args = Args(pass, kept);
  args.out = pass.New(kept.x.shape());
  pass.backend.LayerNorm(args);
  return args.out;
}

Tensor LayerNorm::Backward(Pass& pass, const Kept& kept, const Tensor& dout,
                           const Tensor& add) const {
  pass.backend.LayerNormBackward({.forward = Args(pass, kept),
                                  .dout = dout,
                                  .add = add,
                                  .dx = dout,  // nothing reads dout after this
                                  .dgamma = pass.Gradient(gamma_),
                                  .dbeta = pass.Gradient(beta_)});
  return dout;
}

TimestepEmbedding::TimestepEmbedding(const Declare& declare, int in_features, int out_features,
                                     Activation activation)
    : linear_1_({declare / "linear_1"}, in_features, {out_features}),
      linear_2_({declare / "linear_2"}, out_features, {out_features}),
      activation_(activation) {}

void TimestepEmbedding::Pack(const Masters& masters) const {
  linear_1_.Pack(masters);
  linear_2_.Pack(masters);
}

Tensor TimestepEmbedding::Forward(Pass& pass, const Tensor& x, const Tensor& residual,
                                  Kept* kept) const {
  kept->x = x;
  kept->hidden = linear_1_.Forward(pass, x);
  kept->activated = pass.New(kept->hidden.shape());
  pass.backend.Activate(activation_, kept->hidden, kept->activated);
  return linear_2_.Forward(pass, kept->activated, residual);
}

Tensor TimestepEmbedding::Backward(Pass& pass, const Kept& kept, const Tensor& dout,
                                   bool wants_dx) const {
  const Tensor d = linear_2_.Backward(pass, kept.activated, dout);
  pass.backend.ActivateBackward(activation_, kept.hidden, d, d);
  return linear_1_.Backward(pass, kept.x, d, wants_dx);
}

void CheckHeads(const Declare& declare, int channels, int heads, int head_dim) {
  if (heads * head_dim != channels)
    declare.Complain(
        fmt::format("has {} channels, which attention_head_dim does not divide into heads; change "
                    "it or block_out_channels",
                    channels));
  if (head_dim > kMaxHeadDim)
    declare.Complain(
        fmt::format("has attention heads {} wide; at most {} can be served: change "
                    "attention_head_dim",
                    head_dim, kMaxHeadDim));
}

AttentionArgs HeadAttention::Args(const Kept& kept) const {
  const auto dim = static_cast<double>(kept.q.dim(2) / heads);
  return {.q = kept.q,
          .k = kept.k,
          .v = kept.v,
          .heads = heads,
          .scale = static_cast<float>(1 / std::sqrt(dim)),
          .causal = causal,
          .log_sum_exp = kept.log_sum_exp,
          .out = kept.out};
}

Tensor HeadAttention::Forward(Pass& pass, const Tensor& q, const Tensor& k, const Tensor& v,
                              Kept* kept) const {
  *kept = {q, k, v, pass.NewF32({q.dim(0), heads, q.dim(1)}), pass.New(q.shape())};
  pass.backend.Attention(Args(*kept));
  return kept->out;
}

void HeadAttention::Backward(Pass& pass, const Kept& kept, const Tensor& dout, const Tensor& dq,
                             const Tensor& dk, const Tensor& dv) const {
  pass.backend.AttentionBackward(
      {.forward = Args(kept), .dout = dout, .dq = dq, .dk = dk, .dv = dv});
}

SelfAttention::SelfAttention(const Declare& declare, const Options& options)
    : options_(options), attention_{.heads = options.channels / options.head_dim} {
  const int c = options.channels;
  CheckHeads(declare, c, attention_.heads, options.head_dim);
  if (options.groups)
    norm_.emplace(declare / "group_norm", c, *options.groups, options.eps, Activation::kNone);
  qkv_ = Linear({declare / "to_q", declare / "to_k", declare / "to_v"}, c, {c, c, c});
  out_ = Linear({declare / "to_out" / 0}, c, {c});
}

void SelfAttention::Pack(const Masters& masters) const {
  qkv_.Pack(masters);
  out_.Pack(masters);
}

Tensor SelfAttention::Forward(Pass& pass, const Tensor& x, Kept* kept) const {
  const Shape tokens{x.dim(0), x.dim(1) * x.dim(2), x.dim(3)};
  const Tensor flat = x.Reshape(tokens);
  Tensor normed = flat;
  if (norm_) normed = norm_->Forward(pass, flat, {}, &kept->norm);
  if (!norm_ || !pass.recompute_norms) kept->normed = normed;
  const int c = options_.channels;
  const Tensor qkv = qkv_.Forward(pass, normed);
  const Tensor attended = attention_.Forward(pass, qkv.Columns(0, c), qkv.Columns(c, c),
                                             qkv.Columns(2 * c, c), &kept->attention);
  const auto scale = static_cast<float>(1 / options_.output_scale_factor);
  return out_.Forward(pass, attended, flat, scale).Reshape(x.shape());
}

Tensor SelfAttention::Backward(Pass& pass, const Kept& kept, const Tensor& dout) const {
  const int c = options_.channels;
  const Tensor d = pass.Scaled(dout.Reshape(kept.attention.out.shape()),
                               static_cast<float>(1 / options_.output_scale_factor));
  Tensor dqkv = pass.New({d.dim(0), d.dim(1), 3 * int64_t{c}});
  {
    const Tensor dattended = out_.Backward(pass, kept.attention.out, d);
    attention_.Backward(pass, kept.attention, dattended, dqkv.Columns(0, c), dqkv.Columns(c, c),
                        dqkv.Columns(2 * c, c));
  }
  if (!norm_) {
    // d may be the caller's dout, so it is not written to.
    const Tensor dx = qkv_.Backward(pass, kept.normed, dqkv);
    pass.backend.Add(dx, 1, d, 1, 0, dx);
    return dx.Reshape(dout.shape());
  }
  const Tensor normed = kept.normed ? kept.normed : norm_->Again(pass, kept.norm);
  const Tensor dnormed = qkv_.Backward(pass, normed, dqkv);
  return norm_->Backward(pass, kept.norm, dnormed, d).Reshape(dout.shape());
}

ResnetBlock::ResnetBlock(const Declare& declare, const Options& options) : options_(options) {
  const int in = options.in_channels, out = options.out_channels;
  norm1_ = GroupNorm(declare / "norm1", in, options.groups, options.eps, options.activation);
  conv1_ = Conv2d(declare / "conv1", in, out, 3, options.resample == Resample::kNearestUp);
  if (has_time())
    time_ = Linear({declare / "time_emb_proj"}, options.time_channels,
                   {options.scale_shift ? 2 * out : out});
  norm2_ =
      GroupNorm(declare / "norm2", out, options.groups_out ? options.groups_out : options.groups,
                options.eps, options.activation);
  conv2_ = Conv2d(declare / "conv2", out, out, 3);
  if (has_shortcut()) shortcut_ = Linear::Conv1x1(declare / "conv_shortcut", in, out);
}

void ResnetBlock::Pack(const Masters& masters) const {
  conv1_.Pack(masters);
  conv2_.Pack(masters);
  if (has_time()) time_.Pack(masters);
  if (has_shortcut()) shortcut_.Pack(masters);
}

void ResnetBlock::Drop(Pass& pass, const Tensor& x) const {
  if (pass.dropout == 0) return;
  pass.backend.Dropout({.x = x,
                        .probability = pass.dropout,
                        .seed = pass.seed,
                        .step = pass.step,
                        .rows = pass.rows,
                        .layer = options_.dropout_layer,
                        .out = x});
}

Tensor ResnetBlock::Normed1(Pass& pass, const Kept& kept) const {
  if (kept.normed1) return kept.normed1;
  const Tensor normed = norm1_.Again(pass, kept.norm1);
  return resamples_norm() ? pass.Resampled(*options_.resample, normed) : normed;
}

Tensor ResnetBlock::Normed2(Pass& pass, const Kept& kept) const {
  if (kept.normed2) return kept.normed2;
  Tensor normed = norm2_.Again(pass, kept.norm2);
  Drop(pass, normed);
  return normed;
}

Tensor ResnetBlock::Forward(Pass& pass, const Tensor& x, const Tensor& skip, const Tensor& time,
                            Kept* kept) const {
  Tensor input = x;
  if (skip) {
    input = pass.New({x.dim(0), x.dim(1), x.dim(2), x.dim(3) + skip.dim(3)});
    pass.backend.Concat(x, skip, input);
    kept->skip_channels = skip.dim(3);
  }
  Tensor normed = norm1_.Forward(pass, input, {}, &kept->norm1);
  kept->input = input;  // for the residual or the shortcut
  if (options_.resample) kept->input = pass.Resampled(*options_.resample, input);
  if (resamples_norm()) normed = pass.Resampled(*options_.resample, normed);
  if (!pass.recompute_norms) kept->normed1 = normed;
  const Tensor columns = has_time() ? time_.Forward(pass, time) : Tensor(), none;
  const Tensor hidden = conv1_.Forward(
      pass, {.x = normed, .geometry = conv1_.Same(), .add = options_.scale_shift ? none : columns});
  normed = norm2_.Forward(pass, hidden, options_.scale_shift ? columns : none, &kept->norm2);
  Drop(pass, normed);
  if (!pass.recompute_norms) kept->normed2 = normed;
  const Tensor residual = has_shortcut() ? shortcut_.Forward(pass, kept->input) : kept->input;
  Tensor out =
      conv2_.Forward(pass, {.x = normed,
                            .geometry = conv2_.Same(),
                            .residual = residual,
                            .scale = static_cast<float>(1 / options_.output_scale_factor)});
  // The gradients of the shortcut's weights need its input; a plain residual needs nothing.
  if (!has_shortcut()) kept->input = {};
  return out;
}

Tensor ResnetBlock::Backward(Pass& pass, const Kept& kept, const Tensor& time, const Tensor& dout,
                             Tensor* dskip, Tensor* dtime) const {
  const Tensor d = pass.Scaled(dout, static_cast<float>(1 / options_.output_scale_factor));
  Tensor dhidden = conv2_.Backward(pass, Normed2(pass, kept), conv2_.Same(), d);
  Drop(pass, dhidden);
  if (has_time()) {
    Tensor dcolumns;
    dhidden = norm2_.BackwardOfColumns(pass, kept.norm2, dhidden, &dcolumns);
    *dtime = time_.Backward(pass, time, dcolumns, /*wants_dx=*/true, *dtime);
  } else {
    dhidden = norm2_.Backward(pass, kept.norm2, dhidden, {});
  }

  Tensor dnormed = conv1_.Backward(pass, Normed1(pass, kept), conv1_.Same(), dhidden);
  dhidden = {};
  Tensor dresidual = has_shortcut() ? shortcut_.Backward(pass, kept.input, d) : d;
  if (resamples_norm()) dnormed = pass.ResampledBackward(*options_.resample, dnormed);
  if (options_.resample) dresidual = pass.ResampledBackward(*options_.resample, dresidual);
  if (kept.skip_channels == 0) return norm1_.Backward(pass, kept.norm1, dnormed, dresidual);
  return norm1_.BackwardOfConcat(pass, kept.norm1, dnormed, dresidual, kept.skip_channels, dskip);
}

OutputLayers::OutputLayers(const Declare& declare, const Options& options)
    : out_channels_(options.out_channels),
      norm_(declare / "conv_norm_out", options.in_channels, options.groups, options.eps,
            options.activation),
      conv_(declare / "conv_out", options.in_channels, options.out_channels, 3) {}

void OutputLayers::Pack(const Masters& masters) const { conv_.Pack(masters); }

Tensor OutputLayers::Forward(Pass& pass, const Tensor& x, Kept* kept) const {
  const Tensor normed = norm_.Forward(pass, x, {}, &kept->norm);
  if (!pass.recompute_norms) kept->normed = normed;
  const Tensor out = pass.NewF32({x.dim(0), x.dim(1), x.dim(2), out_channels_});
  return conv_.Forward(pass, {.x = normed, .geometry = conv_.Same(), .out = out});
}

Tensor OutputLayers::Backward(Pass& pass, Kept kept, const Tensor& dout) const {
  if (!kept.normed) kept.normed = norm_.Again(pass, kept.norm);
  const Tensor dnormed = conv_.Backward(pass, kept.normed, conv_.Same(), dout);
  kept.normed = {};
  return norm_.Backward(pass, kept.norm, dnormed, {});
}

}  // namespace denoised::training
