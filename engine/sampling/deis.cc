// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "engine/sampling/sigma_path.h"

namespace denoised {
namespace {

/// ∫ dσ from `begin` to `end` of the Lagrange polynomial in ln σ that is 1 at nodes[which] and 0 at
/// the other nodes: three at most. With u = ln σ it is ∫ eᵘ·P(u) du = eᵘ·(P − P′ + P″).
double LogLagrangeIntegral(const std::vector<double>& nodes, size_t which, double begin,
                           double end) {
  std::vector<double> roots;
  double scale = 1;
  for (size_t k = 0; k < nodes.size(); ++k) {
    if (k == which) continue;
    roots.push_back(std::log(nodes[k]));
    scale /= std::log(nodes[which]) - roots.back();
  }
  const auto antiderivative = [&](double sigma) {
    const double u = std::log(sigma);
    double value = 1;
    if (roots.size() == 1) value = u - roots[0] - 1;
    if (roots.size() == 2)
      value = (u - roots[0]) * (u - roots[1]) - (2 * u - roots[0] - roots[1]) + 2;
    return sigma * value;
  };
  return scale * (antiderivative(end) - antiderivative(begin));
}

}  // namespace

/// Exponential integrator with noise extrapolated in ln σ, of order 1 to 3: arXiv 2204.13902,
/// ρAB-DEIS. Ends at the smallest trained level, not at 0, whose logarithm is infinite.
StepPlan CompileDeis(const SchedulerConfig::Fields& fields, const Request& request) {
  constexpr int kFewSteps = 15;  // below, the last steps drop their order for stability
  constexpr int kHistory = 2;
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  const bool few = fields.lower_order_final.value_or(true) && steps < kFewSteps;
  PlanWriter plan = PlanAlong(path, fields, request);

  for (int i = first; i < steps; ++i) {
    int order = std::min(request.solver_order, i - first + 1);
    if (few) order = std::min(order, steps - i);
    plan.Evaluate(i - first, path.At(i));
    const Combination epsilon = plan.Epsilon();
    const std::vector<double> nodes(path.sigmas.rbegin() + (path.steps() - i),
                                    path.sigmas.rbegin() + (path.steps() - i + order));
    Combination scaled = 1 / path.At(i).alpha * X();  // x/alpha, in which dx/dσ is the noise
    for (int k = 0; k < order; ++k)
      scaled += LogLagrangeIntegral(nodes, k, path.sigmas[i], path.sigmas[i + 1]) *
                (k == 0 ? epsilon : Register(k - 1));
    plan.Next(path.At(i + 1).alpha * scaled);
    plan.Keep(0, epsilon);
    for (int k = 1; k < kHistory; ++k) plan.Keep(k, Register(k - 1));
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
