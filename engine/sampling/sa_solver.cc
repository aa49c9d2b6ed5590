// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "engine/sampling/sigma_path.h"

namespace denoised {
namespace {

// Registers: the predictions of the three evaluations before this one, newest first, and the part
// of the last step that does not depend on predictions: its start, scaled, and its noise.
constexpr int kHistory = 3, kBase = 3;

/// The coefficients of the polynomial in u, constant first, that is 1 at nodes[which] and 0 at the
/// other nodes.
std::vector<double> LagrangePolynomial(const std::vector<double>& nodes, size_t which) {
  std::vector<double> polynomial = {1};
  for (size_t k = 0; k < nodes.size(); ++k) {
    if (k == which) continue;
    const double scale = 1 / (nodes[which] - nodes[k]);
    polynomial.push_back(0);
    for (size_t n = polynomial.size(); n-- > 0;)
      polynomial[n] = scale * ((n > 0 ? polynomial[n - 1] : 0) - nodes[k] * polynomial[n]);
  }
  return polynomial;
}

/// One step from a path level to the next on the SDE whose noise is τ times that of DDPM: arXiv
/// 2309.05019, equations 14 and 17.
class AdamsStep {
 public:
  AdamsStep(const SchedulerConfig::Fields& fields, const SigmaPath& path, int from)
      : path_(path), now_(path.At(from)), next_(path.At(from + 1)) {
    // diffusers' tau_func: noise in the middle of the training timesteps alone.
    tau2_ = now_.condition >= 200 && now_.condition <= 800 ? 1 : 0;
    data_ = !fields.noise_prediction;
    h_ = next_.lambda() - now_.lambda();
  }

  /// What the start and the noise of this evaluation contribute.
  Combination Base(const Combination& x) const {
    if (data_)
      return std::exp(-tau2_ * h_) * next_.sigma / now_.sigma * x +
             next_.sigma * std::sqrt(-std::expm1(-2 * tau2_ * h_)) * Noise();
    return next_.alpha / now_.alpha * x +
           next_.sigma * std::sqrt(tau2_ * std::expm1(2 * h_)) * Noise();
  }

  /// What the predictions contribute: those at path level `newest` and the ones before it.
  Combination Slope(const std::vector<Combination>& predictions, int newest) const {
    const size_t order = predictions.size();
    std::vector<double> nodes;  // λ, counted from the end of the step
    for (size_t k = 0; k < order; ++k)
      nodes.push_back(path_.At(newest - static_cast<int>(k)).lambda() - next_.lambda());

    // ∫ uⁿ·exp(rate·u) du over the step
    const double rate = data_ ? 1 + tau2_ : -1, decay = std::exp(-rate * h_);
    std::vector<double> moments = {-std::expm1(-rate * h_) / rate};
    for (size_t n = 1; n < order; ++n)
      moments.push_back(-(std::pow(-h_, static_cast<double>(n)) * decay + n * moments[n - 1]) /
                        rate);
    // For order 2, diffusers (and the authors) take (u + h) to first order in h.
    if (order == 2 && data_) moments[1] = h_ * h_ / 2 - h_ * moments[0];

    const double scale = (1 + tau2_) * (data_ ? next_.alpha : -next_.sigma);
    Combination slope;
    for (size_t k = 0; k < order; ++k) {
      const std::vector<double> polynomial = LagrangePolynomial(nodes, k);
      double weight = 0;
      for (size_t n = 0; n < order; ++n) weight += polynomial[n] * moments[n];
      slope += scale * weight * predictions[k];
    }
    return slope;
  }

 private:
  const SigmaPath& path_;
  NoiseLevel now_, next_;
  double tau2_, h_;
  bool data_;
};

}  // namespace

/// Stochastic Adams solver: each evaluation first corrects the state that it was predicted from
/// (Adams-Moulton, with the same noise), then predicts the next (Adams-Bashforth). Ends at the
/// smallest trained level.
StepPlan CompileSaSolver(const SchedulerConfig::Fields& fields, const Request& request) {
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  const bool lower_final = fields.lower_order_final.value_or(true);
  PlanWriter plan = PlanAlong(path, fields, request);

  for (int i = first; i < steps; ++i) {
    const Combination x0 = plan.Evaluate(i - first, path.At(i));
    const Combination m = fields.noise_prediction ? plan.Epsilon() : x0;
    const auto predictions = [&](int order) {
      std::vector<Combination> newest = {m};
      for (int k = 1; k < order; ++k) newest.push_back(Register(k - 1));
      return newest;
    };

    Combination x = X();
    if (i > first) {
      int order = std::min(fields.corrector_order, i - first + 1);
      if (lower_final) order = std::min(order, steps - i + 2);
      x = Register(kBase) + AdamsStep(fields, path, i - 1).Slope(predictions(order), i);
    }
    int order = std::min(fields.predictor_order, i - first + 1);
    if (lower_final) order = std::min(order, steps - i);
    const AdamsStep step(fields, path, i);
    const Combination base = step.Base(x);
    plan.Next(base + step.Slope(predictions(order), i));
    plan.Keep(kBase, base);
    plan.Keep(0, m);
    for (int k = 1; k < kHistory; ++k) plan.Keep(k, Register(k - 1));
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
