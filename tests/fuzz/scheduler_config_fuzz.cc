// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "engine/core/config_reader.h"
#include "engine/sampling/sampler.h"

namespace {

/// A coefficient that is not finite would silently spoil every pixel.
bool IsFinite(const denoised::StepPlan& plan) {
  for (const auto& evaluation : plan.evaluations) {
    if (!std::isfinite(evaluation.input_scale) || !std::isfinite(evaluation.input_shift) ||
        !std::isfinite(evaluation.condition) || !std::isfinite(evaluation.x0_from_x) ||
        !std::isfinite(evaluation.x0_from_model))
      return false;
    for (const auto& row : evaluation.weights)
      for (const double weight : row)
        if (!std::isfinite(weight)) return false;
  }
  return std::isfinite(plan.initial_noise_scale) && std::isfinite(plan.initial_shift);
}

}  // namespace

/// A config is refused with a message, or each of its samplers compiles a short plan.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto json = denoised::ParseJsonObject(text, "scheduler_config.json");
  if (!json.ok()) return 0;
  const auto config = denoised::SchedulerConfig::Parse(*json, "scheduler_config.json");
  if (!config.ok()) {
    if (config.status().message().empty()) std::abort();
    return 0;
  }
  for (const denoised::Sampler sampler : config->samplers()) {
    denoised::SamplerParams params;
    params.sampler = sampler;
    params.steps = 3;
    std::vector<denoised::ParamViolation> violations;
    const auto plan = config->Compile(params, &violations);
    // A plan that is refused says why.
    if (plan.ok() != violations.empty()) std::abort();
    if (plan.ok() && (plan->evaluations.empty() || !IsFinite(*plan))) std::abort();
  }
  return 0;
}
