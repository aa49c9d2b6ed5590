#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/sampling/sigma_path.h"

namespace denoised {
namespace {

// Registers: the predictions of the evaluations before this one, newest first, and the state that
// the last step started from.
constexpr int kHistory = 2 + 1, kStart = kHistory;

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

/// One step of UniP or UniC, arXiv 2302.04867, algorithms 1 and 2, from path level `from` to the
/// next one.
struct UniStep {
  UniStep(const SchedulerConfig::Fields& fields, const SigmaPath& path, int from, int order)
      : data(fields.predict_x0), order(order), now(path.At(from)), next(path.At(from + 1)) {
    const double lambda = LambdaOf(now);
    const double h = LambdaOf(next) - lambda;
    // The paper's B(h), times which the differences count; one sign for data, one for noise.
    hh = data ? -h : h;
    b_h = fields.bh1 ? hh : std::expm1(hh);
    for (int i = 1; i < order; ++i) nodes.push_back((LambdaOf(path.At(from - i)) - lambda) / h);
  }

  static double LambdaOf(const Level& level) {
    return std::log(level.alpha) - std::log(level.sigma);
  }

  /// The order-1 part, with the prediction `m` at its start.
  Combination Base(const Combination& x, const Combination& m) const {
    const double ratio = next.sigma / now.sigma, signal = next.alpha / now.alpha;
    // α(1 − e^−h) and σ(e^h − 1), in forms that hold for σ = 0 too.
    return data ? ratio * x + (next.alpha - now.alpha * ratio) * m
                : signal * x + (next.sigma - now.sigma * signal) * m;
  }

  /// What the differences at `nodes` (and `at`, when correcting) weigh: R·ρ = b of the paper.
  std::vector<double> Weights(std::vector<double> at) const {
    const size_t n = at.size();
    std::vector<std::vector<double>> r(n, std::vector<double>(n));
    std::vector<double> b(n);
    double phi = std::expm1(hh) / hh - 1, factorial = 1;
    for (size_t i = 0; i < n; ++i) {
      for (size_t k = 0; k < n; ++k) r[i][k] = std::pow(at[k], static_cast<double>(i));
      b[i] = phi * factorial / b_h;
      factorial *= static_cast<double>(i + 2);
      phi = phi / hh - 1 / factorial;
    }
    return Solve(std::move(r), std::move(b));
  }

  double scale() const { return -(data ? next.alpha : next.sigma) * b_h; }

  /// Register(0) holds `m`'s predecessor when predicting: `earlier(i)` is i evaluations before `m`.
  template <typename Earlier>
  Combination Predict(const Combination& x, const Combination& m, const Earlier& earlier) const {
    Combination result = Base(x, m);
    if (order == 1) return result;
    // The paper's exception: order 2 needs no system.
    const std::vector<double> rho = order == 2 ? std::vector<double>{0.5} : Weights(nodes);
    for (int i = 0; i < order - 1; ++i)
      result += scale() * rho[i] / nodes[i] * (earlier(i + 1) - m);
    return result;
  }

  template <typename Earlier>
  Combination Correct(const Combination& x, const Combination& m, const Combination& m_next,
                      const Earlier& earlier) const {
    std::vector<double> with_next = nodes;
    with_next.push_back(1);
    const std::vector<double> rho = order == 1 ? std::vector<double>{0.5} : Weights(with_next);
    Combination result = Base(x, m);
    for (int i = 0; i < order - 1; ++i)
      result += scale() * rho[i] / nodes[i] * (earlier(i + 1) - m);
    return result += scale() * rho.back() * (m_next - m);
  }

  bool data;
  int order;
  Level now, next;
  double hh = 0, b_h = 0;
  std::vector<double> nodes;
};

}  // namespace

/// Each evaluation first corrects the state that it was predicted from, then predicts the next.
StepPlan CompileUniPc(const SchedulerConfig::Fields& fields, const Request& request) {
  const SigmaPath path = SigmaPathOf(fields, request);
  const int steps = path.steps(), first = request.FirstStep(steps);
  PlanWriter plan(fields, /*clip=*/0);
  plan.StartFromNoise(path.initial_noise);
  if (request.from_image()) plan.StartFromImage(path.At(first));

  int last_order = 0;
  for (int i = first; i < steps; ++i) {
    const Combination x0 = plan.Evaluate(i - first, path.At(i));
    const Combination m = fields.predict_x0 ? x0 : plan.Epsilon();
    Combination x = X();
    const auto& off = fields.disable_corrector;
    if (i > first && std::find(off.begin(), off.end(), i - 1) == off.end())
      x = UniStep(fields, path, i - 1, last_order)
              .Correct(Register(kStart), Register(0), m, [](int k) { return Register(k); });

    int order = std::min(request.solver_order, i - first + 1);
    if (fields.lower_order_final) order = std::min(order, steps - i);
    const UniStep step(fields, path, i, order);
    // A last step without length: final_sigmas_type "sigma_min" after Karras' spacing.
    plan.Next(step.hh == 0 ? x : step.Predict(x, m, [](int k) { return Register(k - 1); }));
    plan.Keep(kStart, x);
    plan.Keep(0, m);
    for (int k = 1; k < kHistory; ++k) plan.Keep(k, Register(k - 1));
    last_order = order;
  }
  return plan.Finish(steps - first);
}

}  // namespace denoised
