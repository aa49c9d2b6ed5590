// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "engine/sampling/timesteps.h"

namespace denoised {

/// Multistep consistency sampling, arXiv 2310.04378, algorithm 3.
StepPlan CompileLcm(const SchedulerConfig::Fields& fields, const Request& request) {
  constexpr double kSigmaData = 0.5;
  const std::vector<int> timesteps = DistilledTimesteps(fields, request.steps);
  const int first = request.FirstStep(request.steps);
  PlanWriter plan(fields, ClipOf(fields, false));
  if (request.from_image()) plan.StartFromImage(LevelAt(fields, timesteps[first]));

  for (int i = first; i < request.steps; ++i) {
    // The consistency function is the identity at t = 0 by its boundary condition.
    const double scaled = timesteps[i] * fields.timestep_scaling;
    const double norm = std::hypot(scaled, kSigmaData);
    const double c_skip = kSigmaData * kSigmaData / (norm * norm), c_out = scaled / norm;

    const Combination x0 = plan.Evaluate(i - first, LevelAt(fields, timesteps[i]));
    const Combination denoised = c_out * x0 + c_skip * X();
    if (i + 1 == request.steps) {
      plan.Next(denoised);
    } else {
      const NoiseLevel next = LevelAt(fields, timesteps[i + 1]);
      plan.Next(next.alpha * denoised + next.sigma * Noise());
    }
  }
  return plan.Finish(request.steps - first);
}

}  // namespace denoised
