// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "engine/sampling/dpm_update.h"

namespace denoised {

/// Multistep DPM-Solver, DPM-Solver++ and their stochastic kin, of order 1 to 3; of EDM's too.
StepPlan CompileDpmSolver(const SchedulerConfig::Fields& fields, const Request& request) {
  constexpr int kFewSteps = 15;  // below, the last steps drop their order for stability
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  const bool few = fields.lower_order_final.value_or(true) && steps < kFewSteps;
  PlanWriter plan = PlanAlong(path, fields, request);

  for (int i = first; i < steps; ++i) {
    int order = std::min(request.solver_order, i - first + 1);
    if (i == steps - 1 && (few || fields.euler_at_final || fields.final_sigma_zero)) order = 1;
    if (i == steps - 2 && few) order = std::min(order, 2);

    const Combination x0 = plan.Evaluate(i - first, path.At(i));
    const Combination d0 = fields.data_prediction ? x0 : plan.Epsilon();
    plan.Keep(0, d0);
    plan.Keep(1, Register(0));
    const NoiseLevel from = path.At(i), to = path.At(i + 1);
    const double h = to.lambda() - from.lambda();
    if (h == 0) {  // does not move: final_sigmas_type "sigma_min" after Karras' spacing
      plan.Next(X());
      continue;
    }
    const DpmUpdate update = DpmUpdateOf(from, to, order, fields.data_prediction,
                                         request.stochastic, fields.heun_solver);
    Combination x = update.x * X() + update.d0 * d0 + update.noise * Noise();
    if (order >= 2) {
      const double r0 = (from.lambda() - path.At(i - 1).lambda()) / h;
      Combination d1 = 1 / r0 * (d0 - Register(0));
      if (order == 3) {
        const double r1 = (path.At(i - 1).lambda() - path.At(i - 2).lambda()) / h;
        const Combination earlier = 1 / r1 * (Register(0) - Register(1));
        const Combination d2 = 1 / (r0 + r1) * (d1 - earlier);
        x += update.d2 * d2;
        d1 += r0 * d2;
      }
      x += update.d1 * d1;
    }
    plan.Next(x);
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
