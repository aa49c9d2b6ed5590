// SPDX-License-Identifier: Apache-2.0
#include "engine/sampling/sigma_path.h"

namespace denoised {

/// Euler's method in σ, with the churn of arXiv 2206.00364, algorithm 2: its first-order half. (In
/// diffusers the model sees the state before the churn, which then stays in the image as noise.)
StepPlan CompileEuler(const SchedulerConfig::Fields& fields, const Request& request) {
  const SigmaPath path = SigmaPathOf(fields, request);
  const int first = request.FirstStep(path.steps());
  PlanWriter plan = PlanAlong(path, fields, request);
  plan.ChurnStart(path.Churned(first, request.churn, fields).added);

  for (int i = first; i < path.steps(); ++i) {
    const NoiseLevel level = path.Churned(i, request.churn, fields).level;
    plan.Evaluate(i - first, level);
    plan.Next(X() + (path.sigmas[i + 1] - level.sigma) * plan.Epsilon() +
              path.Churned(i + 1, request.churn, fields).added * Noise());
  }
  return plan.Finish(path.steps() - first);
}

}  // namespace denoised
