#include "engine/sampling/sigma_path.h"

namespace denoised {

/// Euler's method in σ, with the churn of arXiv 2206.00364 where asked. As in diffusers, the model
/// sees the state before the churn, and its output is taken for one at σ̂. (Heun churns before.)
StepPlan CompileEuler(const SchedulerConfig::Fields& fields, const Request& request) {
  const SigmaPath path = SigmaPathOf(fields, request);
  const int first = request.FirstStep(path.steps());
  const int levels = static_cast<int>(path.sigmas.size()) - 1;
  PlanWriter plan(fields, /*clip=*/0);
  plan.StartFromNoise(path.initial_noise);
  if (request.from_image()) plan.StartFromImage(path.At(first));

  for (int i = first; i < path.steps(); ++i) {
    const double sigma = path.sigmas[i], raised = request.churn.Raised(sigma, levels);
    plan.Evaluate(i - first, path.At(i));
    const Combination x = X() + request.churn.Added(sigma, raised) * Noise();
    // diffusers' v-prediction alone keeps to σ.
    const bool at_sigma = !fields.edm && fields.prediction == Prediction::kV;
    const Preconditioning model = PreconditioningAt({1, at_sigma ? sigma : raised, 0}, fields);
    const Combination x0 = model.x0_from_x * x + model.x0_from_model * Model();
    plan.Next(x + (path.sigmas[i + 1] - raised) / raised * (x - x0));
  }
  return plan.Finish(path.steps() - first);
}

}  // namespace denoised
