// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "engine/models/clip_text.h"
#include "engine/training/transformer.h"

namespace denoised::training {

/// transformers' CLIPTextModel (engine/models/clip_text.h) up to last_hidden_state, with its
/// backward pass. Declares its parameters by the names of published files ("text_model.…").
/// Immutable during passes.
class ClipText {
 public:
  /// InvalidArgument if the class has a projection, which would get no gradient.
  static absl::StatusOr<std::unique_ptr<ClipText>> Make(const Declare& declare,
                                                        const ClipTextConfig& config);
  void Pack(const Masters& masters) const;

  /// What Backward() needs from Forward().
  struct Kept {
    struct Layer {
      LayerNorm::Kept norm1, norm2;
      Tensor normed1, normed2;  // only if they are not recomputed
      HeadAttention::Kept attention;
      Tensor hidden, activated;
    };
    std::vector<Layer> layers;
    LayerNorm::Kept final_norm;
  };
  /// ids and positions (0, 1, …) I32 [N, tokens] → [N, tokens, hidden_size].
  Tensor Forward(Pass& pass, const Tensor& ids, const Tensor& positions, Kept* kept) const;
  /// Writes the gradients of all parameters. `dstates` is overwritten; `kept` is freed piece by
  /// piece.
  void Backward(Pass& pass, const Tensor& ids, const Tensor& positions, Kept kept,
                const Tensor& dstates) const;

 private:
  struct Layer {
    LayerNorm norm1, norm2;
    Linear qkv, out, fc1, fc2;
  };
  explicit ClipText(const ClipTextConfig& config)
      : config_(config), attention_{.heads = config.num_attention_heads, .causal = true} {}
  Tensor Run(Pass& pass, const Layer& layer, const Tensor& x, Kept::Layer* kept) const;
  Tensor RunBackward(Pass& pass, const Layer& layer, const Kept::Layer& kept,
                     const Tensor& dout) const;

  ClipTextConfig config_;
  HeadAttention attention_;
  int token_table_ = -1, position_table_ = -1;
  std::vector<Layer> layers_;
  LayerNorm final_norm_;
};

}  // namespace denoised::training
