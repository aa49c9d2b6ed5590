// SPDX-License-Identifier: Apache-2.0
#include "engine/sampling/dpm_update.h"

#include <cmath>

namespace denoised {
namespace {

/// DPM-Solver++ predicts the image, over a step of h in λ: arXiv 2211.01095, with the paper's
/// SDE-DPM-Solver++ as its stochastic form.
DpmUpdate DataUpdate(const NoiseLevel& from, const NoiseLevel& to, double h, int order,
                     bool stochastic, bool heun) {
  const double ratio = to.sigma / from.sigma;
  // The stochastic solver integrates over twice the λ and returns what it added as noise.
  const double span = stochastic ? 2 * h : h;
  const double phi_1 = std::expm1(-span);
  DpmUpdate update = {stochastic ? ratio * std::exp(-h) : ratio, -to.alpha * phi_1, 0, 0,
                      stochastic ? to.sigma * std::sqrt(-phi_1) : 0};
  if (order == 2 && !heun) update.d1 = -0.5 * to.alpha * phi_1;
  if (order == 3 || (order == 2 && heun)) update.d1 = to.alpha * (phi_1 / span + 1);
  // No paper describes a stochastic third order; the sign of its ½ is as in diffusers.
  const double half = stochastic ? -0.5 : 0.5;
  if (order == 3) update.d2 = -to.alpha * ((phi_1 + span) / (span * span) - half);
  return update;
}

/// DPM-Solver predicts the noise: arXiv 2206.00927, section 3.
DpmUpdate NoiseUpdate(const NoiseLevel& from, const NoiseLevel& to, double h, int order,
                      bool stochastic, bool heun) {
  const double phi_1 = std::expm1(h), twice = stochastic ? 2 : 1;
  DpmUpdate update = {to.alpha / from.alpha, -twice * to.sigma * phi_1, 0, 0,
                      stochastic ? to.sigma * std::sqrt(std::expm1(2 * h)) : 0};
  if (order == 2 && !heun) update.d1 = -0.5 * twice * to.sigma * phi_1;
  if (order == 3 || (order == 2 && heun)) update.d1 = -twice * to.sigma * (phi_1 / h - 1);
  if (order == 3) update.d2 = -to.sigma * ((phi_1 - h) / (h * h) - 0.5);
  return update;
}

}  // namespace

DpmUpdate DpmUpdateOf(const NoiseLevel& from, const NoiseLevel& to, int order, bool data_prediction,
                      bool stochastic, bool heun) {
  const double h = to.lambda() - from.lambda();
  return data_prediction ? DataUpdate(from, to, h, order, stochastic, heun)
                         : NoiseUpdate(from, to, h, order, stochastic, heun);
}

}  // namespace denoised
