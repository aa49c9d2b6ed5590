// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "engine/sampling/combination.h"
#include "engine/sampling/scheduler_fields.h"

namespace denoised {

/// A noise level in a sampler's own scale: x = alpha·x0 + sigma·noise. Samplers of Ho et al. keep
/// alpha² + sigma² = 1, those that count in σ keep alpha = 1.
struct NoiseLevel {
  double alpha = 1;
  double sigma = 0;
  /// The model's condition: the timestep, or EDM's c_noise.
  double condition = 0;

  /// λ = ln(alpha/sigma), half of the log SNR; +∞ at the image.
  double lambda() const { return std::log(alpha) - std::log(sigma); }
};

/// The model's inputs and prediction at a level: F(input_scale·x + input_shift, condition), x0 =
/// x0_from_x·x + x0_from_model·F.
struct Preconditioning {
  double input_scale, x0_from_x, x0_from_model, input_shift = 0;
};
Preconditioning PreconditioningAt(const NoiseLevel& level, const SchedulerConfig::Fields& fields);

/// Writes a StepPlan, one evaluation after the other:
///
///   const Combination x0 = plan.Evaluate(step, level);
///   plan.Keep(0, x0);                       // for a later evaluation, as Register(0)
///   plan.Next(a * x0 + b * X());            // the next state
///
/// Registers that an evaluation does not Keep are zero for the next one.
class PlanWriter {
 public:
  /// `clip` bounds x0 to ±clip; 0 leaves it. `fields` must outlive the writer.
  PlanWriter(const SchedulerConfig::Fields& fields, double clip);

  /// The state before the first evaluation, drawn from noise or from an image at a noise level.
  void StartFromNoise(double scale);
  void StartFromImage(const NoiseLevel& level);
  /// Noise that the churn of the first evaluation adds.
  void ChurnStart(double scale);

  /// Appends an evaluation of `step` (0-based) at `level`; returns the predicted x0.
  Combination Evaluate(int step, const NoiseLevel& level);
  /// The noise in x as the model sees it: x0 as predicted, before clipping.
  Combination Epsilon() const;
  void Next(const Combination& x);
  void Keep(int reg, const Combination& value);
  /// Model() is times r² in this evaluation, and Noise() times r: see NoiseScale::kNormRatio.
  void ScaleByNorms();
  /// For a model that predicts the variance of the noise.
  void LearnedNoise(NoiseScale scale, double log_variance_min, double log_variance_max);

  StepPlan Finish(int steps);

 private:
  void Write(int output, const Combination& value);

  const SchedulerConfig::Fields& fields_;
  double clip_;
  NoiseLevel level_;
  StepPlan plan_;
};

}  // namespace denoised
