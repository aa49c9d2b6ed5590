// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "engine/sampling/noise_levels.h"
#include "engine/sampling/sampler.h"

namespace denoised {

/// What fixes the noise levels that a model knows.
enum class Training {
  kBetas,        // timesteps, each with its beta
  kEdm,          // a range of σ, arXiv 2206.00364
  kFlow,         // straight paths from image to noise, σ from 0 to 1: arXiv 2209.03003
  kConsistency,  // a range of σ, distilled to reach the image at once: arXiv 2303.01469
  kScore,        // a range of σ, of images in [0, 1]: arXiv 2011.13456
};
enum class Prediction { kEpsilon, kSample, kV };
enum class Variance { kFixedSmall, kFixedLarge, kLearned, kLearnedRange };

/// The fields of a scheduler_config.json. Those of the model's training hold for every sampler. A
/// field of one sampler is optional where diffusers' classes disagree on its default:
/// `X.from_config(config)` takes the file's values and leaves the rest at X's defaults.
struct SchedulerConfig::Fields {
  Sampler default_sampler = Sampler::kDdpm;
  NoiseSchedule default_schedule = NoiseSchedule::kNative;

  // The model's training.
  Training training = Training::kBetas;
  Prediction prediction = Prediction::kEpsilon;
  Variance variance = Variance::kFixedSmall;
  int train_timesteps = 1000;
  // By timestep; empty without betas.
  std::vector<double> alphas_cumprod, sigmas, log_sigmas;
  double sigma_data = 0.5;  // EDM and consistency

  // Noise levels to sample at.
  std::optional<TimestepSpacing> timestep_spacing;
  int steps_offset = 0;
  std::optional<double> sigma_min, sigma_max;  // always set for EDM, consistency and score
  double rho = 7;                              // EDM and consistency
  double shift = 1;                            // flow: above 1 there is more noise at a step
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
  // DPM-Solver, DEIS and UniPC.
  int solver_order = 2;
  bool data_prediction = true;  // dpmsolver++ rather than dpmsolver
  bool stochastic = false;      // sde-
  bool heun_solver = false;     // solver_type "heun" rather than "midpoint"
  std::optional<bool> lower_order_final;
  bool euler_at_final = false;
  bool predict_x0 = true;
  bool bh1 = false;  // solver_type "bh1" rather than "bh2"
  std::vector<int> disable_corrector;
  // SA-Solver.
  int predictor_order = 2, corrector_order = 2;
  bool noise_prediction = false;
  // LCM and TCD.
  int original_inference_steps = 50;
  double timestep_scaling = 10;
  // Flow.
  bool stochastic_sampling = false;
  // Consistency.
  bool clip_denoised = true;
  double s_noise = 1;
  // Score.
  double snr = 0.15;
  double sampling_eps = 1e-5;
  int correct_steps = 1;
};

}  // namespace denoised
