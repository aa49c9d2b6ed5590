// SPDX-License-Identifier: Apache-2.0
#include "engine/sampling/sigma_path.h"

namespace denoised {

/// Euler's method along the straight paths of rectified flow (arXiv 2209.03003), whose state is
/// (1 − σ)·x0 + σ·noise; stochastic, it draws the noise anew at each level.
StepPlan CompileFlowMatchEuler(const SchedulerConfig::Fields& fields, const Request& request) {
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  PlanWriter plan = PlanAlong(path, fields, request);

  for (int i = first; i < steps; ++i) {
    const double now = path.sigmas[i], next = path.sigmas[i + 1];
    const Combination x0 = plan.Evaluate(i - first, path.At(i));
    plan.Next(fields.stochastic_sampling ? (1 - next) * x0 + next * Noise()
                                         : X() + (next - now) * Model());
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
