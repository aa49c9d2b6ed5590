// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "engine/nn/layers.h"

namespace denoised::nn {

/// Which keys and values the rows of an evaluation attend to.
struct CrossAttentionInput {
  Tensor keys_values;  // [S, tokens, columns of the key and value projections]
  Tensor key_counts;   // I32 [S]
  Tensor set;          // I32 [N]: each row's set, in [0, S)
};

struct TransformerOptions {
  int channels = 0;
  int heads = 0;
  int depth = 1;  // transformer blocks
  int text_features = 0;
  int groups = 32;
  bool linear_projection = false;  // proj_in and proj_out are linears, not 1×1 convolutions
};

/// diffusers' Transformer2DModel as its UNet2DConditionModel uses it: group norm, projection,
/// blocks of self-attention, cross-attention and GEGLU feed-forward (each after a LayerNorm, with a
/// residual), projection, residual.
class Transformer2D {
 public:
  /// `key_values` gets to_k and to_v of all cross-attention layers. They read nothing but the
  /// prompt, so one call for each prompt computes them for all steps and all layers.
  static absl::StatusOr<Transformer2D> Load(NetworkOps& ops, const Weights& weights,
                                            const TransformerOptions& options,
                                            LinearColumns& key_values);
  /// [N, H, W, C] → the same.
  Tensor operator()(Context& context, const Tensor& x, const CrossAttentionInput& text) const;

 private:
  struct Block {
    LayerNorm norm1, norm2, norm3;
    Linear self_qkv, self_out;
    Linear cross_q, cross_out;
    int key_column = 0;  // the first of its keys; then come its values
    Linear feed_in, feed_out;
  };

  absl::StatusOr<Block> LoadBlock(NetworkOps& ops, const Weights& weights,
                                  LinearColumns& key_values) const;
  Tensor Run(Context& context, const Block& block, Tensor x, const CrossAttentionInput& text) const;
  AttentionArgs Heads(const Tensor& q, const Tensor& k, const Tensor& v) const;

  TransformerOptions options_;
  GroupNorm norm_;
  Linear proj_in_, proj_out_;
  std::vector<Block> blocks_;
};

}  // namespace denoised::nn
