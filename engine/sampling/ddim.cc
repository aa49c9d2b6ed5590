// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "engine/sampling/timesteps.h"

namespace denoised {

/// arXiv 2010.02502, equations 12 and 16.
StepPlan CompileDdim(const SchedulerConfig::Fields& fields, const Request& request) {
  const std::vector<int> timesteps = WholeTimesteps(fields, request);
  const int stride = fields.train_timesteps / request.steps;
  const int first = request.FirstStep(request.steps);
  PlanWriter plan(fields, ClipOf(fields, true));
  if (request.from_image()) plan.StartFromImage(LevelAt(fields, timesteps[first]));

  for (int i = first; i < request.steps; ++i) {
    const NoiseLevel now = LevelAt(fields, timesteps[i]);
    const int target = timesteps[i] - stride;
    const NoiseLevel next = target >= 0
                                ? LevelAt(fields, target)
                                : FinalLevel(fields, fields.set_alpha_to_one.value_or(true));
    const double ratio = now.alpha / next.alpha;
    const double variance = next.sigma * next.sigma / (now.sigma * now.sigma) * (1 - ratio * ratio);
    const double noise = request.eta * std::sqrt(variance);
    const double direction = std::sqrt(std::max(next.sigma * next.sigma - noise * noise, 0.0));

    const Combination x0 = plan.Evaluate(i - first, now);
    plan.Next(next.alpha * x0 + direction * plan.Epsilon() + noise * Noise());
  }
  return plan.Finish(request.steps - first);
}

}  // namespace denoised
