// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "engine/sampling/timesteps.h"

namespace denoised {

/// Trajectory consistency distillation, arXiv 2402.19159, algorithm 4: each step goes along the
/// model's line to a timestep below the next one, by η (the paper's γ), and adds noise up to it.
StepPlan CompileTcd(const SchedulerConfig::Fields& fields, const Request& request) {
  const std::vector<int> timesteps = DistilledTimesteps(fields, request.steps);
  const int first = request.FirstStep(request.steps);
  PlanWriter plan(fields, /*clip=*/0);
  if (request.from_image()) plan.StartFromImage(LevelAt(fields, timesteps[first]));

  for (int i = first; i < request.steps; ++i) {
    const bool last = i + 1 == request.steps;
    const int target = last ? 0 : timesteps[i + 1];
    const NoiseLevel next = LevelAt(fields, target);
    const NoiseLevel down = LevelAt(fields, static_cast<int>((1 - request.eta) * target));

    const Combination x0 = plan.Evaluate(i - first, LevelAt(fields, timesteps[i]));
    const double kept = last ? 1 : next.alpha / down.alpha;
    plan.Next(kept * (down.alpha * x0 + down.sigma * plan.Epsilon()) +
              std::sqrt(1 - kept * kept) * Noise());
  }
  return plan.Finish(request.steps - first);
}

}  // namespace denoised
