// SPDX-License-Identifier: Apache-2.0
#include "trainer/text_to_image.h"

#include <algorithm>
#include <filesystem>

#include "engine/pipelines/prompt_reader.h"
#include "engine/text/clip_tokenizer.h"
#include "engine/text/unicode.h"
#include "engine/training/latents.h"
#include "trainer/data/archive.h"
#include "trainer/data/pictures.h"

namespace denoised::trainer {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTextTable = "text_model.embeddings.token_embedding.weight";

/// The trained parameters below a prefix, by the rest of their names.
std::map<std::string, Tensor> Below(const std::string& prefix,
                                    const std::map<std::string, Tensor>& weights) {
  std::map<std::string, Tensor> below;
  for (const auto& [name, tensor] : weights)
    if (name.rfind(prefix, 0) == 0) below[name.substr(prefix.size())] = tensor;
  return below;
}

/// Sets what a snapshot copies: everything that is not one of its parts, and not `left_out`.
void CopyOthers(const ModelDirectory& from, const std::string& left_out, Pipeline* pipeline) {
  pipeline->index = from.index;
  // The scheduler's file is copied: diffusers writes infinities, which the parsed JSON cannot hold.
  pipeline->copied = {fs::path(from.scheduler_config_file).parent_path().string()};
  for (const auto& item : from.components) {
    if (item.first == left_out) continue;
    const bool written =
        std::any_of(pipeline->parts.begin(), pipeline->parts.end(),
                    [&](const Pipeline::Part& part) { return part.folder == item.first; });
    if (!written) pipeline->copied.push_back(item.second.directory);
  }
  // Components that only diffusers reads, such as a safety checker. Where the folder is missing,
  // diffusers would refuse an index that names it.
  pipeline->index.erase(left_out);
  for (const auto& item : from.index.items()) {
    const nlohmann::json& value = item.value();
    if (item.key() == left_out || item.key() == "scheduler" ||
        from.components.count(item.key()) > 0 || !value.is_array() || value.size() != 2 ||
        !value[1].is_string())
      continue;
    const fs::path folder = fs::path(from.root) / item.key();
    std::error_code error;
    if (fs::is_directory(folder, error)) {
      pipeline->copied.push_back(folder.string());
    } else {
      pipeline->index[item.key()] = {nullptr, nullptr};
    }
  }
}

}  // namespace

absl::StatusOr<PipelineParts> PipelineParts::Read(const std::string& directory, Stage stage) {
  PipelineParts parts;
  DENOISED_ASSIGN_OR_RETURN(parts.directory, ModelDirectory::Read(directory));
  const ModelDirectory& from = parts.directory;
  if (from.pipeline_class != "StableDiffusionPipeline")
    return InvalidArgument("{}: is a {}; --pipeline trains a StableDiffusionPipeline", directory,
                           from.pipeline_class.empty() ? "single model" : from.pipeline_class);
  for (const char* const part : {"text_encoder", "tokenizer", "vae"})
    if (from.components.count(part) == 0)
      return NotFound("{}: has no {}; a StableDiffusionPipeline needs one", directory, part);
  if (!from.scheduler_config)
    return NotFound("{}: has no scheduler/scheduler_config.json, which says how to train",
                    directory);
  // Snapshots have a folder for each part, and what is not trained is copied by folder.
  const auto check_folder = [&](const std::string& part, const fs::path& folder) {
    if (folder / "" != fs::path(from.root) / "") return absl::OkStatus();  // "x" or "x/"
    return InvalidArgument("{}: its {} lies beside model_index.json; move the files to {}",
                           directory, part, (folder / part).string());
  };
  for (const auto& [name, component] : from.components)
    DENOISED_RETURN_IF_ERROR(check_folder(name, component.directory));
  DENOISED_RETURN_IF_ERROR(
      check_folder("scheduler", fs::path(from.scheduler_config_file).parent_path()));
  const auto file = [&](const char* part) { return from.components.at(part).config_file; };
  DENOISED_ASSIGN_OR_RETURN(parts.network.unet,
                            UNet2DConditionConfig::Parse(parts.config("unet"), file("unet")));
  DENOISED_ASSIGN_OR_RETURN(
      parts.network.text, ClipTextConfig::Parse(parts.config("text_encoder"), file("text_encoder"),
                                                from.components.at("text_encoder").class_name));
  DENOISED_ASSIGN_OR_RETURN(parts.vae,
                            AutoencoderKLConfig::Parse(parts.config("vae"), file("vae")));
  const VaeConfig& latents = parts.vae.vae;
  DENOISED_RETURN_IF_ERROR(CheckChannels(latents.in_channels, file("vae")));
  // Also in stage vae, whose model is for stage diffusion.
  if (const int channels = parts.network.unet.in_channels; channels != latents.latent_channels)
    return InvalidArgument(
        "{}: field 'in_channels' is {}, but {} has latent_channels {}; set it to {}, or take both "
        "parts from one pipeline",
        file("unet"), channels, file("vae"), latents.latent_channels, latents.latent_channels);
  // SDXL's pipelines alone read these of diffusers'. Stage vae writes null.
  if (const AutoencoderKLConfig& vae = parts.vae; stage == Stage::kDiffusion)
    for (const auto& [field, used] : {std::pair{"shift_factor", vae.shift_factor != 0},
                                      std::pair{"latents_mean", !vae.latents_mean.empty()},
                                      std::pair{"latents_std", !vae.latents_std.empty()}})
      if (used)
        return InvalidArgument(
            "{}: field '{}' is {}, which diffusers' StableDiffusionPipeline ignores; use null, or "
            "run stage vae first",
            file("vae"), field, parts.config("vae")[field].dump());
  // What the server refuses, it would refuse in the model, too.
  const std::string& schedule = from.scheduler_config_file;
  DENOISED_ASSIGN_OR_RETURN(parts.served, PipelineFiles::Of(parts.directory));
  PromptReader::Rules rules;
  rules.encoders = {{.max_tokens = parts.network.text.max_position_embeddings,
                     .vocabulary = parts.network.text.vocab_size}};
  DENOISED_RETURN_IF_ERROR(PromptReader::Load(from, rules).status());
  DENOISED_ASSIGN_OR_RETURN(parts.objective,
                            training::ObjectiveOfScheduler(*from.scheduler_config, schedule));
  if (!training::IsDdpm(parts.objective.kind))
    return InvalidArgument(
        "{}: field '_class_name' is {}, but text to image is trained with DDPM's noise; use the "
        "scheduler that the pipeline was trained with, such as DDIMScheduler",
        schedule, (*from.scheduler_config)["_class_name"].dump());
  if (parts.served.scheduler.learns_variance())
    return InvalidArgument(
        "{}: field 'variance_type' is {}, but text to image learns no variance; use "
        "\"fixed_small\"",
        schedule, (*from.scheduler_config)["variance_type"].dump());
  const nlohmann::json dropout = parts.config("unet").value("dropout", nlohmann::json());
  if (dropout.is_number() && dropout != 0)
    return InvalidArgument("{}: dropout is {}, which cannot be trained with; use 0", file("unet"),
                           dropout.dump());
  if (parts.network.unet.sample_height == 0)
    return InvalidArgument("{}: sample_size is missing or 0; set it", file("unet"));
  return parts;
}

training::NetworkConfig PipelineParts::Network(Stage stage) const {
  if (stage == Stage::kDiffusion) return network;
  return training::AutoencoderConfig{
      .vae = vae, .sample_height = height(), .sample_width = width()};
}

absl::StatusOr<Captions> ReadCaptions(const std::string& folder,
                                      const std::vector<std::string>& files) {
  Captions captions;
  const fs::path metadata = fs::path(folder) / "metadata.jsonl";
  std::error_code error;
  if (!fs::exists(metadata, error)) {
    for (const std::string& name : files) {
      const fs::path path = (fs::path(folder) / name).replace_extension(".txt");
      if (!fs::exists(path, error)) continue;
      DENOISED_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
      for (const std::string& line : LinesOf(text))
        if (!line.empty()) captions[name].push_back(line);
    }
    return captions;
  }
  DENOISED_ASSIGN_OR_RETURN(const std::string text, ReadFile(metadata));
  int number = 0;
  for (const std::string& line : LinesOf(text)) {
    ++number;
    if (line.empty()) continue;
    DENOISED_ASSIGN_OR_RETURN(const nlohmann::json json,
                              ParseMetadataLine(line, metadata.string(), number));
    if (!json.contains("text")) continue;
    const nlohmann::json& texts = json["text"];
    for (const nlohmann::json& one : texts.is_array() ? texts : nlohmann::json::array({texts})) {
      if (!one.is_string())
        return InvalidArgument("{}, line {}: \"text\" is {}; use a text or a list of texts",
                               metadata.string(), number, texts.dump());
      captions[PictureName(json["file_name"])].push_back(one);
    }
  }
  return captions;
}

std::string CheckCaptions(const Captions& captions, const std::string& file) {
  const auto found = captions.find(file);
  if (found == captions.end() || found->second.empty())
    return "has no caption. Give it \"text\" in metadata.jsonl, or a .txt of its name if there is "
           "no metadata.jsonl";
  for (const std::string& text : found->second) {
    if (text.size() > ClipTokenizer::kMaxTextBytes)
      return fmt::format("its caption has {} bytes; use at most {}", text.size(),
                         ClipTokenizer::kMaxTextBytes);
    if (const absl::Status status = DecodeUtf8(text).status(); !status.ok())
      return fmt::format("its caption cannot be read: {}", std::string(status.message()));
  }
  return "";
}

absl::StatusOr<int64_t> Tokenize(const PipelineParts& parts, const std::vector<std::string>& files,
                                 const Captions& captions, training::Dataset* dataset) {
  DENOISED_ASSIGN_OR_RETURN(const ClipTokenizer tokenizer,
                            ClipTokenizer::Load(parts.folder("tokenizer")));
  const int width = tokenizer.max_length();
  std::vector<int32_t> ids;
  int64_t cut = 0;
  const auto add = [&](const std::string& name, const std::string& text) -> absl::Status {
    const absl::StatusOr<TokenizedText> tokens = tokenizer.Encode(text);
    if (!tokens.ok())
      return InvalidArgument("{}: its caption cannot be read: {}", name,
                             std::string(tokens.status().message()));
    ids.insert(ids.end(), tokens->ids.begin(), tokens->ids.begin() + width);
    cut += tokens->kept_tokens < tokens->tokens;
    return absl::OkStatus();
  };
  dataset->first_caption.clear();
  for (const std::string& name : files) {
    dataset->first_caption.push_back(static_cast<int32_t>(ids.size() / width));
    if (const std::string fault = CheckCaptions(captions, name); !fault.empty())
      return InvalidArgument("{}: {}", name, fault);
    for (const std::string& text : captions.at(name)) DENOISED_RETURN_IF_ERROR(add(name, text));
  }
  const auto count = static_cast<int64_t>(ids.size()) / width;
  dataset->first_caption.push_back(static_cast<int32_t>(count));
  DENOISED_RETURN_IF_ERROR(add("the empty caption", ""));
  dataset->tokens = Tensor::Host({count + 1, width}, DType::kI32);
  std::copy(ids.begin(), ids.end(), dataset->tokens.as<int32_t>());
  return cut;
}

absl::StatusOr<Weights> OpenPart(const std::string& directory, const std::string& part) {
  const std::string folder = directory + "/" + part;
  DENOISED_ASSIGN_OR_RETURN(
      Safetensors tensors,
      Safetensors::OpenDirectory(folder,
                                 part == "text_encoder" ? "model" : "diffusion_pytorch_model"));
  Weights weights(std::move(tensors), folder);
  if (part == "text_encoder") {
    weights.Ignore("embeddings.position_ids");
    weights.Ignore("text_model.embeddings.position_ids");
  }
  return weights;
}

absl::StatusOr<std::map<std::string, Weights>> OpenParts(const PipelineParts& parts, Stage stage,
                                                         const std::string& init_from) {
  std::map<std::string, Weights> opened;
  if (stage == Stage::kAutoencoder) {
    if (init_from.empty()) return opened;
    DENOISED_ASSIGN_OR_RETURN(Weights weights, OpenPart(init_from, "vae"));
    opened.emplace("", std::move(weights));
    return opened;
  }
  if (!init_from.empty()) {
    DENOISED_ASSIGN_OR_RETURN(Weights weights, OpenPart(init_from, "unet"));
    opened.emplace("unet.", std::move(weights));
  }
  if (init_from.empty() && parts.network.train_text) return opened;
  DENOISED_ASSIGN_OR_RETURN(
      Weights weights,
      OpenPart(init_from.empty() ? parts.directory.root : init_from, "text_encoder"));
  const char* const prefix = weights.Has(kTextTable) ? "text_encoder." : "text_encoder.text_model.";
  opened.emplace(prefix, std::move(weights));
  return opened;
}

absl::StatusOr<Pipeline> MakeSnapshot(const PipelineParts& parts, Stage stage,
                                      std::map<std::string, Tensor> weights,
                                      training::Backend& backend, const Tensor& pictures) {
  Pipeline pipeline;
  std::string left_out;
  if (stage == Stage::kAutoencoder) {
    DENOISED_RETURN_IF_ERROR(training::StandardizeLatents(backend, parts.vae, pictures, &weights));
    nlohmann::json config = parts.config("vae");
    config["scaling_factor"] = 1.0;
    config["shift_factor"] = config["latents_mean"] = config["latents_std"] = nullptr;
    pipeline.parts = {{"vae", config, "diffusion_pytorch_model", weights}};
    left_out = ModelDirectory::kTinyVae;  // decodes the latents before this stage
  } else {
    nlohmann::json text = parts.config("text_encoder");
    // Of the computation, also if the file is fp16: transformers would load the encoder in half,
    // and diffusers the UNet beside it in float32.
    text.erase("torch_dtype");
    text["dtype"] = "float32";
    pipeline.parts = {
        {"text_encoder", text, "model", Below("text_encoder.", weights)},
        {"unet", parts.config("unet"), "diffusion_pytorch_model", Below("unet.", weights)}};
  }
  CopyOthers(parts.directory, left_out, &pipeline);
  return pipeline;
}

}  // namespace denoised::trainer
