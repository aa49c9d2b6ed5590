// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "engine/sampling/noise_levels.h"
#include "engine/sampling/sampler.h"

namespace denoised {

enum class Prediction { kEpsilon, kSample, kV };
enum class Variance { kFixedSmall, kFixedLarge, kLearned, kLearnedRange };

/// The fields of a scheduler_config.json. Those of the model's training hold for every sampler. A
/// field of one sampler is optional where diffusers' classes disagree on its default:
/// `X.from_config(config)` takes the file's values and leaves the rest at X's defaults.
struct SchedulerConfig::Fields {
  Sampler default_sampler = Sampler::kDdpm;
  NoiseSchedule default_schedule = NoiseSchedule::kNative;

  // The model's training.
  bool edm = false;
  Prediction prediction = Prediction::kEpsilon;
  Variance variance = Variance::kFixedSmall;
  int train_timesteps = 1000;
  // By timestep; empty for EDM.
  std::vector<double> alphas_cumprod, sigmas, log_sigmas;
  double sigma_data = 0.5;  // EDM

  // Noise levels to sample at.
  std::optional<TimestepSpacing> timestep_spacing;
  int steps_offset = 0;
  std::optional<double> sigma_min, sigma_max;  // always set for EDM
  double rho = 7;                              // EDM
  bool final_sigma_zero = true;
  bool log_linear = false;            // Euler
  bool continuous_timesteps = false;  // Euler with v-prediction
  bool lu_lambdas = false;            // DPM-Solver
  bool rounded_timesteps = true;      // DPM-Solver, with Karras' and Lu's spacing
  double lambda_min_clipped = -std::numeric_limits<double>::infinity();  // DPM-Solver

  // DDPM, DDIM, LCM, Heun.
  std::optional<bool> clip_sample;
  double clip_sample_range = 1;
  // DDIM and PNDM.
  std::optional<bool> set_alpha_to_one;
  bool skip_prk_steps = false;
  // DPM-Solver and UniPC.
  int solver_order = 2;
  bool data_prediction = true;  // dpmsolver++ rather than dpmsolver
  bool stochastic = false;      // sde-
  bool heun_solver = false;     // solver_type "heun" rather than "midpoint"
  bool lower_order_final = true;
  bool euler_at_final = false;
  bool predict_x0 = true;
  bool bh1 = false;  // solver_type "bh1" rather than "bh2"
  std::vector<int> disable_corrector;
  // LCM.
  int original_inference_steps = 50;
  double timestep_scaling = 10;
};

/// The default spacing of a request: the config's, unless diffusers' class of this sampler supports
/// only its own.
NoiseSchedule DefaultSchedule(const SchedulerConfig::Fields& fields, Sampler sampler);

}  // namespace denoised
