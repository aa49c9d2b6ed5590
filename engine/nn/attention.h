// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "engine/nn/layers.h"

namespace denoised::nn {

struct AttentionOptions {
  int channels = 0;
  int head_dim = 0;           // heads = channels / head_dim
  std::optional<int> groups;  // no group norm when unset
  double eps = 1e-5;
  double output_scale_factor = 1.0;
};

/// diffusers' Attention as its UNet2DModel uses it: group norm, self-attention over all pixels,
/// residual, division by output_scale_factor.
class Attention {
 public:
  static absl::StatusOr<Attention> Load(NetworkOps& ops, const Weights& weights,
                                        const AttentionOptions& options);
  /// [N, H, W, C] → the same.
  Tensor operator()(Context& context, const Tensor& x) const;

 private:
  AttentionOptions options_;
  int heads_ = 0;
  std::optional<GroupNorm> norm_;
  Linear qkv_, out_;
};

}  // namespace denoised::nn
