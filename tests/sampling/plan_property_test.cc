// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "engine/core/philox.h"
#include "engine/sampling/sampler.h"
#include "tests/sampling/fake_denoiser.h"

// What holds for every plan, whatever the sampler.

namespace denoised {
namespace {

using nlohmann::json;

const std::vector<json> kConfigs = {
    {{"_class_name", "DDPMScheduler"}},
    {{"_class_name", "DDPMScheduler"}, {"variance_type", "learned_range"}},
    {{"_class_name", "PNDMScheduler"},
     {"beta_schedule", "scaled_linear"},
     {"skip_prk_steps", true},
     {"steps_offset", 1}},
    {{"_class_name", "PNDMScheduler"}, {"prediction_type", "v_prediction"}},
    {{"_class_name", "DDIMScheduler"}, {"prediction_type", "sample"}},
    {{"_class_name", "EulerDiscreteScheduler"},
     {"beta_schedule", "scaled_linear"},
     {"beta_start", 0.00085},
     {"beta_end", 0.012},
     {"rescale_betas_zero_snr", true},
     {"prediction_type", "v_prediction"},
     {"timestep_spacing", "trailing"}},
    {{"_class_name", "EulerDiscreteScheduler"}, {"use_karras_sigmas", true}},
    {{"_class_name", "DPMSolverMultistepScheduler"}, {"solver_order", 3}},
    {{"_class_name", "DPMSolverMultistepScheduler"},
     {"algorithm_type", "dpmsolver"},
     {"final_sigmas_type", "sigma_min"},
     {"use_exponential_sigmas", true}},
    {{"_class_name", "UniPCMultistepScheduler"}, {"solver_order", 3}, {"solver_type", "bh1"}},
    {{"_class_name", "LCMScheduler"}},
    {{"_class_name", "EDMEulerScheduler"}},
    {{"_class_name", "EDMDPMSolverMultistepScheduler"}, {"solver_order", 3}},
    {{"_class_name", "DEISMultistepScheduler"}, {"solver_order", 3}},
    {{"_class_name", "DPMSolverSinglestepScheduler"},
     {"solver_order", 3},
     {"final_sigmas_type", "sigma_min"}},
    {{"_class_name", "FlowMatchEulerDiscreteScheduler"}, {"shift", 3.0}},
    {{"_class_name", "FlowMatchEulerDiscreteScheduler"}, {"stochastic_sampling", true}},
    {{"_class_name", "CMStochasticIterativeScheduler"}},
    {{"_class_name", "SASolverScheduler"}, {"predictor_order", 4}, {"corrector_order", 4}},
    {{"_class_name", "ScoreSdeVeScheduler"}},
};

State Normals(uint64_t seed, uint32_t draw) {
  const Normal4 normal = PhiloxNormal(seed, draw, 0);
  return {normal.v[0], normal.v[1], normal.v[2], normal.v[3]};
}

Trajectory RunOn(const StepPlan& plan, const Model& model) {
  const State source = {0.5, -0.5, 0.25, 0};
  return Execute(
      plan, source, Normals(7, kInitialDraw), Normals(7, kInitialChurnDraw),
      [](size_t i) { return Normals(7, static_cast<uint32_t>(i)); }, model);
}

/// Calls `check(config json, params, plan)` on every plan that a config offers.
template <typename Check>
void ForEveryPlan(const std::vector<int>& steps, const std::vector<double>& strengths,
                  const Check& check) {
  for (const json& json : kConfigs) {
    const auto config = SchedulerConfig::Parse(json, "scheduler_config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    for (const Sampler sampler : config->samplers())
      for (const NoiseSchedule schedule : config->schedules(sampler))
        for (const int count : steps)
          for (const double strength : strengths) {
            SamplerParams params;
            params.sampler = sampler;
            params.schedule = schedule;
            params.steps = count;
            params.strength = strength;
            if (sampler == Sampler::kDdim || sampler == Sampler::kTcd) params.eta = 0.5;
            if (sampler == Sampler::kHeun || sampler == Sampler::kEuler) params.s_churn = 5;
            SCOPED_TRACE(json.dump() + " " + std::string(Name(sampler)) + " " +
                         std::string(Name(schedule)) + " " + std::to_string(count) + " " +
                         std::to_string(strength));
            const auto plan = config->Compile(params);
            check(json, params, plan);
          }
  }
}

TEST(PlanPropertyTest, EveryPlanIsFiniteOrRefused) {
  int compiled = 0, refused = 0;
  ForEveryPlan({1, 2, 5, 18, 50, 333, 1000}, {1, 0.5, 0.01},
               [&](const json&, const SamplerParams& params, const absl::StatusOr<StepPlan>& plan) {
                 if (!plan.ok()) {
                   ++refused;
                   // Only the corners may be: Runge-Kutta, LCM's 50 steps, more steps than levels.
                   const bool corner =
                       params.sampler == Sampler::kPndm || params.sampler == Sampler::kLcm ||
                       params.sampler == Sampler::kTcd || params.sampler == Sampler::kConsistency ||
                       params.steps > 900;
                   EXPECT_TRUE(corner) << plan.status();
                   return;
                 }
                 ++compiled;
                 const int kept = std::max(1, static_cast<int>(params.steps * params.strength));
                 EXPECT_EQ(plan->steps, kept);
                 ASSERT_EQ(plan->step.size(), plan->evaluations.size());
                 EXPECT_EQ(plan->step.front(), 0);
                 EXPECT_EQ(plan->step.back(), kept - 1);
                 EXPECT_TRUE(params.strength < 1 || plan->initial_source_scale == 0);
                 for (size_t i = 1; i < plan->step.size(); ++i) {
                   EXPECT_GE(plan->step[i], plan->step[i - 1]);
                   EXPECT_LE(plan->step[i], plan->step[i - 1] + 1);
                 }
                 for (const DeviceEvaluation& row : ToDevice(*plan)) {
                   ASSERT_TRUE(std::isfinite(row.input_scale) && std::isfinite(row.input_shift) &&
                               std::isfinite(row.condition) && std::isfinite(row.x0_from_x) &&
                               std::isfinite(row.x0_from_model));
                   for (const auto& weights : row.weights)
                     for (const float weight : weights) ASSERT_TRUE(std::isfinite(weight));
                 }
                 if (params.steps > 50) return;
                 const Trajectory run = RunOn(*plan, FakeModelOf);
                 for (const double x : run.states.back()) ASSERT_TRUE(std::isfinite(x));
               });
  EXPECT_GT(compiled, 5000);
  EXPECT_LT(refused, compiled / 10);
}

// A model that always sees through to one image must lead there, whatever the noise on the way: the
// final state is the image, and no noise is added that the next step does not remove.
TEST(PlanPropertyTest, APerfectModelLeadsToItsImage) {
  const State image = {0.75, -0.5, 0.125, -1};
  const auto perfect = [&](const Evaluation<double>& row, double x, size_t e) {
    return (image[e] - row.x0_from_x * x) / row.x0_from_model;
  };
  ForEveryPlan(
      {18, 50}, {1, 0.5},
      [&](const json& config, const SamplerParams& params, const absl::StatusOr<StepPlan>& plan) {
        if (!plan.ok()) return;
        // Unstable in fewer than hundreds of steps: its noise grows by e^h in each.
        if (params.sampler == Sampler::kDpmSolverSde &&
            config.value("algorithm_type", "") == "dpmsolver")
          return;

        const Trajectory run = RunOn(*plan, perfect);
        for (size_t e = 0; e < image.size(); ++e) {
          // What may remain is the noise of timestep 0, σ = 0.01 to 0.04.
          EXPECT_NEAR(run.states.back()[e], image[e], 0.1);
          for (const State& x0 : run.x0s) ASSERT_NEAR(x0[e], image[e], 1e-6);
        }
      });
}

// An image of deviation 1, and so are its previews at every noise level.
TEST(PlanPropertyTest, PreviewsOfTheStateHaveTheContrastOfTheImage) {
  State image;
  for (int e = 0; e < 256; ++e) image.push_back(e % 2 ? 1 : -1);
  const auto perfect = [&](const Evaluation<double>& row, double x, size_t e) {
    return (image[e] - row.x0_from_x * x) / row.x0_from_model;
  };
  const auto draw = [&](size_t number) {
    State noise;
    for (uint64_t seed = 0; noise.size() < image.size(); ++seed)
      for (const double value : Normals(seed, static_cast<uint32_t>(number)))
        noise.push_back(value);
    return noise;
  };
  ForEveryPlan(
      {18, 200}, {1},
      [&](const json& config, const SamplerParams& params, const absl::StatusOr<StepPlan>& plan) {
        if (!plan.ok()) return;
        if (params.sampler == Sampler::kDpmSolverSde &&
            config.value("algorithm_type", "") == "dpmsolver")
          return;  // unstable, as above
        // In few steps its state has twice the noise of its level.
        const bool many = params.sampler == Sampler::kScoreSdeVe;
        if (params.steps != (many ? 200 : 18)) return;
        ASSERT_EQ(plan->preview_scale.size(), plan->evaluations.size());
        const Trajectory run =
            Execute(*plan, image, draw(kInitialDraw), draw(kInitialChurnDraw), draw, perfect);
        for (size_t i = 1; i < plan->evaluations.size(); ++i) {
          double squares = 0;
          for (const double x : run.states[i - 1])
            squares += std::pow(plan->preview_scale[i] * x, 2);
          // The deviation of 256 numbers is off by 4%; solvers are off by more on their way.
          EXPECT_NEAR(std::sqrt(squares / static_cast<double>(image.size())), 1, 0.25)
              << "evaluation " << i;
        }
      });
}

// diffusers has no EDM form of these samplers to compare with.
TEST(PlanPropertyTest, EdmModelsAreToldTheirOwnCondition) {
  constexpr double kSigmaData = 0.5;
  const auto config = SchedulerConfig::Parse({{"_class_name", "EDMEulerScheduler"}}, "file");
  ASSERT_TRUE(config.ok());
  for (const Sampler sampler : {Sampler::kDpmppSde, Sampler::kKdpm2, Sampler::kKdpm2Ancestral}) {
    SamplerParams params;
    params.steps = 10;
    params.sampler = sampler;
    const auto plan = config->Compile(params);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->evaluations.size(), 19u);
    for (const auto& row : plan->evaluations) {
      const double sigma =
          std::sqrt(1 / (row.input_scale * row.input_scale) - kSigmaData * kSigmaData);
      EXPECT_NEAR(row.condition, 0.25 * std::log(sigma), 1e-6);
    }
  }
}

TEST(PlanPropertyTest, ChurnIsDrawnBeforeTheFirstEvaluation) {
  const auto config = SchedulerConfig::Parse({{"_class_name", "EDMEulerScheduler"}}, "file");
  ASSERT_TRUE(config.ok());
  SamplerParams params;
  params.steps = 10;
  for (const Sampler sampler : {Sampler::kHeun, Sampler::kEdmEuler}) {
    params.sampler = sampler;
    params.s_churn = 0;
    EXPECT_EQ(config->Compile(params)->initial_churn_scale, 0);
    params.s_churn = 10;  // γ = √2 − 1: as much noise again
    const auto plan = config->Compile(params);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_NEAR(plan->initial_churn_scale, 80, 1e-9);
    EXPECT_NEAR(plan->evaluations[0].condition, 0.25 * std::log(80 * std::sqrt(2.0)), 1e-12);
    EXPECT_EQ(plan->evaluations.size(), sampler == Sampler::kHeun ? 19u : 10u);
  }
}

}  // namespace
}  // namespace denoised
