// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "engine/sampling/sigma_path.h"

namespace denoised {
namespace {

/// Level k of `count` whose logarithms are evenly spaced, as the predictor counts them. The
/// image is below the lowest.
double DiscreteSigma(const SchedulerConfig::Fields& fields, int k, int count) {
  if (k < 0) return 0;
  const double ratio = *fields.sigma_max / *fields.sigma_min;
  return *fields.sigma_min * std::pow(ratio, count > 1 ? static_cast<double>(k) / (count - 1) : 0);
}

}  // namespace

/// A predictor and `correct_steps` correctors before it, arXiv 2011.13456, algorithms 2 and 4. The
/// model predicts the score of images in [0, 1]; the state is twice as large, so is each change.
StepPlan CompileScoreSdeVe(const SchedulerConfig::Fields& fields, const Request& request) {
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  PlanWriter plan = PlanAlong(path, fields, request);

  for (int i = first; i < steps; ++i) {
    for (int corrector = 0; corrector < fields.correct_steps; ++corrector) {
      plan.Evaluate(i - first, path.At(i));
      plan.ScaleByNorms();  // the step size ε = 2 · (snr · ‖noise‖ / ‖score‖)²
      plan.Next(X() + 2 * (2 * fields.snr * fields.snr * Model() + 2 * fields.snr * Noise()));
    }
    plan.Evaluate(i - first, path.At(i));
    const int level = static_cast<int>(steps - 1 - i * (1 - fields.sampling_eps));
    const double sigma = DiscreteSigma(fields, level, steps);
    const double below = DiscreteSigma(fields, level - 1, steps);
    const double variance = sigma * sigma - below * below;
    const Combination mean = X() + 2 * variance * Model();
    plan.Next(i + 1 == steps ? mean : mean + 2 * std::sqrt(variance) * Noise());
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
