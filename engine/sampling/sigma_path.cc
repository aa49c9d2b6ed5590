// SPDX-License-Identifier: Apache-2.0
#include "engine/sampling/sigma_path.h"

#include <algorithm>
#include <cmath>

namespace denoised {
namespace {

using Fields = SchedulerConfig::Fields;

/// The model's condition at a level between the levels that it was trained on.
double ConditionAt(double sigma, const Fields& fields) {
  if (fields.edm) return 0.25 * std::log(sigma);
  return TimestepOfSigma(sigma, fields.log_sigmas);
}

std::vector<double> SpacedSigmas(NoiseSchedule schedule, double min, double max, double rho,
                                 int count) {
  switch (schedule) {
    case NoiseSchedule::kExponential:
      return ExponentialSigmas(min, max, count);
    case NoiseSchedule::kBeta:
      return BetaSigmas(min, max, count);
    default:
      return KarrasSigmas(min, max, rho, count);
  }
}

SigmaPath EdmPath(const Fields& fields, const Request& request) {
  SigmaPath path;
  const double min = *fields.sigma_min, max = *fields.sigma_max;
  path.sigmas = SpacedSigmas(request.schedule, min, max, fields.rho, request.steps);
  for (const double sigma : path.sigmas) path.conditions.push_back(ConditionAt(sigma, fields));
  path.sigmas.push_back(fields.final_sigma_zero ? 0 : min);
  // diffusers' EDM schedulers count the image's own variance in; the paper does not.
  path.initial_noise =
      request.sampler == Sampler::kHeun ? path.sigmas.front() : std::hypot(max, 1.0);
  return path;
}

/// Euler, Euler ancestral, LMS and Heun of diffusers.
SigmaPath DiscretePath(const Fields& fields, const Request& request) {
  constexpr double kKarrasRho = 7;
  const std::vector<double>& training = fields.sigmas;
  const TimestepSpacing spacing = fields.timestep_spacing.value_or(TimestepSpacing::kLinspace);
  SigmaPath path;
  path.conditions =
      SpacedTimesteps(spacing, fields.train_timesteps, request.steps, fields.steps_offset);
  if (request.sampler == Sampler::kEuler && fields.log_linear)
    path.sigmas = ExponentialSigmas(training.front(), training.back(), request.steps + 1);
  else
    for (const double t : path.conditions) path.sigmas.push_back(InterpolateAt(training, t));

  if (request.schedule != NoiseSchedule::kNative) {
    double min = path.sigmas.back(), max = path.sigmas.front();
    // LMS' Karras spacing is the one that knows no range of its own.
    if (request.sampler != Sampler::kLms || request.schedule != NoiseSchedule::kKarras) {
      min = fields.sigma_min.value_or(min);
      max = fields.sigma_max.value_or(max);
    }
    path.sigmas = SpacedSigmas(request.schedule, min, max, kKarrasRho, request.steps);
    for (int i = 0; i < request.steps; ++i)
      path.conditions[i] = TimestepOfSigma(path.sigmas[i], fields.log_sigmas);
  }
  const bool to_zero = request.sampler != Sampler::kEuler || fields.final_sigma_zero;
  path.sigmas.push_back(to_zero ? 0 : std::min(training.front(), path.sigmas.back()));
  if (request.sampler == Sampler::kEuler && fields.continuous_timesteps &&
      fields.prediction == Prediction::kV)
    for (int i = 0; i < request.steps; ++i) path.conditions[i] = 0.25 * std::log(path.sigmas[i]);

  const double max = path.sigmas.front();
  path.initial_noise = spacing == TimestepSpacing::kLeading ? std::hypot(max, 1.0) : max;
  return path;
}

/// The whole timesteps of DPM-Solver and UniPC: one more is spaced than visited.
std::vector<double> SolverTimesteps(const Fields& fields, const Request& request) {
  int count = fields.train_timesteps;
  if (request.sampler != Sampler::kUniPc)
    // λ = ln(alpha/sigma) = −ln σ; the noisiest levels may be cut off.
    count = static_cast<int>(
        std::count_if(fields.log_sigmas.begin(), fields.log_sigmas.end(),
                      [&](double log_sigma) { return -log_sigma >= fields.lambda_min_clipped; }));
  const TimestepSpacing spacing = fields.timestep_spacing.value_or(TimestepSpacing::kLinspace);
  if (spacing == TimestepSpacing::kTrailing)
    return TrailingTimesteps(count, static_cast<double>(fields.train_timesteps) / request.steps);
  std::vector<double> timesteps =
      Rounded(SpacedTimesteps(spacing, count, request.steps + 1, fields.steps_offset));
  timesteps.pop_back();
  return timesteps;
}

SigmaPath SolverPath(const Fields& fields, const Request& request) {
  constexpr double kKarrasRho = 7;
  const std::vector<double>& training = fields.sigmas;
  const bool uni_pc = request.sampler == Sampler::kUniPc;
  SigmaPath path;
  path.variance_preserving = true;
  double last = training.front();
  const bool lu = fields.lu_lambdas && !uni_pc && request.schedule == NoiseSchedule::kNative;
  if (request.schedule == NoiseSchedule::kNative && !lu) {
    path.conditions = SolverTimesteps(fields, request);
    for (const double t : path.conditions) path.sigmas.push_back(InterpolateAt(training, t));
  } else {
    if (lu)  // uniform in λ: arXiv 2206.00927
      path.sigmas = ExponentialSigmas(training.front(), training.back(), request.steps);
    else
      path.sigmas =
          SpacedSigmas(request.schedule, fields.sigma_min.value_or(training.front()),
                       fields.sigma_max.value_or(training.back()), kKarrasRho, request.steps);
    for (const double sigma : path.sigmas)
      path.conditions.push_back(TimestepOfSigma(sigma, fields.log_sigmas));
    // diffusers' timesteps are integers here; which spacings round first differs by class.
    if ((lu || request.schedule == NoiseSchedule::kKarras) && (uni_pc || fields.rounded_timesteps))
      path.conditions = Rounded(path.conditions);
    for (double& timestep : path.conditions) timestep = std::floor(timestep);
    last = uni_pc ? path.sigmas.back() : std::min(last, path.sigmas.back());
  }
  path.sigmas.push_back(fields.final_sigma_zero ? 0 : last);
  return path;
}

}  // namespace

Level SigmaPath::At(int i) const {
  const double condition = i < steps() ? conditions[i] : 0;
  if (!variance_preserving) return {1, sigmas[i], condition};
  const double alpha = 1 / std::hypot(sigmas[i], 1.0);
  return {alpha, sigmas[i] * alpha, condition};
}

SigmaPath::ChurnedLevel SigmaPath::Churned(int i, const Churn& churn, const Fields& fields) const {
  const Level level = At(i);
  if (i >= steps() || churn.amount == 0) return {level, 0};
  const double sigma = level.sigma, count = static_cast<double>(sigmas.size()) - 1;
  const bool within = churn.min <= sigma && sigma <= churn.max;
  const double gamma = within ? std::min(churn.amount / count, std::sqrt(2.0) - 1) : 0;
  if (gamma == 0) return {level, 0};
  const double raised = sigma * (1 + gamma);
  const bool continuous = fields.continuous_timesteps && fields.prediction == Prediction::kV;
  const double condition = continuous ? 0.25 * std::log(raised) : ConditionAt(raised, fields);
  return {{1, raised, condition}, churn.noise * std::sqrt(raised * raised - sigma * sigma)};
}

SigmaPath SigmaPathOf(const Fields& fields, const Request& request) {
  if (fields.edm) return EdmPath(fields, request);
  return IsExponentialSolver(request.sampler) ? SolverPath(fields, request)
                                              : DiscretePath(fields, request);
}

bool WalksSigmas(Sampler sampler) {
  return sampler != Sampler::kDdpm && sampler != Sampler::kDdim && sampler != Sampler::kPndm &&
         sampler != Sampler::kLcm;
}

bool IsExponentialSolver(Sampler sampler) {
  return sampler == Sampler::kDpmSolver || sampler == Sampler::kDpmSolverSde ||
         sampler == Sampler::kEdmDpmSolver || sampler == Sampler::kUniPc;
}

}  // namespace denoised
