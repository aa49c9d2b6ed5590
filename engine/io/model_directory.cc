// SPDX-License-Identifier: Apache-2.0
#include "engine/io/model_directory.h"

#include <charconv>
#include <cmath>
#include <filesystem>

#include "engine/core/config_reader.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::json;

constexpr char kUNetClass[] = "UNet2DModel";

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

/// config.json must be of the one class that is built from it.
absl::Status CheckUNetClass(const json& config, const std::string& file, bool required) {
  const json name = config.value("_class_name", json());
  if (name.is_null() && !required) return absl::OkStatus();
  if (name.is_string() && name == kUNetClass) return absl::OkStatus();
  return InvalidArgument("{}: field '_class_name' is {}; only \"{}\" is supported", file,
                         name.dump(-1, ' ', true, json::error_handler_t::replace), kUNetClass);
}

/// diffusers loads a component from its subfolder, or from the root when there is none
/// (pipelines/pipeline_loading_utils.py, load_sub_model).
fs::path ComponentDirectory(const fs::path& root, const char* name) {
  return IsDirectory(root / name) ? root / name : root;
}

}  // namespace

absl::Status ModelDirectory::ParseIndex(const json& json_index, const std::string& file) {
  ConfigReader reader(json_index, file);
  for (const auto& [field, value] : json_index.items()) {
    const std::string component = ComponentClass(value);
    if (field == "unet") {
      if (component != kUNetClass)
        reader.Complain("unet",
                        fmt::format("only pipelines whose unet is a {} are supported", kUNetClass));
    } else if (field != "scheduler" && !component.empty()) {
      reader.Complain(
          field.c_str(),
          "pipelines with this component are not supported; only unet and scheduler are");
    }
    // Other fields configure the Python pipeline.
    reader.Ignore({field.c_str()});
  }
  if (!json_index.contains("unet"))
    reader.Complain("unet", "missing: only pipelines around a UNet2DModel are supported");
  if (json_index.contains("scheduler") && ComponentClass(json_index["scheduler"]).empty())
    reader.Complain("scheduler", "expected [\"diffusers\", \"<class>\"]");
  ReadLabels(reader.Raw("id2label"), &labels, &reader);

  const json ours = json_index.value("_denoised", json::object());
  if (!ours.is_object()) {
    reader.Complain("_denoised", "expected an object");
    return reader.Finish();
  }
  ConfigReader defaults(ours, file + ", _denoised");
  defaults.Read("null_class", &null_class);
  if (null_class < -1) defaults.Complain("null_class", "expected a class from 0, or -1 for none");
  defaults.Read("default_steps", &default_steps);
  if (default_steps < 0) defaults.Complain("default_steps", "expected at least 1");
  defaults.Read("default_guidance_scale", &default_guidance_scale);
  if (!std::isfinite(default_guidance_scale) || default_guidance_scale < 0)
    defaults.Complain("default_guidance_scale", "expected a finite number ≥ 0; 1 is no guidance");
  if (null_class < 0 && default_guidance_scale > 1)
    defaults.Complain("default_guidance_scale", "guidance needs a null_class");
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
  fs::path unet = base, scheduler = base;

  const fs::path index_file = base / "model_index.json";
  const bool is_pipeline = IsFile(index_file);
  if (is_pipeline) {
    DENOISED_ASSIGN_OR_RETURN(json index, ReadJsonFile(index_file.string()));
    DENOISED_RETURN_IF_ERROR(model.ParseIndex(index, index_file.string()));
    unet = ComponentDirectory(base, "unet");
    scheduler = ComponentDirectory(base, "scheduler");
  } else if (!IsFile(base / "config.json")) {
    return NotFound(
        "{}: neither model_index.json (a pipeline) nor config.json (a UNet2DModel) is there; give "
        "a model directory as diffusers saves it",
        root);
  }

  model.unet_directory = unet.string();
  model.unet_config_file = (unet / "config.json").string();
  DENOISED_ASSIGN_OR_RETURN(model.unet_config, ReadJsonFile(model.unet_config_file));
  DENOISED_RETURN_IF_ERROR(
      CheckUNetClass(model.unet_config, model.unet_config_file, /*required=*/!is_pipeline));

  const fs::path scheduler_file = scheduler / "scheduler_config.json";
  if (IsFile(scheduler_file)) {
    model.scheduler_config_file = scheduler_file.string();
    DENOISED_ASSIGN_OR_RETURN(model.scheduler_config, ReadJsonFile(model.scheduler_config_file));
    // As in diffusers, the index decides which class reads the fields.
    if (is_pipeline && model.index.contains("scheduler"))
      (*model.scheduler_config)["_class_name"] = ComponentClass(model.index["scheduler"]);
  } else if (is_pipeline && model.index.contains("scheduler")) {
    return NotFound("{}: no such file, but {} has a scheduler", scheduler_file.string(),
                    index_file.string());
  }
  return model;
}

absl::StatusOr<Weights> ModelDirectory::OpenWeights() const {
  absl::StatusOr<Safetensors> tensors =
      Safetensors::OpenDirectory(unet_directory, "diffusion_pytorch_model");
  if (absl::IsNotFound(tensors.status())) {
    absl::StatusOr<Safetensors> other = Safetensors::OpenDirectory(unet_directory, "model");
    if (!absl::IsNotFound(other.status())) tensors = std::move(other);
  }
  if (!tensors.ok()) return tensors.status();
  return Weights(*std::move(tensors), unet_directory);
}

}  // namespace denoised
