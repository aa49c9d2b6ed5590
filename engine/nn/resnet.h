// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "engine/nn/layers.h"

namespace denoised::nn {

struct ResnetOptions {
  int in_channels = 0;  // of the concatenation, when there is a skip connection
  int out_channels = 0;
  int time_channels = 0;  // of the activated time embedding; 0: the block reads no time
  int groups = 32;
  int groups_out = 0;  // of the second norm; 0: `groups`
  double eps = 1e-6;
  Activation activation = Activation::kSilu;
  bool scale_shift = false;  // resnet_time_scale_shift: "scale_shift" instead of "default"
  double output_scale_factor = 1.0;
  std::optional<Resample> resample;
  bool shortcut = false;  // conv_shortcut also where channels do not change
  bool has_shortcut() const { return shortcut || in_channels != out_channels; }
};

/// diffusers' ResnetBlock2D: norm, act, conv, time embedding, norm, act, conv, plus the input.
class ResnetBlock {
 public:
  /// `time_projections` gets its time_emb_proj, since those of all blocks read the same activated
  /// embedding.
  static absl::StatusOr<ResnetBlock> Load(NetworkOps& ops, const Weights& weights,
                                          const ResnetOptions& options,
                                          LinearColumns& time_projections);
  /// A block that reads no time.
  static absl::StatusOr<ResnetBlock> Load(NetworkOps& ops, const Weights& weights,
                                          const ResnetOptions& options);
  /// x [N, H, W, C] and `skip` (undefined, or [N, H, W, C2] to be concatenated) → [N, H', W',
  /// Cout]. `time` is the output of the model's time projections, undefined for a block without.
  Tensor operator()(Context& context, const Tensor& x, const Tensor& skip,
                    const Tensor& time) const;

 private:
  absl::Status LoadLayers(NetworkOps& ops, const Weights& weights);

  ResnetOptions options_;
  int time_column_ = 0;
  GroupNorm norm1_, norm2_;
  Conv2d conv1_, conv2_;
};

}  // namespace denoised::nn
