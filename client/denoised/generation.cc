// SPDX-License-Identifier: Apache-2.0
#include "denoised/generation.h"

#include <algorithm>
#include <iterator>

namespace denoised::client {
namespace {

// Names by value; index 0 is the value that has none.
constexpr std::string_view kUnknown = "unknown";
constexpr std::string_view kSamplers[] = {kUnknown,
                                          "ddpm",
                                          "ddim",
                                          "pndm",
                                          "euler",
                                          "euler_ancestral",
                                          "lms",
                                          "heun",
                                          "dpm_solver",
                                          "dpm_solver_sde",
                                          "uni_pc",
                                          "lcm",
                                          "edm_euler",
                                          "edm_dpm_solver",
                                          "dpmpp_sde",
                                          "deis",
                                          "kdpm2",
                                          "kdpm2_ancestral",
                                          "tcd",
                                          "dpm_solver_singlestep",
                                          "flow_match_euler",
                                          "consistency",
                                          "sa_solver",
                                          "score_sde_ve"};
constexpr std::string_view kSchedules[] = {kUnknown, "native", "karras", "exponential", "beta"};
constexpr std::string_view kPriorities[] = {kUnknown, "interactive", "normal", "batch"};
constexpr std::string_view kStates[] = {kUnknown, "loading", "available", "failed", "unloading"};
constexpr std::string_view kJobStates[] = {kUnknown,    "queued", "running",
                                           "succeeded", "failed", "cancelled"};
constexpr std::string_view kMilestones[] = {kUnknown,  "queued", "admitted", "evaluation",
                                            "decoded", "sent",   "stage"};
constexpr std::string_view kDecoders[] = {kUnknown, "linear", "tiny"};
constexpr std::string_view kStages[] = {kUnknown, "condition", "encode", "denoise", "decode"};

template <typename Enum, size_t N>
std::string_view NameIn(const std::string_view (&names)[N], Enum value) {
  const int index = static_cast<int>(value);
  return index > 0 && index < static_cast<int>(N) ? names[index] : kUnknown;
}

template <typename Enum, size_t N>
std::optional<Enum> FromName(const std::string_view (&names)[N], std::string_view name) {
  const auto found = std::find(std::begin(names) + 1, std::end(names), name);
  if (found == std::end(names)) return std::nullopt;
  return static_cast<Enum>(found - std::begin(names));
}

template <typename Enum, size_t N>
std::vector<Enum> All(const std::string_view (&)[N]) {
  std::vector<Enum> all;
  for (size_t i = 1; i < N; ++i) all.push_back(static_cast<Enum>(i));
  return all;
}

}  // namespace

std::string_view Name(Sampler sampler) { return NameIn(kSamplers, sampler); }
std::string_view Name(NoiseSchedule schedule) { return NameIn(kSchedules, schedule); }
std::string_view Name(Priority priority) { return NameIn(kPriorities, priority); }
std::string_view Name(ModelState state) { return NameIn(kStates, state); }
std::string_view Name(JobState state) { return NameIn(kJobStates, state); }
std::string_view Name(TimelineEntry::Milestone milestone) { return NameIn(kMilestones, milestone); }
std::string_view Name(PreviewDecoder decoder) { return NameIn(kDecoders, decoder); }
std::string_view Name(Stage stage) { return NameIn(kStages, stage); }

std::optional<Sampler> SamplerFromName(std::string_view name) {
  return FromName<Sampler>(kSamplers, name);
}
std::optional<NoiseSchedule> NoiseScheduleFromName(std::string_view name) {
  return FromName<NoiseSchedule>(kSchedules, name);
}
std::optional<Priority> PriorityFromName(std::string_view name) {
  return FromName<Priority>(kPriorities, name);
}
std::vector<Sampler> AllSamplers() { return All<Sampler>(kSamplers); }
std::vector<NoiseSchedule> AllNoiseSchedules() { return All<NoiseSchedule>(kSchedules); }
std::vector<Priority> AllPriorities() { return All<Priority>(kPriorities); }

}  // namespace denoised::client
