// SPDX-License-Identifier: Apache-2.0
#include "engine/sampling/sigma_path.h"
#include "engine/sampling/timesteps.h"

namespace denoised {

/// arXiv 2206.00364, algorithm 2; without churn algorithm 1, and diffusers' HeunDiscreteScheduler.
StepPlan CompileHeun(const SchedulerConfig::Fields& fields, const Request& request) {
  constexpr int kStart = 0, kSlope = 1;
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  PlanWriter plan = PlanAlong(path, fields, request, ClipOf(fields, false));
  plan.ChurnStart(path.Churned(first, request.churn, fields).added);

  for (int i = first; i < steps; ++i) {
    const NoiseLevel level = path.Churned(i, request.churn, fields).level;
    const double next = path.sigmas[i + 1], length = next - level.sigma;
    Combination x0 = plan.Evaluate(i - first, level);
    const Combination slope = 1 / level.sigma * (X() - x0);
    plan.Next(X() + length * slope);
    if (i + 1 == steps) break;
    plan.Keep(kStart, X());
    plan.Keep(kSlope, slope);

    x0 = plan.Evaluate(i - first, path.At(i + 1));
    const Combination end_slope = 1 / next * (X() - x0);
    plan.Next(Register(kStart) + length / 2 * (Register(kSlope) + end_slope) +
              path.Churned(i + 1, request.churn, fields).added * Noise());
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
