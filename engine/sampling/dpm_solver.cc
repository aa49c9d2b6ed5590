// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "engine/sampling/sigma_path.h"

namespace denoised {
namespace {

struct Lambda {
  double alpha, sigma, lambda;  // λ = ln(alpha/sigma); +∞ at the image
};

Lambda LambdaAt(const SigmaPath& path, int i) {
  const Level level = path.At(i);
  return {level.alpha, level.sigma, std::log(level.alpha) - std::log(level.sigma)};
}

/// The weights of one update: x ← x_weight·x + d0·D0 + d1·D1 + d2·D2 + noise·n, where D0, D1, D2
/// are the model's prediction and its first two derivatives in λ.
struct Update {
  double x, d0, d1, d2, noise;
};

/// DPM-Solver++ predicts the image, over a step of h in λ: arXiv 2211.01095, with the paper's
/// SDE-DPM-Solver++ as its stochastic form.
Update DataUpdate(const Lambda& from, const Lambda& to, double h, int order, bool stochastic,
                  bool heun) {
  const double ratio = to.sigma / from.sigma;
  // The stochastic solver integrates over twice the λ and returns what it added as noise.
  const double span = stochastic ? 2 * h : h;
  const double phi_1 = std::expm1(-span);
  Update update = {stochastic ? ratio * std::exp(-h) : ratio, -to.alpha * phi_1, 0, 0,
                   stochastic ? to.sigma * std::sqrt(-phi_1) : 0};
  if (order == 2 && !heun) update.d1 = -0.5 * to.alpha * phi_1;
  if (order == 3 || (order == 2 && heun)) update.d1 = to.alpha * (phi_1 / span + 1);
  // No paper describes a stochastic third order; the sign of its ½ is as in diffusers.
  const double half = stochastic ? -0.5 : 0.5;
  if (order == 3) update.d2 = -to.alpha * ((phi_1 + span) / (span * span) - half);
  return update;
}

/// DPM-Solver predicts the noise: arXiv 2206.00927, section 3.
Update NoiseUpdate(const Lambda& from, const Lambda& to, double h, int order, bool stochastic,
                   bool heun) {
  const double phi_1 = std::expm1(h), twice = stochastic ? 2 : 1;
  Update update = {to.alpha / from.alpha, -twice * to.sigma * phi_1, 0, 0,
                   stochastic ? to.sigma * std::sqrt(std::expm1(2 * h)) : 0};
  if (order == 2 && !heun) update.d1 = -0.5 * twice * to.sigma * phi_1;
  if (order == 3 || (order == 2 && heun)) update.d1 = -twice * to.sigma * (phi_1 / h - 1);
  if (order == 3) update.d2 = -to.sigma * ((phi_1 - h) / (h * h) - 0.5);
  return update;
}

}  // namespace

/// Multistep DPM-Solver, DPM-Solver++ and their stochastic kin, of order 1 to 3; of EDM's too.
StepPlan CompileDpmSolver(const SchedulerConfig::Fields& fields, const Request& request) {
  constexpr int kFewSteps = 15;  // below, the last steps drop their order for stability
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  const bool few = fields.lower_order_final && steps < kFewSteps;
  PlanWriter plan(fields, /*clip=*/0);
  plan.StartFromNoise(path.initial_noise);
  if (request.from_image()) plan.StartFromImage(path.At(first));

  for (int i = first; i < steps; ++i) {
    int order = std::min(request.solver_order, i - first + 1);
    if (i == steps - 1 && (few || fields.euler_at_final || fields.final_sigma_zero)) order = 1;
    if (i == steps - 2 && few) order = std::min(order, 2);

    const Combination x0 = plan.Evaluate(i - first, path.At(i));
    const Combination d0 = fields.data_prediction ? x0 : plan.Epsilon();
    plan.Keep(0, d0);
    plan.Keep(1, Register(0));
    const Lambda from = LambdaAt(path, i), to = LambdaAt(path, i + 1);
    const double h = to.lambda - from.lambda;
    if (h == 0) {  // does not move: final_sigmas_type "sigma_min" after Karras' spacing
      plan.Next(X());
      continue;
    }
    const Update update =
        fields.data_prediction
            ? DataUpdate(from, to, h, order, request.stochastic, fields.heun_solver)
            : NoiseUpdate(from, to, h, order, request.stochastic, fields.heun_solver);
    Combination x = update.x * X() + update.d0 * d0 + update.noise * Noise();
    if (order >= 2) {
      const double r0 = (from.lambda - LambdaAt(path, i - 1).lambda) / h;
      Combination d1 = 1 / r0 * (d0 - Register(0));
      if (order == 3) {
        const double r1 = (LambdaAt(path, i - 1).lambda - LambdaAt(path, i - 2).lambda) / h;
        const Combination earlier = 1 / r1 * (Register(0) - Register(1));
        const Combination d2 = 1 / (r0 + r1) * (d1 - earlier);
        x += update.d2 * d2;
        d1 += r0 * d2;
      }
      x += update.d1 * d1;
    }
    plan.Next(x);
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
