#include "engine/sampling/sigma_path.h"
#include "engine/sampling/timesteps.h"

namespace denoised {

/// arXiv 2206.00364, algorithm 2; without churn algorithm 1, and diffusers' HeunDiscreteScheduler.
/// The churn of a step is added where the step before it ends, so that the model sees its result.
StepPlan CompileHeun(const SchedulerConfig::Fields& fields, const Request& request) {
  constexpr int kStart = 0, kSlope = 1;
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  PlanWriter plan(fields, ClipOf(fields, false));
  plan.StartFromNoise(path.initial_noise);
  if (request.from_image()) plan.StartFromImage(path.At(first));

  const auto raised = [&](int i) { return request.churn.Raised(path.sigmas[i], steps); };
  const auto churn = [&](int i) { return request.churn.Added(path.sigmas[i], raised(i)); };
  plan.ChurnStart(churn(first));
  for (int i = first; i < steps; ++i) {
    const double sigma = raised(i), next = path.sigmas[i + 1];
    Level level = path.At(i);
    if (sigma > level.sigma) level = {1, sigma, ConditionAt(sigma, fields)};
    Combination x0 = plan.Evaluate(i - first, level);
    const Combination slope = 1 / sigma * (X() - x0);
    plan.Next(X() + (next - sigma) * slope);
    if (i + 1 == steps) break;
    plan.Keep(kStart, X());
    plan.Keep(kSlope, slope);

    x0 = plan.Evaluate(i - first, path.At(i + 1));
    const Combination end_slope = 1 / next * (X() - x0);
    plan.Next(Register(kStart) + (next - sigma) / 2 * (Register(kSlope) + end_slope) +
              churn(i + 1) * Noise());
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
