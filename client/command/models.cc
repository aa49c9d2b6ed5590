// SPDX-License-Identifier: Apache-2.0
#include "command/models.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>

#include "command/call_options.h"
#include "command/json.h"
#include "command/table.h"
#include "flags/printable.h"

namespace denoised::command {
namespace {

std::string HumanCount(int64_t count) {
  if (count >= 1'000'000'000) return fmt::format("{:.2f} G", count / 1e9);
  if (count >= 1'000'000) return fmt::format("{:.2f} M", count / 1e6);
  return std::to_string(count);
}

std::string HumanBytes(int64_t bytes) { return fmt::format("{:.1f} MiB", bytes / 1048576.0); }

std::string SizeOf(const client::Model& model) {
  return fmt::format("{}x{}x{}", model.defaults.width, model.defaults.height,
                     model.limits.channels);
}

void PrintTable(const std::vector<client::Model>& models) {
  std::vector<std::vector<std::string>> rows = {{"NAME", "VERSION", "STATE", "ALIASES", "SIZE",
                                                 "CLASSES", "WEIGHTS", "SAMPLER", "STEPS",
                                                 "DEVICE"}};
  for (const client::Model& model : models) {
    rows.push_back({model.name, model.version + (model.current ? "*" : ""),
                    std::string(client::Name(model.state)),
                    fmt::format("{}", fmt::join(model.aliases, ",")), SizeOf(model),
                    std::to_string(model.limits.num_classes), HumanCount(model.parameters),
                    std::string(client::Name(model.defaults.sampler)),
                    std::to_string(model.defaults.steps), model.device});
  }
  std::fputs(Table(rows).c_str(), stdout);
  for (const client::Model& model : models) {
    if (model.error.empty()) continue;
    std::puts(fmt::format("\n{}: {}", Printable(model.name), Printable(model.error)).c_str());
  }
}

template <typename Enum>
std::string Joined(const std::vector<Enum>& values) {
  std::vector<std::string> names;
  names.reserve(values.size());
  for (const Enum value : values) names.emplace_back(client::Name(value));
  return fmt::format("{}", fmt::join(names, ", "));
}

void PrintModel(const client::Model& model) {
  const auto line = [](const char* key, const std::string& value) {
    std::puts(fmt::format("{:<14}{}", key, Printable(value)).c_str());
  };
  line("name", model.name);
  line("version", model.version + (model.current ? ", current" : ""));
  if (!model.aliases.empty()) line("aliases", fmt::format("{}", fmt::join(model.aliases, ", ")));
  line("state", std::string(client::Name(model.state)));
  if (!model.error.empty()) line("error", model.error);
  line("architecture",
       fmt::format("{}, {} weights", model.pipeline.empty() ? model.architecture : model.pipeline,
                   HumanCount(model.parameters)));
  if (!model.precision.empty()) line("precision", model.precision);
  line("device", fmt::format("{}, {}", model.device, HumanBytes(model.memory_bytes)));
  if (model.stages.size() > 1) line("stages", Joined(model.stages));
  if (!model.preview_decoders.empty()) line("previews", Joined(model.preview_decoders));
  line("size", fmt::format("{}, multiples of {} up to {}", SizeOf(model),
                           model.limits.size_multiple, model.limits.max_edge));
  const client::Model::Capabilities& can = model.capabilities;
  line("condition", can.text           ? "text"
                    : can.class_label  ? "label"
                    : can.class_vector ? fmt::format("vector of {}", model.limits.class_vector_size)
                                       : "none");
  if (model.limits.max_chunks > 0)
    line("prompts",
         fmt::format("up to {} tokens, in {} chunks",
                     model.limits.max_chunks * model.limits.chunk_tokens, model.limits.max_chunks));
  if (model.limits.num_classes > 0) line("classes", std::to_string(model.limits.num_classes));
  if (!model.labels.empty()) line("labels", fmt::format("{}", fmt::join(model.labels, ", ")));
  line("guidance",
       can.guidance ? fmt::format("yes, default {}", model.defaults.guidance_scale) : "no");
  std::vector<std::string> pictures;
  const auto picture = [&](bool taken, bool required, const char* name) {
    if (taken) pictures.push_back(required ? std::string(name) + " (required)" : name);
  };
  picture(can.init_image, can.init_image_required, "init image");
  picture(can.mask, can.mask_required, "mask");
  picture(can.image_guidance, false, "image guidance");
  if (!pictures.empty()) line("pictures", fmt::format("{}", fmt::join(pictures, ", ")));
  line("sampler",
       fmt::format("{} (of {})", client::Name(model.defaults.sampler), Joined(model.samplers)));
  line("schedule", fmt::format("{} (of {})", client::Name(model.defaults.noise_schedule),
                               Joined(model.noise_schedules)));
  line("steps", fmt::format("{} (up to {})", model.defaults.steps, model.limits.max_steps));
  line("images", fmt::format("up to {} a request", model.limits.max_count));
}

}  // namespace

ExitCode Models(const client::Client& client, const ModelsFlags& flags,
                const client::CallOptions& call) {
  const client::CallOptions options = WithTimeout(call, kQuestionTimeout);
  if (!flags.name.empty()) {
    const auto model = client.GetModel(flags.name, options);
    if (!model.ok()) return Report(model.status(), flags.json);
    if (flags.json) {
      std::puts(PrintableJson(ToJson(*model)).c_str());
    } else {
      PrintModel(*model);
    }
    return kOk;
  }
  const auto models = client.ListModels(options);
  if (!models.ok()) return Report(models.status(), flags.json);
  if (!flags.json) {
    PrintTable(*models);
    return kOk;
  }
  nlohmann::json json = nlohmann::json::array();
  for (const client::Model& model : *models) json.push_back(ToJson(model));
  std::puts(PrintableJson(json).c_str());
  return kOk;
}

namespace {

ExitCode TellModel(const absl::StatusOr<client::Model>& model, bool json) {
  if (!model.ok()) return Report(model.status(), json);
  if (json) {
    std::puts(PrintableJson(ToJson(*model)).c_str());
  } else {
    PrintTable({*model});
  }
  return kOk;
}

}  // namespace

// Without a timeout: large models take their time, and so do the requests that are to end.
ExitCode LoadModel(const client::Client& client, const ModelChangeFlags& flags,
                   const client::CallOptions& call) {
  return TellModel(client.LoadModel(flags.load, call), flags.json);
}

ExitCode UnloadModel(const client::Client& client, const ModelChangeFlags& flags,
                     const client::CallOptions& call) {
  return Report(client.UnloadModel(flags.unload, call), flags.json);
}

ExitCode SetAlias(const client::Client& client, const ModelChangeFlags& flags,
                  const client::CallOptions& call) {
  const client::CallOptions options = WithTimeout(call, kQuestionTimeout);
  if (flags.delete_alias) return Report(client.DeleteAlias(flags.alias, options), flags.json);
  return TellModel(client.SetAlias(flags.alias, flags.target, options), flags.json);
}

}  // namespace denoised::command
