// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "engine/sampling/sigma_path.h"

namespace denoised {

/// Multistep consistency sampling, arXiv 2303.01469, algorithm 1: to the image, and back to the
/// next level with fresh noise.
StepPlan CompileConsistency(const SchedulerConfig::Fields& fields, const Request& request) {
  const double min = *fields.sigma_min, max = *fields.sigma_max;
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  PlanWriter plan = PlanAlong(path, fields, request, fields.clip_denoised ? 1 : 0);

  for (int i = first; i < steps; ++i) {
    const Combination x0 = plan.Evaluate(i - first, path.At(i));
    const double next = std::clamp(path.sigmas[i + 1], min, max);
    plan.Next(x0 + fields.s_noise * std::sqrt(next * next - min * min) * Noise());
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
