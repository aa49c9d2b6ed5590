// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "engine/sampling/dpm_update.h"

namespace denoised {
namespace {

/// The order of each step: 1, 2, …, solver_order, over and over. A step of order n redoes the n − 1
/// steps before it from where the first of them started. The last one drops to order 1 where it
/// ends at σ = 0, and where lower_order_final wants it.
int OrderOf(int step, int steps, int solver_order, const SchedulerConfig::Fields& fields) {
  const bool lower_final = fields.lower_order_final.value_or(false);
  if (step == steps - 1 && (fields.final_sigma_zero || (lower_final && steps % solver_order == 0)))
    return 1;
  return step % solver_order + 1;
}

}  // namespace

/// Singlestep DPM-Solver (arXiv 2206.00927) and DPM-Solver++ (2211.01095), one evaluation a step.
StepPlan CompileDpmSolverSinglestep(const SchedulerConfig::Fields& fields, const Request& request) {
  constexpr int kNewest = 0, kOlder = 1, kStart = 2;
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  PlanWriter plan = PlanAlong(path, fields, request);

  for (int i = first; i < steps; ++i) {
    const int order = std::min(OrderOf(i, steps, request.solver_order, fields), i - first + 1);
    const Combination x0 = plan.Evaluate(i - first, path.At(i));
    const Combination m = fields.data_prediction ? x0 : plan.Epsilon();
    const Combination start = order == 1 ? X() : Register(kStart);
    plan.Keep(kNewest, m);
    plan.Keep(kOlder, Register(kNewest));
    plan.Keep(kStart, start);

    const NoiseLevel from = path.At(i - order + 1), to = path.At(i + 1);
    const double h = to.lambda() - from.lambda();
    if (h == 0) {  // does not move: final_sigmas_type "sigma_min" after Karras' spacing
      plan.Next(start);
      continue;
    }
    const DpmUpdate update = DpmUpdateOf(from, to, order, fields.data_prediction,
                                         request.stochastic, fields.heun_solver);
    Combination x = update.x * start + update.noise * Noise();
    if (order == 1) {
      x += update.d0 * m;
    } else if (order == 2) {
      const double r = (path.At(i).lambda() - from.lambda()) / h;
      x += update.d0 * Register(kNewest) + update.d1 / r * (m - Register(kNewest));
    } else {
      const double r0 = (path.At(i).lambda() - from.lambda()) / h;
      const double r1 = (path.At(i - 1).lambda() - from.lambda()) / h;
      const Combination d0 = Register(kOlder);
      const Combination near = 1 / r1 * (Register(kNewest) - d0), far = 1 / r0 * (m - d0);
      x += update.d0 * d0;
      if (fields.heun_solver)
        x += update.d1 / (r0 - r1) * (r0 * near - r1 * far) +
             2 * update.d2 / (r0 - r1) * (far - near);
      else
        x += update.d1 * far;
    }
    plan.Next(x);
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
