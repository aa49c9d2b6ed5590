// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/sampling/plan_writer.h"
#include "engine/sampling/samplers.h"

namespace denoised {

/// The noise levels that samplers in σ walk down: sigmas[i] is where step i starts, sigmas[i + 1]
/// where it lands.
struct SigmaPath {
  std::vector<double> sigmas;      // at least one more than conditions
  std::vector<double> conditions;  // of the model, at each step's start
  double initial_noise = 1;        // of the state drawn from noise, in the scale of At()
  /// What alpha goes with a sigma.
  enum class Scale {
    kOne,           // 1
    kPreserving,    // alpha² + sigma² = 1; sigmas[i] is sigma/alpha
    kInterpolating  // alpha = 1 − sigma
  } scale = Scale::kOne;

  int steps() const { return static_cast<int>(conditions.size()); }
  /// Level i in the sampler's scale.
  NoiseLevel At(int i) const;

  /// Level i (alpha 1) after churn raised it, and the scale of the noise that raises it. The
  /// step before adds that noise at its end, so that the model sees the result. None at the end.
  struct ChurnedLevel {
    NoiseLevel level;
    double added = 0;
  };
  ChurnedLevel Churned(int i, const Churn& churn, const SchedulerConfig::Fields& fields) const;
};

/// The model's condition at a level between the levels that it was trained on.
double ConditionAt(double sigma, const SchedulerConfig::Fields& fields);

SigmaPath SigmaPathOf(const SchedulerConfig::Fields& fields, const Request& request);

/// A plan that starts from the path's noise, or from the request's image at its first step. `clip`:
/// see PlanWriter.
PlanWriter PlanAlong(const SigmaPath& path, const SchedulerConfig::Fields& fields,
                     const Request& request, double clip = 0);

}  // namespace denoised
