// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "engine/sampling/sigma_path.h"

namespace denoised {
namespace {

/// Moves `x` from one σ to a lower one by the exact solution of the SDE for a constant x0.
Combination Toward(const Combination& x0, const Combination& x, double from, double to) {
  const double kept = (to / from) * (to / from);
  return kept * x + (1 - kept) * x0 + to * std::sqrt(1 - kept) * Noise();
}

}  // namespace

/// DPM-Solver++ on the SDE, of order 2 within each step: to the geometric mean of both levels, then
/// the whole step again with the x0 found there. Both draws of noise are independent. (In diffusers
/// they are two spans of one Brownian path.)
StepPlan CompileDpmppSde(const SchedulerConfig::Fields& fields, const Request& request) {
  constexpr int kStart = 0;
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  PlanWriter plan = PlanAlong(path, fields, request);

  for (int i = first; i < steps; ++i) {
    const double now = path.sigmas[i], next = path.sigmas[i + 1];
    Combination x0 = plan.Evaluate(i - first, path.At(i));
    if (next == 0) {
      plan.Next(x0);
      break;
    }
    const double middle = std::sqrt(now * next);
    plan.Next(Toward(x0, X(), now, middle));
    plan.Keep(kStart, X());

    x0 = plan.Evaluate(i - first, {1, middle, ConditionAt(middle, fields)});
    plan.Next(Toward(x0, Register(kStart), now, next));
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
