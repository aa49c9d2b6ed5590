// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/models/unet2d_condition.h"
#include "engine/training/transformer.h"

namespace denoised::training {

/// diffusers' UNet2DConditionModel as in Stable Diffusion 1 and 2, with its backward pass.
/// Declares its parameters by their checkpoint names. Immutable during passes.
class UNet2DCondition {
 public:
  struct Input {
    Tensor x;          // [N, h, w, in_channels]
    Tensor condition;  // F32 [N]: timestep
    Tensor states;     // [N, tokens, cross_attention_dim]
  };

  /// InvalidArgument names what cannot be trained: text_time, time_cond_proj_dim, a sample_size
  /// that the levels do not halve evenly, groups or heads that do not divide channels.
  static absl::StatusOr<std::unique_ptr<UNet2DCondition>> Make(const Declare& declare,
                                                               const UNet2DConditionConfig& config);
  void Pack(const Masters& masters) const;

  /// What Backward() needs from Forward().
  struct Kept;
  struct KeptDeleter {
    void operator()(Kept* kept) const;
  };
  using KeptPointer = std::unique_ptr<Kept, KeptDeleter>;

  /// F32 [N, h, w, out_channels].
  Tensor Forward(Pass& pass, const Input& input, KeptPointer* kept) const;
  /// Writes the gradients of all parameters, and the gradient of the states into `dstates`; null:
  /// not wanted. `kept` is freed piece by piece.
  void Backward(Pass& pass, const Input& input, KeptPointer kept, const Tensor& doutput,
                Tensor* dstates) const;

 private:
  struct Level {
    std::vector<ResnetBlock> resnets;
    std::vector<Transformer2D> transformers;
    std::optional<Conv2d> resample;
  };
  struct KeptLevel;

  explicit UNet2DCondition(const UNet2DConditionConfig& config) : config_(config) {}
  absl::Status Check() const;
  void Build(const Declare& declare);
  void BuildLevel(const Declare& declare, const UNetLevel& shape, bool transformers, Level* to);
  ResnetBlock::Options Resnet(int in_channels, int out_channels) const;
  Transformer2D::Options TransformerOf(int level) const;
  Conv2dGeometry Down() const;

  UNet2DConditionConfig config_;
  TimestepEmbedding time_embedding_;
  Conv2d conv_in_;
  OutputLayers output_;
  std::vector<Level> down_, up_;
  std::vector<ResnetBlock> mid_resnets_;
  std::optional<Transformer2D> mid_transformer_;
};

}  // namespace denoised::training
