// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/backend/network_ops.h"
#include "engine/core/arena.h"
#include "engine/core/config_reader.h"
#include "engine/io/weights.h"

/// Modules are loaded from a Weights prefix that mirrors diffusers' names, hold packed weights, and
/// are called with a Context. They are immutable after loading; calls only enqueue.

namespace denoised::nn {

/// Where a forward pass runs: the device and the memory of its activations.
struct Context {
  NetworkOps& ops;
  Arena& arena;
  /// For parity tests: called with the output of each of diffusers' submodules and its path
  /// ("down_blocks.0"). May be empty.
  std::function<void(const std::string& module, const Tensor& output)> trace;

  Tensor New(const Shape& shape) { return arena.New(shape, ops.activation_dtype()); }
  Tensor NewF32(const Shape& shape) { return arena.New(shape, DType::kF32); }
  void Trace(const std::string& module, const Tensor& output) {
    if (trace) trace(module, output);
  }
};

/// The precision of a layer's products: always the activation dtype, or e4m3 if the model is in fp8
/// and its weights have a scale for the layer (Weights::InputScale()).
enum class Products { kWide, kOfModel };

/// Whether a layer adds a bias, which its weights then have.
enum class Bias { kYes, kNo };

/// torch.nn.Conv2d with a square kernel and, by default, "same" padding.
class Conv2d {
 public:
  /// `upsample2x`: its input is doubled first, by nearest neighbour, at every call.
  static absl::StatusOr<Conv2d> Load(NetworkOps& ops, const Weights& weights, int in_channels,
                                     int out_channels, int kernel, bool upsample2x = false,
                                     Products products = Products::kWide, Bias bias = Bias::kYes);
  /// Packs computed weights, F32 in host memory: [out, in, k, k] and [out].
  static absl::StatusOr<Conv2d> Pack(NetworkOps& ops, const Tensor& weight_oihw,
                                     const Tensor& bias);
  /// Together with a 1×1 convolution whose input is epilogue.shortcut.x and x2 at every call. It
  /// has Products::kWide, the other Products::kOfModel.
  static absl::StatusOr<Conv2d> LoadWithShortcut(NetworkOps& ops, const Weights& weights,
                                                 int in_channels, int out_channels, int kernel,
                                                 const Weights& shortcut_weights,
                                                 int shortcut_channels);

  bool MultipliesE4m3() const { return weight_->e4m3.input_scale != 0; }
  /// Convolves args.x as args.prologue and args.epilogue say. Sets weights, padding (kernel / 2 on
  /// all sides), the tensors that a norm of the input may need, and, if undefined, a new output in
  /// activation dtype.
  Tensor operator()(Context& context, Conv2dArgs args) const;
  /// Loads a convolution whose doubling may drop the last line (see Upsample()).
  static absl::StatusOr<Conv2d> LoadUpsample(NetworkOps& ops, const Weights& weights, int channels);
  /// Doubles `x` and drops what is beyond [height, width], then convolves, as diffusers' Upsample2D
  /// to a size. Height and width are twice those of x, or one less.
  Tensor Upsample(Context& context, const Tensor& x, int64_t height, int64_t width) const;
  /// Stride 2 as diffusers' Downsample2D: `padding` 1 all around, or 0 with one row and column of
  /// zeros at the bottom and right.
  Tensor Downsample(Context& context, const Tensor& x, int padding) const;

 private:
  /// The same with args' own padding.
  Tensor Padded(Context& context, Conv2dArgs args) const;
  std::shared_ptr<const PackedConv2d> weight_, shortcut_;
  std::shared_ptr<const PackedConv2d> plain_;  // of LoadUpsample(): the same without doubling
};

/// A new tensor of NetworkOps::Resample2x().
Tensor Resampled(Context& context, Resample kind, const Tensor& x);

/// torch.nn.Linear over the last dimension.
class Linear {
 public:
  static absl::StatusOr<Linear> Load(NetworkOps& ops, const Weights& weights, int in_features,
                                     int out_features, Products products = Products::kWide,
                                     Bias bias = Bias::kYes);
  /// A 1×1 convolution as the linear layer over pixels that it is.
  static absl::StatusOr<Linear> LoadConv1x1(NetworkOps& ops, const Weights& weights,
                                            int in_features, int out_features,
                                            Products products = Products::kWide);
  /// Several layers with the same input as one, outputs side by side. Their scale is the first's.
  static absl::StatusOr<Linear> LoadFused(NetworkOps& ops, const std::vector<Weights>& layers,
                                          int in_features, const std::vector<int>& out_features,
                                          Products products = Products::kWide,
                                          Bias bias = Bias::kYes);

  /// diffusers' GEGLU: weights of values and gates; the result is value · gelu(gate).
  static absl::StatusOr<Linear> LoadGated(NetworkOps& ops, const Weights& weights, int in_features,
                                          int out_features, Products products = Products::kWide);

  /// Multiplies args.x as args.prologue and args.epilogue say. Sets weights, the tensors that a
  /// norm of the input or a gate may need, and, if undefined, a new output in activation dtype.
  /// `reader`, with a gate: the one layer that reads the result. It is returned in e4m3 if that
  /// layer wants it so.
  Tensor operator()(Context& context, LinearArgs args, const Linear* reader = nullptr) const;
  /// NetworkOps::Attention() into a new tensor that this layer alone reads, likewise.
  Tensor Attend(Context& context, AttentionArgs args) const;

 private:
  std::shared_ptr<const PackedLinear> weight_;
};

/// Linear layers of a model that read the same input, as one. Layers register while they load and
/// get their columns of its output.
class LinearColumns {
 public:
  explicit LinearColumns(Bias bias = Bias::kYes) : bias_(bias) {}
  /// Returns the first of this layer's `out_features` columns.
  int Add(const Weights& layer, int in_features, int out_features);
  /// Call once, after all layers were loaded.
  absl::Status Pack(NetworkOps& ops);
  int columns() const { return columns_; }
  /// Of the packed layer, once for all that registered.
  Tensor operator()(Context& context, LinearArgs args) const;

 private:
  std::vector<Weights> layers_;
  std::vector<int> out_features_;
  Bias bias_;
  int in_features_ = 0, columns_ = 0;
  Linear linear_;
};

/// torch.nn.GroupNorm, optionally over the concatenation of two tensors.
class GroupNorm {
 public:
  static absl::StatusOr<GroupNorm> Load(NetworkOps& ops, const Weights& weights, int channels,
                                        int groups, double eps);

  /// x, or concat(x, x2), to a new tensor.
  Tensor operator()(Context& context, const Tensor& x, const Tensor& x2 = Tensor(),
                    Activation activation = Activation::kNone) const;
  /// For the prologue or the epilogue of a layer.
  Norm Then(Activation activation, const Tensor& scale_shift = Tensor()) const;

 private:
  Norm norm_;
};

/// torch.nn.LayerNorm over the last dimension.
class LayerNorm {
 public:
  static absl::StatusOr<LayerNorm> Load(NetworkOps& ops, const Weights& weights, int channels,
                                        double eps);
  /// [.., channels] → the same, a new tensor.
  Tensor operator()(Context& context, const Tensor& x) const;
  /// For the prologue of a linear layer.
  Norm Before() const;

 private:
  Tensor gamma_, beta_;
  float eps_ = 0;
};

/// diffusers' get_activation: "silu" (or "swish"), "mish", "gelu", "relu".
std::optional<Activation> ActivationFromName(const std::string& name);
/// Reads the name of an activation. `quick_gelu`: it may be that one, which transformers alone has.
/// A field that is absent or null leaves `value` as it is.
void ReadActivation(ConfigReader& reader, const char* field, Activation* value,
                    bool quick_gelu = false);

}  // namespace denoised::nn
