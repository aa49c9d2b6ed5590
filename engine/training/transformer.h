// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "engine/training/layers.h"

namespace denoised::training {

/// diffusers' BasicTransformerBlock: self-attention, attention to text states, GEGLU, each after a
/// layer norm and with a residual.
class TransformerBlock {
 public:
  struct Kept {
    LayerNorm::Kept norm1, norm2, norm3;
    Tensor normed1, normed2, normed3;  // only if they are not recomputed
    HeadAttention::Kept self, cross;
    Tensor hidden, gated;
  };
  TransformerBlock(const Declare& declare, int channels, int heads, int text_features);
  void Pack(const Masters& masters) const;
  /// x [N, tokens, C], states [N, text tokens, text_features].
  Tensor Forward(Pass& pass, const Tensor& x, const Tensor& states, Kept* kept) const;
  /// Returns dx. Adds to `dstates`, which the first user sets; null: not wanted. `dout` does not
  /// change.
  Tensor Backward(Pass& pass, const Kept& kept, const Tensor& states, const Tensor& dout,
                  Tensor* dstates) const;

 private:
  int channels_ = 0;
  HeadAttention attention_;
  LayerNorm norm1_, norm2_, norm3_;
  Linear self_qkv_, self_out_, cross_q_, cross_kv_, cross_out_, feed_in_, feed_out_;
};

/// diffusers' Transformer2DModel: group norm, projection, blocks, projection, residual.
class Transformer2D {
 public:
  struct Options {
    int channels = 0, heads = 1, depth = 1;
    int text_features = 0;
    int groups = 32;
    bool linear_projection = false;  // false: 1×1 convolutions
  };
  struct Kept {
    GroupNorm::Kept norm;
    Tensor normed;  // only if it is not recomputed
    std::vector<TransformerBlock::Kept> blocks;
    Tensor tokens;  // the input of proj_out
  };
  Transformer2D(const Declare& declare, const Options& options);
  void Pack(const Masters& masters) const;
  Tensor Forward(Pass& pass, const Tensor& x, const Tensor& states, Kept* kept) const;
  /// As TransformerBlock::Backward.
  Tensor Backward(Pass& pass, const Kept& kept, const Tensor& states, const Tensor& dout,
                  Tensor* dstates) const;

 private:
  GroupNorm norm_;
  Linear proj_in_, proj_out_;
  std::vector<TransformerBlock> blocks_;
};

}  // namespace denoised::training
