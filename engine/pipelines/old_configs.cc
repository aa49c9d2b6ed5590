// SPDX-License-Identifier: Apache-2.0
#include "engine/pipelines/old_configs.h"

#include <charconv>
#include <string>
#include <string_view>

#include "engine/pipelines/registry.h"
#include "engine/sampling/registry.h"

namespace denoised {
namespace {

void CorrectScheduler(const Corrections& corrects, nlohmann::json* config) {
  if (!config->is_object()) return;
  const auto scheduler = config->find("_class_name");
  const std::string name =
      scheduler != config->end() && scheduler->is_string() ? scheduler->get<std::string>() : "";
  // Values of another type are left for SchedulerConfig to refuse.
  const auto offset = config->find("steps_offset");
  const SamplerTraits* const known = FindSchedulerClass(name);
  if (offset == config->end() ? !known || known->has_steps_offset
                              : offset->is_number() || offset->is_null())
    (*config)["steps_offset"] = 1;

  const auto correct = [&](const char* field, bool old, bool old_by_default) {
    const auto found = config->find(field);
    if (found == config->end() ? old_by_default : *found == old) (*config)[field] = !old;
  };
  if (corrects.clip_sample) correct("clip_sample", true, known && known->clips_samples);
  if (corrects.skip_prk_steps) correct("skip_prk_steps", false, name == "PNDMScheduler");
}

/// Of "0.8.1" or "0.9.0.dev0"; diffusers does not compare what is behind the third number.
bool IsBefore09(const std::string& version) {
  int major = 0, minor = 0;
  const char* const end = version.data() + version.size();
  const auto [dot, error] = std::from_chars(version.data(), end, major);
  if (error != std::errc() || dot == end || *dot != '.') return false;
  if (std::from_chars(dot + 1, end, minor).ec != std::errc()) return false;
  return major == 0 && minor < 9;
}

void CorrectUNet(nlohmann::json* config) {
  if (!config->is_object()) return;
  const auto version = config->find("_diffusers_version"), size = config->find("sample_size");
  if (version == config->end() || !version->is_string() || size == config->end() ||
      !size->is_number_integer())
    return;
  if (IsBefore09(version->get<std::string>()) && *size < 64) *size = 64;
}

}  // namespace

void CorrectOldConfigs(ModelDirectory* directory) {
  const PipelineClass* const known = FindPipeline(directory->pipeline_class);
  if (!known || !known->corrections) return;
  if (directory->scheduler_config)
    CorrectScheduler(*known->corrections, &*directory->scheduler_config);
  if (const auto unet = directory->components.find("unet"); unet != directory->components.end())
    CorrectUNet(&unet->second.config);
}

}  // namespace denoised
