// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/core/class_condition.h"
#include "engine/nn/layers.h"

namespace denoised {

/// What a prompt, its sizes and its guidance are made into, once a request, for models that read
/// text: condition sets. Every tensor has a set per entry of its first dimension.
struct ConditionSets {
  Tensor keys_values;  // [S, tokens, columns]: keys and values of all cross-attention layers
  Tensor key_counts;   // I32 [S]: tokens that a set has
  Tensor vectors;      // [S, time features], added to the time embedding; undefined: none
  Tensor times;        // [S, time inputs], added to the projected timestep; undefined: none
};

/// What a denoiser reads of the init image, in channels after those of the state.
enum class ImageInput : uint8_t {
  kNone,
  kMasked,  // inpainting: the mask, then the latents of the image where the mask keeps it
  kWhole,   // InstructPix2Pix: its latents, in the autoencoder's own scale
};

/// The input of Denoiser::Condition(): chunks of prompts, and prompts; a prompt has one or more.
struct Prompts {
  Tensor states;    // [chunks, tokens, text_features]
  Tensor pooled;    // [N, pooled_features]; undefined unless the model reads it
  Tensor sizes;     // F32 [N·size_numbers]: SDXL's original size, crop and target size
  Tensor guidance;  // F32 [N]: guidance scale, for models with guidance_embedding
};

/// One evaluation's input, a row per sample.
struct DenoiserInput {
  Tensor x;            // activation dtype [N, H, W, C + E], E extra channels
  Tensor condition;    // F32 [N]: timestep or c_noise
  Tensor label;        // I32 [N], for models with a table of classes: the class; with text: the set
  Tensor embedding;    // F32 [N, D], for models that take the class as numbers
  ConditionSets sets;  // for models with text
};

/// The properties of a model that the step batcher needs.
struct DenoiserTraits {
  int height = 0, width = 0;  // native size; 0 when the config names none
  int size_multiple = 1;      // sizes must be multiples of it
  int channels = 0;           // of the state
  int extra_channels = 0;     // that it reads after those of the state
  int output_channels = 0;    // channels, or twice as many with a learned variance
  /// It takes the logarithm of DenoiserInput::condition, which must be above 0.
  bool logarithmic_time = false;
  ClassCondition condition = ClassCondition::kNone;
  int class_embeddings = 0;   // kLabel: entries of the table, the null class included
  int class_vector_size = 0;  // kVector: D; kValue: 1
  // Models that read text; all 0 for others.
  int text_features = 0;            // of a token's state
  int pooled_features = 0;          // of a prompt's pooled state; 0: not read
  int size_numbers = 0;             // numbers in Prompts::sizes for one prompt; 0: not read
  bool guidance_embedding = false;  // the guidance scale is an input, so no second row is needed
  int key_value_columns = 0;        // of ConditionSets::keys_values
  int vector_features = 0, time_features = 0;  // of ConditionSets::vectors and times; 0: undefined
  int64_t parameters = 0;
};

/// A network that maps a noisy sample, its noise level and a condition to a prediction. Immutable.
class Denoiser {
 public:
  virtual ~Denoiser() = default;
  virtual const DenoiserTraits& traits() const = 0;
  /// Enqueues one evaluation; F32 [N, H, W, output_channels].
  virtual Tensor Forward(nn::Context& context, const DenoiserInput& input) const = 0;
  /// Enqueues what makes condition sets of prompts, for models that read text. `sets` has the
  /// traits' shapes: keys and values for each chunk, all else for each prompt. Its key_counts are
  /// not written, and where `prompts` has no states, neither are keys and values.
  virtual void Condition(nn::Context& /*context*/, const Prompts& /*prompts*/,
                         const ConditionSets& /*sets*/) const {
    DENOISED_CHECK(false, "this model reads no text");
  }
};

}  // namespace denoised
