// SPDX-License-Identifier: Apache-2.0
#include "engine/io/model_directory.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string_view>

#include "engine/core/config_reader.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::json;

// Components that change nothing about how images are drawn.
constexpr std::string_view kIgnored[] = {"safety_checker", "feature_extractor", "image_encoder"};

bool IsTokenizer(std::string_view component) { return component.starts_with("tokenizer"); }

/// The file of a component's folder that says what it is.
const char* ConfigFileOf(const std::string& name, const ModelDirectory::Component& component) {
  if (IsTokenizer(name)) return "tokenizer_config.json";
  return component.class_name.ends_with("Scheduler") ? "scheduler_config.json" : "config.json";
}

bool IsFile(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

bool IsDirectory(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

/// A component in model_index.json is ["library", "Class"]; [null, null] means that it is left out.
/// Empty for anything else.
std::string ComponentClass(const json& component) {
  if (!component.is_array() || component.size() != 2 || !component[1].is_string()) return "";
  return component[1].get<std::string>();
}

/// Reads id2label, {"0": "zero", …}.
void ReadLabels(const json& id2label, std::map<int, std::string>* labels, ConfigReader* reader) {
  if (id2label.is_null()) return;
  if (!id2label.is_object()) {
    reader->Complain("id2label", "expected an object of class numbers and texts");
    return;
  }
  for (const auto& [key, text] : id2label.items()) {
    int id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    // "01" and "1" would be the same class.
    const bool is_class = error == std::errc() && end == key.data() + key.size() && id >= 0 &&
                          std::to_string(id) == key;
    if (!is_class || !text.is_string()) {
      reader->Complain("id2label", "expected class numbers from \"0\" as keys and texts as values");
      return;
    }
    (*labels)[id] = text.get<std::string>();
  }
  if (!labels->empty() && labels->rbegin()->first != static_cast<int>(labels->size()) - 1)
    reader->Complain("id2label",
                     fmt::format("{} labels, but the highest class is {}; label every class from 0",
                                 labels->size(), labels->rbegin()->first));
}

/// diffusers loads a component from its subfolder, or from the root when there is none
/// (pipelines/pipeline_loading_utils.py, load_sub_model). `file` is the component's config.
absl::StatusOr<fs::path> ComponentDirectory(const fs::path& root, const std::string& name,
                                            const char* file) {
  const fs::path directory = IsDirectory(root / name) ? root / name : root;
  if (IsFile(directory / file)) return directory;
  return NotFound("{}: no such file, but {} has a '{}'; copy the whole directory again",
                  (root / name / file).string(), (root / "model_index.json").string(), name);
}

}  // namespace

absl::Status ModelDirectory::ParseIndex(const json& json_index, const std::string& file) {
  ConfigReader reader(json_index, file);
  for (const auto& [field, value] : json_index.items()) {
    const std::string component = ComponentClass(value);
    if (!component.empty() && field != "scheduler" &&
        std::find(std::begin(kIgnored), std::end(kIgnored), field) == std::end(kIgnored))
      components[field].class_name = component;
    reader.Ignore({field.c_str()});  // other fields configure the Python pipeline
  }
  if (!components.contains("unet"))
    reader.Complain("unet", json_index.contains("unet")
                                ? "expected [\"diffusers\", \"<class>\"]"
                                : "missing: only pipelines around a UNet are supported");
  if (json_index.contains("scheduler") && ComponentClass(json_index["scheduler"]).empty())
    reader.Complain("scheduler", "expected [\"diffusers\", \"<class>\"]");
  reader.Read("_class_name", &pipeline_class);
  reader.Read("force_zeros_for_empty_prompt", &force_zeros_for_empty_prompt);
  ReadLabels(reader.Raw("id2label"), &labels, &reader);

  const json ours = json_index.value("_denoised", json::object());
  if (!ours.is_object()) {
    reader.Complain("_denoised", "expected an object");
    return reader.Finish();
  }
  ConfigReader defaults(ours, file + ", _denoised");
  defaults.Read("null_class", &null_class);
  if (null_class < -1) defaults.Complain("null_class", "expected a class from 0, or -1 for none");
  std::optional<int> steps;
  defaults.Read("default_steps", &steps);
  if (steps && *steps < 1) defaults.Complain("default_steps", "expected at least 1");
  default_steps = steps.value_or(0);
  defaults.Read("default_guidance_scale", &default_guidance_scale);
  const double guidance = default_guidance_scale.value_or(1);
  if (!(guidance >= 0 && guidance <= kMaxGuidanceScale))
    defaults.Complain(
        "default_guidance_scale",
        fmt::format("expected a number from 0 to {}; 1 is no guidance", kMaxGuidanceScale));
  std::string name = "default";
  defaults.Read("precision", &name);
  if (const std::optional<Precision> known = PrecisionFromName(name)) {
    precision = *known;
  } else {
    defaults.Complain("precision", fmt::format("expected {}", kPrecisions));
  }
  DENOISED_RETURN_IF_ERROR(reader.Finish());
  DENOISED_RETURN_IF_ERROR(defaults.Finish());
  index = json_index;
  return absl::OkStatus();
}

absl::StatusOr<ModelDirectory> ModelDirectory::Read(const std::string& root) {
  if (!IsDirectory(root)) return NotFound("{}: no such model directory", root);
  ModelDirectory model;
  model.root = root;
  const fs::path base(root);

  const fs::path index_file = base / "model_index.json";
  const bool is_pipeline = IsFile(index_file);
  if (is_pipeline) {
    DENOISED_ASSIGN_OR_RETURN(json index, ReadJsonFile(index_file.string()));
    DENOISED_RETURN_IF_ERROR(model.ParseIndex(index, index_file.string()));
  } else if (IsFile(base / "config.json")) {
    model.components["unet"];
  } else {
    return NotFound(
        "{}: neither model_index.json (a pipeline) nor config.json (a model alone) is there; give "
        "a model directory as diffusers saves it",
        root);
  }
  if (is_pipeline && IsFile(base / kTinyVae / "config.json")) model.components[kTinyVae];
  for (auto& [name, component] : model.components) {
    fs::path directory = base;
    if (is_pipeline) {
      DENOISED_ASSIGN_OR_RETURN(directory,
                                ComponentDirectory(base, name, ConfigFileOf(name, component)));
    }
    component.directory = directory.string();
    component.config_file = (directory / ConfigFileOf(name, component)).string();
    if (IsTokenizer(name)) continue;
    DENOISED_ASSIGN_OR_RETURN(component.config, ReadJsonFile(component.config_file));
    if (!component.class_name.empty()) continue;
    const json class_name = component.config.value("_class_name", json());
    if (!class_name.is_string())
      return InvalidArgument("{}: field '_class_name' is {}; it must name the model's class",
                             component.config_file,
                             class_name.dump(-1, ' ', true, json::error_handler_t::replace));
    component.class_name = class_name.get<std::string>();
  }

  const char* const file = "scheduler_config.json";
  absl::StatusOr<fs::path> scheduler = base;
  if (is_pipeline) {
    scheduler = ComponentDirectory(base, "scheduler", file);
    if (!scheduler.ok() && model.index.contains("scheduler")) return scheduler.status();
  }
  if (scheduler.ok() && IsFile(*scheduler / file)) {
    model.scheduler_config_file = (*scheduler / file).string();
    DENOISED_ASSIGN_OR_RETURN(model.scheduler_config, ReadJsonFile(model.scheduler_config_file));
    // As in diffusers, the index decides which class reads the fields.
    if (is_pipeline && model.index.contains("scheduler"))
      (*model.scheduler_config)["_class_name"] = ComponentClass(model.index["scheduler"]);
  }
  return model;
}

absl::StatusOr<Weights> ModelDirectory::Component::OpenWeights() const {
  // diffusers names its class in the config; transformers does not, and names its files otherwise.
  const char *stem = "diffusion_pytorch_model", *other_stem = "model";
  if (!config.contains("_class_name")) std::swap(stem, other_stem);
  absl::StatusOr<Safetensors> tensors = Safetensors::OpenDirectory(directory, stem);
  if (absl::IsNotFound(tensors.status())) {
    absl::StatusOr<Safetensors> other = Safetensors::OpenDirectory(directory, other_stem);
    if (!absl::IsNotFound(other.status())) tensors = std::move(other);
  }
  if (!tensors.ok()) return tensors.status();
  return Weights(*std::move(tensors), directory);
}

}  // namespace denoised
