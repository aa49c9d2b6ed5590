// SPDX-License-Identifier: Apache-2.0
#include "engine/pipelines/pipeline.h"

#include <algorithm>
#include <set>

#include "engine/models/autoencoder_kl.h"
#include "engine/models/autoencoder_tiny.h"
#include "engine/models/clip_text.h"
#include "engine/models/unet2d.h"
#include "engine/models/unet2d_condition.h"
#include "engine/models/vq_model.h"

namespace denoised {
namespace {

using Component = ModelDirectory::Component;

// The registry. A new class is one line here and one file pair in models/.

/// Defaults of diffusers' pipelines, from the signatures of their __call__. Other classes have
/// those of the parts that they have.
struct PipelineClass {
  const char* name;
  double guidance_scale;
  int steps;
  bool reads_hidden_layer;  // text states are hidden_states[-2] without the final norm
};
constexpr PipelineClass kPipelines[] = {
    {"StableDiffusionPipeline", 7.5, 50, false},
    {"StableDiffusionImg2ImgPipeline", 7.5, 50, false},
    {"StableDiffusionXLPipeline", 5.0, 50, true},
    {"StableDiffusionXLImg2ImgPipeline", 5.0, 50, true},
    {"LatentConsistencyModelPipeline", 8.5, 4, false},
    {"LatentConsistencyModelImg2ImgPipeline", 8.5, 4, false},
};

using LoadCodec = absl::StatusOr<std::unique_ptr<Codec>> (*)(Backend&, const Component&,
                                                             const Weights&);
template <typename Config, auto kLoad>
absl::StatusOr<std::unique_ptr<Codec>> ParseAndLoad(Backend& backend, const Component& component,
                                                    const Weights& weights) {
  DENOISED_ASSIGN_OR_RETURN(const Config config,
                            Config::Parse(component.config, component.config_file));
  return kLoad(backend, config, weights);
}
struct CodecClass {
  const char* name;
  LoadCodec load;
};
constexpr CodecClass kCodecs[] = {
    {"AutoencoderKL", ParseAndLoad<AutoencoderKLConfig, LoadAutoencoderKL>},
    {"AutoencoderTiny", ParseAndLoad<AutoencoderTinyConfig, LoadAutoencoderTiny>},
    {"VQModel", ParseAndLoad<VQModelConfig, LoadVQModel>},
};

constexpr const char* kTextEncoders[] = {"CLIPTextModel", "CLIPTextModelWithProjection"};

const PipelineClass* FindPipeline(const std::string& name) {
  for (const PipelineClass& known : kPipelines)
    if (name == known.name) return &known;
  return nullptr;
}

absl::Status Unsupported(const ModelDirectory& directory, const std::string& name,
                         const std::string& supported) {
  return InvalidArgument("{}: component '{}' is a {}, which is not supported; {}", directory.root,
                         name, directory.components.at(name).class_name, supported);
}

bool ReadsText(const ModelDirectory& directory) {
  return directory.unet().class_name == "UNet2DConditionModel";
}

/// Every component must have a part in drawing.
absl::Status CheckComponents(const ModelDirectory& directory) {
  std::set<std::string> known = {"unet", "vae", "vqvae"};
  if (ReadsText(directory)) {
    known.insert({"tokenizer", "text_encoder"});
    if (directory.components.contains("text_encoder_2"))
      known.insert({"tokenizer_2", "text_encoder_2"});
    for (const std::string& name : known)
      if (name != "unet" && !name.starts_with("v") && !directory.components.contains(name))
        return InvalidArgument(
            "{}: there is no '{}', which a UNet2DConditionModel needs; give the "
            "whole directory as diffusers saves it",
            directory.root, name);
    if (!directory.components.contains("vae"))
      return InvalidArgument(
          "{}: there is no 'vae', which a UNet2DConditionModel needs; give the "
          "whole directory as diffusers saves it",
          directory.root);
  } else if (directory.unet().class_name != "UNet2DModel") {
    return Unsupported(directory, "unet", "use a UNet2DModel or a UNet2DConditionModel");
  }
  for (const auto& [name, component] : directory.components)
    if (!known.contains(name))
      return Unsupported(directory, name,
                         "only unet, vae, vqvae, text encoders and tokenizers are");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PipelineFiles> PipelineFiles::Read(const std::string& path) {
  DENOISED_ASSIGN_OR_RETURN(ModelDirectory directory, ModelDirectory::Read(path));
  DENOISED_RETURN_IF_ERROR(CheckComponents(directory));
  if (!directory.scheduler_config)
    return InvalidArgument(
        "{}: there is no scheduler_config.json; put the one that the model was published with into "
        "{}/scheduler, or beside config.json",
        path, path);
  DENOISED_ASSIGN_OR_RETURN(
      SchedulerConfig scheduler,
      SchedulerConfig::Parse(*directory.scheduler_config, directory.scheduler_config_file));
  PipelineFiles files{.directory = std::move(directory), .scheduler = std::move(scheduler)};
  if (ReadsText(files.directory)) {
    const PipelineClass* known = FindPipeline(files.directory.pipeline_class);
    if (!known) {
      std::string names;
      for (const PipelineClass& each : kPipelines) names += fmt::format(" {}", each.name);
      return InvalidArgument(
          "{}/model_index.json: field '_class_name' is \"{}\", which is not supported; use one "
          "of:{}",
          path, files.directory.pipeline_class, names);
    }
    files.default_guidance_scale = known->guidance_scale;
    files.default_steps = known->steps;
  }
  return files;
}

namespace {

class Loader {
 public:
  Loader(Backend& backend, const PipelineFiles& files)
      : backend_(backend), directory_(files.directory), scheduler_(files.scheduler) {}

  absl::StatusOr<Pipeline> Load() {
    if (ReadsText(directory_)) DENOISED_RETURN_IF_ERROR(LoadTextEncoders());
    for (const char* name : {"vae", "vqvae"})
      if (directory_.components.contains(name)) DENOISED_RETURN_IF_ERROR(LoadCodecOf(name));
    DENOISED_RETURN_IF_ERROR(ReadsText(directory_) ? LoadConditioned() : LoadUnconditioned());
    DENOISED_RETURN_IF_ERROR(CheckDenoiser());
    return std::move(pipeline_);
  }

 private:
  absl::StatusOr<Weights> Open(const Component& component) {
    DENOISED_ASSIGN_OR_RETURN(Weights weights, component.OpenWeights());
    pipeline_.parameters += weights.parameters();
    return weights;
  }

  absl::Status LoadTextEncoders() {
    if (FindPipeline(directory_.pipeline_class)->reads_hidden_layer) {
      pipeline_.final_norm = false;
      pipeline_.skip_layers = 1;
    }
    for (const char* name : {"text_encoder", "text_encoder_2"}) {
      const auto found = directory_.components.find(name);
      if (found == directory_.components.end()) continue;
      const Component& component = found->second;
      if (std::find(std::begin(kTextEncoders), std::end(kTextEncoders), component.class_name) ==
          std::end(kTextEncoders))
        return Unsupported(directory_, name,
                           "use a CLIPTextModel or a CLIPTextModelWithProjection");
      DENOISED_ASSIGN_OR_RETURN(
          const ClipTextConfig config,
          ClipTextConfig::Parse(component.config, component.config_file, component.class_name));
      DENOISED_ASSIGN_OR_RETURN(const Weights weights, Open(component));
      DENOISED_ASSIGN_OR_RETURN(std::shared_ptr<const TextEncoder> encoder,
                                LoadClipText(backend_, config, weights));
      pipeline_.text_encoders.push_back(std::move(encoder));
    }
    return absl::OkStatus();
  }

  absl::Status LoadCodecOf(const std::string& name) {
    const Component& component = directory_.components.at(name);
    const auto codec =
        std::find_if(std::begin(kCodecs), std::end(kCodecs),
                     [&](const CodecClass& each) { return component.class_name == each.name; });
    if (codec == std::end(kCodecs))
      return Unsupported(directory_, name, "use an AutoencoderKL, AutoencoderTiny or VQModel");
    DENOISED_ASSIGN_OR_RETURN(const Weights weights, Open(component));
    DENOISED_ASSIGN_OR_RETURN(pipeline_.codec, codec->load(backend_, component, weights));
    return absl::OkStatus();
  }

  absl::Status LoadConditioned() {
    const Component& unet = directory_.unet();
    DENOISED_ASSIGN_OR_RETURN(const UNet2DConditionConfig config,
                              UNet2DConditionConfig::Parse(unet.config, unet.config_file));
    int features = 0;
    for (const auto& encoder : pipeline_.text_encoders) features += encoder->traits().features;
    if (features != config.cross_attention_dim)
      return InvalidArgument(
          "{}: field 'cross_attention_dim' is {}, but the text encoders have {} features",
          unet.config_file, config.cross_attention_dim, features);
    DENOISED_ASSIGN_OR_RETURN(const Weights weights, Open(unet));
    DENOISED_ASSIGN_OR_RETURN(
        pipeline_.denoiser,
        LoadUNet2DCondition(backend_, config,
                            pipeline_.text_encoders.back()->traits().pooled_features, weights));
    if (const int numbers = pipeline_.denoiser->traits().size_numbers; numbers != 0 && numbers != 6)
      return InvalidArgument(
          "{}: text_time takes {} numbers; only 6 (original size, crop, target size) are supported",
          unet.config_file, numbers);
    return absl::OkStatus();
  }

  absl::Status LoadUnconditioned() {
    const Component& unet = directory_.unet();
    DENOISED_ASSIGN_OR_RETURN(const UNet2DConfig config,
                              UNet2DConfig::Parse(unet.config, unet.config_file));
    DENOISED_ASSIGN_OR_RETURN(const Weights weights, Open(unet));
    DENOISED_ASSIGN_OR_RETURN(pipeline_.denoiser, LoadUNet2D(backend_, config, weights));
    return absl::OkStatus();
  }

  /// What the sampler and the codec need of it.
  absl::Status CheckDenoiser() {
    const std::string& file = directory_.unet().config_file;
    const DenoiserTraits& traits = pipeline_.denoiser->traits();
    if (traits.height == 0 || traits.width == 0)
      return InvalidArgument(
          "{}: field 'sample_size' is missing; set it to the size of the images (or latents) that "
          "the model was trained on",
          file);
    if (pipeline_.codec && pipeline_.codec->traits().latent_channels != traits.channels)
      return InvalidArgument(
          "{}: field 'in_channels' is {}, but the autoencoder has {} latent channels; models that "
          "read a mask or another image are not supported",
          file, traits.channels, pipeline_.codec->traits().latent_channels);
    const bool learned = traits.output_channels == 2 * traits.channels;
    if (traits.output_channels != traits.channels && !learned)
      return InvalidArgument(
          "{}: field 'out_channels' is {}: a model that can be sampled has in_channels ({}), or "
          "twice as many with a learned variance",
          file, traits.output_channels, traits.channels);
    if (scheduler_.learns_variance() && !learned)
      return InvalidArgument(
          "{}: field 'variance_type' asks for a learned variance, but the model in {} has "
          "out_channels {}; it would need {}",
          directory_.scheduler_config_file, file, traits.output_channels, 2 * traits.channels);
    return absl::OkStatus();
  }

  Backend& backend_;
  const ModelDirectory& directory_;
  const SchedulerConfig& scheduler_;
  Pipeline pipeline_;
};

}  // namespace

absl::StatusOr<Pipeline> LoadPipeline(Backend& backend, const PipelineFiles& files) {
  return Loader(backend, files).Load();
}

}  // namespace denoised
