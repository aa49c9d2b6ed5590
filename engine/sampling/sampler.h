// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/status.h"
#include "engine/core/step_plan.h"

/// Pure mathematics, no device: turns a diffusers scheduler_config.json and the parameters of a
/// request into a StepPlan. Everything is computed in double.

namespace denoised {

/// diffusers' schedulers, by what they do.
enum class Sampler {
  kDdpm,                 // DDPMScheduler, arXiv 2006.11239
  kDdim,                 // DDIMScheduler, 2010.02502
  kPndm,                 // PNDMScheduler, 2202.09778
  kEuler,                // EulerDiscreteScheduler
  kEulerAncestral,       // EulerAncestralDiscreteScheduler
  kLms,                  // LMSDiscreteScheduler
  kHeun,                 // HeunDiscreteScheduler; with EDM models, 2206.00364 algorithm 2
  kDpmSolver,            // DPMSolverMultistepScheduler, dpmsolver and dpmsolver++; 2211.01095
  kDpmSolverSde,         // the same with algorithm_type sde-dpmsolver(++)
  kUniPc,                // UniPCMultistepScheduler, 2302.04867
  kLcm,                  // LCMScheduler, 2310.04378
  kEdmEuler,             // EDMEulerScheduler, 2206.00364
  kEdmDpmSolver,         // EDMDPMSolverMultistepScheduler
  kDpmppSde,             // DPMSolverSDEScheduler, "DPM++ SDE"; 2211.01095
  kDeis,                 // DEISMultistepScheduler, 2204.13902
  kKdpm2,                // KDPM2DiscreteScheduler, "DPM2"; 2206.00364 and 2206.00927
  kKdpm2Ancestral,       // KDPM2AncestralDiscreteScheduler, "DPM2 a"
  kTcd,                  // TCDScheduler, 2402.19159
  kDpmSolverSinglestep,  // DPMSolverSinglestepScheduler, 2206.00927 and 2211.01095
  kFlowMatchEuler,       // FlowMatchEulerDiscreteScheduler, 2403.03206
  kConsistency,          // CMStochasticIterativeScheduler, 2303.01469
  kSaSolver,             // SASolverScheduler, 2309.05019
  kScoreSdeVe,           // ScoreSdeVeScheduler, 2011.13456
};

/// How noise levels are spaced.
enum class NoiseSchedule {
  kNative,       // as the model was trained: from its betas, or EDM's Karras spacing
  kKarras,       // ρ = 7
  kExponential,  // log-linear
  kBeta,         // quantiles of Beta(0.6, 0.6)
};

/// Lower-case names for messages, the command line and metrics: "dpm_solver", "karras".
std::string_view Name(Sampler sampler);
std::string_view Name(NoiseSchedule schedule);
std::optional<Sampler> SamplerFromName(std::string_view name);
std::optional<NoiseSchedule> NoiseScheduleFromName(std::string_view name);
const std::vector<Sampler>& AllSamplers();
const std::vector<NoiseSchedule>& AllNoiseSchedules();

/// The sampling parameters of a request. Unset fields come from the model's scheduler config.
struct SamplerParams {
  std::optional<Sampler> sampler;
  std::optional<NoiseSchedule> schedule;
  int steps = 0;  // ≥ 1
  /// DDIM's η and TCD's γ in [0, 1]: 0 is deterministic.
  std::optional<double> eta;
  /// EDM's churn (algorithm 2), for Euler, Heun and EDM Euler.
  std::optional<double> s_churn, s_tmin, s_tmax, s_noise;
  /// 1–3, for DPM-Solver, DEIS and UniPC.
  std::optional<int> solver_order;
  /// In (0, 1]: 1 draws from noise; below, image to image that keeps the last strength × steps.
  double strength = 1.0;
};

/// One error in SamplerParams: the field's name as above, and what would be accepted.
struct ParamViolation {
  std::string field;
  std::string description;
};

/// A parsed scheduler_config.json: training betas or EDM's σ range, prediction type, and the fields
/// of its class. Immutable, cheap to copy, thread-safe.
class SchedulerConfig {
 public:
  /// InvalidArgument names a class or field that is not supported. `file` appears in messages.
  /// `latents`: the states are latents, which have no bounds. x0 is then clipped only if the config
  /// says so, or its own class does by default.
  static absl::StatusOr<SchedulerConfig> Parse(const nlohmann::json& config, std::string file,
                                               bool latents = false);

  /// The config's own class and spacing: the defaults of a request.
  Sampler default_sampler() const;
  NoiseSchedule default_schedule() const;
  /// The samplers for this model. An EDM model has no betas, so those that need them are not among
  /// them. Flow matching, consistency and score models have one sampler each.
  std::vector<Sampler> samplers() const;
  std::vector<NoiseSchedule> schedules(Sampler sampler) const;
  /// Most steps that a plan may have: num_train_timesteps, or 1000 for EDM; no more than
  /// original_inference_steps for LCM and TCD.
  int max_steps(Sampler sampler) const;
  /// The same with timesteps that exist: with steps_offset the first may lie beyond the training's.
  int max_steps(Sampler sampler, NoiseSchedule schedule) const;
  /// The model must output twice the channels: mean and variance.
  bool learns_variance() const;
  /// Plans have NoiseScale::kNormRatio.
  bool measures_outputs() const;

  /// Valid `params` with unset fields filled in, so that they alone determine the plan. Fields that
  /// the sampler does not have stay unset.
  SamplerParams WithDefaults(const SamplerParams& params) const;
  /// InvalidArgument with all errors in `params`; `violations`, if given, receives them.
  absl::StatusOr<StepPlan> Compile(const SamplerParams& params,
                                   std::vector<ParamViolation>* violations = nullptr) const;

  struct Fields;

 private:
  std::shared_ptr<const Fields> fields_;
};

}  // namespace denoised
