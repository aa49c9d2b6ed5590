// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "engine/sampling/timesteps.h"

namespace denoised {

/// Ancestral sampling, arXiv 2006.11239, equations 6 and 7.
StepPlan CompileDdpm(const SchedulerConfig::Fields& fields, const Request& request) {
  const std::vector<int> timesteps = WholeTimesteps(fields, request);
  const int first = request.FirstStep(request.steps);
  PlanWriter plan(fields, ClipOf(fields, true));
  if (request.from_image()) plan.StartFromImage(LevelAt(fields, timesteps[first]));

  for (int i = first; i < request.steps; ++i) {
    const bool last = i + 1 == request.steps;
    const double cumprod = fields.alphas_cumprod[timesteps[i]];
    const double previous = last ? 1 : fields.alphas_cumprod[timesteps[i + 1]];
    const double alpha = cumprod / previous, beta = 1 - alpha;

    const Combination x0 = plan.Evaluate(i - first, LevelAt(fields, timesteps[i]));
    Combination mean = std::sqrt(previous) * beta / (1 - cumprod) * x0 +
                       std::sqrt(alpha) * (1 - previous) / (1 - cumprod) * X();
    if (timesteps[i] == 0) {
      plan.Next(mean);
      continue;
    }
    // The posterior's variance; its logarithm is taken, so it must not be 0.
    const double posterior = std::max((1 - previous) / (1 - cumprod) * beta, 1e-20);
    switch (fields.variance) {
      case Variance::kFixedSmall:
        mean += std::sqrt(posterior) * Noise();
        break;
      case Variance::kFixedLarge:
        mean += std::sqrt(beta) * Noise();
        break;
      case Variance::kLearned:
        plan.LearnedNoise(NoiseScale::kLearned, 0, 0);
        mean += Noise();
        break;
      case Variance::kLearnedRange:  // arXiv 2102.09672, equation 15
        plan.LearnedNoise(NoiseScale::kLearnedRange, std::log(posterior), std::log(beta));
        mean += Noise();
        break;
    }
    plan.Next(mean);
  }
  return plan.Finish(request.steps - first);
}

}  // namespace denoised
