// SPDX-License-Identifier: Apache-2.0
#include "engine/nn/layers.h"

#include <utility>

namespace denoised::nn {
namespace {

Shape WithFeatures(const Shape& shape, int64_t features) {
  int64_t dims[Shape::kMaxRank];
  for (int i = 0; i < shape.rank(); ++i) dims[i] = shape[i];
  dims[shape.rank() - 1] = features;
  return Shape(std::span<const int64_t>(dims, shape.rank()));
}
/// A new tensor in activation dtype with the rows of `shape` and `features` features.
Tensor NewRows(Context& context, const Shape& shape, int64_t features) {
  return context.New(WithFeatures(shape, features));
}

Tensor NewRounded(Context& context, const Shape& shape, int rounded_bytes) {
  return context.arena.New(WithFeatures(shape, rounded_bytes), DType::kU8);
}
/// The same in the memory of `tensor`.
Tensor RoundedIn(const Tensor& tensor, const Shape& shape, int rounded_bytes) {
  Tensor rounded(tensor.data(), WithFeatures(shape, rounded_bytes), DType::kU8, tensor.device(),
                 std::make_shared<const Tensor>(tensor));
  DENOISED_CHECK(rounded.bytes() <= tensor.bytes(), "{} bytes in {}", rounded.bytes(),
                 tensor.bytes());
  return rounded;
}

int64_t Features(const Tensor& x, const Tensor& x2) { return x.dim(-1) + (x2 ? x2.dim(-1) : 0); }

/// Allocated even if the norm is applied elsewhere, so that memory does not depend on fusion.
void MakeRoom(Context& context, const Tensor& x, int rounded_bytes, Prologue* prologue) {
  if (prologue->norm.gamma)
    prologue->normed = NewRows(context, x.shape(), Features(x, prologue->x2));
  if (rounded_bytes > 0 && !IsRounded(x))
    prologue->rounded = NewRounded(context, x.shape(), rounded_bytes);
}

absl::StatusOr<E4m3Layer> LayerOf(const Weights& weights, Products products) {
  if (products == Products::kWide || !weights.MayHaveInputScales()) return E4m3Layer();
  DENOISED_ASSIGN_OR_RETURN(const float scale, weights.InputScale());
  return E4m3Layer{.name = weights.prefix(), .input_scale = scale};
}

/// Undefined if the layer has none.
absl::StatusOr<Tensor> BiasOf(const Weights& weights, int features, Bias bias) {
  if (bias == Bias::kNo) return Tensor();
  return weights.Get("bias", {features});
}

}  // namespace

absl::StatusOr<Conv2d> Conv2d::Load(NetworkOps& ops, const Weights& weights, int in_channels,
                                    int out_channels, int kernel, bool upsample2x,
                                    Products products, Bias bias) {
  DENOISED_ASSIGN_OR_RETURN(Tensor weight,
                            weights.Get("weight", {out_channels, in_channels, kernel, kernel}));
  DENOISED_ASSIGN_OR_RETURN(Tensor added, BiasOf(weights, out_channels, bias));
  DENOISED_ASSIGN_OR_RETURN(const E4m3Layer e4m3, LayerOf(weights, products));
  Conv2d conv;
  DENOISED_ASSIGN_OR_RETURN(conv.weight_, ops.PackConv2d(weight, added, upsample2x, e4m3));
  return conv;
}

absl::StatusOr<Conv2d> Conv2d::Pack(NetworkOps& ops, const Tensor& weight_oihw,
                                    const Tensor& bias) {
  Conv2d conv;
  DENOISED_ASSIGN_OR_RETURN(conv.weight_, ops.PackConv2d(weight_oihw, bias, /*upsample2x=*/false));
  return conv;
}

absl::StatusOr<Conv2d> Conv2d::LoadWithShortcut(NetworkOps& ops, const Weights& weights,
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
    DENOISED_ASSIGN_OR_RETURN(const Tensor bias, layer.Get("bias", {out_channels}));
    const std::vector<float> values = bias.ToFloats();
    for (int i = 0; i < out_channels; ++i) sum.as<float>()[i] += values[i];
  }
  DENOISED_ASSIGN_OR_RETURN(const E4m3Layer e4m3, LayerOf(weights, Products::kOfModel));
  Conv2d conv;
  DENOISED_ASSIGN_OR_RETURN(conv.weight_, ops.PackConv2d(weight, sum, /*upsample2x=*/false, e4m3));
  DENOISED_ASSIGN_OR_RETURN(conv.shortcut_,
                            ops.PackConv2d(shortcut, Tensor(), /*upsample2x=*/false));
  return conv;
}

Tensor Conv2d::operator()(Context& context, Conv2dArgs args) const {
  args.pad_top = args.pad_left = args.pad_bottom = args.pad_right = weight_->kernel / 2;
  return Padded(context, std::move(args));
}

absl::StatusOr<Conv2d> Conv2d::LoadUpsample(NetworkOps& ops, const Weights& weights, int channels) {
  DENOISED_ASSIGN_OR_RETURN(Conv2d conv, Load(ops, weights, channels, channels, 3,
                                              /*upsample2x=*/true, Products::kOfModel));
  DENOISED_ASSIGN_OR_RETURN(const Conv2d plain, Load(ops, weights, channels, channels, 3,
                                                     /*upsample2x=*/false, Products::kOfModel));
  conv.plain_ = plain.weight_;
  return conv;
}

Tensor Conv2d::Upsample(Context& context, const Tensor& x, int64_t height, int64_t width) const {
  if (height == 2 * x.dim(1) && width == 2 * x.dim(2)) return (*this)(context, {.x = x});
  const Tensor doubled = context.New({x.dim(0), height, width, x.dim(3)});
  context.ops.Resample2x(Resample::kNearestUp, x, doubled);
  Conv2d plain;
  plain.weight_ = plain_;
  return plain(context, {.x = doubled});
}

Tensor Conv2d::Downsample(Context& context, const Tensor& x, int padding) const {
  Conv2dArgs args{.x = x, .stride = 2};
  args.pad_top = args.pad_left = padding;
  args.pad_bottom = args.pad_right = padding == 0 ? 1 : padding;
  return Padded(context, std::move(args));
}

Tensor Conv2d::Padded(Context& context, Conv2dArgs args) const {
  args.weight = weight_.get();
  args.prologue.upsample2x = weight_->upsample2x;
  MakeRoom(context, args.x, weight_->rounded_bytes, &args.prologue);
  if (shortcut_ != nullptr) args.epilogue.shortcut.weight = shortcut_.get();
  if (!args.out) {
    const int up = weight_->upsample2x ? 2 : 1, kernel = weight_->kernel;
    const int64_t height =
        (args.x.dim(1) * up + args.pad_top + args.pad_bottom - kernel) / args.stride + 1;
    const int64_t width =
        (args.x.dim(2) * up + args.pad_left + args.pad_right - kernel) / args.stride + 1;
    args.out = context.New({args.x.dim(0), height, width, weight_->out_channels});
  }
  context.ops.Conv2d(args);
  return args.out;
}

Tensor Resampled(Context& context, Resample kind, const Tensor& x) {
  const bool up = Doubles(kind);
  Tensor out = context.New(
      {x.dim(0), up ? x.dim(1) * 2 : x.dim(1) / 2, up ? x.dim(2) * 2 : x.dim(2) / 2, x.dim(3)});
  context.ops.Resample2x(kind, x, out);
  return out;
}

absl::StatusOr<Linear> Linear::Load(NetworkOps& ops, const Weights& weights, int in_features,
                                    int out_features, Products products, Bias bias) {
  return LoadFused(ops, {weights}, in_features, {out_features}, products, bias);
}

absl::StatusOr<Linear> Linear::LoadConv1x1(NetworkOps& ops, const Weights& weights, int in_features,
                                           int out_features, Products products) {
  DENOISED_ASSIGN_OR_RETURN(const Tensor weight,
                            weights.Get("weight", {out_features, in_features, 1, 1}));
  DENOISED_ASSIGN_OR_RETURN(const Tensor bias, weights.Get("bias", {out_features}));
  DENOISED_ASSIGN_OR_RETURN(const E4m3Layer e4m3, LayerOf(weights, products));
  Linear linear;
  DENOISED_ASSIGN_OR_RETURN(
      linear.weight_, ops.PackLinear({weight.Reshape({out_features, in_features})}, {bias}, e4m3));
  return linear;
}

absl::StatusOr<Linear> Linear::LoadFused(NetworkOps& ops, const std::vector<Weights>& layers,
                                         int in_features, const std::vector<int>& out_features,
                                         Products products, Bias bias) {
  std::vector<Tensor> weights, biases;
  for (size_t i = 0; i < layers.size(); ++i) {
    DENOISED_ASSIGN_OR_RETURN(Tensor weight,
                              layers[i].Get("weight", {out_features[i], in_features}));
    DENOISED_ASSIGN_OR_RETURN(Tensor added, BiasOf(layers[i], out_features[i], bias));
    weights.push_back(std::move(weight));
    if (added) biases.push_back(std::move(added));
  }
  DENOISED_ASSIGN_OR_RETURN(const E4m3Layer e4m3, LayerOf(layers[0], products));
  Linear linear;
  DENOISED_ASSIGN_OR_RETURN(linear.weight_, ops.PackLinear(weights, biases, e4m3));
  return linear;
}

absl::StatusOr<Linear> Linear::LoadGated(NetworkOps& ops, const Weights& weights, int in_features,
                                         int out_features, Products products) {
  DENOISED_ASSIGN_OR_RETURN(const Tensor weight,
                            weights.Get("weight", {2 * out_features, in_features}));
  DENOISED_ASSIGN_OR_RETURN(const Tensor bias, weights.Get("bias", {2 * out_features}));
  DENOISED_ASSIGN_OR_RETURN(const E4m3Layer e4m3, LayerOf(weights, products));
  Linear linear;
  DENOISED_ASSIGN_OR_RETURN(linear.weight_, ops.PackLinear({weight}, {bias}, e4m3, /*gated=*/true));
  return linear;
}

Tensor Linear::operator()(Context& context, LinearArgs args, const Linear* reader) const {
  const int outputs = weight_->out_features;
  args.weight = weight_.get();
  MakeRoom(context, args.x, weight_->rounded_bytes, &args.prologue);
  if (!args.out)
    args.out = NewRows(context, args.x.shape(), weight_->gated ? outputs / 2 : outputs);
  if (weight_->gated) args.epilogue.ungated = NewRows(context, args.x.shape(), outputs);
  const bool rounds = reader != nullptr && reader->weight_->rounded_bytes > 0;
  // What reads `ungated` is done before the result is rounded.
  if (rounds)
    args.epilogue.reader = {.rounded = RoundedIn(args.epilogue.ungated, args.out.shape(),
                                                 reader->weight_->rounded_bytes),
                            .scale = reader->weight_->e4m3.input_scale};
  context.ops.Linear(args);
  return rounds ? args.epilogue.reader.rounded : args.out;
}

Tensor Linear::Attend(Context& context, AttentionArgs args) const {
  args.out = context.New(args.q.shape());
  const bool rounds = weight_->rounded_bytes > 0;
  if (rounds)
    args.reader = {.rounded = NewRounded(context, args.out.shape(), weight_->rounded_bytes),
                   .scale = weight_->e4m3.input_scale};
  context.ops.Attention(args);
  return rounds ? args.reader.rounded : args.out;
}

int LinearColumns::Add(const Weights& layer, int in_features, int out_features) {
  DENOISED_CHECK(in_features_ == 0 || in_features_ == in_features);
  in_features_ = in_features;
  layers_.push_back(layer);
  out_features_.push_back(out_features);
  return std::exchange(columns_, columns_ + out_features);
}

absl::Status LinearColumns::Pack(NetworkOps& ops) {
  DENOISED_ASSIGN_OR_RETURN(linear_, Linear::LoadFused(ops, layers_, in_features_, out_features_,
                                                       Products::kWide, bias_));
  layers_.clear();
  return absl::OkStatus();
}

Tensor LinearColumns::operator()(Context& context, LinearArgs args) const {
  return linear_(context, std::move(args));
}

absl::StatusOr<GroupNorm> GroupNorm::Load(NetworkOps& ops, const Weights& weights, int channels,
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
  DENOISED_ASSIGN_OR_RETURN(norm.norm_.gamma, ops.PackVector(gamma));
  DENOISED_ASSIGN_OR_RETURN(norm.norm_.beta, ops.PackVector(beta));
  norm.norm_.groups = groups;
  norm.norm_.eps = static_cast<float>(eps);
  return norm;
}

Tensor GroupNorm::operator()(Context& context, const Tensor& x, const Tensor& x2,
                             Activation activation) const {
  Tensor out = NewRows(context, x.shape(), Features(x, x2));
  context.ops.GroupNorm({.x = x, .x2 = x2, .norm = Then(activation), .out = out});
  return out;
}

Norm GroupNorm::Then(Activation activation, const Tensor& scale_shift) const {
  Norm norm = norm_;
  norm.activation = activation;
  norm.scale_shift = scale_shift;
  return norm;
}

absl::StatusOr<LayerNorm> LayerNorm::Load(NetworkOps& ops, const Weights& weights, int channels,
                                          double eps) {
  DENOISED_ASSIGN_OR_RETURN(Tensor gamma, weights.Get("weight", {channels}));
  DENOISED_ASSIGN_OR_RETURN(Tensor beta, weights.Get("bias", {channels}));
  LayerNorm norm;
  DENOISED_ASSIGN_OR_RETURN(norm.gamma_, ops.PackVector(gamma));
  DENOISED_ASSIGN_OR_RETURN(norm.beta_, ops.PackVector(beta));
  norm.eps_ = static_cast<float>(eps);
  return norm;
}

Tensor LayerNorm::operator()(Context& context, const Tensor& x) const {
  Tensor out = context.New(x.shape());
  context.ops.LayerNorm({.x = x, .gamma = gamma_, .beta = beta_, .eps = eps_, .out = out});
  return out;
}

Norm LayerNorm::Before() const {
  return {.gamma = gamma_, .beta = beta_, .groups = 0, .eps = eps_};
}

std::optional<Activation> ActivationFromName(const std::string& name) {
  if (name == "silu" || name == "swish") return Activation::kSilu;
  if (name == "mish") return Activation::kMish;
  if (name == "gelu") return Activation::kGelu;
  if (name == "relu") return Activation::kRelu;
  return std::nullopt;
}

void ReadActivation(ConfigReader& reader, const char* field, Activation* value, bool quick_gelu) {
  std::optional<std::string> name;
  reader.Read(field, &name);
  if (!name) return;
  if (quick_gelu && *name == "quick_gelu") {
    *value = Activation::kQuickGelu;
  } else if (const std::optional<Activation> found = ActivationFromName(*name)) {
    *value = *found;
  } else {
    reader.Complain(field, fmt::format("not supported; use {}silu, swish, mish, gelu or relu",
                                       quick_gelu ? "quick_gelu, " : ""));
  }
}

}  // namespace denoised::nn
