// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "engine/sampling/sigma_path.h"

namespace denoised {
namespace {

/// ∫ from `begin` to `end` of the Lagrange polynomial that is 1 at nodes[which] and 0 at the other
/// nodes. Of degree 3 at most, so Gauss' two points are exact.
double LagrangeIntegral(const std::vector<double>& nodes, size_t which, double begin, double end) {
  const auto polynomial = [&](double at) {
    double product = 1;
    for (size_t k = 0; k < nodes.size(); ++k)
      if (k != which) product *= (at - nodes[k]) / (nodes[which] - nodes[k]);
    return product;
  };
  const double middle = (begin + end) / 2, half = (end - begin) / 2;
  const double offset = half / std::sqrt(3.0);
  return half * (polynomial(middle - offset) + polynomial(middle + offset));
}

}  // namespace

/// Linear multistep of order four over the derivatives dx/dσ.
StepPlan CompileLms(const SchedulerConfig::Fields& fields, const Request& request) {
  constexpr int kOrder = 4;
  const SigmaPath path = SigmaPathOf(fields, request);
  const int first = request.FirstStep(path.steps());
  PlanWriter plan = PlanAlong(path, fields, request);

  for (int i = first; i < path.steps(); ++i) {
    plan.Evaluate(i - first, path.At(i));
    const Combination derivative = plan.Epsilon();
    std::vector<double> nodes;
    for (int k = i; k >= std::max(first, i - kOrder + 1); --k) nodes.push_back(path.sigmas[k]);

    Combination x = X();
    for (size_t k = 0; k < nodes.size(); ++k)
      x += LagrangeIntegral(nodes, k, path.sigmas[i], path.sigmas[i + 1]) *
           (k == 0 ? derivative : Register(static_cast<int>(k) - 1));
    plan.Next(x);
    plan.Keep(0, derivative);
    for (int k = 1; k < kOrder - 1; ++k) plan.Keep(k, Register(k - 1));
  }
  return plan.Finish(path.steps() - first);
}

}  // namespace denoised
