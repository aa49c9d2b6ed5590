// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "engine/core/step_plan.h"

/// Symbolic weighted sums of the inputs of an evaluation, so that a sampler's file reads like its
/// paper: `plan.Next(sigma_ratio * X() - alpha * std::expm1(-h) * denoised)`.

namespace denoised {

class Combination {
 public:
  /// Zero.
  Combination() = default;
  explicit Combination(int input) { weights_[input] = 1; }

  /// Indexed by PlanInput.
  const std::array<double, kPlanInputs>& weights() const { return weights_; }

  Combination& operator+=(const Combination& other) {
    for (int i = 0; i < kPlanInputs; ++i) weights_[i] += other.weights_[i];
    return *this;
  }
  Combination& operator*=(double scale) {
    for (double& weight : weights_) weight *= scale;
    return *this;
  }

 private:
  std::array<double, kPlanInputs> weights_ = {};
};

inline Combination operator*(double scale, Combination c) { return c *= scale; }
inline Combination operator+(Combination a, const Combination& b) { return a += b; }
inline Combination operator-(Combination a, const Combination& b) { return a += -1.0 * b; }

/// The state that the model was just evaluated on.
inline Combination X() { return Combination(kInputX); }
/// The model's output F.
inline Combination Model() { return Combination(kInputModel); }
/// Standard normal noise of this evaluation.
inline Combination Noise() { return Combination(kInputNoise); }
/// The value that an earlier evaluation kept in register `i`.
inline Combination Register(int i) { return Combination(kInputRegister + i); }

}  // namespace denoised
