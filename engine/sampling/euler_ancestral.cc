// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "engine/sampling/sigma_path.h"

namespace denoised {

/// Euler's method to a level below the next one, and fresh noise up to it: DDPM's posterior (arXiv
/// 2006.11239) in σ.
StepPlan CompileEulerAncestral(const SchedulerConfig::Fields& fields, const Request& request) {
  const SigmaPath path = SigmaPathOf(fields, request);
  const int first = request.FirstStep(path.steps());
  PlanWriter plan = PlanAlong(path, fields, request);

  for (int i = first; i < path.steps(); ++i) {
    const double now = path.sigmas[i], next = path.sigmas[i + 1];
    const double up = next * std::sqrt(now * now - next * next) / now;
    const double down = next * next / now;  // √(next² − up²)
    plan.Evaluate(i - first, path.At(i));
    plan.Next(X() + (down - now) * plan.Epsilon() + up * Noise());
  }
  return plan.Finish(path.steps() - first);
}

}  // namespace denoised
