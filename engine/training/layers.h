// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/arena.h"
#include "engine/training/backend.h"
#include "engine/training/parameters.h"

/// The modules of a network, each with an explicit backward pass. A module declares its parameters
/// when it is made, and packs their values after every update. Forward() stores what Backward()
/// needs in the module's struct Kept. Backward() takes that, writes the gradients of the module's
/// parameters into Pass::gradient and returns the gradient of its input. Modules are immutable
/// during passes, so several passes may use one at a time.

namespace denoised::training {

/// One pass: forward and backward of a few rows.
struct Pass {
  Backend& backend;
  Arena& arena;
  const Parameters& parameters;
  Tensor trained, fixed;  // flat: the weights
  Tensor gradient;        // flat: of this pass
  Tensor rows;            // I32 [N, kSampleNumbers]: SampleRow; for dropout
  Tensor step;            // I32 [1]
  uint64_t seed = 0;
  float dropout = 0;
  /// The backward pass recomputes the outputs of norms instead of keeping them.
  bool recompute_norms = false;
  /// There is no backward pass, so a network may drop what its modules kept.
  bool forward_only = false;

  template <typename Kept>
  void DropIfForwardOnly(Kept* kept) const {
    if (forward_only) *kept = {};
  }
  Tensor New(const Shape& shape) { return arena.New(shape, backend.activation_dtype()); }
  Tensor NewF32(const Shape& shape) { return arena.New(shape, DType::kF32); }
  Tensor Weight(int index) const {
    return parameters.Part(parameters[index].trained ? trained : fixed, index);
  }
  Tensor Gradient(int index) const {
    DENOISED_CHECK(parameters[index].trained, "{} is fixed", parameters[index].name);
    return parameters.Part(gradient, index);
  }
  /// `a` converted to F32, or to the activation dtype; `a` itself if it has that dtype.
  Tensor ToF32(const Tensor& a) { return Converted(a, DType::kF32); }
  Tensor ToActivation(const Tensor& a) { return Converted(a, backend.activation_dtype()); }
  /// out = a·scale; `a` itself if the scale is 1.
  Tensor Scaled(const Tensor& a, float scale);
  /// A new image of twice or half the edges, and the gradient of what was resampled.
  Tensor Resampled(Resample kind, const Tensor& x);
  Tensor ResampledBackward(Resample kind, const Tensor& dout);

 private:
  Tensor Converted(const Tensor& a, DType dtype);
};

/// Declares a module's parameters under a prefix of their names.
class Declare {
 public:
  Declare(Backend& backend, Parameters& parameters) : Declare(backend, parameters, "") {}
  Declare operator/(std::string_view name) const;
  Declare operator/(int index) const { return *this / std::to_string(index); }
  /// The same for a module that is not trained and has only a forward pass.
  Declare Frozen() const {
    Declare frozen = *this;
    frozen.trained_ = false;
    return frozen;
  }
  int Add(const std::string& name, const Shape& shape, Initial initial, bool trained = true,
          bool served = true) const {
    return parameters_->Add(prefix_ + name, shape, initial, trained && trained_, served);
  }
  /// Parameters::Complain() of this module: `what` follows its name.
  void Complain(std::string_view what) const;
  const absl::Status& status() const { return parameters_->status(); }
  Backend& backend() const { return *backend_; }

 private:
  Declare(Backend& backend, Parameters& parameters, std::string prefix)
      : backend_(&backend), parameters_(&parameters), prefix_(std::move(prefix)) {}
  Backend* backend_;
  Parameters* parameters_;
  std::string prefix_;  // ends with a dot, or is empty
  bool trained_ = true;
};

/// The values to pack from.
struct Masters {
  Backend& backend;
  const Parameters& parameters;
  Tensor trained, fixed;
  Tensor operator()(int index) const {
    return parameters.Part(parameters[index].trained ? trained : fixed, index);
  }
};

/// Complains unless `heads` of `head_dim` are `channels` and can be served.
void CheckHeads(const Declare& declare, int channels, int heads, int head_dim);

class Conv2d {
 public:
  Conv2d() = default;
  /// `geometry`: with which it is used; Same() if not given.
  Conv2d(const Declare& declare, int in_channels, int out_channels, int kernel,
         bool upsample2x = false, const std::optional<Conv2dGeometry>& geometry = {});
  void Pack(const Masters& masters) const;
  /// "Same" padding and stride 1.
  Conv2dGeometry Same() const { return {1, pad_, pad_, pad_, pad_}; }
  /// Sets weight, and out if undefined.
  Tensor Forward(Pass& pass, Conv2dArgs args) const;
  /// Returns dx, of the shape of x; undefined if not `wants_dx`.
  Tensor Backward(Pass& pass, const Tensor& x, const Conv2dGeometry& geometry, const Tensor& dout,
                  bool wants_dx = true) const;

 private:
  int weight_ = 0, bias_ = 0, pad_ = 0;
  std::shared_ptr<PackedConv2d> packed_;
};

struct LinearOptions {
  bool bias = true;
  /// If set, initial weights are normally distributed and biases 0, as in transformers. Otherwise
  /// they are PyTorch's.
  std::optional<double> deviation;
};

/// One linear layer, or several with the same input; or a 1×1 convolution.
class Linear {
 public:
  Linear() = default;
  Linear(const std::vector<Declare>& parts, int in_features, const std::vector<int>& out_features,
         const LinearOptions& options = {});
  static Linear Conv1x1(const Declare& declare, int in_channels, int out_channels);
  /// Without bias, and not part of the served network.
  static Linear OfTrainingAlone(const Declare& declare, int in_features, int out_features);
  void Pack(const Masters& masters) const;
  Tensor Forward(Pass& pass, const Tensor& x, const Tensor& residual = {}, float scale = 1) const;
  /// Returns dx; with `add` it is dx + add, in the memory of `add`.
  Tensor Backward(Pass& pass, const Tensor& x, const Tensor& dout, bool wants_dx = true,
                  const Tensor& add = {}) const;

 private:
  std::vector<int> weights_, biases_;
  std::shared_ptr<PackedLinear> packed_;
};

class GroupNorm {
 public:
  struct Kept {
    Tensor x, statistics, scale_shift;
  };
  GroupNorm() = default;
  GroupNorm(const Declare& declare, int channels, int groups, double eps, Activation activation);
  Tensor Forward(Pass& pass, const Tensor& x, const Tensor& scale_shift, Kept* kept) const;
  /// Forward's output once more.
  Tensor Again(Pass& pass, const Kept& kept) const;
  /// Returns dx (plus `add`).
  Tensor Backward(Pass& pass, const Kept& kept, const Tensor& dout, const Tensor& add) const;
  /// Also the gradient of a time embedding: dcolumns is dscale_shift if there was a scale_shift,
  /// else the sums of dx over pixels.
  Tensor BackwardOfColumns(Pass& pass, const Kept& kept, const Tensor& dout,
                           Tensor* dcolumns) const;
  /// For x from Concat: returns dx but for its last channels, which dskip has.
  Tensor BackwardOfConcat(Pass& pass, const Kept& kept, const Tensor& dout, const Tensor& add,
                          int64_t skip_channels, Tensor* dskip) const;

 private:
  GroupNormArgs Args(Pass& pass, const Kept& kept) const;
  GroupNormBackwardArgs BackwardArgs(Pass& pass, const Kept& kept, const Tensor& dout) const;
  int gamma_ = 0, beta_ = 0, groups_ = 0;
  float eps_ = 0;
  Activation activation_ = Activation::kNone;
};

class LayerNorm {
 public:
  struct Kept {
    Tensor x, statistics;
  };
  LayerNorm() = default;
  LayerNorm(const Declare& declare, int channels, double eps);
  Tensor Forward(Pass& pass, const Tensor& x, Kept* kept) const;
  /// Forward's output once more.
  Tensor Again(Pass& pass, const Kept& kept) const;
  /// Returns dx (plus `add`), in place of dout.
  Tensor Backward(Pass& pass, const Kept& kept, const Tensor& dout, const Tensor& add) const;

 private:
  LayerNormArgs Args(Pass& pass, const Kept& kept) const;
  int gamma_ = 0, beta_ = 0;
  float eps_ = 0;
};

/// diffusers' TimestepEmbedding: linear, activation, linear.
class TimestepEmbedding {
 public:
  struct Kept {
    Tensor x, hidden, activated;
  };
  TimestepEmbedding() = default;
  TimestepEmbedding(const Declare& declare, int in_features, int out_features,
                    Activation activation);
  void Pack(const Masters& masters) const;
  Tensor Forward(Pass& pass, const Tensor& x, const Tensor& residual, Kept* kept) const;
  /// Returns dx, undefined if not `wants_dx`: most inputs have no gradient.
  Tensor Backward(Pass& pass, const Kept& kept, const Tensor& dout, bool wants_dx = false) const;

 private:
  Linear linear_1_, linear_2_;
  Activation activation_ = Activation::kNone;
};

/// Attention between projected sequences: softmax(q kᵀ / √dim) v per head.
struct HeadAttention {
  int heads = 1;
  bool causal = false;

  struct Kept {
    Tensor q, k, v, log_sum_exp, out;
  };
  /// q [N, tokens, C], k and v [N, keys, C], which may be columns. Returns kept->out.
  Tensor Forward(Pass& pass, const Tensor& q, const Tensor& k, const Tensor& v, Kept* kept) const;
  void Backward(Pass& pass, const Kept& kept, const Tensor& dout, const Tensor& dq,
                const Tensor& dk, const Tensor& dv) const;

 private:
  AttentionArgs Args(const Kept& kept) const;
};

/// diffusers' Attention in UNet2DModel: group norm, self-attention, residual, division.
class SelfAttention {
 public:
  struct Options {
    int channels = 0, head_dim = 0;
    std::optional<int> groups;
    double eps = 1e-5, output_scale_factor = 1;
  };
  struct Kept {
    GroupNorm::Kept norm;
    Tensor normed;
    HeadAttention::Kept attention;
  };
  SelfAttention(const Declare& declare, const Options& options);
  void Pack(const Masters& masters) const;
  Tensor Forward(Pass& pass, const Tensor& x, Kept* kept) const;
  Tensor Backward(Pass& pass, const Kept& kept, const Tensor& dout) const;

 private:
  Options options_;
  HeadAttention attention_;
  std::optional<GroupNorm> norm_;
  Linear qkv_, out_;
};

/// diffusers' ResnetBlock2D, with the concatenation that comes before it in the up path.
class ResnetBlock {
 public:
  struct Options {
    int in_channels = 0;  // of the concatenation
    int out_channels = 0;
    int time_channels = 0;  // 0: no time embedding
    int groups = 32;
    int groups_out = 0;  // of the second norm; 0: `groups`
    double eps = 1e-6;
    Activation activation = Activation::kSilu;
    bool scale_shift = false;
    double output_scale_factor = 1;
    std::optional<Resample> resample;
    bool shortcut = false;  // conv_shortcut also where channels do not change
    uint32_t dropout_layer = 0;
  };
  struct Kept {
    GroupNorm::Kept norm1, norm2;
    Tensor input, normed1, normed2;  // the last two only if they are not recomputed
    int64_t skip_channels = 0;
  };
  ResnetBlock(const Declare& declare, const Options& options);
  void Pack(const Masters& masters) const;
  /// x [N, H, W, C], skip optional [N, H, W, C2], `time` the activated embedding [N,
  /// time_channels], undefined without time_channels.
  Tensor Forward(Pass& pass, const Tensor& x, const Tensor& skip, const Tensor& time,
                 Kept* kept) const;
  /// Returns dx; dskip when there was a skip; adds to `dtime` (whose first user sets it),
  /// which may be null without time_channels.
  Tensor Backward(Pass& pass, const Kept& kept, const Tensor& time, const Tensor& dout,
                  Tensor* dskip, Tensor* dtime) const;

 private:
  Tensor Normed1(Pass& pass, const Kept& kept) const;
  Tensor Normed2(Pass& pass, const Kept& kept) const;
  void Drop(Pass& pass, const Tensor& x) const;
  bool has_shortcut() const {
    return options_.shortcut || options_.in_channels != options_.out_channels;
  }
  /// Whether norm1's output is resampled; nearest-neighbour doubling is part of conv1.
  bool resamples_norm() const {
    return options_.resample && *options_.resample != Resample::kNearestUp;
  }
  bool has_time() const { return options_.time_channels > 0; }
  Options options_;
  GroupNorm norm1_, norm2_;
  Conv2d conv1_, conv2_;
  Linear time_, shortcut_;
};

/// A network's last layers, diffusers' conv_norm_out, SiLU and conv_out.
class OutputLayers {
 public:
  struct Options {
    int in_channels = 0, out_channels = 0;
    int groups = 32;
    double eps = 1e-6;
    Activation activation = Activation::kSilu;
  };
  struct Kept {
    GroupNorm::Kept norm;
    Tensor normed;  // unless it is recomputed
  };
  OutputLayers() = default;
  /// Under the network's own prefix.
  OutputLayers(const Declare& declare, const Options& options);
  void Pack(const Masters& masters) const;
  /// x [N, H, W, in_channels]. Returns F32 [N, H, W, out_channels].
  Tensor Forward(Pass& pass, const Tensor& x, Kept* kept) const;
  /// Returns dx. Frees what was kept as soon as it is used.
  Tensor Backward(Pass& pass, Kept kept, const Tensor& dout) const;

 private:
  int out_channels_ = 0;
  GroupNorm norm_;
  Conv2d conv_;
};

}  // namespace denoised::training
