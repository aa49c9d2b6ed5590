// SPDX-License-Identifier: Apache-2.0
#include "engine/training/objective.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "engine/core/config_reader.h"
#include "engine/sampling/registry.h"
#include "engine/training/random.h"

namespace denoised::training {
namespace {

using Kind = ObjectiveOptions::Kind;

constexpr std::pair<Kind, const char*> kNames[] = {
    {Kind::kEdm, "edm"}, {Kind::kEpsilon, "epsilon"}, {Kind::kV, "v"},
    {Kind::kX0, "x0"},   {Kind::kFlow, "flow"},       {Kind::kScore, "score"}};

constexpr std::pair<BetaSchedule, const char*> kSchedules[] = {
    {BetaSchedule::kLinear, "linear"},
    {BetaSchedule::kScaledLinear, "scaled_linear"},
    {BetaSchedule::kSquaredCosCapV2, "squaredcos_cap_v2"}};
constexpr const char* kUseSchedule = "use linear, scaled_linear or squaredcos_cap_v2";

std::optional<BetaSchedule> ScheduleFromName(const std::string& name) {
  for (const auto& [schedule, its_name] : kSchedules)
    if (name == its_name) return schedule;
  return std::nullopt;
}

constexpr std::pair<Kind, const char*> kPredictions[] = {
    {Kind::kEpsilon, "epsilon"}, {Kind::kV, "v_prediction"}, {Kind::kX0, "sample"}};

// Samplers go from 0.002 to 80. Far beyond, what the network gets would not be finite.
constexpr double kMinSigmaData = 1e-3, kMaxSigmaData = 1e3;
constexpr double kMinScoreSigma = 1e-4, kMaxScoreSigma = 1e4;

/// Betas, and what the network predicts.
void ReadDdpm(const SamplerTraits& traits, ConfigReader& reader, ObjectiveOptions* options) {
  // Fields that say another schedule than the betas do.
  reader.Refuse("rescale_betas_zero_snr", false);
  reader.Refuse("trained_betas", nullptr);
  reader.Refuse("use_flow_sigmas", false);
  // diffusers before 0.9 said so that the network predicts x0.
  if (const nlohmann::json& epsilon = reader.Raw("predict_epsilon");
      !epsilon.is_null() && epsilon != true)
    reader.Complain("predict_epsilon",
                    "not supported; remove it, and set prediction_type to \"sample\"");
  options->beta_start = traits.betas.start;
  options->beta_end = traits.betas.end;
  for (const auto& [schedule, name] : kSchedules)
    if (schedule == traits.betas.schedule) options->beta_schedule = name;
  reader.Read("beta_schedule", &options->beta_schedule);
  reader.Read("beta_start", &options->beta_start);
  reader.Read("beta_end", &options->beta_end);
  if (!ScheduleFromName(options->beta_schedule)) reader.Complain("beta_schedule", kUseSchedule);
  if (!(options->beta_start > 0 && options->beta_start <= options->beta_end &&
        options->beta_end < 1))
    reader.Complain("beta_start", fmt::format("use 0 < beta_start ≤ beta_end < 1; beta_end is {}",
                                              options->beta_end));
  std::string prediction = "epsilon";
  reader.Read("prediction_type", &prediction);
  for (const auto& [kind, name] : kPredictions)
    if (prediction == name) {
      options->kind = kind;
      return;
    }
  reader.Complain("prediction_type", "use epsilon, v_prediction or sample");
}

}  // namespace

bool IsDdpm(Kind kind) { return kind == Kind::kEpsilon || kind == Kind::kV || kind == Kind::kX0; }

std::optional<Kind> ObjectiveFromName(const std::string& name) {
  for (const auto& [kind, its_name] : kNames)
    if (name == its_name) return kind;
  return std::nullopt;
}

const char* Name(Kind kind) {
  for (const auto& [each, name] : kNames)
    if (each == kind) return name;
  return "";
}

absl::StatusOr<ObjectiveOptions> ObjectiveOfScheduler(const nlohmann::json& config,
                                                      const std::string& file) {
  ConfigReader reader(config, file);
  // The others say how to sample.
  for (const auto& item : config.items()) reader.Ignore({item.key().c_str()});
  std::string name;
  reader.Read("_class_name", &name);
  const SamplerTraits* const traits = FindSchedulerClass(name);
  ObjectiveOptions options;
  if (traits == nullptr || traits->levels == Levels::kDistilled ||
      traits->training == Training::kConsistency) {
    reader.Complain("_class_name",
                    "does not say how to train; use a DDPM schedule, such as DDIMScheduler or "
                    "DPMSolverMultistepScheduler");
  } else if (traits->training == Training::kEdm) {
    options.kind = Kind::kEdm;
    reader.Refuse("prediction_type", "epsilon");
    reader.Read("sigma_data", &options.sigma_data);
    reader.Read("sigma_min", &options.sigma_min);
    reader.Read("sigma_max", &options.sigma_max);
    reader.CheckRange("sigma_data", options.sigma_data, kMinSigmaData, kMaxSigmaData);
    if (!(options.sigma_min > 0)) reader.Complain("sigma_min", "use a number above 0");
    if (!(options.sigma_max > options.sigma_min))
      reader.Complain("sigma_max", "use a number above sigma_min");
  } else if (traits->training == Training::kScore) {
    options.kind = Kind::kScore;
    options.score_sigma_max = 1348;  // the default of diffusers' class
    reader.Read("sigma_min", &options.score_sigma_min);
    reader.Read("sigma_max", &options.score_sigma_max);
    reader.CheckRange("sigma_min", options.score_sigma_min, kMinScoreSigma, kMaxScoreSigma);
    reader.CheckRange("sigma_max", options.score_sigma_max, kMinScoreSigma, kMaxScoreSigma);
    if (!(options.score_sigma_max > options.score_sigma_min))
      reader.Complain("sigma_max", "use a number above sigma_min");
  } else {
    options.timesteps = traits->train_timesteps;
    reader.Read("timesteps", &options.timesteps);  // before diffusers 0.1
    reader.Read("num_train_timesteps", &options.timesteps);
    reader.CheckRange("num_train_timesteps", options.timesteps, 1, kMaxTimesteps);
    options.kind = Kind::kFlow;
    if (traits->training == Training::kBetas) {
      ReadDdpm(*traits, reader, &options);
    } else if (const nlohmann::json& shift = reader.Raw("shift"); !shift.is_null() && shift != 1) {
      reader.Complain("shift", "the scheduler of the trained model has 1; use 1");
    }
  }
  DENOISED_RETURN_IF_ERROR(reader.Finish());
  return options;
}

absl::StatusOr<Objective> Objective::Make(const ObjectiveOptions& options) {
  Objective objective(options);
  const auto positive = [](const char* field, double value) {
    if (value > 0) return absl::OkStatus();
    return InvalidArgument("{} is {}; it must be greater than 0", field, value);
  };
  const auto between = [](const char* field, double value, double low, double high) {
    if (value >= low && value <= high) return absl::OkStatus();
    return InvalidArgument("{} is {}; use {} to {}", field, value, low, high);
  };
  DENOISED_RETURN_IF_ERROR(
      between("--sigma-data", options.sigma_data, kMinSigmaData, kMaxSigmaData));
  DENOISED_RETURN_IF_ERROR(between("--log-sigma-mean", options.log_sigma_mean, -10, 10));
  DENOISED_RETURN_IF_ERROR(between("--log-sigma-deviation", options.log_sigma_deviation, 1e-3, 10));
  if (options.min_snr) DENOISED_RETURN_IF_ERROR(positive("--min-snr", *options.min_snr));
  if (options.cap_snr) DENOISED_RETURN_IF_ERROR(positive("--cap-snr", *options.cap_snr));
  if (options.cap_snr && (options.kind != Kind::kV || options.min_snr))
    return InvalidArgument("--cap-snr is of the objective v, without --min-snr");
  const bool ddpm = IsDdpm(options.kind);
  if (options.min_snr && !ddpm)
    return InvalidArgument("--min-snr weights the DDPM objectives; \"{}\" has weights of its own",
                           Name(options.kind));
  if (options.learned_variance) {
    if (!ddpm)
      return InvalidArgument(
          "the network's out_channels is twice its in_channels, a learned variance, which \"{}\" "
          "does not have; use the objective epsilon, v or x0, or make out_channels in_channels",
          Name(options.kind));
    DENOISED_RETURN_IF_ERROR(positive("--variance-weight", options.variance_weight));
    if (options.timesteps < 2)
      return InvalidArgument("--timesteps is {}; a learned variance needs at least 2",
                             options.timesteps);
  }
  if (options.kind == Kind::kScore) {
    DENOISED_RETURN_IF_ERROR(
        between("--sigma-min", options.score_sigma_min, kMinScoreSigma, kMaxScoreSigma));
    DENOISED_RETURN_IF_ERROR(
        between("--sigma-max", options.score_sigma_max, kMinScoreSigma, kMaxScoreSigma));
    if (!(options.score_sigma_min < options.score_sigma_max))
      return InvalidArgument("--sigma-min is {} and --sigma-max {}; use a larger maximum",
                             options.score_sigma_min, options.score_sigma_max);
  }
  if ((ddpm || options.kind == Kind::kFlow) &&
      (options.timesteps < 1 || options.timesteps > kMaxTimesteps))
    return InvalidArgument("--timesteps is {}; use 1 to {}", options.timesteps, kMaxTimesteps);
  if (!ddpm) return objective;
  if (!(options.beta_start > 0 && options.beta_start <= options.beta_end && options.beta_end < 1))
    return InvalidArgument("--beta-start is {} and --beta-end {}; use 0 < start ≤ end < 1",
                           options.beta_start, options.beta_end);
  const std::optional<BetaSchedule> schedule = ScheduleFromName(options.beta_schedule);
  if (!schedule)
    return InvalidArgument("--beta-schedule is \"{}\"; {}", options.beta_schedule, kUseSchedule);
  objective.betas_ = Betas(*schedule, options.beta_start, options.beta_end, options.timesteps);
  objective.alphas_cumprod_ = AlphasCumprod(objective.betas_);
  return objective;
}

void Objective::Plan(uint64_t seed, uint32_t step, uint32_t sample, SampleRow* row) const {
  const Philox4 bits = Draw(seed, Purpose::kLevel, step, sample, 0);
  const double normal = NormalOfBits(bits).v[0];
  const double uniform = (static_cast<double>(bits.v[2]) + 0.5) * 0x1p-32;
  if (options_.kind == Kind::kEdm) {
    // Table 1: D = c_skip·x + c_out·F(c_in·x), and λ(σ)·c_out² = 1, so F's target has weight 1.
    const double sigma = std::exp(options_.log_sigma_mean + options_.log_sigma_deviation * normal);
    const double data = options_.sigma_data, root = std::hypot(sigma, data);
    const double skip = data * data / (root * root), out = sigma * data / root;
    row->signal = static_cast<float>(1 / root);
    row->noise = static_cast<float>(sigma / root);
    row->target_signal = static_cast<float>((1 - skip) / out);
    row->target_noise = static_cast<float>(-skip * sigma / out);
    row->condition = static_cast<float>(std::log(sigma) / 4);
    row->weight = 1;
  } else if (options_.kind == Kind::kScore) {
    // Equation 7 with λ(σ) = σ². y/2 + 1/2 is the image in [0, 1].
    const double ratio = options_.score_sigma_max / options_.score_sigma_min;
    const double sigma = options_.score_sigma_min * std::pow(ratio, uniform);
    row->signal = row->shift = 0.5f;
    row->noise = row->condition = static_cast<float>(sigma);
    row->target_signal = 0;
    row->target_noise = static_cast<float>(-1 / sigma);
    row->weight = static_cast<float>(sigma * sigma);
  } else if (options_.kind == Kind::kFlow) {
    const double sigma = options_.logit_normal ? 1 / (1 + std::exp(-normal)) : uniform;
    row->signal = static_cast<float>(1 - sigma);
    row->noise = static_cast<float>(sigma);
    row->target_signal = -1;
    row->target_noise = 1;
    row->condition = static_cast<float>(sigma * options_.timesteps);
    row->weight = 1;
  } else {
    PlanDdpm(static_cast<int>(uint64_t{bits.v[2]} * alphas_cumprod_.size() >> 32), row);
  }
}

void Objective::PlanDdpm(int timestep, SampleRow* row) const {
  const double bar = alphas_cumprod_[timestep], signal = std::sqrt(bar), noise = std::sqrt(1 - bar);
  const double snr = bar / (1 - bar);
  const double capped = options_.min_snr ? std::min(snr, *options_.min_snr) : snr;
  double target_signal = 0, target_noise = 0, weight = 1;
  switch (options_.kind) {
    case Kind::kEpsilon:
      target_noise = 1;
      weight = options_.min_snr ? std::min(1.0, *options_.min_snr / snr) : 1;  // snr may be 0
      break;
    case Kind::kV:
      target_signal = -noise;
      target_noise = signal;
      weight = options_.min_snr   ? capped / (snr + 1)
               : options_.cap_snr ? (std::min(snr, *options_.cap_snr) + 1) / (snr + 1)
                                  : 1;
      break;
    default:  // kX0
      target_signal = 1;
      weight = capped;
      break;
  }
  row->signal = static_cast<float>(signal);
  row->noise = static_cast<float>(noise);
  row->target_signal = static_cast<float>(target_signal);
  row->target_noise = static_cast<float>(target_noise);
  row->condition = static_cast<float>(timestep);
  row->weight = static_cast<float>(weight);
  if (!options_.learned_variance) return;
  // 2102.09672: the posterior's mean is √ᾱ_{t−1}·β/(1 − ᾱ)·x0 + …, its variance (1 − ᾱ_{t−1})/(1 −
  // ᾱ)·β; at t = 0 that is 0, and the next one stands for it.
  const double beta = betas_[timestep], before = timestep == 0 ? 1 : alphas_cumprod_[timestep - 1];
  const double of_image = std::sqrt(before) * beta / (1 - bar);
  if (options_.kind != Kind::kEpsilon) {
    row->mean_factor = static_cast<float>(of_image * (options_.kind == Kind::kV ? noise : -1));
  } else if (bar >= std::numeric_limits<double>::min()) {
    row->mean_factor = static_cast<float>(of_image * (noise / signal));
  } else {  // ᾱ is 0 or has few bits; √ᾱ_{t−1} and √ᾱ cancel but for √(1 − β)
    row->mean_factor = static_cast<float>(beta / std::sqrt((1 - beta) * (1 - bar)));
  }
  const int posterior = std::max(timestep, 1);
  const double variance =
      (1 - alphas_cumprod_[posterior - 1]) / (1 - alphas_cumprod_[posterior]) * betas_[posterior];
  row->log_variance_min = static_cast<float>(std::log(variance));
  row->log_variance_max = static_cast<float>(std::log(beta));
}

double Objective::VarianceWeight() const {
  return options_.variance_weight * options_.timesteps / std::numbers::ln2;
}

nlohmann::json Objective::SchedulerConfig() const {
  if (options_.kind == Kind::kEdm)
    return {{"_class_name", "EDMDPMSolverMultistepScheduler"},
            {"algorithm_type", "dpmsolver++"},
            {"final_sigmas_type", "zero"},
            {"num_train_timesteps", 1000},
            {"prediction_type", "epsilon"},
            {"rho", 7.0},
            {"sigma_data", options_.sigma_data},
            {"sigma_max", options_.sigma_max},
            {"sigma_min", options_.sigma_min},
            {"sigma_schedule", "karras"},
            {"solver_order", 2},
            {"solver_type", "midpoint"}};
  if (options_.kind == Kind::kFlow)
    return {{"_class_name", "FlowMatchEulerDiscreteScheduler"},
            {"num_train_timesteps", options_.timesteps},
            {"shift", 1.0}};
  if (options_.kind == Kind::kScore)
    return {{"_class_name", "ScoreSdeVeScheduler"},
            {"correct_steps", 1},
            {"num_train_timesteps", 2000},
            {"sampling_eps", 1e-5},
            {"sigma_max", options_.score_sigma_max},
            {"sigma_min", options_.score_sigma_min},
            {"snr", 0.15}};
  const char* prediction = "";
  for (const auto& [kind, name] : kPredictions)
    if (kind == options_.kind) prediction = name;
  nlohmann::json config = {{"beta_start", options_.beta_start},
                           {"beta_end", options_.beta_end},
                           {"beta_schedule", options_.beta_schedule},
                           {"clip_sample", true},
                           {"num_train_timesteps", options_.timesteps},
                           {"prediction_type", prediction},
                           {"steps_offset", 0},
                           {"timestep_spacing", "leading"}};
  if (options_.learned_variance) {
    config["_class_name"] = "DDPMScheduler";  // the one of diffusers that samples with it
    config["variance_type"] = "learned_range";
  } else {
    config["_class_name"] = "DDIMScheduler";
    config["set_alpha_to_one"] = true;
  }
  return config;
}

}  // namespace denoised::training
