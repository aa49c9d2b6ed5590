// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/core/config_reader.h"
#include "engine/models/codec.h"
#include "engine/nn/attention.h"
#include "engine/nn/resnet.h"

/// What diffusers' AutoencoderKL and VQModel share: the fields of their configs, and Encoder and
/// Decoder of models/autoencoders/vae.py.

namespace denoised {

struct VaeConfig {
  int in_channels = 3, out_channels = 3;
  std::vector<std::string> down_block_types = {"DownEncoderBlock2D"};
  std::vector<std::string> up_block_types = {"UpDecoderBlock2D"};
  std::vector<int> block_out_channels = {64};
  int layers_per_block = 1;
  Activation activation = Activation::kSilu;  // act_fn
  int latent_channels = 4;
  int norm_num_groups = 32;
  double norm_eps = 1e-6;  // of all norms; not in the file
  double scaling_factor = 0.18215;
  bool mid_block_add_attention = true;

  bool operator==(const VaeConfig&) const = default;
  /// Reads and checks these fields, with the defaults above.
  void Read(ConfigReader& reader);
  /// Pixels that a latent pixel stands for, along each edge: every level but one halves.
  int factor() const { return 1 << (block_out_channels.size() - 1); }
};

/// diffusers' UNetMidBlock2D as encoder and decoder use it: resnet, attention, resnet.
class VaeMidBlock {
 public:
  static absl::StatusOr<VaeMidBlock> Load(NetworkOps& ops, const Weights& weights,
                                          const VaeConfig& config);
  Tensor operator()(nn::Context& context, Tensor x) const;

 private:
  std::vector<nn::ResnetBlock> resnets_;
  std::optional<nn::Attention> attention_;
};

/// Resnets, each followed by attention in the Attn blocks; then a convolution that resamples, in
/// every level but the last.
struct VaeLevel {
  std::vector<nn::ResnetBlock> resnets;
  std::vector<nn::Attention> attentions;
  std::optional<nn::Conv2d> resample;
};

class VaeEncoder {
 public:
  /// `out_channels`: twice latent_channels where a distribution is predicted.
  static absl::StatusOr<VaeEncoder> Load(NetworkOps& ops, const Weights& weights,
                                         const VaeConfig& config, int out_channels);
  /// [N, H, W, in_channels] → [N, H / factor, W / factor, out_channels], into `out` when defined.
  Tensor operator()(nn::Context& context, const Tensor& x, Tensor out) const;

 private:
  nn::Conv2d conv_in_, conv_out_;
  std::vector<VaeLevel> levels_;
  VaeMidBlock mid_block_;
  nn::GroupNorm norm_out_;
};

class VaeDecoder {
 public:
  static absl::StatusOr<VaeDecoder> Load(NetworkOps& ops, const Weights& weights,
                                         const VaeConfig& config);
  /// [N, h, w, latent_channels] → F32 [N, h · factor, w · factor, out_channels].
  Tensor operator()(nn::Context& context, const Tensor& x) const;

 private:
  int out_channels_ = 0;
  nn::Conv2d conv_in_, conv_out_;
  std::vector<VaeLevel> levels_;
  VaeMidBlock mid_block_;
  nn::GroupNorm norm_out_;
};

}  // namespace denoised
