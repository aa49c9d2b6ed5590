// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>

#include "engine/models/denoiser.h"

namespace denoised {

/// A network of two element-wise ops: quick, and every output depends on x, noise level and class.
class FakeDenoiser : public Denoiser {
 public:
  FakeDenoiser(int size, int channels, int classes) {
    traits_.height = traits_.width = size;
    traits_.channels = traits_.output_channels = channels;
    traits_.condition = classes ? ClassCondition::kLabel : ClassCondition::kNone;
    traits_.class_embeddings = classes;
    if (classes == 0) return;
    table_ = Tensor::Host({classes, int64_t{size} * size * channels}, DType::kF32);
    for (int64_t i = 0; i < table_.elements(); ++i)
      table_.as<float>()[i] = 0.01f * static_cast<float>((i * 7919) % 101 - 50);
  }
  /// What is drawn of this class from now on is NaN.
  void BreakClass(int label) { FillClass(label, NAN); }
  /// What is drawn of this class from now on depends on `value` alone, if that is large.
  void FillClass(int label, float value) {
    const int64_t features = table_.dim(1);
    std::fill_n(table_.as<float>() + label * features, features, value);
  }

  const DenoiserTraits& traits() const override { return traits_; }

  Tensor Forward(nn::Context& context, const DenoiserInput& input) const override {
    const int64_t rows = input.x.dim(0), pixels = input.x.elements() / rows;
    Tensor x = input.x;
    if (table_) {
      const Tensor offset = context.New({rows, pixels});
      context.ops.Embedding({.table = table_, .index = input.label, .out = offset});
      const Tensor shifted = context.New(x.shape());
      context.ops.Add(x, 1.0f, offset.Reshape(x.shape()), 0.0f, Activation::kNone, shifted);
      x = shifted;
    }
    const Tensor curved = context.NewF32(x.shape());
    context.ops.Add(x, 0.7f, Tensor(), 0.1f, Activation::kGelu, curved);
    const Tensor divisor = context.NewF32({rows});
    context.ops.Add(input.condition, 0.001f, Tensor(), 3.0f, Activation::kNone, divisor);
    const Tensor out = context.NewF32(x.shape());
    context.ops.DivideRows(curved, divisor, out);
    return out;
  }

 private:
  DenoiserTraits traits_;
  Tensor table_;
};

}  // namespace denoised
