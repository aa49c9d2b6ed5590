// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/core/status.h"

namespace denoised::training {

/// The learning rate by step: a linear warm-up, and then constant, a half cosine that would be 0
/// one step after the last, or rate / √max(step / reference, 1) (EDM2, arXiv 2312.02696).
struct RateSchedule {
  enum class Kind { kConstant, kCosine, kInverseSqrt } kind = Kind::kConstant;
  double rate = 1e-4;
  int64_t warmup_steps = 0;
  int64_t reference_steps = 10000;  // kInverseSqrt

  /// The rate of step `step` (from 0) of `steps`.
  double At(int64_t step, int64_t steps) const;
};

/// An exponential moving average of the weights.
struct AverageOptions {
  enum class Kind {
    kDecay,  // w̄ ← d·w̄ + (1 − d)·w
    // Update number t (from 1) has
    kWarmup,  // d = min(value, 1 − t^−0.75): diffusers' EMAModel(use_ema_warmup=True, power=0.75)
    kPower    // d = (1 − 1/t)^(γ + 1) of relative width `value` (EDM2)
  } kind = Kind::kWarmup;
  double value = 0.999;

  /// The name of its folder: "decay_0.999", "power_0.05".
  std::string Name() const;
  absl::Status Check() const;
  /// d in update number `update` (from 1).
  double DecayAt(int64_t update) const;
};

/// γ of a power-function average whose width, relative to the training time, is `width`:
/// width² = (γ + 1) / ((γ + 2)²(γ + 3)). `width` is in (0, 0.28).
double PowerOfWidth(double width);

}  // namespace denoised::training
