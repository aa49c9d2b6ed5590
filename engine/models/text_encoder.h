// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/nn/layers.h"

namespace denoised {

/// Prompts, a row each, as their tokenizer made them. Device memory.
struct TextInput {
  Tensor ids;        // I32 [N·tokens]
  Tensor positions;  // I32 [N·tokens]: 0, 1, … in each prompt
  Tensor ends;       // I32 [N]: where in [0, N·tokens) the token lies that is pooled
};

struct TextOptions {
  int skip_layers = 0;     // the last so many layers are not run
  bool final_norm = true;  // of `states`; `pooled` is always normed
  bool pool = false;       // needs all layers, whatever is skipped for `states`
};

struct TextOutput {
  Tensor states;  // [N, tokens, features]
  Tensor pooled;  // [N, pooled_features], if asked for
};

struct TextEncoderTraits {
  int max_tokens = 77;      // of one prompt
  int features = 0;         // of a token's state
  int pooled_features = 0;  // 0: cannot pool
  int layers = 0;
  int vocabulary = 0;  // ids are below it
  int end_token = -1;  // pooled: the first token of this id; -1: the one with the largest id
  int64_t parameters = 0;
};

/// A network that turns tokens into states. Immutable. Rows do not depend on each other.
class TextEncoder {
 public:
  virtual ~TextEncoder() = default;
  virtual const TextEncoderTraits& traits() const = 0;
  /// Enqueues. `options` must fit the traits.
  virtual TextOutput Forward(nn::Context& context, const TextInput& input,
                             const TextOptions& options) const = 0;
};

}  // namespace denoised
