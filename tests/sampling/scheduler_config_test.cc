// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "engine/core/config_reader.h"
#include "engine/sampling/sampler.h"

namespace denoised {
namespace {

using nlohmann::json;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;

absl::StatusOr<SchedulerConfig> ParseWith(const char* class_name, json extra = json::object()) {
  extra["_class_name"] = class_name;
  return SchedulerConfig::Parse(extra, "scheduler/scheduler_config.json");
}

std::string ErrorOf(const absl::StatusOr<SchedulerConfig>& parsed) {
  if (parsed.ok()) return "accepted";
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(parsed.status().message());
}

TEST(SamplerNamesTest, RoundTrip) {
  EXPECT_EQ(AllSamplers().size(), 23u);
  EXPECT_EQ(AllNoiseSchedules().size(), 4u);
  for (const Sampler sampler : AllSamplers()) EXPECT_EQ(SamplerFromName(Name(sampler)), sampler);
  for (const NoiseSchedule schedule : AllNoiseSchedules())
    EXPECT_EQ(NoiseScheduleFromName(Name(schedule)), schedule);
  EXPECT_EQ(Name(Sampler::kDpmSolverSde), "dpm_solver_sde");
  EXPECT_EQ(SamplerFromName("Euler"), std::nullopt);
  EXPECT_EQ(NoiseScheduleFromName(""), std::nullopt);
}

// Every published config among the goldens parses there; here what it becomes.
TEST(SchedulerConfigTest, DefaultsFollowTheClass) {
  const std::pair<const char*, Sampler> classes[] = {
      {"DDPMScheduler", Sampler::kDdpm},
      {"DDIMScheduler", Sampler::kDdim},
      {"PNDMScheduler", Sampler::kPndm},
      {"EulerDiscreteScheduler", Sampler::kEuler},
      {"EulerAncestralDiscreteScheduler", Sampler::kEulerAncestral},
      {"LMSDiscreteScheduler", Sampler::kLms},
      {"HeunDiscreteScheduler", Sampler::kHeun},
      {"DPMSolverMultistepScheduler", Sampler::kDpmSolver},
      {"UniPCMultistepScheduler", Sampler::kUniPc},
      {"LCMScheduler", Sampler::kLcm},
      {"EDMEulerScheduler", Sampler::kEdmEuler},
      {"EDMDPMSolverMultistepScheduler", Sampler::kEdmDpmSolver},
      {"DPMSolverSDEScheduler", Sampler::kDpmppSde},
      {"DEISMultistepScheduler", Sampler::kDeis},
      {"KDPM2DiscreteScheduler", Sampler::kKdpm2},
      {"KDPM2AncestralDiscreteScheduler", Sampler::kKdpm2Ancestral},
      {"TCDScheduler", Sampler::kTcd},
      {"DPMSolverSinglestepScheduler", Sampler::kDpmSolverSinglestep},
      {"FlowMatchEulerDiscreteScheduler", Sampler::kFlowMatchEuler},
      {"CMStochasticIterativeScheduler", Sampler::kConsistency},
      {"SASolverScheduler", Sampler::kSaSolver},
      {"ScoreSdeVeScheduler", Sampler::kScoreSdeVe},
  };
  for (const auto& [name, sampler] : classes) {
    const auto config = ParseWith(name);
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->default_sampler(), sampler);
    EXPECT_EQ(config->default_schedule(), NoiseSchedule::kNative);
    const bool distilled = sampler == Sampler::kLcm || sampler == Sampler::kTcd;
    EXPECT_EQ(config->max_steps(sampler), distilled                          ? 50
                                          : sampler == Sampler::kConsistency ? 40
                                          : sampler == Sampler::kScoreSdeVe  ? 2000
                                                                             : 1000);
    EXPECT_FALSE(config->learns_variance());
    EXPECT_THAT(config->samplers(), Contains(sampler));
  }
}

TEST(SchedulerConfigTest, ReadsWhatTheClassDoesNotSay) {
  EXPECT_EQ(ParseWith("DPMSolverMultistepScheduler", {{"algorithm_type", "sde-dpmsolver++"}})
                ->default_sampler(),
            Sampler::kDpmSolverSde);
  EXPECT_EQ(ParseWith("EulerDiscreteScheduler", {{"use_karras_sigmas", true}})->default_schedule(),
            NoiseSchedule::kKarras);
  // Its class has no such field.
  EXPECT_EQ(ParseWith("DDIMScheduler", {{"use_karras_sigmas", true}})->default_schedule(),
            NoiseSchedule::kNative);
  EXPECT_EQ(ParseWith("EDMEulerScheduler", {{"sigma_schedule", "exponential"}})->default_schedule(),
            NoiseSchedule::kExponential);
  EXPECT_TRUE(ParseWith("DDPMScheduler", {{"variance_type", "learned_range"}})->learns_variance());
  EXPECT_EQ(ParseWith("DDPMScheduler", {{"num_train_timesteps", 4000}})->max_steps(Sampler::kDdpm),
            4000);
  // The name of diffusers 0.0.4.
  EXPECT_EQ(ParseWith("DDIMScheduler", {{"timesteps", 500}})->max_steps(Sampler::kDdim), 500);
  // The first of n leading steps is at n - 1 + steps_offset, of 0 to 999.
  const auto offset = ParseWith("DDIMScheduler", {{"steps_offset", 100}});
  EXPECT_EQ(offset->max_steps(Sampler::kDdim, NoiseSchedule::kNative), 900);
  EXPECT_TRUE(offset->Compile({.steps = 900}).ok());
  EXPECT_FALSE(offset->Compile({.steps = 901}).ok());
}

// DDIM and DDPM clip by default, whatever class the file has; latents have no bounds.
TEST(SchedulerConfigTest, ClipsLatentsOnlyIfTheFileOrItsClassSaysSo) {
  struct Case {
    const char* class_name;
    json fields;
    bool pixels, latents;  // whether x0 is clipped
  };
  const Case cases[] = {
      {"DDIMScheduler", {}, true, true},
      {"DDPMScheduler", {}, true, true},
      {"DDIMScheduler", {{"clip_sample", false}}, false, false},
      {"DPMSolverMultistepScheduler", {}, true, false},
      {"UniPCMultistepScheduler", {}, true, false},
      {"DEISMultistepScheduler", {}, true, false},
      {"EulerDiscreteScheduler", {}, true, false},
      {"PNDMScheduler", {}, true, false},
      // These have the field, and do not clip by default.
      {"HeunDiscreteScheduler", {}, true, false},
      {"LCMScheduler", {}, true, false},
      // A file may have a field that its class does not read.
      {"EulerDiscreteScheduler", {{"clip_sample", true}}, true, true},
      {"EulerDiscreteScheduler", {{"clip_sample", false}}, false, false},
      {"EulerDiscreteScheduler", {{"clip_sample", nullptr}}, false, false},
  };
  for (const auto& [class_name, fields, pixels, latents] : cases)
    for (const Sampler sampler : {Sampler::kDdim, Sampler::kDdpm}) {
      SCOPED_TRACE(fmt::format("{} {} {}", class_name, fields.dump(), Name(sampler)));
      json config = fields.is_null() ? json::object() : fields;
      config["_class_name"] = class_name;
      for (const bool of_latents : {false, true}) {
        const auto parsed = SchedulerConfig::Parse(config, "scheduler_config.json", of_latents);
        ASSERT_TRUE(parsed.ok()) << parsed.status();
        const auto plan = parsed->Compile({.sampler = sampler, .steps = 2});
        ASSERT_TRUE(plan.ok()) << plan.status();
        EXPECT_EQ(plan->evaluations[0].clip > 0, of_latents ? latents : pixels) << of_latents;
      }
    }
}

TEST(SchedulerConfigTest, OffersWhatTheModelCanRun) {
  const auto edm = ParseWith("EDMEulerScheduler");
  for (const Sampler sampler :
       {Sampler::kDdpm, Sampler::kDdim, Sampler::kPndm, Sampler::kUniPc, Sampler::kLcm,
        Sampler::kDeis, Sampler::kTcd, Sampler::kSaSolver, Sampler::kDpmSolverSinglestep,
        Sampler::kFlowMatchEuler, Sampler::kConsistency, Sampler::kScoreSdeVe})
    EXPECT_THAT(edm->samplers(), Not(Contains(sampler)));
  EXPECT_THAT(edm->samplers(), Contains(Sampler::kHeun));
  const auto ddpm = ParseWith("DDPMScheduler");
  EXPECT_THAT(ddpm->samplers(), Not(Contains(Sampler::kEdmEuler)));
  EXPECT_EQ(ddpm->samplers().size(), 18u);
  EXPECT_THAT(ddpm->schedules(Sampler::kDdim), testing::ElementsAre(NoiseSchedule::kNative));
  EXPECT_EQ(ddpm->schedules(Sampler::kEuler).size(), 4u);
  const auto flow = ParseWith("FlowMatchEulerDiscreteScheduler");
  EXPECT_THAT(flow->samplers(), testing::ElementsAre(Sampler::kFlowMatchEuler));
  EXPECT_EQ(flow->schedules(Sampler::kFlowMatchEuler).size(), 4u);
  const auto consistency = ParseWith("CMStochasticIterativeScheduler");
  EXPECT_THAT(consistency->samplers(), testing::ElementsAre(Sampler::kConsistency));
  EXPECT_THAT(consistency->schedules(Sampler::kConsistency),
              testing::ElementsAre(NoiseSchedule::kNative));
  const auto score = ParseWith("ScoreSdeVeScheduler");
  EXPECT_THAT(score->samplers(), testing::ElementsAre(Sampler::kScoreSdeVe));
  EXPECT_THAT(score->schedules(Sampler::kScoreSdeVe), testing::ElementsAre(NoiseSchedule::kNative));
  EXPECT_TRUE(score->measures_outputs());
  EXPECT_FALSE(ParseWith("ScoreSdeVeScheduler", {{"correct_steps", 0}})->measures_outputs());
  EXPECT_FALSE(ddpm->measures_outputs());
  const auto sample = ParseWith("DDPMScheduler", {{"prediction_type", "sample"}});
  EXPECT_THAT(sample->samplers(), Not(Contains(Sampler::kPndm)));
}

struct Refusal {
  const char* class_name;
  json fields;
  const char* field;   // that the message names
  const char* remedy;  // part of it
};

TEST(SchedulerConfigTest, RefusesByName) {
  const Refusal refusals[] = {
      {"FlowMatchHeunDiscreteScheduler", {}, "_class_name", "DDPMScheduler"},
      {"FlowMatchEulerDiscreteScheduler",
       {{"use_dynamic_shifting", true}},
       "use_dynamic_shifting",
       "only false"},
      {"FlowMatchEulerDiscreteScheduler", {{"shift", 0.0}}, "shift", "above 0"},
      {"FlowMatchEulerDiscreteScheduler", {{"shift_terminal", 0.1}}, "shift_terminal", "only null"},
      {"FlowMatchEulerDiscreteScheduler", {{"invert_sigmas", true}}, "invert_sigmas", "only false"},
      {"CMStochasticIterativeScheduler",
       {{"num_train_timesteps", 1}},
       "num_train_timesteps",
       "at least 2"},
      {"CMStochasticIterativeScheduler", {{"s_noise", -1.0}}, "s_noise", "at least 0"},
      {"CMStochasticIterativeScheduler", {{"sigma_data", 0.0}}, "sigma_data", "above 0"},
      {"TCDScheduler",
       {{"original_inference_steps", 1001}},
       "original_inference_steps",
       "use 1 to 1000"},
      {"SASolverScheduler", {{"predictor_order", 5}}, "predictor_order", "use 1 to 4"},
      {"ScoreSdeVeScheduler", {{"snr", 0.0}}, "snr", "above 0"},
      {"ScoreSdeVeScheduler", {{"sampling_eps", 1.0}}, "sampling_eps", "below 1"},
      {"ScoreSdeVeScheduler", {{"correct_steps", 100}}, "correct_steps", "0 to 99"},
      {"ScoreSdeVeScheduler", {{"sigma_max", 0.01}}, "sigma_max", "above sigma_min"},
      {"SASolverScheduler", {{"corrector_order", 0}}, "corrector_order", "use 1 to 4"},
      {"SASolverScheduler", {{"tau_func", "x"}}, "tau_func", "only null"},
      {"SASolverScheduler",
       {{"algorithm_type", "dpmsolver++"}},
       "algorithm_type",
       "noise_prediction"},
      {"DEISMultistepScheduler",
       {{"algorithm_type", "sde-dpmsolver++"}},
       "algorithm_type",
       "no stochastic form"},
      {"DEISMultistepScheduler", {{"use_flow_sigmas", true}}, "use_flow_sigmas", "only false"},
      {"DPMSolverSinglestepScheduler",
       {{"algorithm_type", "sde-dpmsolver"}, {"final_sigmas_type", "sigma_min"}},
       "algorithm_type",
       "sde-dpmsolver++"},
      {"DDPMScheduler", {{"thresholding", true}}, "thresholding", "only false"},
      {"DDPMScheduler", {{"num_train_timesteps", 0}}, "num_train_timesteps", "use 1 to"},
      {"DDPMScheduler", {{"num_train_timesteps", 1 << 30}}, "num_train_timesteps", "use 1 to"},
      {"DDPMScheduler", {{"num_train_timesteps", "many"}}, "num_train_timesteps", "an integer"},
      {"DDPMScheduler", {{"beta_schedule", "cosine"}}, "beta_schedule", "squaredcos_cap_v2"},
      {"DDPMScheduler", {{"beta_schedule", 3}}, "beta_schedule", "squaredcos_cap_v2"},
      {"DDPMScheduler", {{"beta_end", 1.5}}, "beta_end", "between 0 and 1"},
      {"DDPMScheduler", {{"beta_start", -0.1}}, "beta_start", "beta 0 would be -0.1"},
      {"DDPMScheduler", {{"trained_betas", {0.1, 0.2}}}, "trained_betas", "num_train_timesteps"},
      {"DDPMScheduler",
       {{"num_train_timesteps", 2}, {"trained_betas", {0.1, 1.0}}},
       "trained_betas",
       "beta 1 would be 1"},
      {"DDPMScheduler", {{"variance_type", "large"}}, "variance_type", "fixed_large"},
      {"DDPMScheduler", {{"prediction_type", "flow_prediction"}}, "prediction_type", "epsilon"},
      {"PNDMScheduler", {{"prediction_type", "sample"}}, "prediction_type", "v_prediction"},
      {"EDMEulerScheduler", {{"prediction_type", "sample"}}, "prediction_type", "v_prediction"},
      {"DDPMScheduler", {{"timestep_spacing", "even"}}, "timestep_spacing", "trailing"},
      {"DDPMScheduler", {{"steps_offset", -1}}, "steps_offset", "use 0 to 999"},
      {"DDPMScheduler", {{"clip_sample", "yes"}}, "clip_sample", "true or false"},
      {"DDPMScheduler", {{"clip_sample_range", 0.0}}, "clip_sample_range", "above 0"},
      {"DDPMScheduler", {{"predict_epsilon", false}}, "predict_epsilon", "only true"},
      {"DDPMScheduler", {{"surprise", 1}}, "surprise", "unknown field"},
      {"DDIMScheduler", {{"timestep_values", {1, 2}}}, "timestep_values", "only null"},
      {"EulerDiscreteScheduler",
       {{"use_karras_sigmas", true}, {"use_beta_sigmas", true}},
       "use_karras_sigmas",
       "set only one"},
      {"EulerDiscreteScheduler", {{"interpolation_type", "cubic"}}, "interpolation_type", "linear"},
      {"EulerDiscreteScheduler", {{"timestep_type", "odd"}}, "timestep_type", "continuous"},
      {"EulerDiscreteScheduler", {{"final_sigmas_type", "one"}}, "final_sigmas_type", "sigma_min"},
      {"EulerDiscreteScheduler", {{"sigma_min", 0.0}}, "sigma_min", "above 0"},
      {"EulerDiscreteScheduler",
       {{"sigma_min", 2.0}, {"sigma_max", 1.0}},
       "sigma_max",
       "above sigma_min"},
      {"DPMSolverMultistepScheduler", {{"use_flow_sigmas", true}}, "use_flow_sigmas", "only false"},
      {"DPMSolverMultistepScheduler", {{"solver_order", 4}}, "solver_order", "1, 2 or 3"},
      {"DPMSolverMultistepScheduler", {{"solver_type", "rk4"}}, "solver_type", "midpoint"},
      {"DPMSolverMultistepScheduler", {{"algorithm_type", "dpm"}}, "algorithm_type", "dpmsolver++"},
      {"DPMSolverMultistepScheduler",
       {{"algorithm_type", "dpmsolver"}},
       "algorithm_type",
       "final_sigmas_type"},
      {"DPMSolverMultistepScheduler",
       {{"algorithm_type", "sde-dpmsolver"},
        {"solver_order", 3},
        {"final_sigmas_type", "sigma_min"}},
       "solver_order",
       "1 or 2"},
      {"UniPCMultistepScheduler", {{"solver_p", json::object()}}, "solver_p", "only null"},
      {"UniPCMultistepScheduler",
       {{"use_dynamic_shifting", true}},
       "use_dynamic_shifting",
       "only false"},
      {"UniPCMultistepScheduler", {{"shift_terminal", 0.1}}, "shift_terminal", "only null"},
      {"UniPCMultistepScheduler", {{"disable_corrector", {0.5}}}, "disable_corrector", "integers"},
      {"LCMScheduler",
       {{"original_inference_steps", 0}},
       "original_inference_steps",
       "use 1 to 1000"},
      {"EDMEulerScheduler", {{"sigma_data", 0.0}}, "sigma_data", "above 0"},
      {"EDMEulerScheduler", {{"rho", -7.0}}, "rho", "above 0"},
      {"EDMEulerScheduler", {{"sigma_schedule", "linear"}}, "sigma_schedule", "karras"},
      {"EDMEulerScheduler", {{"sigma_max", 0.001}}, "sigma_max", "above sigma_min"},
      {"EDMDPMSolverMultistepScheduler",
       {{"algorithm_type", "dpmsolver"}, {"final_sigmas_type", "sigma_min"}},
       "algorithm_type",
       "dpmsolver++"},
  };
  for (const Refusal& refusal : refusals) {
    const std::string error = ErrorOf(
        ParseWith(refusal.class_name, refusal.fields.is_null() ? json::object() : refusal.fields));
    EXPECT_THAT(error, HasSubstr("scheduler/scheduler_config.json: field '" +
                                 std::string(refusal.field) + "'"));
    EXPECT_THAT(error, HasSubstr(refusal.remedy));
  }
}

TEST(SchedulerConfigTest, ReportsEveryComplaintAtOnce) {
  const std::string error = ErrorOf(
      ParseWith("DDPMScheduler", {{"thresholding", true}, {"solver_order", 9}, {"rho2", 1}}));
  EXPECT_THAT(error, HasSubstr("thresholding"));
  EXPECT_THAT(error, HasSubstr("solver_order"));
  EXPECT_THAT(error, HasSubstr("rho2"));
}

TEST(SchedulerConfigTest, NeedsAnObjectWithAClass) {
  EXPECT_THAT(ErrorOf(SchedulerConfig::Parse(json::array(), "f")), HasSubstr("JSON object"));
  EXPECT_THAT(ErrorOf(SchedulerConfig::Parse(json::object(), "f")), HasSubstr("_class_name"));
}

// Values of every JSON type in every known field: refused or honoured, never a crash.
TEST(SchedulerConfigTest, SurvivesAnyValue) {
  const char* const fields[] = {"num_train_timesteps",
                                "timesteps",
                                "beta_start",
                                "beta_end",
                                "beta_schedule",
                                "trained_betas",
                                "variance_type",
                                "clip_sample",
                                "clip_sample_range",
                                "prediction_type",
                                "timestep_spacing",
                                "steps_offset",
                                "rescale_betas_zero_snr",
                                "set_alpha_to_one",
                                "sigma_min",
                                "sigma_max",
                                "sigma_data",
                                "rho",
                                "final_sigmas_type",
                                "solver_order",
                                "algorithm_type",
                                "disable_corrector",
                                "lambda_min_clipped",
                                "original_inference_steps",
                                "timestep_scaling",
                                "shift",
                                "stochastic_sampling",
                                "clip_denoised",
                                "s_noise"};
  const json values[] = {nullptr,    true,          -1,     0,  1,   3,
                         1e300,      -1e-300,       1e-300, "", "x", json::array(),
                         {0.1, "x"}, json::object()};
  for (const char* class_name :
       {"DDPMScheduler", "LCMScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler",
        "EDMEulerScheduler", "DPMSolverSinglestepScheduler", "DEISMultistepScheduler",
        "FlowMatchEulerDiscreteScheduler", "CMStochasticIterativeScheduler"})
    for (const char* field : fields)
      for (const json& value : values) {
        const auto config = ParseWith(class_name, {{field, value}});
        if (!config.ok()) {
          EXPECT_THAT(std::string(config.status().message()), HasSubstr("field '"));
          continue;
        }
        SamplerParams params;
        params.steps = 3;
        std::vector<ParamViolation> violations;
        const bool compiles = config->Compile(params, &violations).ok();
        EXPECT_EQ(compiles, violations.empty());
      }
}

}  // namespace
}  // namespace denoised
