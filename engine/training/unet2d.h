// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/models/unet2d.h"
#include "engine/training/layers.h"

namespace denoised::training {

/// The inputs of a network, one row per sample.
struct NetworkInput {
  Tensor x;          // [N, H, W, C]
  Tensor condition;  // F32 [N]: timestep or c_noise
  Tensor timestep;   // I32 [N]: condition as a whole number, for a learned time embedding
  Tensor label;      // I32 [N], for ClassCondition::kLabel
  Tensor embedding;  // [N, D] for kVector, F32 [N, 1] for kValue
  Tensor augment;    // [N, augment_labels], see UNet2D::Make()
};

/// diffusers' UNet2DModel, as far as serving supports it (engine/models/unet2d.h), with its
/// backward pass. Declares its parameters by their checkpoint names when it is made. Immutable
/// during passes.
class UNet2D {
 public:
  /// With `augment_labels`, the network reads this many numbers for each sample: EDM's conditional
  /// augmentation. A linear map without bias, "map_augment.weight", adds them to the projected
  /// timestep. They are 0 when sampling, so the served network has no such map and is a plain
  /// UNet2DModel. InvalidArgument if groups or heads do not divide the channels.
  static absl::StatusOr<std::unique_ptr<UNet2D>> Make(Backend& backend, Parameters& parameters,
                                                      const UNet2DConfig& config,
                                                      int augment_labels = 0);

  /// Lays out the weights for the kernels; call after every change of the master weights.
  void Pack(const Masters& masters) const;

  /// What Backward() needs from Forward().
  struct Kept;
  struct KeptDeleter {
    void operator()(Kept* kept) const;
  };
  using KeptPointer = std::unique_ptr<Kept, KeptDeleter>;

  /// F32 [N, H, W, out_channels]. `kept` receives what Backward() needs.
  Tensor Forward(Pass& pass, const NetworkInput& input, KeptPointer* kept) const;
  /// Writes the gradients of all parameters into pass.gradient; doutput is F32 and may be
  /// overwritten. `kept` is freed piece by piece.
  void Backward(Pass& pass, const NetworkInput& input, KeptPointer kept,
                const Tensor& doutput) const;

  const UNet2DConfig& config() const { return config_; }

 private:
  struct Level {
    std::vector<ResnetBlock> resnets;
    std::vector<SelfAttention> attentions;
    std::optional<Conv2d> resample_conv;
    std::optional<ResnetBlock> resample_resnet;
    // As in engine/models/unet2d.cc.
    std::optional<Conv2d> skip_conv;
    std::optional<GroupNorm> skip_norm;
    bool skip = false;
  };
  struct KeptLevel;

  UNet2D(const UNet2DConfig& config, int augment_labels)
      : config_(config), augment_labels_(augment_labels) {}
  void Build(const Declare& declare);
  void BuildLevel(const Declare& declare, const UNet2DBlock& kind, const UNetLevel& shape,
                  Level* level);
  void BuildSkipLevel(const Declare& declare, const UNet2DBlock& kind, const UNetLevel& shape,
                      Level* level);
  ResnetBlock::Options Resnet(int in_channels, int out_channels);
  SelfAttention::Options AttentionOf(int channels) const;
  Tensor Project(Pass& pass, const Tensor& t) const;
  Conv2dGeometry Down() const;
  /// What every resnet reads of the timestep and the class, and the gradients from what they read.
  Tensor Embed(Pass& pass, const NetworkInput& input, Kept* kept) const;
  void EmbedBackward(Pass& pass, const NetworkInput& input, const Kept& kept,
                     const Tensor& dtime) const;
  /// A level on the way down: appends its outputs to `skips`. `image` is beside Skip blocks.
  Tensor DownForward(Pass& pass, const Level& level, Tensor x, Tensor* image,
                     std::vector<Tensor>* skips, const Tensor& time, KeptLevel* kept) const;
  /// Takes the gradients of its outputs from the end of `dskips`, and adds to `dtime`.
  Tensor DownBackward(Pass& pass, const Level& level, KeptLevel kept, const Tensor& time, Tensor d,
                      std::vector<Tensor>* dskips, Tensor* dtime) const;
  /// A level on the way up: takes skips from the end, and its gradient appends theirs.
  Tensor UpForward(Pass& pass, const Level& level, Tensor x, Tensor* image,
                   std::vector<Tensor>* skips, const Tensor& time, KeptLevel* kept) const;
  Tensor UpBackward(Pass& pass, const Level& level, KeptLevel kept, const Tensor& time, Tensor d,
                    const Tensor& dimage, std::vector<Tensor>* dskips, Tensor* dtime) const;

  UNet2DConfig config_;
  int augment_labels_ = 0;
  uint32_t dropout_layers_ = 0;
  int fourier_weight_ = -1, time_table_ = -1, class_table_ = -1;
  TimestepEmbedding time_embedding_;
  std::optional<TimestepEmbedding> class_embedding_;
  std::optional<Linear> augment_;
  Conv2d conv_in_;
  OutputLayers output_;
  std::vector<Level> down_, up_;
  std::vector<ResnetBlock> mid_resnets_;
  std::optional<SelfAttention> mid_attention_;
};

}  // namespace denoised::training
