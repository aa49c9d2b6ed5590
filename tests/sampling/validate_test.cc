// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/sampling/sampler.h"

namespace denoised {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::EndsWith;
using testing::Field;
using testing::HasSubstr;
using testing::IsEmpty;

SchedulerConfig ConfigOf(json config) {
  auto parsed = SchedulerConfig::Parse(config, "scheduler_config.json");
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return *std::move(parsed);
}

const json kDdpm = {{"_class_name", "DDPMScheduler"}};
const json kEdm = {{"_class_name", "EDMEulerScheduler"}};
const json kPndm = {{"_class_name", "PNDMScheduler"}};

testing::Matcher<ParamViolation> Violation(const char* field, const char* remedy) {
  return AllOf(Field(&ParamViolation::field, field),
               Field(&ParamViolation::description, HasSubstr(remedy)));
}

SamplerParams Steps(int steps) {
  SamplerParams params;
  params.steps = steps;
  return params;
}

std::vector<ParamViolation> Violations(const json& config, const SamplerParams& params) {
  std::vector<ParamViolation> violations;
  const bool compiles = ConfigOf(config).Compile(params, &violations).ok();
  EXPECT_EQ(compiles, violations.empty());
  return violations;
}

template <typename Value>
std::vector<ParamViolation> With(const json& config, Sampler sampler, Value SamplerParams::*field,
                                 typename std::type_identity<Value>::type value, int steps = 10) {
  SamplerParams params = Steps(steps);
  params.sampler = sampler;
  params.*field = value;
  return Violations(config, params);
}

TEST(ValidateTest, AcceptsWhatIsRight) {
  EXPECT_THAT(Violations(kDdpm, Steps(50)), IsEmpty());
  EXPECT_THAT(With(kDdpm, Sampler::kDdim, &SamplerParams::eta, 1.0), IsEmpty());
  EXPECT_THAT(With(kEdm, Sampler::kHeun, &SamplerParams::s_tmax, INFINITY), IsEmpty());
}

TEST(ValidateTest, Steps) {
  EXPECT_THAT(Violations(kDdpm, Steps(0)), ElementsAre(Violation("steps", "use 1 to 1000")));
  EXPECT_THAT(Violations(kDdpm, Steps(1001)), ElementsAre(Violation("steps", "use 1 to 1000")));
  EXPECT_THAT(Violations(kPndm, Steps(3)), ElementsAre(Violation("steps", "at least 4")));
  EXPECT_THAT(Violations({{"_class_name", "LCMScheduler"}}, Steps(51)),
              ElementsAre(Violation("steps", "use 1 to 50")));
  EXPECT_THAT(Violations({{"_class_name", "TCDScheduler"}}, Steps(51)),
              ElementsAre(Violation("steps", "use 1 to 50 with tcd")));
  EXPECT_THAT(Violations({{"_class_name", "CMStochasticIterativeScheduler"}}, Steps(41)),
              ElementsAre(Violation("steps", "use 1 to 40")));
  json offset = kDdpm;
  offset["steps_offset"] = 1;
  EXPECT_THAT(Violations(offset, Steps(1000)), ElementsAre(Violation("steps", "use at most 999")));
  EXPECT_THAT(Violations(offset, Steps(999)), IsEmpty());
  EXPECT_THAT(Violations(offset, Steps(1001)), ElementsAre(Violation("steps", "use 1 to 999")));
  EXPECT_THAT(Violations({{"_class_name", "DPMSolverMultistepScheduler"}}, Steps(1000)),
              ElementsAre(Violation("steps", "share a noise level")));
}

TEST(ValidateTest, SamplerMustSuitTheModel) {
  for (const Sampler sampler :
       {Sampler::kDdpm, Sampler::kDdim, Sampler::kPndm, Sampler::kUniPc, Sampler::kLcm})
    EXPECT_THAT(With(kEdm, sampler, &SamplerParams::strength, 1.0),
                ElementsAre(Violation("sampler", "use one of euler, ")));
  EXPECT_THAT(With(kDdpm, Sampler::kEdmEuler, &SamplerParams::strength, 1.0),
              ElementsAre(Violation("sampler", "use one of ddpm, ")));
  EXPECT_THAT(With({{"_class_name", "FlowMatchEulerDiscreteScheduler"}}, Sampler::kEuler,
                   &SamplerParams::strength, 1.0),
              ElementsAre(Violation("sampler", "flow matching model; use flow_match_euler")));
  EXPECT_THAT(With({{"_class_name", "CMStochasticIterativeScheduler"}}, Sampler::kLcm,
                   &SamplerParams::strength, 1.0),
              ElementsAre(Violation("sampler", "consistency model; use consistency")));
  // Epsilon says nothing about the image where there is only noise.
  const json zero_snr = {{"_class_name", "DDIMScheduler"},
                         {"rescale_betas_zero_snr", true},
                         {"timestep_spacing", "trailing"}};
  EXPECT_THAT(Violations(zero_snr, Steps(10)), ElementsAre(Violation("sampler", "use euler")));
  EXPECT_THAT(With(zero_snr, Sampler::kEuler, &SamplerParams::strength, 1.0), IsEmpty());
}

TEST(ValidateTest, ScheduleMustSuitTheSampler) {
  EXPECT_THAT(With(kDdpm, Sampler::kDdim, &SamplerParams::schedule, NoiseSchedule::kKarras),
              ElementsAre(Violation("schedule", "use native")));
  EXPECT_THAT(With(kDdpm, Sampler::kEuler, &SamplerParams::schedule, NoiseSchedule::kKarras),
              IsEmpty());
}

TEST(ValidateTest, Eta) {
  EXPECT_THAT(With(kDdpm, Sampler::kTcd, &SamplerParams::eta, 0.0), IsEmpty());
  SamplerParams tcd = Steps(10);
  tcd.sampler = Sampler::kTcd;
  // As diffusers' pipelines have it; step() alone would take 0.3.
  EXPECT_EQ(ConfigOf(kDdpm).WithDefaults(tcd).eta, 0.0);
  EXPECT_THAT(With(kDdpm, Sampler::kEuler, &SamplerParams::eta, 0.5),
              ElementsAre(Violation("eta", "use one of ddim, tcd")));
  // A model that none of them can sample has no such hint.
  EXPECT_THAT(With(kEdm, Sampler::kEuler, &SamplerParams::eta, 0.5),
              ElementsAre(Field(&ParamViolation::description, EndsWith("leave it unset"))));
  for (const double eta : {-0.1, 1.1, std::nan("")})
    EXPECT_THAT(With(kDdpm, Sampler::kDdim, &SamplerParams::eta, eta),
                ElementsAre(Violation("eta", "use 0 to 1")));
}

TEST(ValidateTest, Churn) {
  using Params = SamplerParams;
  for (const auto& [field, name] :
       {std::pair{&Params::s_churn, "s_churn"}, std::pair{&Params::s_tmin, "s_tmin"},
        std::pair{&Params::s_tmax, "s_tmax"}, std::pair{&Params::s_noise, "s_noise"}}) {
    EXPECT_THAT(With(kDdpm, Sampler::kDdim, field, 1.0),
                ElementsAre(Violation(name, "use one of euler, heun")));
    EXPECT_THAT(With(kEdm, Sampler::kLms, field, 1.0),
                ElementsAre(Violation(name, "use one of euler, heun, edm_euler")));
    for (const double bad : {-1.0, std::nan("")})
      EXPECT_THAT(With(kEdm, Sampler::kHeun, field, bad),
                  ElementsAre(Violation(name, "at least 0")));
    EXPECT_THAT(With(kEdm, Sampler::kEdmEuler, field, 0.5), IsEmpty());
  }
  SamplerParams params = Steps(5);
  params.s_tmin = 2;
  params.s_tmax = 1;
  EXPECT_THAT(Violations(kEdm, params), ElementsAre(Violation("s_tmin", "swap")));
}

TEST(ValidateTest, ChurnStaysWithinFloat32) {
  SamplerParams params = Steps(4);
  params.s_churn = 1;
  params.s_noise = 1e38;  // finite as a float, but not times sigma
  EXPECT_THAT(Violations(kEdm, params), ElementsAre(Violation("s_noise", "use about 1")));
  params.s_noise = 1.003;
  EXPECT_THAT(Violations(kEdm, params), IsEmpty());
}

TEST(ValidateTest, DefaultsAreWhatTheSamplerHas) {
  const SchedulerConfig config = ConfigOf({{"_class_name", "DPMSolverMultistepScheduler"},
                                           {"use_karras_sigmas", true},
                                           {"solver_order", 3}});
  const SamplerParams own = config.WithDefaults(Steps(5));
  EXPECT_EQ(own.sampler, Sampler::kDpmSolver);
  EXPECT_EQ(own.schedule, NoiseSchedule::kKarras);
  EXPECT_EQ(own.solver_order, 3);
  EXPECT_FALSE(own.s_churn || own.s_tmin || own.s_tmax || own.s_noise || own.eta);

  SamplerParams params = Steps(5);
  params.sampler = Sampler::kDdim;  // knows no spacing but its own
  const SamplerParams ddim = config.WithDefaults(params);
  EXPECT_EQ(ddim.schedule, NoiseSchedule::kNative);
  EXPECT_EQ(ddim.eta, 0);
  EXPECT_FALSE(ddim.solver_order || ddim.s_churn);

  params.sampler = Sampler::kHeun;
  params.s_tmin = 0.5;
  const SamplerParams heun = config.WithDefaults(params);
  EXPECT_EQ(heun.s_churn, 0);
  EXPECT_EQ(heun.s_tmin, 0.5);
  EXPECT_EQ(heun.s_tmax, std::numeric_limits<double>::infinity());
  EXPECT_EQ(heun.s_noise, 1);
  for (const SamplerParams& full : {own, ddim, heun}) EXPECT_TRUE(config.Compile(full).ok());
}

TEST(ValidateTest, SolverOrder) {
  EXPECT_THAT(With(kDdpm, Sampler::kEuler, &SamplerParams::solver_order, 2),
              ElementsAre(Violation("solver_order", "leave it unset")));
  EXPECT_THAT(With(kDdpm, Sampler::kSaSolver, &SamplerParams::solver_order, 2),
              ElementsAre(Violation("solver_order", "leave it unset")));
  EXPECT_THAT(With(kDdpm, Sampler::kUniPc, &SamplerParams::solver_order, 4),
              ElementsAre(Violation("solver_order", "1, 2 or 3")));
  const json noise_prediction = {{"_class_name", "DPMSolverMultistepScheduler"},
                                 {"algorithm_type", "dpmsolver"},
                                 {"final_sigmas_type", "sigma_min"}};
  EXPECT_THAT(With(noise_prediction, Sampler::kDpmSolverSde, &SamplerParams::solver_order, 3),
              ElementsAre(Violation("solver_order", "use 1 or 2")));
  const json open_end = {{"_class_name", "UniPCMultistepScheduler"}, {"lower_order_final", false}};
  EXPECT_THAT(Violations(open_end, Steps(5)),
              ElementsAre(Violation("solver_order", "lower_order_final")));
}

TEST(ValidateTest, Strength) {
  for (const double strength : {0.0, -1.0, 1.5, std::nan("")})
    EXPECT_THAT(With(kDdpm, Sampler::kDdim, &SamplerParams::strength, strength),
                ElementsAre(Violation("strength", "above 0")));
  EXPECT_THAT(With(kPndm, Sampler::kPndm, &SamplerParams::strength, 0.5),
              ElementsAre(Violation("strength", "another sampler")));
}

TEST(ValidateTest, EverythingAtOnce) {
  SamplerParams params = Steps(-3);
  params.eta = 7;
  params.solver_order = 9;
  params.strength = 2;
  EXPECT_THAT(
      Violations(kDdpm, params),
      testing::UnorderedElementsAre(Violation("steps", "-3"), Violation("eta", "ddim"),
                                    Violation("solver_order", "ddpm"), Violation("strength", "2")));
  const auto plan = ConfigOf(kDdpm).Compile(params);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(plan.status().message()),
              AllOf(HasSubstr("steps is -3"), HasSubstr("strength is 2")));
}

}  // namespace
}  // namespace denoised
