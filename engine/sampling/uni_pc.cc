// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/sampling/sigma_path.h"

namespace denoised {
namespace {

// Registers: the predictions of the three evaluations before this one, newest first, and the state
// that the last step started from.
constexpr int kPredictions = 3, kStart = kPredictions;

/// Solves the square system a·x = b by Gaussian elimination with pivoting.
std::vector<double> Solve(std::vector<std::vector<double>> a, std::vector<double> b) {
  const size_t n = b.size();
  for (size_t column = 0; column < n; ++column) {
    size_t pivot = column;
    for (size_t row = column; row < n; ++row)
      if (std::abs(a[row][column]) > std::abs(a[pivot][column])) pivot = row;
    std::swap(a[column], a[pivot]);
    std::swap(b[column], b[pivot]);
    for (size_t row = 0; row < n; ++row) {
      if (row == column) continue;
      const double factor = a[row][column] / a[column][column];
      for (size_t k = column; k < n; ++k) a[row][k] -= factor * a[column][k];
      b[row] -= factor * b[column];
    }
  }
  for (size_t i = 0; i < n; ++i) b[i] /= a[i][i];
  return b;
}

/// One step from a path level to the next, arXiv 2302.04867: UniP (algorithm 2) when it knows
/// predictions at and before its start, UniC (algorithm 1) when at its end too.
class UniStep {
 public:
  UniStep(const SchedulerConfig::Fields& fields, const SigmaPath& path, int from)
      : path_(path), now_(path.At(from)), next_(path.At(from + 1)) {
    data_ = fields.predict_x0;
    h_ = next_.lambda() - now_.lambda();
    signed_h_ = data_ ? -h_ : h_;
    b_h_ = fields.bh1 ? signed_h_ : std::expm1(signed_h_);
  }

  double h() const { return h_; }
  /// Where an earlier level lies, in units of h from the start; the end lies at 1.
  double Position(int level) const { return (path_.At(level).lambda() - now_.lambda()) / h_; }

  /// The state at the end, from `x` and the prediction `m` at the start and `others` elsewhere.
  Combination Advance(const Combination& x, const Combination& m,
                      const std::vector<Combination>& others,
                      const std::vector<double>& positions) const {
    const double noise = next_.sigma / now_.sigma, signal = next_.alpha / now_.alpha;
    // α(1 − e^−h) and σ(1 − e^h), in forms that hold for σ = 0 too.
    Combination result = data_ ? noise * x + (next_.alpha - now_.alpha * noise) * m
                               : signal * x + (next_.sigma - now_.sigma * signal) * m;
    if (others.empty()) return result;
    // A single difference weighs ½ whatever B(h) is, as the paper has it for UniP-2 and UniC-1.
    const std::vector<double> rho =
        others.size() == 1 ? std::vector<double>{0.5} : Weights(positions);
    const double scale = -(data_ ? next_.alpha : next_.sigma) * b_h_;
    for (size_t k = 0; k < others.size(); ++k)
      result += scale * rho[k] / positions[k] * (others[k] - m);
    return result;
  }

 private:
  /// R·ρ = b, equation 5: ρ that match the exponential integrator's expansion order by order.
  std::vector<double> Weights(const std::vector<double>& positions) const {
    const size_t n = positions.size();
    std::vector<std::vector<double>> r(n, std::vector<double>(n));
    std::vector<double> b(n);
    double phi = std::expm1(signed_h_) / signed_h_ - 1, factorial = 1;
    for (size_t i = 0; i < n; ++i) {
      for (size_t k = 0; k < n; ++k) r[i][k] = std::pow(positions[k], static_cast<double>(i));
      b[i] = phi * factorial / b_h_;
      factorial *= static_cast<double>(i + 2);
      phi = phi / signed_h_ - 1 / factorial;
    }
    return Solve(std::move(r), std::move(b));
  }

  const SigmaPath& path_;
  NoiseLevel now_, next_;
  bool data_;
  double h_, signed_h_, b_h_;  // h as data or noise prediction counts it, and the paper's B(h)
};

}  // namespace

std::optional<ParamViolation> CheckUniPc(const SchedulerConfig::Fields& fields,
                                         const Request& request) {
  const bool lowers = fields.lower_order_final.value_or(true);
  if (request.solver_order == 1 || request.steps == 1 || lowers || !fields.final_sigma_zero)
    return std::nullopt;
  return ParamViolation{"solver_order",
                        fmt::format("is {}; uni_pc cannot end at sigma 0 with lower_order_final "
                                    "false in its config, use 1",
                                    request.solver_order)};
}

/// Each evaluation first corrects the state that it was predicted from, then predicts the next.
StepPlan CompileUniPc(const SchedulerConfig::Fields& fields, const Request& request) {
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  PlanWriter plan = PlanAlong(path, fields, request);

  int last_order = 0;
  for (int i = first; i < steps; ++i) {
    const Combination x0 = plan.Evaluate(i - first, path.At(i));
    const Combination m = fields.predict_x0 ? x0 : plan.Epsilon();

    Combination x = X();
    const auto& off = fields.disable_corrector;
    if (i > first && std::find(off.begin(), off.end(), i - 1) == off.end()) {
      const UniStep step(fields, path, i - 1);
      std::vector<Combination> others;
      std::vector<double> positions;
      for (int k = 1; k < last_order; ++k) {
        others.push_back(Register(k));
        positions.push_back(step.Position(i - 1 - k));
      }
      others.push_back(m);
      positions.push_back(1);
      x = step.Advance(Register(kStart), Register(0), others, positions);
    }

    int order = std::min(request.solver_order, i - first + 1);
    if (fields.lower_order_final.value_or(true)) order = std::min(order, steps - i);
    const UniStep step(fields, path, i);
    std::vector<Combination> others;
    std::vector<double> positions;
    for (int k = 1; k < order; ++k) {
      others.push_back(Register(k - 1));
      positions.push_back(step.Position(i - k));
    }
    // A last step without length: final_sigmas_type "sigma_min" after Karras' spacing.
    plan.Next(step.h() == 0 ? x : step.Advance(x, m, others, positions));
    plan.Keep(kStart, x);
    plan.Keep(0, m);
    for (int k = 1; k < kPredictions; ++k) plan.Keep(k, Register(k - 1));
    last_order = order;
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
