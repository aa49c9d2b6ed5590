// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string_view>

#include "engine/sampling/samplers.h"

namespace denoised {

/// Which noise levels a sampler visits.
enum class Levels {
  kSigmas,       // a SigmaPath, spaced as the request asks
  kSolver,       // the same, of an exponential integrator: one timestep more is spaced than visited
  kFixedSigmas,  // a SigmaPath with a spacing of its own
  kTimesteps,    // whole training timesteps
  kDistilled,    // of the timesteps that the model was distilled at
};

/// Whether a sampler solves the SDE, as "sde-" in algorithm_type asks. Only kAlways has
/// "sde-dpmsolver", which predicts noise.
enum class SolvesSde { kNever, kAlways, kAsConfigured };

/// What diffusers' class takes for betas that a config leaves out.
struct DefaultBetas {
  double start = 0.0001, end = 0.02;
  BetaSchedule schedule = BetaSchedule::kLinear;
};

/// All that is known of a sampler outside its own file, but for what the words of algorithm_type
/// mean to DPM-Solver, DEIS and SA-Solver: scheduler_config.cc reads all of them in one place.
struct SamplerTraits {
  Sampler sampler;
  std::string_view name;
  const char* class_name = nullptr;  // of diffusers; null if it is an option of another's class
  StepPlan (*compile)(const SchedulerConfig::Fields& fields, const Request& request);

  // The models that it samples.
  Training training = Training::kBetas;
  bool also_edm = false;          // EDM models too
  bool sample_prediction = true;  // models that predict the sample too

  // What its class takes for fields that the config leaves out.
  int train_timesteps = 1000;
  DefaultBetas betas = {};
  bool has_steps_offset = true;  // its class knows the field
  bool clips_samples = false;    // by default
  int default_steps = 50;        // of pipelines that have no default of their own

  // How it samples.
  Levels levels = Levels::kSigmas;
  bool spaced_by_config = true;  // its class knows use_karras_sigmas and its like
  std::optional<TimestepSpacing> timestep_spacing = {};  // the only one that its class knows
  SolvesSde sde = SolvesSde::kNever;

  // How its class differs from others in spacing σ.
  bool edm_noise_has_image = true;  // EDM: the first state counts the image's variance in
  bool euler_fields = false;        // interpolation_type, timestep_type, final_sigmas_type
  bool karras_reads_range = true;   // Karras' spacing too reads sigma_min and sigma_max
  bool rounds_karras = false;       // to whole timesteps
  bool reads_lambda_min = false;    // lambda_min_clipped
  bool dpm_fields = false;          // use_lu_lambdas; rounded_timesteps
  bool repeats_last_sigma = false;  // final_sigmas_type "sigma_min" is the last one spaced
  bool ends_before_image = false;   // at the last level, whatever final_sigmas_type says

  // The parameters of a request that it reads.
  std::optional<double> eta = {};  // its default
  bool churn = false;
  bool solver_order = false;
  /// A condition on a request that is right but for this. Null if there is none.
  std::optional<ParamViolation> (*check)(const SchedulerConfig::Fields& fields,
                                         const Request& request) = nullptr;

  /// Whether it samples the model that a config describes.
  bool samples(const SchedulerConfig::Fields& fields) const;
  /// Whether a request may choose how its levels are spaced.
  bool spaces_levels() const { return levels == Levels::kSigmas || levels == Levels::kSolver; }
  /// Whether it walks a SigmaPath, rather than whole timesteps.
  bool walks_sigmas() const { return spaces_levels() || levels == Levels::kFixedSigmas; }
};

const SamplerTraits& TraitsOf(Sampler sampler);
/// The sampler of a class of diffusers; null if there is none.
const SamplerTraits* FindSchedulerClass(std::string_view class_name);

/// The default spacing of a request: the config's, unless diffusers' class of this sampler supports
/// only its own.
NoiseSchedule DefaultSchedule(const SchedulerConfig::Fields& fields, Sampler sampler);
/// How training timesteps are spaced, by the same rule.
TimestepSpacing SpacingOf(const SchedulerConfig::Fields& fields, Sampler sampler);
/// The first of so many leading timesteps, which may lie beyond the training's; −1 of others.
int HighestTimestep(const SchedulerConfig::Fields& fields, Sampler sampler, NoiseSchedule schedule,
                    int steps);

}  // namespace denoised
