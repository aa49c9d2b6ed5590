// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "engine/sampling/sampler.h"

namespace denoised {
namespace {

constexpr std::pair<Sampler, std::string_view> kSamplerNames[] = {
    {Sampler::kDdpm, "ddpm"},
    {Sampler::kDdim, "ddim"},
    {Sampler::kPndm, "pndm"},
    {Sampler::kEuler, "euler"},
    {Sampler::kEulerAncestral, "euler_ancestral"},
    {Sampler::kLms, "lms"},
    {Sampler::kHeun, "heun"},
    {Sampler::kDpmSolver, "dpm_solver"},
    {Sampler::kDpmSolverSde, "dpm_solver_sde"},
    {Sampler::kUniPc, "uni_pc"},
    {Sampler::kLcm, "lcm"},
    {Sampler::kEdmEuler, "edm_euler"},
    {Sampler::kEdmDpmSolver, "edm_dpm_solver"},
    {Sampler::kDpmppSde, "dpmpp_sde"},
    {Sampler::kDeis, "deis"},
    {Sampler::kKdpm2, "kdpm2"},
    {Sampler::kKdpm2Ancestral, "kdpm2_ancestral"},
    {Sampler::kTcd, "tcd"},
    {Sampler::kDpmSolverSinglestep, "dpm_solver_singlestep"},
    {Sampler::kFlowMatchEuler, "flow_match_euler"},
    {Sampler::kConsistency, "consistency"},
    {Sampler::kSaSolver, "sa_solver"},
    {Sampler::kScoreSdeVe, "score_sde_ve"},
};

constexpr std::pair<NoiseSchedule, std::string_view> kScheduleNames[] = {
    {NoiseSchedule::kNative, "native"},
    {NoiseSchedule::kKarras, "karras"},
    {NoiseSchedule::kExponential, "exponential"},
    {NoiseSchedule::kBeta, "beta"},
};

template <typename Pairs, typename Value>
std::string_view NameIn(const Pairs& pairs, Value value) {
  for (const auto& [candidate, name] : pairs)
    if (candidate == value) return name;
  return "unknown";
}

template <typename Value, typename Pairs>
std::optional<Value> ValueIn(const Pairs& pairs, std::string_view wanted) {
  for (const auto& [value, name] : pairs)
    if (name == wanted) return value;
  return std::nullopt;
}

template <typename Value, typename Pairs>
std::vector<Value> ValuesOf(const Pairs& pairs) {
  std::vector<Value> values;
  for (const auto& [value, name] : pairs) values.push_back(value);
  return values;
}

}  // namespace

std::string_view Name(Sampler sampler) { return NameIn(kSamplerNames, sampler); }
std::string_view Name(NoiseSchedule schedule) { return NameIn(kScheduleNames, schedule); }

std::optional<Sampler> SamplerFromName(std::string_view name) {
  return ValueIn<Sampler>(kSamplerNames, name);
}
std::optional<NoiseSchedule> NoiseScheduleFromName(std::string_view name) {
  return ValueIn<NoiseSchedule>(kScheduleNames, name);
}

const std::vector<Sampler>& AllSamplers() {
  static const auto* const kAll = new std::vector<Sampler>(ValuesOf<Sampler>(kSamplerNames));
  return *kAll;
}
const std::vector<NoiseSchedule>& AllNoiseSchedules() {
  static const auto* const kAll =
      new std::vector<NoiseSchedule>(ValuesOf<NoiseSchedule>(kScheduleNames));
  return *kAll;
}

}  // namespace denoised
