// SPDX-License-Identifier: Apache-2.0
#include "engine/nn/layers.h"

namespace denoised::nn {

absl::StatusOr<Conv2d> Conv2d::Load(Backend& backend, const Weights& weights, int in_channels,
                                    int out_channels, int kernel, bool upsample2x) {
  DENOISED_ASSIGN_OR_RETURN(Tensor weight,
                            weights.Get("weight", {out_channels, in_channels, kernel, kernel}));
  DENOISED_ASSIGN_OR_RETURN(Tensor bias, weights.GetOptional("bias", {out_channels}));
  Conv2d conv;
  DENOISED_ASSIGN_OR_RETURN(conv.weight_, backend.PackConv2d(weight, bias, upsample2x));
  return conv;
}

absl::StatusOr<Conv2d> Conv2d::Pack(Backend& backend, const Tensor& weight_oihw,
                                    const Tensor& bias) {
  Conv2d conv;
  DENOISED_ASSIGN_OR_RETURN(conv.weight_,
                            backend.PackConv2d(weight_oihw, bias, /*upsample2x=*/false));
  return conv;
}

absl::StatusOr<Conv2d> Conv2d::LoadWithShortcut(Backend& backend, const Weights& weights,
                                                int in_channels, int out_channels, int kernel,
                                                const Weights& shortcut_weights,
                                                int shortcut_channels) {
  DENOISED_ASSIGN_OR_RETURN(Tensor weight,
                            weights.Get("weight", {out_channels, in_channels, kernel, kernel}));
  DENOISED_ASSIGN_OR_RETURN(
      Tensor shortcut, shortcut_weights.Get("weight", {out_channels, shortcut_channels, 1, 1}));
  // Both biases are added to the same sums, so one bias is enough.
  const Tensor sum = Tensor::HostF32({out_channels}, std::vector<float>(out_channels));
  for (const Weights& layer : {weights, shortcut_weights}) {
    DENOISED_ASSIGN_OR_RETURN(const Tensor bias, layer.GetOptional("bias", {out_channels}));
    if (!bias) continue;
    const std::vector<float> values = bias.ToFloats();
    for (int i = 0; i < out_channels; ++i) sum.as<float>()[i] += values[i];
  }
  Conv2d conv;
  DENOISED_ASSIGN_OR_RETURN(conv.weight_, backend.PackConv2d(weight, sum, /*upsample2x=*/false));
  DENOISED_ASSIGN_OR_RETURN(conv.shortcut_,
                            backend.PackConv2d(shortcut, Tensor(), /*upsample2x=*/false));
  return conv;
}

Tensor Conv2d::operator()(Context& context, Conv2dArgs args) const {
  args = Complete(context, std::move(args));
  context.backend.Conv2d(args);
  return args.out;
}

Tensor Conv2d::operator()(Context& context, const GroupNormArgs& norm, Conv2dArgs args) const {
  args.x = norm.out;
  args = Complete(context, std::move(args));
  context.backend.NormConv2d(norm, args);
  return args.out;
}

Tensor Conv2d::Downsample(Context& context, const Tensor& x, int padding) const {
  Conv2dArgs args{.x = x, .stride = 2};
  args.pad_top = args.pad_left = padding;
  args.pad_bottom = args.pad_right = padding == 0 ? 1 : padding;
  args = Padded(context, std::move(args));
  context.backend.Conv2d(args);
  return args.out;
}

Conv2dArgs Conv2d::Complete(Context& context, Conv2dArgs args) const {
  args.pad_top = args.pad_left = args.pad_bottom = args.pad_right = weight_->kernel / 2;
  return Padded(context, std::move(args));
}

Conv2dArgs Conv2d::Padded(Context& context, Conv2dArgs args) const {
  args.weight = weight_.get();
  args.shortcut.weight = shortcut_.get();
  args.upsample2x = weight_->upsample2x;
  if (!args.out) {
    const int up = args.upsample2x ? 2 : 1, kernel = weight_->kernel;
    const int64_t height =
        (args.x.dim(1) * up + args.pad_top + args.pad_bottom - kernel) / args.stride + 1;
    const int64_t width =
        (args.x.dim(2) * up + args.pad_left + args.pad_right - kernel) / args.stride + 1;
    args.out = context.New({args.x.dim(0), height, width, weight_->out_channels});
  }
  return args;
}

absl::StatusOr<Linear> Linear::Load(Backend& backend, const Weights& weights, int in_features,
                                    int out_features) {
  return LoadFused(backend, {weights}, in_features, {out_features});
}

absl::StatusOr<Linear> Linear::LoadConv1x1(Backend& backend, const Weights& weights,
                                           int in_features, int out_features) {
  DENOISED_ASSIGN_OR_RETURN(const Tensor weight,
                            weights.Get("weight", {out_features, in_features, 1, 1}));
  DENOISED_ASSIGN_OR_RETURN(const Tensor bias, weights.GetOptional("bias", {out_features}));
  Linear linear;
  DENOISED_ASSIGN_OR_RETURN(
      linear.weight_, backend.PackLinear({weight.Reshape({out_features, in_features})}, {bias}));
  return linear;
}

absl::StatusOr<Linear> Linear::LoadFused(Backend& backend, const std::vector<Weights>& layers,
                                         int in_features, const std::vector<int>& out_features) {
  std::vector<Tensor> weights, biases;
  for (size_t i = 0; i < layers.size(); ++i) {
    DENOISED_ASSIGN_OR_RETURN(Tensor weight,
                              layers[i].Get("weight", {out_features[i], in_features}));
    DENOISED_ASSIGN_OR_RETURN(Tensor bias, layers[i].GetOptional("bias", {out_features[i]}));
    weights.push_back(std::move(weight));
    if (bias) biases.push_back(std::move(bias));
  }
  if (!biases.empty() && biases.size() != weights.size())
    return InvalidArgument(
        "{}: '{}' has layers with and without bias; fused layers need all or none",
        layers[0].file(), layers[0].prefix());
  Linear linear;
  DENOISED_ASSIGN_OR_RETURN(linear.weight_, backend.PackLinear(weights, biases));
  return linear;
}

Tensor Linear::operator()(Context& context, LinearArgs args) const {
  args.weight = weight_.get();
  if (!args.out) {
    int64_t dims[Shape::kMaxRank];
    const int rank = args.x.shape().rank();
    for (int i = 0; i < rank; ++i) dims[i] = args.x.dim(i);
    dims[rank - 1] = weight_->out_features;
    args.out = context.New(Shape(std::span<const int64_t>(dims, rank)));
  }
  context.backend.Linear(args);
  return args.out;
}

absl::StatusOr<GroupNorm> GroupNorm::Load(Backend& backend, const Weights& weights, int channels,
                                          int groups, double eps) {
  if (groups < 1 || channels % groups != 0)
    return InvalidArgument(
        "{}: '{}' has {} channels, which {} groups do not divide; correct norm_num_groups (or "
        "attn_norm_num_groups) or block_out_channels in the config",
        weights.file(), weights.prefix(), channels, groups);
  if (channels > kMaxNormChannels)
    return InvalidArgument("{}: '{}' normalises {} channels; at most {} are supported",
                           weights.file(), weights.prefix(), channels, kMaxNormChannels);
  DENOISED_ASSIGN_OR_RETURN(Tensor gamma, weights.Get("weight", {channels}));
  DENOISED_ASSIGN_OR_RETURN(Tensor beta, weights.Get("bias", {channels}));
  GroupNorm norm;
  DENOISED_ASSIGN_OR_RETURN(norm.gamma_, backend.PackVector(gamma));
  DENOISED_ASSIGN_OR_RETURN(norm.beta_, backend.PackVector(beta));
  norm.groups_ = groups;
  norm.eps_ = static_cast<float>(eps);
  return norm;
}

Tensor GroupNorm::operator()(Context& context, GroupNormArgs args) const {
  args = Complete(context, std::move(args));
  context.backend.GroupNorm(args);
  return args.out;
}

GroupNormArgs GroupNorm::Complete(Context& context, GroupNormArgs args) const {
  args.gamma = gamma_;
  args.beta = beta_;
  args.groups = groups_;
  args.eps = eps_;
  if (!args.out) {
    int64_t dims[Shape::kMaxRank];
    const int rank = args.x.shape().rank();
    for (int i = 0; i < rank; ++i) dims[i] = args.x.dim(i);
    if (args.x2) dims[rank - 1] += args.x2.dim(-1);
    args.out = context.New(Shape(std::span<const int64_t>(dims, rank)));
  }
  return args;
}

absl::StatusOr<LayerNorm> LayerNorm::Load(Backend& backend, const Weights& weights, int channels,
                                          double eps) {
  DENOISED_ASSIGN_OR_RETURN(Tensor gamma, weights.Get("weight", {channels}));
  DENOISED_ASSIGN_OR_RETURN(Tensor beta, weights.Get("bias", {channels}));
  LayerNorm norm;
  DENOISED_ASSIGN_OR_RETURN(norm.gamma_, backend.PackVector(gamma));
  DENOISED_ASSIGN_OR_RETURN(norm.beta_, backend.PackVector(beta));
  norm.eps_ = static_cast<float>(eps);
  return norm;
}

Tensor LayerNorm::operator()(Context& context, const Tensor& x) const {
  Tensor out = context.New(x.shape());
  context.backend.LayerNorm({.x = x, .gamma = gamma_, .beta = beta_, .eps = eps_, .out = out});
  return out;
}

absl::StatusOr<Activation> ActivationFromName(const std::string& name) {
  if (name == "silu" || name == "swish") return Activation::kSilu;
  if (name == "mish") return Activation::kMish;
  if (name == "gelu") return Activation::kGelu;
  if (name == "relu") return Activation::kRelu;
  if (name == "quick_gelu") return Activation::kQuickGelu;
  return InvalidArgument(
      "activation '{}' is unknown; use silu, swish, mish, gelu, quick_gelu or relu", name);
}

}  // namespace denoised::nn
