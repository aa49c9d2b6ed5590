// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/core/status.h"
#include "engine/sampling/noise_levels.h"
#include "engine/training/backend.h"

namespace denoised::training {

/// What the network learns to predict, and from which noise levels.
struct ObjectiveOptions {
  /// kEdm: Karras et al. (arXiv 2206.00364), preconditioned. kEpsilon, kV, kX0: DDPM (2006.11239)
  /// with the noise, the velocity (2202.00512) or the image as the target. kFlow: rectified flow
  /// (2209.03003), as FlowMatchEulerDiscreteScheduler samples it. kScore: the score of images in
  /// [0, 1] under a variance exploding SDE (2011.13456), for networks with a Fourier embedding of
  /// σ.
  enum class Kind { kEdm, kEpsilon, kV, kX0, kFlow, kScore } kind = Kind::kEdm;

  // kEdm.
  double sigma_data = 0.5, log_sigma_mean = -1.2, log_sigma_deviation = 1.2;
  double sigma_min = 0.002, sigma_max = 80;  // of the sampler

  // DDPM.
  int timesteps = 1000;
  std::string beta_schedule = "linear";  // or scaled_linear, squaredcos_cap_v2
  double beta_start = 1e-4, beta_end = 0.02;
  std::optional<double> min_snr;  // γ of min-SNR weighting (2303.09556)
  /// The network predicts its variance too, as "learned_range" of 2102.09672: twice the channels.
  bool learned_variance = false;
  double variance_weight = 1e-3;  // λ of L_vlb
  /// kV: plain v weights the image's error by SNR + 1 (2202.00512); the SNR is capped at this.
  std::optional<double> cap_snr;

  // kScore: ln σ is uniform between these.
  double score_sigma_min = 0.01, score_sigma_max = 50;

  // kFlow: σ is uniform in (0, 1), or the logistic function of a normal random number (2403.03206).
  bool logit_normal = true;
};

/// epsilon, v or x0: they have timesteps and betas.
bool IsDdpm(ObjectiveOptions::Kind kind);
std::optional<ObjectiveOptions::Kind> ObjectiveFromName(const std::string& name);
const char* Name(ObjectiveOptions::Kind kind);

/// How the networks that this scheduler_config.json samples are trained. InvalidArgument names
/// `file`, the field, its value and the remedy.
absl::StatusOr<ObjectiveOptions> ObjectiveOfScheduler(const nlohmann::json& config,
                                                      const std::string& file);

/// As many as the server accepts in a scheduler's config.
constexpr int kMaxTimesteps = 100'000;

/// Plans the noise of samples. Everything is computed in double. Immutable.
class Objective {
 public:
  static absl::StatusOr<Objective> Make(const ObjectiveOptions& options);

  /// Fills in signal, noise, shift, target_signal, target_noise, condition and weight from the
  /// sample's own random numbers; with a learned variance also mean_factor, log_variance_min and
  /// log_variance_max.
  void Plan(uint64_t seed, uint32_t step, uint32_t sample, SampleRow* row) const;

  /// VarianceLossArgs::weight. L_vlb is the sum of L over all timesteps, in bits; a sample has one
  /// random timestep.
  double VarianceWeight() const;

  /// The scheduler_config.json with which diffusers and the server sample the trained network.
  nlohmann::json SchedulerConfig() const;

 private:
  explicit Objective(const ObjectiveOptions& options) : options_(options) {}
  void PlanDdpm(int timestep, SampleRow* row) const;

  ObjectiveOptions options_;
  std::vector<double> betas_;
  std::vector<double> alphas_cumprod_;  // ᾱ by timestep
};

}  // namespace denoised::training
