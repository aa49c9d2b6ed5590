// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "engine/sampling/sampler.h"
#include "tests/sampling/fake_denoiser.h"

// Parity with diffusers' schedulers, which tests/reference/make_sampler_goldens.py ran in float64.

namespace denoised {
namespace {

using nlohmann::json;

const std::string kGoldens = DENOISED_SOURCE_DIR "/tests/sampling/goldens/";

/// The goldens keep 14 digits, so most cases lie below 1e-13; the worst is 4e-11, Heun's at the
/// huge first σ of the squared cosine. Anything wrong in a formula is far above.
constexpr double kTolerance = 1e-9;

json ReadJson(const std::string& name) {
  std::ifstream stream(kGoldens + name);
  return json::parse(stream);
}

struct NoiseDraws {
  NoiseDraws() {
    const json file = ReadJson("noise.json");
    draws = file["draws"].get<std::vector<State>>();
    source = draws.at(file["source"]);
    initial = draws.at(file["initial"]);
    churn = draws.at(file["churn"]);
  }
  std::vector<State> draws;
  State source, initial, churn;
};

SamplerParams ParamsOf(const json& golden) {
  SamplerParams params;
  params.steps = golden["steps"];
  for (const auto& [field, value] : golden["params"].items()) {
    if (field == "sampler") {
      params.sampler = SamplerFromName(value.get<std::string>());
    } else if (field == "schedule") {
      params.schedule = NoiseScheduleFromName(value.get<std::string>());
    } else if (field == "strength") {
      params.strength = value;
    } else {
      std::optional<double>* const number = field == "eta"       ? &params.eta
                                            : field == "s_churn" ? &params.s_churn
                                            : field == "s_tmin"  ? &params.s_tmin
                                            : field == "s_tmax"  ? &params.s_tmax
                                            : field == "s_noise" ? &params.s_noise
                                                                 : nullptr;
      if (!number)
        ADD_FAILURE() << "unknown parameter " << field;
      else
        *number = value.get<double>();
    }
  }
  return params;
}

Trajectory RunFake(const StepPlan& plan) {
  static const NoiseDraws noise;
  return Execute(plan, noise.source, noise.initial, noise.churn,
                 [](size_t i) { return noise.draws.at(i); });
}

/// Largest difference over all states, relative to the largest value of each.
double Distance(const std::vector<State>& got, const std::vector<State>& expected) {
  if (got.size() != expected.size()) return INFINITY;
  double worst = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    double difference = 0, scale = 0;
    for (size_t e = 0; e < expected[i].size(); ++e) {
      difference = std::max(difference, std::abs(got[i][e] - expected[i][e]));
      scale = std::max(scale, std::abs(expected[i][e]));
    }
    if (!(difference <= worst * scale)) worst = difference / scale;
  }
  return worst;
}

absl::StatusOr<StepPlan> PlanOf(const json& golden) {
  DENOISED_ASSIGN_OR_RETURN(const SchedulerConfig config,
                            SchedulerConfig::Parse(golden["config"], golden["name"]));
  return config.Compile(ParamsOf(golden));
}

class GoldenTest : public testing::TestWithParam<std::string> {};

TEST_P(GoldenTest, PlanFollowsTheReference) {
  double worst = 0;
  std::string worst_name;
  for (const json& golden : ReadJson(GetParam() + ".json")) {
    SCOPED_TRACE(golden["name"].get<std::string>());
    const auto plan = PlanOf(golden);
    if (!plan.ok()) {
      ADD_FAILURE() << plan.status();
      continue;
    }
    std::vector<double> conditions;
    for (const auto& evaluation : plan->evaluations) conditions.push_back(evaluation.condition);
    EXPECT_THAT(conditions,
                testing::Pointwise(testing::DoubleNear(1e-6), golden["conditions"].get<State>()));

    const Trajectory run = RunFake(*plan);
    const double distance = Distance(run.states, golden["states"].get<std::vector<State>>());
    EXPECT_LE(distance, kTolerance);
    if (golden.contains("x0")) {
      EXPECT_LE(Distance(run.x0s, golden["x0"].get<std::vector<State>>()), kTolerance);
    }
    if (distance > worst) {
      worst = distance;
      worst_name = golden["name"];
    }
    EXPECT_EQ(plan->step.size(), plan->evaluations.size());
    EXPECT_EQ(plan->step.front(), 0);
    EXPECT_EQ(plan->step.back(), plan->steps - 1);
  }
  std::printf("worst relative error %.1e (%s)\n", worst, worst_name.c_str());
}

INSTANTIATE_TEST_SUITE_P(Reference, GoldenTest,
                         testing::Values("ddpm", "ddim", "pndm", "euler", "euler_ancestral", "lms",
                                         "heun", "dpm_solver", "uni_pc", "lcm", "edm_euler",
                                         "edm_dpm_solver", "edm_heun", "edm_walks", "swapped",
                                         "published", "dpmpp_sde", "deis", "kdpm2",
                                         "kdpm2_ancestral", "tcd", "dpm_solver_singlestep",
                                         "flow_match_euler", "consistency", "sa_solver",
                                         "score_sde_ve"),
                         [](const auto& info) { return info.param; });

// The comparison above can fail: it notices a ten-thousandth more of one coefficient.
TEST(GoldenComparisonTest, NoticesAPerturbedCoefficient) {
  for (const char* file : {"ddim", "euler", "heun", "dpm_solver", "uni_pc", "pndm", "dpmpp_sde",
                           "deis", "kdpm2", "kdpm2_ancestral", "tcd", "dpm_solver_singlestep",
                           "flow_match_euler", "consistency", "sa_solver", "score_sde_ve"}) {
    for (const json& golden : ReadJson(std::string(file) + ".json")) {
      if (golden["steps"] != 5) continue;
      SCOPED_TRACE(golden["name"].get<std::string>());
      auto plan = PlanOf(golden);
      ASSERT_TRUE(plan.ok()) << plan.status();
      plan->evaluations[2].weights[kOutputX][kInputX] += 1e-4;
      EXPECT_GT(Distance(RunFake(*plan).states, golden["states"].get<std::vector<State>>()),
                kTolerance);
      break;
    }
  }
}

}  // namespace
}  // namespace denoised
