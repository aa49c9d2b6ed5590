// SPDX-License-Identifier: Apache-2.0
#include "engine/sampling/registry.h"

#include <iterator>
#include <utility>

namespace denoised {
namespace {

using Fields = SchedulerConfig::Fields;

// Of the classes that were written for Stable Diffusion, and of those for models distilled from it.
constexpr DefaultBetas kLatentBetas = {0.00085, 0.012};
constexpr DefaultBetas kScaledLatentBetas = {0.00085, 0.012, BetaSchedule::kScaledLinear};

/// In the order of the enum. By hand, as one field a line is too long to read from top to bottom.
// clang-format off
constexpr SamplerTraits kSamplers[] = {
    {.sampler = Sampler::kDdpm, .name = "ddpm", .class_name = "DDPMScheduler",
     .compile = CompileDdpm, .clips_samples = true, .levels = Levels::kTimesteps},
    {.sampler = Sampler::kDdim, .name = "ddim", .class_name = "DDIMScheduler",
     .compile = CompileDdim, .clips_samples = true, .levels = Levels::kTimesteps, .eta = 0},
    {.sampler = Sampler::kPndm, .name = "pndm", .class_name = "PNDMScheduler",
     .compile = CompilePndm,
     .sample_prediction = false, .levels = Levels::kTimesteps, .check = CheckPndm},
    {.sampler = Sampler::kEuler, .name = "euler", .class_name = "EulerDiscreteScheduler",
     .compile = CompileEuler, .also_edm = true, .euler_fields = true, .churn = true},
    {.sampler = Sampler::kEulerAncestral, .name = "euler_ancestral",
     .class_name = "EulerAncestralDiscreteScheduler",
     .compile = CompileEulerAncestral, .also_edm = true, .spaced_by_config = false},
    {.sampler = Sampler::kLms, .name = "lms", .class_name = "LMSDiscreteScheduler",
     .compile = CompileLms, .also_edm = true, .karras_reads_range = false},
    {.sampler = Sampler::kHeun, .name = "heun", .class_name = "HeunDiscreteScheduler",
     .compile = CompileHeun, .also_edm = true, .betas = kLatentBetas,
     .edm_noise_has_image = false, .churn = true},
    {.sampler = Sampler::kDpmSolver, .name = "dpm_solver",
     .class_name = "DPMSolverMultistepScheduler",
     .compile = CompileDpmSolver, .also_edm = true, .levels = Levels::kSolver,
     .reads_lambda_min = true, .dpm_fields = true, .solver_order = true},
    {.sampler = Sampler::kDpmSolverSde, .name = "dpm_solver_sde",
     .compile = CompileDpmSolver, .also_edm = true, .levels = Levels::kSolver,
     .sde = SolvesSde::kAlways, .reads_lambda_min = true, .dpm_fields = true,
     .solver_order = true},
    {.sampler = Sampler::kUniPc, .name = "uni_pc", .class_name = "UniPCMultistepScheduler",
     .compile = CompileUniPc, .levels = Levels::kSolver, .repeats_last_sigma = true,
     .solver_order = true, .check = CheckUniPc},
    {.sampler = Sampler::kLcm, .name = "lcm", .class_name = "LCMScheduler",
     .compile = CompileLcm, .betas = kScaledLatentBetas, .levels = Levels::kDistilled},
    {.sampler = Sampler::kEdmEuler, .name = "edm_euler", .class_name = "EDMEulerScheduler",
     .compile = CompileEuler, .training = Training::kEdm, .sample_prediction = false,
     .has_steps_offset = false, .churn = true},
    {.sampler = Sampler::kEdmDpmSolver, .name = "edm_dpm_solver",
     .class_name = "EDMDPMSolverMultistepScheduler",
     .compile = CompileDpmSolver, .training = Training::kEdm, .sample_prediction = false,
     .has_steps_offset = false, .levels = Levels::kSolver,
     .sde = SolvesSde::kAsConfigured, .solver_order = true},
    {.sampler = Sampler::kDpmppSde, .name = "dpmpp_sde", .class_name = "DPMSolverSDEScheduler",
     .compile = CompileDpmppSde, .also_edm = true, .betas = kLatentBetas,
     .karras_reads_range = false},
    {.sampler = Sampler::kDeis, .name = "deis", .class_name = "DEISMultistepScheduler",
     .compile = CompileDeis, .levels = Levels::kSolver, .ends_before_image = true,
     .solver_order = true},
    {.sampler = Sampler::kKdpm2, .name = "kdpm2", .class_name = "KDPM2DiscreteScheduler",
     .compile = CompileKdpm2, .also_edm = true, .betas = kLatentBetas, .rounds_karras = true},
    {.sampler = Sampler::kKdpm2Ancestral, .name = "kdpm2_ancestral",
     .class_name = "KDPM2AncestralDiscreteScheduler",
     .compile = CompileKdpm2, .also_edm = true, .betas = kLatentBetas, .rounds_karras = true},
    {.sampler = Sampler::kTcd, .name = "tcd", .class_name = "TCDScheduler",
     .compile = CompileTcd, .betas = kScaledLatentBetas, .levels = Levels::kDistilled, .eta = 0},
    {.sampler = Sampler::kDpmSolverSinglestep, .name = "dpm_solver_singlestep",
     .class_name = "DPMSolverSinglestepScheduler",
     .compile = CompileDpmSolverSinglestep, .has_steps_offset = false, .levels = Levels::kSolver,
     .timestep_spacing = TimestepSpacing::kLinspace, .sde = SolvesSde::kAsConfigured,
     .reads_lambda_min = true, .solver_order = true},
    {.sampler = Sampler::kFlowMatchEuler, .name = "flow_match_euler",
     .class_name = "FlowMatchEulerDiscreteScheduler",
     .compile = CompileFlowMatchEuler, .training = Training::kFlow, .has_steps_offset = false},
    {.sampler = Sampler::kConsistency, .name = "consistency",
     .class_name = "CMStochasticIterativeScheduler",
     .compile = CompileConsistency, .training = Training::kConsistency, .train_timesteps = 40,
     .has_steps_offset = false, .levels = Levels::kFixedSigmas},
    {.sampler = Sampler::kSaSolver, .name = "sa_solver", .class_name = "SASolverScheduler",
     .compile = CompileSaSolver, .levels = Levels::kSolver, .reads_lambda_min = true,
     .ends_before_image = true},
    {.sampler = Sampler::kScoreSdeVe, .name = "score_sde_ve", .class_name = "ScoreSdeVeScheduler",
     .compile = CompileScoreSdeVe, .training = Training::kScore, .train_timesteps = 2000,
     .has_steps_offset = false, .default_steps = 2000, .levels = Levels::kFixedSigmas},
};
// clang-format on

constexpr bool InOrder() {
  for (size_t i = 0; i < std::size(kSamplers); ++i)
    if (kSamplers[i].sampler != static_cast<Sampler>(i) || !kSamplers[i].compile) return false;
  return true;
}
static_assert(InOrder(), "kSamplers has the order of enum Sampler");
static_assert(std::size(kSamplers) == static_cast<size_t>(Sampler::kScoreSdeVe) + 1,
              "the last of enum Sampler has no entry");

constexpr std::pair<NoiseSchedule, std::string_view> kSchedules[] = {
    {NoiseSchedule::kNative, "native"},
    {NoiseSchedule::kKarras, "karras"},
    {NoiseSchedule::kExponential, "exponential"},
    {NoiseSchedule::kBeta, "beta"},
};

}  // namespace

const SamplerTraits& TraitsOf(Sampler sampler) {
  const auto index = static_cast<size_t>(sampler);
  DENOISED_CHECK(index < std::size(kSamplers), "sampler {}", index);
  return kSamplers[index];
}

const SamplerTraits* FindSchedulerClass(std::string_view class_name) {
  for (const SamplerTraits& traits : kSamplers)
    if (traits.class_name && class_name == traits.class_name) return &traits;
  return nullptr;
}

bool SamplerTraits::samples(const Fields& fields) const {
  if (training != fields.training && !(also_edm && fields.training == Training::kEdm)) return false;
  if (!sample_prediction && fields.prediction == Prediction::kSample) return false;
  return sde != SolvesSde::kAsConfigured || !fields.stochastic || fields.data_prediction;
}

NoiseSchedule DefaultSchedule(const Fields& fields, Sampler sampler) {
  const SamplerTraits& traits = TraitsOf(sampler);
  // The spacing of an EDM model is of its training, not of a class.
  const bool of_config = traits.spaced_by_config || fields.training == Training::kEdm;
  return traits.spaces_levels() && of_config ? fields.default_schedule : NoiseSchedule::kNative;
}

TimestepSpacing SpacingOf(const Fields& fields, Sampler sampler) {
  const SamplerTraits& traits = TraitsOf(sampler);
  if (traits.timestep_spacing) return *traits.timestep_spacing;
  return fields.timestep_spacing.value_or(traits.walks_sigmas() ? TimestepSpacing::kLinspace
                                                                : TimestepSpacing::kLeading);
}

int HighestTimestep(const Fields& fields, Sampler sampler, NoiseSchedule schedule, int steps) {
  const Levels levels = TraitsOf(sampler).levels;
  if (fields.training != Training::kBetas || levels == Levels::kDistilled) return -1;
  if (SpacingOf(fields, sampler) != TimestepSpacing::kLeading) return -1;
  const bool solver = levels == Levels::kSolver;
  if (solver && schedule != NoiseSchedule::kNative) return -1;
  const int points = steps + solver;
  return (points - 1) * (fields.train_timesteps / points) + fields.steps_offset;
}

std::string_view Name(Sampler sampler) { return TraitsOf(sampler).name; }

std::optional<Sampler> SamplerFromName(std::string_view name) {
  for (const SamplerTraits& traits : kSamplers)
    if (traits.name == name) return traits.sampler;
  return std::nullopt;
}

const std::vector<Sampler>& AllSamplers() {
  static const auto* const kAll = [] {
    auto* const all = new std::vector<Sampler>;
    for (const SamplerTraits& traits : kSamplers) all->push_back(traits.sampler);
    return all;
  }();
  return *kAll;
}

std::string_view Name(NoiseSchedule schedule) {
  for (const auto& [value, name] : kSchedules)
    if (value == schedule) return name;
  return "unknown";
}

std::optional<NoiseSchedule> NoiseScheduleFromName(std::string_view wanted) {
  for (const auto& [value, name] : kSchedules)
    if (name == wanted) return value;
  return std::nullopt;
}

const std::vector<NoiseSchedule>& AllNoiseSchedules() {
  static const auto* const kAll = [] {
    auto* const all = new std::vector<NoiseSchedule>;
    for (const auto& [value, name] : kSchedules) all->push_back(value);
    return all;
  }();
  return *kAll;
}

}  // namespace denoised
