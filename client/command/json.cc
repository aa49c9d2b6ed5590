// SPDX-License-Identifier: Apache-2.0
#include "command/json.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "flags/printable.h"

namespace denoised::command {
namespace {

template <typename Enum>
std::string NameOf(Enum value) {
  return std::string(client::Name(value));
}

template <typename Enum>
std::vector<std::string> NamesOf(const std::vector<Enum>& values) {
  std::vector<std::string> names;
  names.reserve(values.size());
  for (const Enum value : values) names.push_back(NameOf(value));
  return names;
}

}  // namespace

nlohmann::json ToJson(const client::EffectiveParams& params) {
  nlohmann::json json = {{"model", params.model},
                         {"model_version", params.model_version},
                         {"request_id", params.request_id},
                         {"seed", std::to_string(params.seed)},
                         {"count", params.count},
                         {"class_labels", params.class_labels},
                         {"guidance_scale", params.guidance_scale},
                         {"steps", params.steps},
                         {"evaluations", params.evaluations},
                         {"sampler", NameOf(params.sampler)},
                         {"noise_schedule", NameOf(params.noise_schedule)},
                         {"width", params.width},
                         {"height", params.height},
                         {"masked", params.masked},
                         {"eta", params.eta},
                         {"s_churn", params.s_churn},
                         {"class_vectors", params.class_vectors}};
  // Of an init image, and of no other request.
  const auto& init_image = params.request.init_image;
  if (init_image && init_image->strength) json["strength"] = *init_image->strength;
  if (params.image_guidance_scale) json["image_guidance_scale"] = *params.image_guidance_scale;
  if (params.guidance_rescale) json["guidance_rescale"] = *params.guidance_rescale;
  if (params.guidance_start) json["guidance_start"] = *params.guidance_start;
  if (params.guidance_stop) json["guidance_stop"] = *params.guidance_stop;
  if (params.s_tmin) json["s_tmin"] = *params.s_tmin;
  // JSON has no infinity; left out, it says the same: there is no upper bound.
  if (params.s_tmax && std::isfinite(*params.s_tmax)) json["s_tmax"] = *params.s_tmax;
  if (params.s_noise) json["s_noise"] = *params.s_noise;
  if (params.solver_order) json["solver_order"] = *params.solver_order;
  for (const uint64_t seed : params.seeds) json["seeds"].push_back(std::to_string(seed));
  for (size_t i = 0; i < params.prompts.size(); ++i) {
    const client::Prompt& prompt = params.prompts[i];
    nlohmann::json& text = json["prompts"].emplace_back();
    text["text"] = prompt.text;
    if (prompt.negative) text["negative"] = *prompt.negative;
    if (prompt.text_2) text["text_2"] = *prompt.text_2;
    if (prompt.negative_2) text["negative_2"] = *prompt.negative_2;
    if (i >= params.texts.size()) continue;
    const client::TextRead& read = params.texts[i];
    text["tokens"] = read.tokens;
    for (const auto& [name, cut_off] : {std::pair{"cut_off", &read.cut_off},
                                        std::pair{"negative_cut_off", &read.negative_cut_off},
                                        std::pair{"text_2_cut_off", &read.text_2_cut_off},
                                        std::pair{"negative_2_cut_off", &read.negative_2_cut_off}})
      if (!cut_off->empty()) text[name] = *cut_off;
  }
  if (params.max_chunks > 0) json["max_chunks"] = params.max_chunks;
  return json;
}

nlohmann::json ToJson(const client::Timing& timing) {
  return {{"queued_seconds", timing.queued_seconds}, {"total_seconds", timing.total_seconds}};
}

nlohmann::json ToJson(const client::Image& image) {
  nlohmann::json json = {{"index", image.index},
                         {"seed", std::to_string(image.seed)},
                         {"mime_type", image.mime_type},
                         {"width", image.width},
                         {"height", image.height}};
  if (image.class_label) json["class_label"] = *image.class_label;
  return json;
}

nlohmann::json ToJson(const client::Model& model) {
  return {{"name", model.name},
          {"version", model.version},
          {"current", model.current},
          {"aliases", model.aliases},
          {"state", NameOf(model.state)},
          {"error", model.error},
          {"architecture", model.architecture},
          {"pipeline", model.pipeline},
          {"parameters", model.parameters},
          {"capabilities",
           {{"text", model.capabilities.text},
            {"second_text", model.capabilities.second_text},
            {"class_label", model.capabilities.class_label},
            {"class_vector", model.capabilities.class_vector},
            {"size_conditions", model.capabilities.size_conditions},
            {"guidance", model.capabilities.guidance},
            {"guidance_interval", model.capabilities.guidance_interval},
            {"guidance_rescale", model.capabilities.guidance_rescale},
            {"image_guidance", model.capabilities.image_guidance},
            {"init_image", model.capabilities.init_image},
            {"init_image_required", model.capabilities.init_image_required},
            {"strength", model.capabilities.strength},
            {"mask", model.capabilities.mask},
            {"mask_required", model.capabilities.mask_required}}},
          {"precision", model.precision},
          {"labels", model.labels},
          {"defaults",
           {{"sampler", NameOf(model.defaults.sampler)},
            {"noise_schedule", NameOf(model.defaults.noise_schedule)},
            {"steps", model.defaults.steps},
            {"guidance_scale", model.defaults.guidance_scale},
            {"image_guidance_scale", model.defaults.image_guidance_scale},
            {"strength", model.defaults.strength},
            {"width", model.defaults.width},
            {"height", model.defaults.height}}},
          {"limits",
           {{"max_steps", model.limits.max_steps},
            {"max_count", model.limits.max_count},
            {"num_classes", model.limits.num_classes},
            {"class_vector_size", model.limits.class_vector_size},
            {"size_multiple", model.limits.size_multiple},
            {"max_edge", model.limits.max_edge},
            {"channels", model.limits.channels},
            {"max_request_bytes", model.limits.max_request_bytes},
            {"latent_factor", model.limits.latent_factor},
            {"latent_channels", model.limits.latent_channels},
            {"max_clip_skip", model.limits.max_clip_skip},
            {"max_chunks", model.limits.max_chunks},
            {"chunk_tokens", model.limits.chunk_tokens}}},
          {"samplers", NamesOf(model.samplers)},
          {"noise_schedules", NamesOf(model.noise_schedules)},
          {"stages", NamesOf(model.stages)},
          {"preview_decoders", NamesOf(model.preview_decoders)},
          {"memory_bytes", model.memory_bytes},
          {"device", model.device}};
}

nlohmann::json ToJson(const client::Job& job) {
  nlohmann::json json = {{"request_id", job.request_id},
                         {"client", job.client},
                         {"state", client::Name(job.state)},
                         {"params", ToJson(job.params)},
                         {"create_time", job.create_time},
                         {"evaluations_done", job.progress.evaluations_done},
                         {"evaluations_total", job.progress.evaluations_total},
                         {"images_done", job.images_done},
                         {"last_sequence", job.last_sequence}};
  if (job.start_time) json["start_time"] = *job.start_time;
  if (job.end_time) json["end_time"] = *job.end_time;
  if (job.expire_time) json["expire_time"] = *job.expire_time;
  if (!job.error.empty()) json["error"] = job.error;
  return json;
}

nlohmann::json ToJson(const client::ServerInfo& info) {
  nlohmann::json limits = nlohmann::json::object();
  for (const auto& [name, value] : info.limits) limits[name] = value;
  nlohmann::json devices = nlohmann::json::array();
  for (const client::Device& device : info.devices) {
    devices.push_back({{"name", device.name}, {"description", device.description}});
    if (!device.error.empty()) devices.back()["error"] = device.error;
  }
  return {{"version", info.version},
          {"build", info.build},
          {"state", info.state},
          {"device", info.device},
          {"device_description", info.device_description},
          {"devices", devices},
          {"uptime_seconds", info.uptime_seconds},
          {"batching", info.batching},
          {"client", info.client},
          {"features", info.features},
          {"limits", limits}};
}

nlohmann::json ToJson(const std::vector<client::TimelineEntry>& timeline) {
  nlohmann::json json = nlohmann::json::array();
  for (const client::TimelineEntry& entry : timeline) {
    nlohmann::json item = {{"milestone", client::Name(entry.milestone)},
                           {"seconds", entry.seconds}};
    if (entry.evaluations) item["evaluations"] = *entry.evaluations;
    if (entry.image_index) item["image_index"] = *entry.image_index;
    if (entry.stage != client::Stage::kUnknown) item["stage"] = client::Name(entry.stage);
    if (entry.device_seconds) item["device_seconds"] = *entry.device_seconds;
    json.push_back(std::move(item));
  }
  return json;
}

std::string PrintableJson(const nlohmann::json& json, int indent) {
  const std::string text =
      json.dump(indent, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace);
  std::string printable;
  for (size_t i = 0; i < text.size();) {
    const auto control = ControlAt(text, i);
    if (control && control->code > 0x20) {  // below it, only the ends of indented lines are left
      printable += fmt::format("\\u{:04x}", static_cast<uint32_t>(control->code));
      i += control->bytes;
    } else {
      printable += text[i++];
    }
  }
  return printable;
}

absl::StatusOr<nlohmann::json> ParseJson(std::string_view text) {
  std::vector<std::set<std::string>> keys;  // of the objects that have not ended
  std::optional<std::string> twice;
  const auto inspect = [&](int, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !keys.back().insert(parsed.get<std::string>()).second && !twice)
      twice = parsed.get<std::string>();
    return true;
  };
  try {
    nlohmann::json json = nlohmann::json::parse(text, inspect);
    if (!twice) return json;
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(fmt::format("is not valid JSON: {}", error.what()));
  }
  return absl::InvalidArgumentError(fmt::format("has \"{}\" twice; give it once", *twice));
}

}  // namespace denoised::command
