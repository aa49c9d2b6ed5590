// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "engine/sampling/sigma_path.h"

namespace denoised {

/// The midpoint method in σ, after DPM-Solver-2 (arXiv 2206.00927): the slope of a step is that at
/// the geometric mean of its ends. The ancestral form steps below the next level and adds fresh
/// noise up to it.
StepPlan CompileKdpm2(const SchedulerConfig::Fields& fields, const Request& request) {
  constexpr int kStart = 0;
  const bool ancestral = request.sampler == Sampler::kKdpm2Ancestral;
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  PlanWriter plan = PlanAlong(path, fields, request);

  for (int i = first; i < steps; ++i) {
    const double now = path.sigmas[i], next = path.sigmas[i + 1];
    const double up = ancestral ? next * std::sqrt(now * now - next * next) / now : 0;
    const double down = ancestral ? next * next / now : next;
    const Combination x0 = plan.Evaluate(i - first, path.At(i));
    if (next == 0) {  // has no geometric mean
      plan.Next(x0);
      break;
    }
    const double middle = ancestral ? next : std::sqrt(now * next);  // √(now·down)
    plan.Next(X() + (middle - now) * plan.Epsilon());
    plan.Keep(kStart, X());

    plan.Evaluate(i - first, {1, middle, ConditionAt(middle, fields)});
    plan.Next(Register(kStart) + (down - now) * plan.Epsilon() + up * Noise());
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
