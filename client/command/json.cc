#include "command/json.h"

#include <cmath>

namespace denoised::command {
namespace {

template <typename Enum>
std::string NameOf(Enum value) {
  return std::string(client::Name(value));
}

template <typename Enum>
std::vector<std::string> NamesOf(const std::vector<Enum>& values) {
  std::vector<std::string> names;
  for (const Enum value : values) names.push_back(NameOf(value));
  return names;
}

}  // namespace

nlohmann::json ToJson(const client::EffectiveParams& params) {
  nlohmann::json json = {{"model", params.model},
                         {"request_id", params.request_id},
                         {"seed", params.seed},
                         {"count", params.count},
                         {"class_labels", params.class_labels},
                         {"guidance_scale", params.guidance_scale},
                         {"steps", params.steps},
                         {"evaluations", params.evaluations},
                         {"sampler", NameOf(params.sampler)},
                         {"noise_schedule", NameOf(params.noise_schedule)},
                         {"width", params.width},
                         {"height", params.height},
                         {"strength", params.strength},
                         {"eta", params.eta},
                         {"s_churn", params.s_churn},
                         {"class_values", params.class_values}};
  if (params.s_tmin) json["s_tmin"] = *params.s_tmin;
  // JSON has no infinity; left out, it says the same: there is no upper bound.
  if (params.s_tmax && std::isfinite(*params.s_tmax)) json["s_tmax"] = *params.s_tmax;
  if (params.s_noise) json["s_noise"] = *params.s_noise;
  if (params.solver_order) json["solver_order"] = *params.solver_order;
  return json;
}

nlohmann::json ToJson(const client::Timing& timing) {
  return {{"queued_seconds", timing.queued_seconds}, {"total_seconds", timing.total_seconds}};
}

nlohmann::json ToJson(const client::Image& image) {
  nlohmann::json json = {{"index", image.index},
                         {"seed", image.seed},
                         {"mime_type", image.mime_type},
                         {"width", image.width},
                         {"height", image.height}};
  if (image.class_label) json["class_label"] = *image.class_label;
  return json;
}

nlohmann::json ToJson(const client::Model& model) {
  return {{"name", model.name},
          {"state", NameOf(model.state)},
          {"error", model.error},
          {"architecture", model.architecture},
          {"parameters", model.parameters},
          {"condition", NameOf(model.condition)},
          {"labels", model.labels},
          {"defaults",
           {{"sampler", NameOf(model.defaults.sampler)},
            {"noise_schedule", NameOf(model.defaults.noise_schedule)},
            {"steps", model.defaults.steps},
            {"guidance_scale", model.defaults.guidance_scale},
            {"width", model.defaults.width},
            {"height", model.defaults.height}}},
          {"limits",
           {{"max_steps", model.limits.max_steps},
            {"max_count", model.limits.max_count},
            {"num_classes", model.limits.num_classes},
            {"class_vector_size", model.limits.class_vector_size},
            {"guidance", model.limits.guidance},
            {"size_multiple", model.limits.size_multiple},
            {"channels", model.limits.channels},
            {"max_request_bytes", model.limits.max_request_bytes}}},
          {"samplers", NamesOf(model.samplers)},
          {"noise_schedules", NamesOf(model.noise_schedules)},
          {"memory_bytes", model.memory_bytes},
          {"device", model.device}};
}

}  // namespace denoised::command
