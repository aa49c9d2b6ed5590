// SPDX-License-Identifier: Apache-2.0
#include "engine/pipelines/pipeline.h"

#include <algorithm>
#include <set>

#include "engine/io/calibration.h"
#include "engine/models/registry.h"
#include "engine/pipelines/old_configs.h"
#include "engine/sampling/registry.h"

namespace denoised {
namespace {

using Component = ModelDirectory::Component;

/// The parts that may turn latents into pixels.
constexpr const char* kCodecs[] = {"vae", "vqvae"};

/// Every component must have a part in drawing.
absl::Status CheckComponents(const ModelDirectory& directory, bool reads_text) {
  std::set<std::string> known = {"unet", "vae", "vqvae", ModelDirectory::kTinyVae};
  if (reads_text) {
    if (directory.components.contains("text_encoder_2") &&
        !directory.components.contains("text_encoder"))
      return InvalidArgument(
          "{}: there is a 'text_encoder_2', but no 'text_encoder': SDXL's refiner, which is not "
          "supported; use a model with both, such as SDXL's base",
          directory.root);
    known.insert({"tokenizer", "text_encoder"});
    if (directory.components.contains("text_encoder_2"))
      known.insert({"tokenizer_2", "text_encoder_2"});
    for (const std::string& name : known)
      if (name != "unet" && !name.starts_with("v") && !directory.components.contains(name))
        return InvalidArgument(
            "{}: there is no '{}', which a {} needs; give the whole directory as diffusers saves "
            "it",
            directory.root, name, directory.unet().class_name);
    if (!directory.components.contains("vae"))
      return InvalidArgument(
          "{}: there is no 'vae', which a {} needs; give the whole directory as diffusers saves it",
          directory.root, directory.unet().class_name);
  }
  if (directory.components.contains("vae") && directory.components.contains("vqvae"))
    return InvalidArgument(
        "{}: there are a 'vae' and a 'vqvae', but a pipeline has one autoencoder; remove from "
        "model_index.json the one that the model was not trained with",
        directory.root);
  for (const auto& [name, component] : directory.components)
    if (!known.contains(name))
      return InvalidArgument(
          "{}: component '{}' is of class {}, which is not supported beside {}; remove it from "
          "model_index.json, or correct the class of 'unet' there",
          directory.root, name, component.class_name, directory.unet().class_name);
  return absl::OkStatus();
}

/// The class decides how texts are read: a UNet under another family's class draws wrong pictures.
absl::Status CheckFamily(const ModelDirectory& directory, const PipelineClass& known) {
  const Component& unet = directory.unet();
  const nlohmann::json addition = unet.config.value("addition_embed_type", nlohmann::json());
  const bool text_time = addition == "text_time";
  if (text_time == known.family.text_time) return absl::OkStatus();
  const auto example = std::ranges::find_if(AllPipelines(), [&](const PipelineClass& other) {
    return other.family.text_time == text_time;
  });
  return InvalidArgument(
      "{}/model_index.json: field '_class_name' is \"{}\", whose UNets have addition_embed_type "
      "{}, but {} has {}; name the class that the model was published with, such as {}",
      directory.root, known.name, known.family.text_time ? "\"text_time\"" : "null",
      unet.config_file, addition.dump(), example->name);
}

/// "A or B": the pipelines of models that read it.
std::string ClassesThatRead(ImageInput input) {
  std::string names;
  for (const PipelineClass& known : AllPipelines())
    if (known.image_input == input)
      names += fmt::format("{}{}", names.empty() ? "" : " or ", known.name);
  return names;
}

bool HasCodec(const ModelDirectory& directory) {
  return std::any_of(std::begin(kCodecs), std::end(kCodecs),
                     [&](const char* name) { return directory.components.contains(name); });
}

/// What keeps the model's own sampler from `steps` steps, if anything. Unless its field is "steps",
/// it is the sampler itself that cannot do them.
std::optional<ParamViolation> WrongWithSteps(const SchedulerConfig& scheduler, int steps,
                                             int max_evaluations) {
  std::vector<ParamViolation> wrong;
  const auto plan = scheduler.Compile({.steps = steps}, &wrong);
  if (!plan.ok()) {
    const auto of_steps = std::find_if(wrong.begin(), wrong.end(),
                                       [](const auto& each) { return each.field == "steps"; });
    return of_steps == wrong.end() ? wrong.front() : *of_steps;
  }
  const int evaluations = static_cast<int>(plan->evaluations.size());
  if (evaluations <= max_evaluations) return std::nullopt;
  return ParamViolation{
      "steps", fmt::format("is {}, which takes {} evaluations; at most {} are allowed", steps,
                           evaluations, max_evaluations)};
}

}  // namespace

absl::StatusOr<PipelineFiles> PipelineFiles::Read(const std::string& path) {
  DENOISED_ASSIGN_OR_RETURN(ModelDirectory directory, ModelDirectory::Read(path));
  return Of(std::move(directory));
}

absl::StatusOr<PipelineFiles> PipelineFiles::Of(ModelDirectory directory) {
  const std::string path = directory.root;
  DENOISED_ASSIGN_OR_RETURN(const DenoiserClass* const denoiser, FindDenoiser(directory));
  const PipelineClass* const known = FindPipeline(directory.pipeline_class);
  if (denoiser->reads_text && !known) {
    std::string names;
    for (const PipelineClass& each : AllPipelines()) names += fmt::format(" {}", each.name);
    return InvalidArgument(
        "{}/model_index.json: field '_class_name' is \"{}\", which is not supported; use one of:{}",
        path, directory.pipeline_class, names);
  }
  DENOISED_RETURN_IF_ERROR(CheckComponents(directory, denoiser->reads_text));
  if (!denoiser->reads_text && directory.null_class < 0 &&
      directory.default_guidance_scale.value_or(1) > 1)
    return InvalidArgument(
        "{}/model_index.json, _denoised: field 'default_guidance_scale' is {}: guidance needs a "
        "null_class; name it, or leave the field out",
        path, *directory.default_guidance_scale);
  if (!directory.scheduler_config)
    return InvalidArgument(
        "{}: there is no scheduler_config.json; put the one that the model was published with into "
        "{}/scheduler, or beside config.json",
        path, path);
  CorrectOldConfigs(&directory);
  DENOISED_ASSIGN_OR_RETURN(
      SchedulerConfig scheduler,
      SchedulerConfig::Parse(*directory.scheduler_config, directory.scheduler_config_file,
                             /*latents=*/HasCodec(directory)));
  PipelineFiles files{.directory = std::move(directory), .scheduler = std::move(scheduler)};
  files.precision = files.directory.precision;
  files.defaults.steps = TraitsOf(files.scheduler.default_sampler()).default_steps;
  if (denoiser->reads_text) {
    DENOISED_RETURN_IF_ERROR(CheckFamily(files.directory, *known));
    files.defaults = known->defaults;
  }
  return files;
}

absl::StatusOr<int> PipelineFiles::DefaultSteps(int max_evaluations,
                                                const std::string& setting) const {
  const int most = scheduler.max_steps(scheduler.default_sampler());
  const int wanted =
      directory.default_steps ? directory.default_steps : std::min(defaults.steps, most);
  const auto wrong = WrongWithSteps(scheduler, wanted, max_evaluations);
  if (!wrong) return wanted;
  int steps = std::min({wanted, most, max_evaluations});  // each takes an evaluation or more
  // Counting down compiles a plan each time, so it begins near the end.
  if (const auto plan = scheduler.Compile({.steps = steps}); plan.ok()) {
    const auto evaluations = static_cast<int64_t>(plan->evaluations.size());
    steps = static_cast<int>(
        std::min<int64_t>(steps, int64_t{steps} * max_evaluations / evaluations + 1));
  }
  std::optional<ParamViolation> left = wrong;
  while (left && left->field == "steps" && steps > 0) {
    left = WrongWithSteps(scheduler, steps, max_evaluations);
    if (left) --steps;
  }
  // The sampler itself is at fault: a request may name another, or another order, if one can. A
  // single step would often pass, but draw nothing.
  if (left) {
    const std::vector<Sampler> samplers = scheduler.samplers();
    if (std::any_of(samplers.begin(), samplers.end(), [&](Sampler sampler) {
          const int most_of = scheduler.max_steps(sampler);
          return scheduler.Compile({.sampler = sampler, .steps = std::min(wanted, most_of)}).ok() ||
                 scheduler.Compile({.sampler = sampler, .steps = std::min(4, most_of)}).ok();
        }))
      return std::min(wanted, most);
    return InvalidArgument(
        "{}: no sampler can follow this schedule, with {} steps or fewer; correct its numbers",
        directory.scheduler_config_file, wanted);
  }
  if (directory.default_steps == 0) return steps;
  return InvalidArgument(
      "{} {}; set it to {}, or leave it out",
      setting.empty()
          ? fmt::format("{}/model_index.json, _denoised: field 'default_steps'", directory.root)
          : setting,
      wrong->description, steps);
}

namespace {

class Loader {
 public:
  Loader(NetworkOps& ops, const PipelineFiles& files, const LoadProgress& progress)
      : ops_(ops),
        files_(files),
        directory_(files.directory),
        scheduler_(files.scheduler),
        known_(FindPipeline(directory_.pipeline_class)),
        progress_(progress) {}

  absl::StatusOr<Pipeline> Load() {
    DENOISED_RETURN_IF_ERROR(LoadTextEncoders());
    for (const char* name : kCodecs)
      if (directory_.components.contains(name)) {
        DENOISED_ASSIGN_OR_RETURN(pipeline_.codec, LoadCodecOf(name));
      }
    if (directory_.components.contains(ModelDirectory::kTinyVae))
      DENOISED_RETURN_IF_ERROR(LoadPreviewCodec());
    DENOISED_RETURN_IF_ERROR(LoadDenoiser());
    DENOISED_RETURN_IF_ERROR(CheckDenoiser());
    DENOISED_RETURN_IF_ERROR(CheckImageInput());
    return std::move(pipeline_);
  }

 private:
  absl::StatusOr<Weights> Open(const Component& component) {
    if (progress_) progress_(LoadPart::kFiles);
    DENOISED_ASSIGN_OR_RETURN(Weights weights, component.OpenWeights());
    weights.SetProgress(progress_);
    pipeline_.parameters += weights.parameters();
    return weights;
  }

  absl::Status LoadTextEncoders() {
    if (known_) {
      pipeline_.final_norm = known_->family.final_norm;
      pipeline_.skip_layers = known_->family.skip_layers;
      pipeline_.zeros_without_negative = known_->family.zeros_without_negative &&
                                         directory_.force_zeros_for_empty_prompt.value_or(true);
    }
    for (const char* name : {"text_encoder", "text_encoder_2"}) {
      const auto found = directory_.components.find(name);
      if (found == directory_.components.end()) continue;
      DENOISED_ASSIGN_OR_RETURN(const TextEncoderClass* const encoder_class,
                                FindTextEncoder(directory_, name));
      DENOISED_ASSIGN_OR_RETURN(const Weights weights, Open(found->second));
      DENOISED_ASSIGN_OR_RETURN(std::shared_ptr<const TextEncoder> encoder,
                                encoder_class->load(ops_, found->second, weights));
      // Their states lie side by side.
      if (const int tokens = encoder->traits().max_tokens;
          !pipeline_.text_encoders.empty() &&
          tokens != pipeline_.text_encoders.front()->traits().max_tokens)
        return InvalidArgument(
            "{}: field 'max_position_embeddings' is {}, but the first text encoder has {}; take "
            "both from one model",
            found->second.config_file, tokens,
            pipeline_.text_encoders.front()->traits().max_tokens);
      pipeline_.text_encoders.push_back(std::move(encoder));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::shared_ptr<const Codec>> LoadCodecOf(const std::string& name) {
    const Component& component = directory_.components.at(name);
    DENOISED_ASSIGN_OR_RETURN(const CodecClass* const codec_class, FindCodec(directory_, name));
    DENOISED_ASSIGN_OR_RETURN(const Weights weights, Open(component));
    return codec_class->load(ops_, component, weights);
  }

  absl::Status LoadPreviewCodec() {
    const std::string name = ModelDirectory::kTinyVae;
    const Component& component = directory_.components.at(name);
    if (!pipeline_.codec)
      return InvalidArgument(
          "{}: decodes latents for previews, but the pipeline has no 'vae' and draws pixels; "
          "remove "
          "the folder",
          component.directory);
    DENOISED_ASSIGN_OR_RETURN(const CodecClass* const codec_class, FindCodec(directory_, name));
    if (!codec_class->small)
      return InvalidArgument(
          "{}: component '{}' is of class {}, which is too slow for previews; use an "
          "AutoencoderTiny",
          directory_.root, name, component.class_name);
    DENOISED_ASSIGN_OR_RETURN(pipeline_.preview_codec, LoadCodecOf(name));
    const CodecTraits &own = pipeline_.codec->traits(), &tiny = pipeline_.preview_codec->traits();
    if (tiny.factor != own.factor)
      return InvalidArgument(
          "{}: makes {} pixels of a latent pixel, but the vae makes {}; use the {} that belongs to "
          "it, or remove the folder",
          component.directory, tiny.factor, own.factor, component.class_name);
    if (tiny.latent_channels != own.latent_channels || tiny.image_channels != own.image_channels)
      return InvalidArgument(
          "{}: has {} latent channels and {} channels of images, but the vae has {} and {}; use "
          "the "
          "{} that was made for it, or remove the folder",
          component.directory, tiny.latent_channels, tiny.image_channels, own.latent_channels,
          own.image_channels, component.class_name);
    return absl::OkStatus();
  }

  absl::Status LoadDenoiser() {
    const Component& unet = directory_.unet();
    TextStates text;
    for (const auto& encoder : pipeline_.text_encoders) {
      text.features += encoder->traits().features;
      text.pooled_features = encoder->traits().pooled_features;  // the last one's are read
    }
    DENOISED_ASSIGN_OR_RETURN(const DenoiserClass* const denoiser_class, FindDenoiser(directory_));
    DENOISED_ASSIGN_OR_RETURN(const Weights weights, Open(unet));
    DENOISED_RETURN_IF_ERROR(SetInputScales(weights));
    DENOISED_ASSIGN_OR_RETURN(pipeline_.denoiser, denoiser_class->load(ops_, unet, text, weights));
    if (const int numbers = pipeline_.denoiser->traits().size_numbers; numbers != 0 && numbers != 6)
      return InvalidArgument(
          "{}: text_time takes {} numbers; only 6 (original size, crop, target size) are supported",
          unet.config_file, numbers);
    return absl::OkStatus();
  }

  absl::Status SetInputScales(const Weights& weights) {
    if (files_.precision != Precision::kFp8) {
      weights.SetInputScales(std::nullopt);
      return absl::OkStatus();
    }
    if (!ops_.MultipliesE4m3())
      return FailedPrecondition(
          "{}: its precision is fp8, but this device has no kernels for it; load it with precision "
          "default, on a GPU of compute capability 8.9 or later (without fp32), or on a CPU",
          directory_.root);
    DENOISED_ASSIGN_OR_RETURN(
        Calibration calibration,
        Calibration::Find(directory_.root, files_.calibrations, weights.Fingerprint()));
    weights.SetInputScales(std::move(calibration.input_scales));
    return absl::OkStatus();
  }

  /// What the sampler and the codec need of it.
  absl::Status CheckDenoiser() {
    const std::string& file = directory_.unet().config_file;
    const DenoiserTraits& traits = pipeline_.denoiser->traits();
    if (traits.height == 0 || traits.width == 0)
      return InvalidArgument(
          "{}: field 'sample_size' is missing or 0; set it to the size of the images (or latents) "
          "that the model was trained on",
          file);
    if (pipeline_.codec && pipeline_.codec->traits().latent_channels != traits.channels)
      return InvalidArgument(
          "{}: field 'in_channels' is {}, but the autoencoder has {} latent channels", file,
          traits.channels + traits.extra_channels, pipeline_.codec->traits().latent_channels);
    if (const SamplerTraits& sampler = TraitsOf(scheduler_.default_sampler());
        sampler.training == Training::kScore && (pipeline_.codec || traits.text_features > 0))
      return InvalidArgument(
          "{}: field '_class_name' is \"{}\", which samples pixels from 0 to 1, "
          "but the model in {} draws latents; use the scheduler that it was trained with",
          directory_.scheduler_config_file, sampler.class_name, file);
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

  /// Channels beside the latents are those that the pipeline's class feeds.
  absl::Status CheckImageInput() {
    const DenoiserTraits& traits = pipeline_.denoiser->traits();
    const ImageInput extra = known_ ? known_->image_input : ImageInput::kNone;
    const std::string& file = directory_.unet().config_file;
    const int channels = traits.channels + traits.extra_channels;
    if (traits.extra_channels == 0 && extra != ImageInput::kWhole) return absl::OkStatus();
    const int wanted = extra == ImageInput::kMasked  ? 1 + traits.channels
                       : extra == ImageInput::kWhole ? traits.channels
                                                     : 0;
    if (traits.extra_channels != wanted)
      return InvalidArgument(
          "{}: field 'in_channels' is {}, but a {} of {} latent channels reads {}; a model that "
          "reads a mask is a {}, one that reads an image a {}",
          file, channels, directory_.pipeline_class, traits.channels, traits.channels + wanted,
          ClassesThatRead(ImageInput::kMasked), ClassesThatRead(ImageInput::kWhole));
    if (!pipeline_.codec || !pipeline_.codec->traits().encodes())
      return InvalidArgument("{}: field 'in_channels' is {}, but the autoencoder has no encoder",
                             file, channels);
    pipeline_.image_input = extra;
    return absl::OkStatus();
  }

  NetworkOps& ops_;
  const PipelineFiles& files_;
  const ModelDirectory& directory_;
  const SchedulerConfig& scheduler_;
  const PipelineClass* const known_;  // null: reads no text
  const LoadProgress& progress_;
  Pipeline pipeline_;
};

}  // namespace

absl::StatusOr<Pipeline> LoadPipeline(NetworkOps& ops, const PipelineFiles& files,
                                      const LoadProgress& progress) {
  return Loader(ops, files, progress).Load();
}

}  // namespace denoised
