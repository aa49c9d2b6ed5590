// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/core/class_condition.h"
#include "engine/nn/layers.h"

namespace denoised {

/// One evaluation's input, a row per sample.
struct DenoiserInput {
  Tensor x;          // activation dtype [N, H, W, C]
  Tensor condition;  // F32 [N]: timestep or c_noise
  Tensor label;      // I32 [N], for models with a table of classes
  Tensor embedding;  // F32 [N, D], for models that take the class as numbers
};

/// The properties of a model that the step batcher needs.
struct DenoiserTraits {
  int height = 0, width = 0;  // native size; 0 when the config names none
  int size_multiple = 1;      // sizes must be multiples of it
  int channels = 0;           // of the image
  int output_channels = 0;    // channels, or twice as many with a learned variance
  ClassCondition condition = ClassCondition::kNone;
  int class_embeddings = 0;   // kLabel: entries of the table, the null class included
  int class_vector_size = 0;  // kVector: D; kValue: 1
  int64_t parameters = 0;
};

/// A network that maps a noisy sample, its noise level and a condition to a prediction. Immutable.
class Denoiser {
 public:
  virtual ~Denoiser() = default;
  virtual const DenoiserTraits& traits() const = 0;
  /// Enqueues one evaluation; F32 [N, H, W, output_channels].
  virtual Tensor Forward(nn::Context& context, const DenoiserInput& input) const = 0;
};

}  // namespace denoised
