#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "engine/core/config_reader.h"
#include "engine/sampling/sampler.h"

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
    const auto plan = config->Compile(params);
    // What Validate passes, Compile must accept.
    if (plan.ok() != config->Validate(params).empty()) std::abort();
    if (plan.ok() && plan->evaluations.empty()) std::abort();
  }
  return 0;
}
