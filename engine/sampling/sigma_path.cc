// SPDX-License-Identifier: Apache-2.0
#include "engine/sampling/sigma_path.h"

#include <algorithm>
#include <cmath>

#include "engine/sampling/registry.h"

namespace denoised {
namespace {

using Fields = SchedulerConfig::Fields;

/// Of NoiseSchedule::kKarras; EDM and consistency models have a field for theirs.
constexpr double kKarrasRho = 7;

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
      TraitsOf(request.sampler).edm_noise_has_image ? std::hypot(max, 1.0) : path.sigmas.front();
  return path;
}

/// FlowMatchEulerDiscreteScheduler: σ in [0, 1], evenly spaced, then shifted towards noise.
SigmaPath FlowPath(const Fields& fields, const Request& request) {
  const auto shifted = [&](double sigma) {
    return fields.shift * sigma / (1 + (fields.shift - 1) * sigma);
  };
  SigmaPath path;
  path.scale = SigmaPath::Scale::kInterpolating;
  // diffusers shifts the lowest level twice.
  for (const double sigma : Linspace(1, shifted(1.0 / fields.train_timesteps), request.steps))
    path.sigmas.push_back(shifted(sigma));
  if (request.schedule != NoiseSchedule::kNative)
    path.sigmas =
        SpacedSigmas(request.schedule, fields.sigma_min.value_or(path.sigmas.back()),
                     fields.sigma_max.value_or(path.sigmas.front()), kKarrasRho, request.steps);
  for (const double sigma : path.sigmas) path.conditions.push_back(sigma * fields.train_timesteps);
  path.sigmas.push_back(0);
  return path;
}

/// CMStochasticIterativeScheduler: every few of the levels that the model was distilled at.
SigmaPath ConsistencyPath(const Fields& fields, const Request& request) {
  const double min = *fields.sigma_min, max = *fields.sigma_max;
  const std::vector<double> distilled = KarrasSigmas(min, max, fields.rho, fields.train_timesteps);
  const int stride = fields.train_timesteps / request.steps;
  SigmaPath path;
  for (int i = 0; i < request.steps; ++i) {
    path.sigmas.push_back(distilled[i * stride]);
    path.conditions.push_back(250 * std::log(path.sigmas.back()));
  }
  path.sigmas.push_back(min);
  path.initial_noise = max;
  return path;
}

/// ScoreSdeVeScheduler: even steps of t from 1 to sampling_eps, with σ = σ_min · (σ_max / σ_min)^t.
/// A model's images are in [0, 1] and ours in [−1, 1], so our σ is twice its own.
SigmaPath ScorePath(const Fields& fields, const Request& request) {
  const double min = *fields.sigma_min, max = *fields.sigma_max;
  SigmaPath path;
  for (const double t : Linspace(1, fields.sampling_eps, request.steps)) {
    path.conditions.push_back(min * std::pow(max / min, t));
    path.sigmas.push_back(2 * path.conditions.back());
  }
  path.sigmas.push_back(0);
  path.initial_noise = 2 * max;
  return path;
}

/// Euler, Euler ancestral, LMS, Heun, KDPM2 and DPM++ SDE of diffusers.
SigmaPath DiscretePath(const Fields& fields, const Request& request) {
  const std::vector<double>& training = fields.sigmas;
  const SamplerTraits& traits = TraitsOf(request.sampler);
  const TimestepSpacing spacing = SpacingOf(fields, request.sampler);
  SigmaPath path;
  path.conditions =
      SpacedTimesteps(spacing, fields.train_timesteps, request.steps, fields.steps_offset);
  if (traits.euler_fields && fields.log_linear)
    path.sigmas = ExponentialSigmas(training.front(), training.back(), request.steps + 1);
  else
    for (const double t : path.conditions) path.sigmas.push_back(InterpolateAt(training, t));

  if (request.schedule != NoiseSchedule::kNative) {
    double min = path.sigmas.back(), max = path.sigmas.front();
    const bool karras = request.schedule == NoiseSchedule::kKarras;
    if (traits.karras_reads_range || !karras) {
      min = fields.sigma_min.value_or(min);
      max = fields.sigma_max.value_or(max);
    }
    path.sigmas = SpacedSigmas(request.schedule, min, max, kKarrasRho, request.steps);
    for (int i = 0; i < request.steps; ++i)
      path.conditions[i] = TimestepOfSigma(path.sigmas[i], fields.log_sigmas);
    if (traits.rounds_karras && karras) path.conditions = Rounded(path.conditions);
  }
  const bool to_zero = !traits.euler_fields || fields.final_sigma_zero;
  path.sigmas.push_back(to_zero ? 0 : std::min(training.front(), path.sigmas.back()));
  if (traits.euler_fields && fields.continuous_timesteps && fields.prediction == Prediction::kV)
    for (int i = 0; i < request.steps; ++i) path.conditions[i] = 0.25 * std::log(path.sigmas[i]);

  const double max = path.sigmas.front();
  path.initial_noise = spacing == TimestepSpacing::kLeading ? std::hypot(max, 1.0) : max;
  return path;
}

/// The whole timesteps of DPM-Solver, DEIS, UniPC and SA-Solver: one more is spaced than visited.
std::vector<double> SolverTimesteps(const Fields& fields, const Request& request) {
  int count = fields.train_timesteps;
  if (TraitsOf(request.sampler).reads_lambda_min)
    // λ = ln(alpha/sigma) = −ln σ; the noisiest levels may be cut off.
    count = static_cast<int>(
        std::count_if(fields.log_sigmas.begin(), fields.log_sigmas.end(),
                      [&](double log_sigma) { return -log_sigma >= fields.lambda_min_clipped; }));
  const TimestepSpacing spacing = SpacingOf(fields, request.sampler);
  if (spacing == TimestepSpacing::kTrailing)
    return TrailingTimesteps(count, static_cast<double>(fields.train_timesteps) / request.steps);
  std::vector<double> timesteps =
      Rounded(SpacedTimesteps(spacing, count, request.steps + 1, fields.steps_offset));
  timesteps.pop_back();
  return timesteps;
}

SigmaPath SolverPath(const Fields& fields, const Request& request) {
  const std::vector<double>& training = fields.sigmas;
  const SamplerTraits& traits = TraitsOf(request.sampler);
  SigmaPath path;
  path.scale = SigmaPath::Scale::kPreserving;
  double last = training.front();
  const bool lu =
      fields.lu_lambdas && traits.dpm_fields && request.schedule == NoiseSchedule::kNative;
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
    if ((lu || request.schedule == NoiseSchedule::kKarras) &&
        (!traits.dpm_fields || fields.rounded_timesteps))
      path.conditions = Rounded(path.conditions);
    for (double& timestep : path.conditions) timestep = std::floor(timestep);
    last = traits.ends_before_image || traits.repeats_last_sigma
               ? path.sigmas.back()
               : std::min(last, path.sigmas.back());
  }
  path.sigmas.push_back(fields.final_sigma_zero && !traits.ends_before_image ? 0 : last);
  return path;
}

}  // namespace

double ConditionAt(double sigma, const Fields& fields) {
  if (fields.training == Training::kEdm) return 0.25 * std::log(sigma);
  return TimestepOfSigma(sigma, fields.log_sigmas);
}

NoiseLevel SigmaPath::At(int i) const {
  const double condition = i < steps() ? conditions[i] : 0;
  if (scale == Scale::kOne) return {1, sigmas[i], condition};
  if (scale == Scale::kInterpolating) return {1 - sigmas[i], sigmas[i], condition};
  const double alpha = 1 / std::hypot(sigmas[i], 1.0);
  return {alpha, sigmas[i] * alpha, condition};
}

SigmaPath::ChurnedLevel SigmaPath::Churned(int i, const Churn& churn, const Fields& fields) const {
  const NoiseLevel level = At(i);
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
  if (fields.training == Training::kEdm) return EdmPath(fields, request);
  if (fields.training == Training::kFlow) return FlowPath(fields, request);
  if (fields.training == Training::kConsistency) return ConsistencyPath(fields, request);
  if (fields.training == Training::kScore) return ScorePath(fields, request);
  return TraitsOf(request.sampler).levels == Levels::kSolver ? SolverPath(fields, request)
                                                             : DiscretePath(fields, request);
}

PlanWriter PlanAlong(const SigmaPath& path, const SchedulerConfig::Fields& fields,
                     const Request& request, double clip) {
  PlanWriter plan(fields, clip);
  plan.StartFromNoise(path.initial_noise);
  if (request.from_image()) plan.StartFromImage(path.At(request.FirstStep(path.steps())));
  return plan;
}

}  // namespace denoised
