// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "engine/nn/layers.h"

namespace denoised::nn {

/// The to_k and to_v of all cross-attention layers of a model as one linear layer. They read
/// nothing but the prompt, so one call per prompt computes them for all steps and all layers.
/// Layers register while they load and get their columns of the output.
class KeyValueProjections {
 public:
  /// Returns the first of this layer's 2 · `features` columns: keys, then values.
  absl::StatusOr<int> Add(const Weights& to_k, const Weights& to_v, int text_features,
                          int features);
  /// Call once, after all layers were loaded.
  absl::Status Pack(Backend& backend);
  int columns() const { return columns_; }
  /// Text states [N, tokens, text_features] → `out` [N, tokens, columns].
  void operator()(Context& context, const Tensor& states, const Tensor& out) const;

 private:
  std::vector<Weights> layers_;
  std::vector<int> out_features_;
  int text_features_ = 0, columns_ = 0;
  Linear linear_;
};

/// Which keys and values the rows of an evaluation attend to.
struct CrossAttentionInput {
  Tensor keys_values;  // [S, tokens, columns of KeyValueProjections]
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
  static absl::StatusOr<Transformer2D> Load(Backend& backend, const Weights& weights,
                                            const TransformerOptions& options,
                                            KeyValueProjections& projections);
  /// [N, H, W, C] → the same.
  Tensor operator()(Context& context, const Tensor& x, const CrossAttentionInput& text) const;

 private:
  struct Block {
    LayerNorm norm1, norm2, norm3;
    Linear self_qkv, self_out;
    Linear cross_q, cross_out;
    int key_column = 0;
    Linear feed_in, feed_out;
  };

  absl::StatusOr<Block> LoadBlock(Backend& backend, const Weights& weights,
                                  KeyValueProjections& projections) const;
  Tensor Run(Context& context, const Block& block, Tensor x, const CrossAttentionInput& text) const;
  AttentionArgs Heads(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) const;

  TransformerOptions options_;
  GroupNorm norm_;
  Linear proj_in_, proj_out_;
  std::vector<Block> blocks_;
};

}  // namespace denoised::nn
