// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>

#include "engine/core/config_reader.h"
#include "engine/sampling/registry.h"

namespace denoised {
namespace {

using Fields = SchedulerConfig::Fields;

/// No published training schedule is longer. The bound keeps a bad file from exhausting memory.
constexpr int kMaxTrainTimesteps = 100000;

void ReadClass(ConfigReader& config, Fields* fields) {
  const nlohmann::json& name = config.Raw("_class_name");
  std::string supported;
  for (const Sampler sampler : AllSamplers()) {
    const SamplerTraits& traits = TraitsOf(sampler);
    if (traits.class_name == nullptr) continue;
    if (name == traits.class_name) {
      fields->default_sampler = sampler;
      fields->training = traits.training;
      return;
    }
    supported += fmt::format("{}{}", supported.empty() ? "" : ", ", traits.class_name);
  }
  config.Complain("_class_name", fmt::format("not supported; use one of {}", supported));
}

/// Reads one of a few words into a value (or an optional of it); any other word is an error.
template <typename Value, typename Target>
void ReadChoice(ConfigReader& config, const char* field,
                std::initializer_list<std::pair<const char*, Value>> choices, Target* target) {
  const nlohmann::json& read = config.Raw(field);
  if (read.is_null()) return;
  std::string accepted;
  for (const auto& [word, value] : choices) {
    if (read == word) {
      *target = value;
      return;
    }
    accepted += fmt::format("{}\"{}\"", accepted.empty() ? "" : ", ", word);
  }
  config.Complain(field, fmt::format("not supported; use one of {}", accepted));
}

void ReadBetas(ConfigReader& config, Fields* fields) {
  auto [start, end, schedule] = TraitsOf(fields->default_sampler).betas;
  std::vector<double> betas;
  config.Read("beta_start", &start);
  config.Read("beta_end", &end);
  ReadChoice<BetaSchedule>(config, "beta_schedule",
                           {{"linear", BetaSchedule::kLinear},
                            {"scaled_linear", BetaSchedule::kScaledLinear},
                            {"squaredcos_cap_v2", BetaSchedule::kSquaredCosCapV2},
                            {"sigmoid", BetaSchedule::kSigmoid},
                            {"laplace", BetaSchedule::kLaplace},
                            {"exp", BetaSchedule::kExp}},
                           &schedule);
  config.Read("trained_betas", &betas);
  bool zero_snr = false;
  config.Read("rescale_betas_zero_snr", &zero_snr);
  fields->rounded_timesteps = schedule != BetaSchedule::kSquaredCosCapV2;

  const bool trained = config.Has("trained_betas");
  const int count = fields->train_timesteps;
  if (trained && static_cast<int>(betas.size()) != count) {
    config.Complain("trained_betas", fmt::format("has {} values; give num_train_timesteps = {}",
                                                 betas.size(), count));
    return;
  }
  if (!trained) betas = Betas(schedule, start, end, count);
  for (int t = 0; t < count; ++t) {
    if (betas[t] > 0 && betas[t] < 1) continue;
    config.Complain(
        trained                     ? "trained_betas"
        : !(start > 0 && start < 1) ? "beta_start"
                                    : "beta_end",
        fmt::format("beta {} would be {}; every beta must lie between 0 and 1", t, betas[t]));
    return;
  }
  if (zero_snr && count < 2) {
    config.Complain("rescale_betas_zero_snr", "needs num_train_timesteps of at least 2");
    return;
  }
  fields->alphas_cumprod = AlphasCumprod(zero_snr ? RescaleToZeroTerminalSnr(betas) : betas);
  std::vector<double> alphas = fields->alphas_cumprod;
  // The last σ would be infinite; diffusers' value, the smallest positive half.
  if (zero_snr) alphas.back() = std::exp2(-24);
  fields->sigmas = SigmasFromAlphas(alphas);
  for (const double sigma : fields->sigmas) fields->log_sigmas.push_back(std::log(sigma));
}

void ReadTraining(ConfigReader& config, Fields* fields) {
  const bool consistency = fields->training == Training::kConsistency;
  fields->train_timesteps = TraitsOf(fields->default_sampler).train_timesteps;
  // diffusers before 0.1 called it "timesteps".
  config.Read("timesteps", &fields->train_timesteps);
  config.Read("num_train_timesteps", &fields->train_timesteps);
  if (fields->train_timesteps < 1 || fields->train_timesteps > kMaxTrainTimesteps) {
    config.Complain("num_train_timesteps", fmt::format("use 1 to {}", kMaxTrainTimesteps));
    fields->train_timesteps = 1000;
  }
  if (consistency && fields->train_timesteps < 2)
    config.Complain("num_train_timesteps", "use at least 2");
  if (TraitsOf(fields->default_sampler).sample_prediction)
    ReadChoice<Prediction>(config, "prediction_type",
                           {{"epsilon", Prediction::kEpsilon},
                            {"sample", Prediction::kSample},
                            {"v_prediction", Prediction::kV}},
                           &fields->prediction);
  else
    ReadChoice<Prediction>(config, "prediction_type",
                           {{"epsilon", Prediction::kEpsilon}, {"v_prediction", Prediction::kV}},
                           &fields->prediction);
  // The _log variants differ in how they were computed, not in value.
  ReadChoice<Variance>(config, "variance_type",
                       {{"fixed_small", Variance::kFixedSmall},
                        {"fixed_small_log", Variance::kFixedSmall},
                        {"fixed_large", Variance::kFixedLarge},
                        {"fixed_large_log", Variance::kFixedLarge},
                        {"learned", Variance::kLearned},
                        {"learned_range", Variance::kLearnedRange}},
                       &fields->variance);
  if (fields->training == Training::kBetas) ReadBetas(config, fields);
}

void ReadSigmas(ConfigReader& config, Fields* fields) {
  config.Read("sigma_min", &fields->sigma_min);
  config.Read("sigma_max", &fields->sigma_max);
  config.Read("shift", &fields->shift);
  if (!(fields->shift > 0)) config.Complain("shift", "use a number above 0");
  const bool edm = fields->training == Training::kEdm;
  if (edm || fields->training == Training::kConsistency) {
    config.Read("sigma_data", &fields->sigma_data);
    config.Read("rho", &fields->rho);
    if (edm)
      ReadChoice<NoiseSchedule>(
          config, "sigma_schedule",
          {{"karras", NoiseSchedule::kNative}, {"exponential", NoiseSchedule::kExponential}},
          &fields->default_schedule);
    if (!fields->sigma_min) fields->sigma_min = 0.002;
    if (!fields->sigma_max) fields->sigma_max = 80.0;
    if (!(fields->sigma_data > 0)) config.Complain("sigma_data", "use a number above 0");
    if (!(fields->rho > 0)) config.Complain("rho", "use a number above 0");
  }
  if (fields->training == Training::kScore) {
    if (!fields->sigma_min) fields->sigma_min = 0.01;
    if (!fields->sigma_max) fields->sigma_max = 1348.0;
  }
  if (fields->sigma_min && !(*fields->sigma_min > 0))
    config.Complain("sigma_min", "use a number above 0");
  if (fields->sigma_max && !(*fields->sigma_max > fields->sigma_min.value_or(0)))
    config.Complain("sigma_max", "use a number above sigma_min");
  ReadChoice<bool>(config, "final_sigmas_type", {{"zero", true}, {"sigma_min", false}},
                   &fields->final_sigma_zero);
}

void ReadSpacing(ConfigReader& config, Fields* fields) {
  ReadChoice<TimestepSpacing>(config, "timestep_spacing",
                              {{"linspace", TimestepSpacing::kLinspace},
                               {"leading", TimestepSpacing::kLeading},
                               {"trailing", TimestepSpacing::kTrailing}},
                              &fields->timestep_spacing);
  config.Read("steps_offset", &fields->steps_offset);
  if (fields->steps_offset < 0 || fields->steps_offset >= fields->train_timesteps)
    config.Complain("steps_offset", fmt::format("use 0 to {}", fields->train_timesteps - 1));
  ReadChoice<bool>(config, "interpolation_type", {{"linear", false}, {"log_linear", true}},
                   &fields->log_linear);
  ReadChoice<bool>(config, "timestep_type", {{"discrete", false}, {"continuous", true}},
                   &fields->continuous_timesteps);
  config.Read("lambda_min_clipped", &fields->lambda_min_clipped);

  bool karras = false, exponential = false, beta = false;
  config.Read("use_karras_sigmas", &karras);
  config.Read("use_exponential_sigmas", &exponential);
  config.Read("use_beta_sigmas", &beta);
  config.Read("use_lu_lambdas", &fields->lu_lambdas);
  if (karras) fields->default_schedule = NoiseSchedule::kKarras;
  if (exponential) fields->default_schedule = NoiseSchedule::kExponential;
  if (beta) fields->default_schedule = NoiseSchedule::kBeta;
  if (karras + exponential + beta + fields->lu_lambdas > 1)
    config.Complain(karras        ? "use_karras_sigmas"
                    : exponential ? "use_exponential_sigmas"
                                  : "use_beta_sigmas",
                    "set only one of use_karras_sigmas, use_exponential_sigmas, use_beta_sigmas "
                    "and use_lu_lambdas");
}

void ReadClipping(ConfigReader& config, bool latents, Fields* fields) {
  config.Read("clip_sample", &fields->clip_sample);
  // The file of a class that does not clip has no reason to forbid it. DDIM and DDPM would clip all
  // the same if a request names them, and ruin latents.
  if (latents && !fields->clip_sample && !TraitsOf(fields->default_sampler).clips_samples)
    fields->clip_sample = false;
  config.Read("clip_sample_range", &fields->clip_sample_range);
  if (!(fields->clip_sample_range > 0))
    config.Complain("clip_sample_range", "use a number above 0");
  // Dynamic thresholding takes a quantile of x0 per image: not linear, so not a step plan.
  config.Refuse("thresholding", false);
  config.Ignore({"dynamic_thresholding_ratio", "sample_max_value"});
}

void ReadSaSolver(ConfigReader& config, Fields* fields) {
  // Orders above 4 need more registers than kRegisters.
  config.Read("predictor_order", &fields->predictor_order);
  config.Read("corrector_order", &fields->corrector_order);
  if (fields->predictor_order < 1 || fields->predictor_order > 4)
    config.Complain("predictor_order", "use 1 to 4");
  if (fields->corrector_order < 1 || fields->corrector_order > 4)
    config.Complain("corrector_order", "use 1 to 4");
  config.Refuse("tau_func", nullptr);
}

void ReadAlgorithm(ConfigReader& config, Fields* fields) {
  constexpr char kField[] = "algorithm_type";
  if (fields->default_sampler == Sampler::kSaSolver)  // has words of its own
    return ReadChoice<bool>(config, kField,
                            {{"data_prediction", false}, {"noise_prediction", true}},
                            &fields->noise_prediction);
  struct Algorithm {
    bool stochastic, data_prediction;
  } algorithm = {false, true};
  ReadChoice<Algorithm>(config, kField,
                        {{"dpmsolver++", {false, true}},
                         {"sde-dpmsolver++", {true, true}},
                         {"dpmsolver", {false, false}},
                         {"sde-dpmsolver", {true, false}},
                         {"deis", {false, true}}},  // as diffusers reads DEIS' configs
                        &algorithm);
  fields->stochastic = algorithm.stochastic;
  fields->data_prediction = algorithm.data_prediction;
  const SamplerTraits& traits = TraitsOf(fields->default_sampler);
  if (!algorithm.data_prediction && fields->training == Training::kEdm)
    config.Complain(kField, "EDM models need \"dpmsolver++\" or \"sde-dpmsolver++\"");
  else if (!traits.samples(*fields))
    config.Complain(
        kField, fmt::format("{} has no \"sde-dpmsolver\"; use \"sde-dpmsolver++\"", traits.name));
  if (algorithm.stochastic && fields->default_sampler == Sampler::kDeis)
    config.Complain(kField, "deis has no stochastic form; use \"deis\"");
  if (!algorithm.data_prediction && fields->final_sigma_zero && !traits.ends_before_image)
    config.Complain(kField,
                    "cannot end at sigma 0; set final_sigmas_type to \"sigma_min\", or use "
                    "\"dpmsolver++\"");
  if (fields->stochastic && fields->default_sampler == Sampler::kDpmSolver)
    fields->default_sampler = Sampler::kDpmSolverSde;
}

void ReadSolvers(ConfigReader& config, Fields* fields) {
  // Each solver reads the other's solver_type as its own default.
  std::string type;
  ReadChoice<const char*>(config, "solver_type",
                          {{"midpoint", "midpoint"},
                           {"heun", "heun"},
                           {"logrho", "logrho"},
                           {"bh1", "bh1"},
                           {"bh2", "bh2"}},
                          &type);
  fields->heun_solver = type == "heun";
  fields->bh1 = type == "bh1";
  config.Read("solver_order", &fields->solver_order);
  if (fields->solver_order < 1 || fields->solver_order > 3)
    config.Complain("solver_order", "use 1, 2 or 3");
  else if (TraitsOf(fields->default_sampler).sde == SolvesSde::kAlways &&
           !fields->data_prediction && fields->solver_order == 3)
    config.Complain("solver_order", "sde-dpmsolver has no third order; use 1 or 2");
  config.Read("lower_order_final", &fields->lower_order_final);
  config.Read("euler_at_final", &fields->euler_at_final);
  config.Read("predict_x0", &fields->predict_x0);
  config.Read("disable_corrector", &fields->disable_corrector);
  config.Refuse("solver_p", nullptr);
  config.Refuse("use_flow_sigmas", false);
  config.Refuse("use_dynamic_shifting", false);
  config.Refuse("shift_terminal", nullptr);
  // They have no effect without the fields above.
  config.Ignore({"flow_shift", "time_shift_type", "base_shift", "max_shift", "base_image_seq_len",
                 "max_image_seq_len"});
  config.Refuse("invert_sigmas", false);
}

void ReadScore(ConfigReader& config, Fields* fields) {
  config.Read("snr", &fields->snr);
  config.Read("sampling_eps", &fields->sampling_eps);
  config.Read("correct_steps", &fields->correct_steps);
  if (!(fields->snr > 0)) config.Complain("snr", "use a number above 0");
  if (!(fields->sampling_eps >= 0 && fields->sampling_eps < 1))
    config.Complain("sampling_eps", "use a number of at least 0 and below 1");
  // The bound keeps a bad file from exhausting memory.
  const int most = 2 * kMaxTrainTimesteps / fields->train_timesteps - 1;
  if (fields->correct_steps < 0 || fields->correct_steps > std::min(100, most))
    config.Complain("correct_steps", fmt::format("use 0 to {}", std::min(100, most)));
}

void ReadSamplers(ConfigReader& config, Fields* fields) {
  config.Read("set_alpha_to_one", &fields->set_alpha_to_one);
  config.Read("skip_prk_steps", &fields->skip_prk_steps);
  config.Read("original_inference_steps", &fields->original_inference_steps);
  if (fields->original_inference_steps < 1 ||
      (TraitsOf(fields->default_sampler).levels == Levels::kDistilled &&
       fields->original_inference_steps > fields->train_timesteps))
    config.Complain("original_inference_steps",
                    fmt::format("use 1 to {}", fields->train_timesteps));
  config.Read("timestep_scaling", &fields->timestep_scaling);
  config.Read("stochastic_sampling", &fields->stochastic_sampling);
  config.Read("clip_denoised", &fields->clip_denoised);
  config.Read("s_noise", &fields->s_noise);
  if (!(fields->s_noise >= 0)) config.Complain("s_noise", "use a number of at least 0");
  config.Ignore({"noise_sampler_seed"});  // a request has its own seed
  // Fields of diffusers before 0.1 and 0.9.
  config.Refuse("timestep_values", nullptr);
  config.Refuse("predict_epsilon", true);
  config.Ignore({"tensor_format"});
}

}  // namespace

absl::StatusOr<SchedulerConfig> SchedulerConfig::Parse(const nlohmann::json& json, std::string file,
                                                       bool latents) {
  if (!json.is_object())
    return InvalidArgument("{}: expected a JSON object with a _class_name", file);
  auto fields = std::make_shared<Fields>();
  ConfigReader config(json, std::move(file));
  ReadClass(config, fields.get());
  ReadTraining(config, fields.get());
  ReadSigmas(config, fields.get());
  ReadSpacing(config, fields.get());
  ReadClipping(config, latents, fields.get());
  ReadAlgorithm(config, fields.get());
  ReadSolvers(config, fields.get());
  ReadSaSolver(config, fields.get());
  ReadScore(config, fields.get());
  ReadSamplers(config, fields.get());
  // Fields of other classes, carried by files that were converted from them.
  if (fields->training != Training::kBetas)
    config.Ignore(
        {"beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr"});
  config.Ignore({"sigma_data", "rho", "sigma_schedule"});
  DENOISED_RETURN_IF_ERROR(config.Finish());
  SchedulerConfig parsed;
  parsed.fields_ = std::move(fields);
  return parsed;
}

Sampler SchedulerConfig::default_sampler() const { return fields_->default_sampler; }

NoiseSchedule SchedulerConfig::default_schedule() const {
  return DefaultSchedule(*fields_, fields_->default_sampler);
}

std::vector<Sampler> SchedulerConfig::samplers() const {
  std::vector<Sampler> possible;
  for (const Sampler sampler : AllSamplers())
    if (TraitsOf(sampler).samples(*fields_)) possible.push_back(sampler);
  return possible;
}

std::vector<NoiseSchedule> SchedulerConfig::schedules(Sampler sampler) const {
  if (!TraitsOf(sampler).spaces_levels()) return {NoiseSchedule::kNative};
  return AllNoiseSchedules();
}

int SchedulerConfig::max_steps(Sampler sampler) const {
  const int steps = fields_->training == Training::kEdm ? 1000 : fields_->train_timesteps;
  const bool distilled = TraitsOf(sampler).levels == Levels::kDistilled;
  return distilled ? std::min(steps, fields_->original_inference_steps) : steps;
}

int SchedulerConfig::max_steps(Sampler sampler, NoiseSchedule schedule) const {
  int steps = max_steps(sampler);
  while (steps > 1 &&
         HighestTimestep(*fields_, sampler, schedule, steps) >= fields_->train_timesteps)
    --steps;
  return steps;
}

bool SchedulerConfig::measures_outputs() const {
  return fields_->training == Training::kScore && fields_->correct_steps > 0;
}

bool SchedulerConfig::learns_variance() const {
  return fields_->variance == Variance::kLearned || fields_->variance == Variance::kLearnedRange;
}

}  // namespace denoised
