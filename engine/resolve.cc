// SPDX-License-Identifier: Apache-2.0
#include "engine/resolve.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "engine/core/philox.h"
#include "engine/io/model_directory.h"
#include "engine/pipelines/prompt_reader.h"

namespace denoised {
namespace {

constexpr int kMaxSizeCondition = 65536;
// A Philox field of its own, so that drawing a class does not reuse the image's noise.
constexpr uint32_t kLabelDraw = 0xfffffffdu;

uint64_t RandomSeed() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

class Resolver {
 public:
  Resolver(const ModelInfo& model, const JobSpec& spec, std::vector<FieldViolation>* violations)
      : model_(model), spec_(spec), violations_(violations) {}

  EffectiveJob Run() {
    Count();
    Size();
    Seeds();
    Condition();
    Guidance();
    if (model_.text) Prompts();
    Previews();
    Images();
    job_.plan = Plan();
    if (job_.plan) GuidedEvaluations();
    job_.spec = std::move(spec_);
    return std::move(job_);
  }

 private:
  template <typename... Args>
  void Violate(std::string field, fmt::format_string<Args...> format, Args&&... args) {
    violations_->push_back({std::move(field), fmt::format(format, std::forward<Args>(args)...)});
  }

  void Count() {
    if (spec_.count >= 1 && spec_.count <= model_.max_count) return;
    Violate("count", "is {}; use 1 to {}", spec_.count, model_.max_count);
    spec_.count = 1;
    count_ok_ = false;
  }

  void Size() {
    const auto check = [&](const char* field, int* value, int native) {
      if (*value == 0) *value = native;
      if (*value >= model_.size_multiple && *value <= model_.max_edge &&
          *value % model_.size_multiple == 0)
        return;
      Violate(field, "is {}; use a multiple of {} up to {} (the model's own is {})", *value,
              model_.size_multiple, model_.max_edge, native);
      *value = native;
    };
    check("width", &spec_.width, model_.width);
    check("height", &spec_.height, model_.height);
  }

  void Seeds() {
    std::vector<uint64_t>& seeds = spec_.seeds;
    if (seeds.empty()) {
      if (!spec_.seed) spec_.seed = RandomSeed();
      return;
    }
    const size_t count = static_cast<size_t>(spec_.count);
    if (spec_.seed && *spec_.seed != seeds[0])
      Violate("seeds", "are set, and seed is too; use one of them");
    if (count_ok_ && seeds.size() != count)
      Violate("seeds", "has {} entries for count {}; give one for each image", seeds.size(), count);
    spec_.seed = seeds[0];
    seeds.resize(count);
  }

  void Condition() {
    const auto refuse = [&](const char* field, bool given, const char* instead) {
      if (given) Violate(field, "is not for model '{}', which {}", model_.name, instead);
    };
    const bool labels = !spec_.class_labels.empty(), values = !spec_.class_values.empty();
    if (model_.text) {
      const char* const instead = spec_.prompts.empty() ? "reads text alone; give a text instead"
                                                        : "reads text alone; leave it out";
      refuse("class_labels[0]", labels, instead);
      refuse("class_values", values, instead);
      return;
    }
    if (!spec_.prompts.empty())
      Violate("prompts", "are not for model '{}', which reads no text; leave them out",
              model_.name);
    if (spec_.clip_skip != 0)
      Violate("clip_skip", "is {}, but model '{}' reads no text; leave it out", spec_.clip_skip,
              model_.name);
    if (spec_.max_chunks != 0)
      Violate("max_chunks", "is {}, but model '{}' reads no text; leave it out", spec_.max_chunks,
              model_.name);
    Sizes(false);
    switch (model_.condition) {
      case ClassCondition::kNone:
        refuse("class_labels[0]", labels, "is unconditional; leave it out");
        refuse("class_values", values, "is unconditional; leave it out");
        break;
      case ClassCondition::kLabel:
        refuse("class_values", values, "takes a class_label");
        Labels();
        break;
      case ClassCondition::kValue:
      case ClassCondition::kVector:
        refuse("class_labels[0]", labels, "takes a class_vector");
        Values();
        break;
    }
  }

  void Prompts() {
    const PromptReader& reader = *model_.prompts;
    const TextTraits& traits = *model_.text;
    // Of a class that is given instead, Condition() has said that it must be a text.
    if (spec_.prompts.empty() && spec_.class_labels.empty() && spec_.class_values.empty())
      Violate("prompts",
              "is missing: model '{}' draws what a text says; give one for all images, "
              "or one for each",
              model_.name);
    if (spec_.prompts.size() > 1 && spec_.prompts.size() != static_cast<size_t>(spec_.count)) {
      if (count_ok_)
        Violate("prompts", "has {} entries for count {}; give one for all, or one for each",
                spec_.prompts.size(), spec_.count);
      spec_.prompts.resize(1);  // so that no more are read
    }
    if (spec_.clip_skip < 0 || spec_.clip_skip > traits.max_clip_skip) {
      Violate("clip_skip", "is {}; use 0 to {}", spec_.clip_skip, traits.max_clip_skip);
      spec_.clip_skip = 0;
    }
    if (spec_.max_chunks == 0) spec_.max_chunks = traits.max_chunks;
    if (spec_.max_chunks < 1 || spec_.max_chunks > traits.max_chunks) {
      Violate("max_chunks", "is {}; use 1 to {}", spec_.max_chunks, traits.max_chunks);
      spec_.max_chunks = traits.max_chunks;
    }
    Sizes(traits.sizes);
    if (!CheckLengths()) return;
    const PromptReader::Request request{
        .clip_skip = spec_.clip_skip,
        .max_chunks = spec_.max_chunks,
        .height = spec_.height,
        .width = spec_.width,
        .sizes = spec_.sizes,
        .guidance_scale = static_cast<float>(*spec_.guidance_scale)};
    for (size_t i = 0; i < spec_.prompts.size(); ++i) {
      const TextPrompt& prompt = spec_.prompts[i];
      const std::string field = fmt::format("prompts[{}]", i);
      if (!traits.two_encoders && (prompt.text_2 || prompt.negative_2))
        Violate(field + (prompt.text_2 ? ".text_2" : ".negative_2"),
                "is set, but model '{}' has one text encoder; leave it out", model_.name);
      PromptRead& read = job_.prompts_read.emplace_back();
      job_.prompts.push_back(reader.Condition(prompt, request, field, violations_, &read));
      if (job_.guided)
        job_.negatives.push_back(reader.Negative(prompt, request, field, violations_, &read));
    }
  }

  /// A text is encoded whole, to tell what of it is not read; 1 MiB takes up to a second. Those
  /// that are not read count too, since a job that waits holds them.
  bool CheckLengths() {
    const size_t violations = violations_->size();
    size_t all = 0;
    const auto check = [&](size_t i, const char* name, const std::string& text) {
      all += text.size();
      if (text.size() > ClipTokenizer::kMaxTextBytes)
        Violate(fmt::format("prompts[{}]{}", i, name), "has {} bytes; send at most {}", text.size(),
                ClipTokenizer::kMaxTextBytes);
    };
    for (size_t i = 0; i < spec_.prompts.size(); ++i) {
      const TextPrompt& prompt = spec_.prompts[i];
      check(i, ".text", prompt.text);
      for (const auto& [name, text] :
           {std::pair{".negative", &prompt.negative}, std::pair{".text_2", &prompt.text_2},
            std::pair{".negative_2", &prompt.negative_2}})
        if (*text) check(i, name, **text);
    }
    if (violations_->size() == violations && all > ClipTokenizer::kMaxTextBytes)
      Violate("prompts", "have {} bytes of text together; send at most {} in a request", all,
              ClipTokenizer::kMaxTextBytes);
    return violations_->size() == violations;
  }

  void Sizes(bool read) {
    const auto check = [&](const char* field, std::optional<std::array<int, 2>>* size, int least) {
      if (!*size) return;
      if (!read)
        return Violate(field, "is set, but model '{}' does not read it; leave it out", model_.name);
      for (int& number : **size) {
        if (number >= least && number <= kMaxSizeCondition) continue;
        Violate(field, "holds {}; use {} to {}", number, least, kMaxSizeCondition);
        number = least;
      }
    };
    check("original_size", &spec_.sizes.original_size, 1);
    check("crop", &spec_.sizes.crop, 0);
    check("target_size", &spec_.sizes.target_size, 1);
  }

  void Labels() {
    std::vector<int>& labels = spec_.class_labels;
    const size_t count = static_cast<size_t>(spec_.count);
    for (size_t i = 0; i < labels.size() && i < count; ++i)
      if (labels[i] < 0 || labels[i] >= model_.num_classes)
        Violate(fmt::format("class_labels[{}]", i), "is {}; use 0 to {}", labels[i],
                model_.num_classes - 1);
    if (count_ok_ && labels.size() > 1 && labels.size() != count)
      Violate("class_labels", "has {} entries for count {}; give one for all, or one for each",
              labels.size(), count);
    if (labels.size() == 1) labels.assign(count, labels[0]);
    for (size_t i = labels.size(); i < count; ++i)
      labels.push_back(
          static_cast<int>(Philox(spec_.SeedOf(static_cast<int>(i)), kLabelDraw, 0).v[0] %
                           static_cast<uint32_t>(model_.num_classes)));
  }

  void Values() {
    std::vector<float>& values = spec_.class_values;
    const size_t size = static_cast<size_t>(model_.class_vector_size);
    const size_t count = static_cast<size_t>(spec_.count);
    if (values.size() != size && values.size() != size * count) {
      if (count_ok_)
        Violate("class_values",
                "has {} numbers; model '{}' needs {} for all images, or {} for each", values.size(),
                model_.name, size, size);
      return;
    }
    for (const float value : values)
      if (!std::isfinite(value)) {
        Violate("class_values", "holds {}; use finite numbers", value);
        return;
      }
    if (model_.condition == ClassCondition::kValue && model_.logarithmic_time)
      for (const float value : values)
        if (!(value > 0)) {
          Violate("class_values",
                  "holds {}; the model's Fourier embedding takes the logarithm, so use numbers "
                  "above 0",
                  value);
          return;
        }
    const std::vector<float> one(values.begin(), values.begin() + size);
    while (values.size() < size * count) values.insert(values.end(), one.begin(), one.end());
  }

  void Guidance() {
    if (!spec_.guidance_scale) spec_.guidance_scale = model_.default_guidance_scale;
    double& scale = *spec_.guidance_scale;
    if (!(scale >= 0 && scale <= kMaxGuidanceScale)) {
      Violate("guidance_scale", "is {}; use 0 to {}{}", scale, kMaxGuidanceScale,
              model_.guidance_input ? "" : ", where 1 and below mean none");
    } else if (scale > 1 && !model_.guidance && !model_.guidance_input) {
      Violate("guidance_scale", "is {}, but model '{}' has no unconditional class; use 1", scale,
              model_.name);
    }
    // As an input it has a meaning below 1, too.
    if (!(scale >= (model_.guidance_input ? 0 : 1))) scale = 1;
    job_.guided = scale > 1 && model_.guidance;
    ImageGuidance();
    if (spec_.guidance_rescale) {
      Within("guidance_rescale", &*spec_.guidance_rescale, 0, 1);
      if (!model_.guidance_rescale)
        Violate("guidance_rescale", "is set, but model '{}' does not take it; leave it out",
                model_.name);
    }
    if (spec_.guidance_start) Within("guidance_start", &*spec_.guidance_start, 0, 1);
    if (spec_.guidance_stop) Within("guidance_stop", &*spec_.guidance_stop, 0, 1);
    if (!job_.guided) return Unguided();
    if (spec_.guidance_start.value_or(0) >= spec_.guidance_stop.value_or(1))
      Violate("guidance_start",
              "is {}, not below guidance_stop, {}; use a lower one, or leave out both and use "
              "guidance_scale 1 for no guidance",
              spec_.guidance_start.value_or(0), spec_.guidance_stop.value_or(1));
  }

  /// Refuses what would do something if there were guidance. Negative texts are ignored, as in
  /// diffusers' pipelines: clients send one with every request.
  void Unguided() {
    const auto drop = [&](const char* field, std::optional<double>* value, double nothing) {
      if (*value && **value != nothing)
        Violate(
            field, "is {}, but {}", **value,
            model_.guidance
                ? "has no effect without guidance; use a guidance_scale above 1, or leave it out"
                : fmt::format("model '{}' does not take it; leave it out", model_.name));
      value->reset();
    };
    if (model_.guidance_rescale) drop("guidance_rescale", &spec_.guidance_rescale, 0);
    if (model_.images.guidance) drop("image_guidance_scale", &spec_.image_guidance_scale, 1);
    drop("guidance_start", &spec_.guidance_start, 0);
    drop("guidance_stop", &spec_.guidance_stop, 1);
  }

  void ImageGuidance() {
    std::optional<double>& scale = spec_.image_guidance_scale;
    if (!model_.images.guidance) {
      if (scale)
        Violate("image_guidance_scale", "is {}, but model '{}' does not take it; leave it out",
                *scale, model_.name);
      return;
    }
    if (!scale && job_.guided) scale = model_.images.default_guidance_scale;
    if (scale) Within("image_guidance_scale", &*scale, 1, kMaxGuidanceScale);
    job_.image_guided = job_.guided && *scale > 1;
  }

  void Within(const char* field, double* value, double low, double high) {
    if (*value >= low && *value <= high) return;
    Violate(field, "is {}; use {} to {}", *value, low, high);
    *value = *value > high ? high : low;  // low for NaN
  }

  /// Steps are counted; a step may take several evaluations.
  void GuidedEvaluations() {
    const auto first_of = [&](double part) {
      const int step = static_cast<int>(part * job_.plan->steps);
      return static_cast<int>(
          std::lower_bound(job_.plan->step.begin(), job_.plan->step.end(), step) -
          job_.plan->step.begin());
    };
    job_.guided_evaluations = {first_of(spec_.guidance_start.value_or(0)),
                               first_of(spec_.guidance_stop.value_or(1))};
  }

  void Previews() {
    if (spec_.previews && spec_.preview_every < 1)
      Violate("preview_every", "is {}; use 1 or more evaluations", spec_.preview_every);
    const std::vector<PreviewDecoder>& decoders = model_.preview_decoders;
    PreviewDecoder& decoder = spec_.preview_decoder;
    if (decoder == PreviewDecoder::kDefault) {
      if (!decoders.empty()) decoder = decoders.front();
    } else if (decoders.empty()) {
      Violate("preview_decoder", "is set, but model '{}' draws pixels; leave it out", model_.name);
    } else if (std::find(decoders.begin(), decoders.end(), decoder) == decoders.end()) {
      Violate("preview_decoder",
              "is tiny, but model '{}' has no small autoencoder; put an AutoencoderTiny into its "
              "folder {}, or use linear",
              model_.name, "vae_tiny");
    }
  }

  void Images() {
    const Shape image{spec_.height, spec_.width, model_.channels};
    const ImageTraits& traits = model_.images;
    if (spec_.init_image) {
      Finite("init_image", spec_.init_image);
      if (!(spec_.init_image.shape() == image))
        Violate("init_image", "has shape {}; expected {}", spec_.init_image.shape().ToString(),
                image.ToString());
      if (!traits.init)
        Violate("init_image",
                "is set, but the autoencoder of model '{}' has no encoder; leave it out",
                model_.name);
      else if (!traits.strength && spec_.sampler.strength != 1)
        Violate("strength", "is {}, but model '{}' starts from noise; leave it out",
                spec_.sampler.strength, model_.name);
    } else if (traits.required) {
      Violate("init_image", "is missing: model '{}' draws a picture from another", model_.name);
    } else if (spec_.sampler.strength != 1) {
      Violate("strength", "is {}, but there is no init_image; leave it out",
              spec_.sampler.strength);
    }
    Mask();
    if (spec_.initial_noise) {
      const int factor = model_.latent_factor;
      const Shape state{spec_.height / factor, spec_.width / factor, model_.latent_channels};
      const Shape noise{spec_.count, state[0], state[1], state[2]};
      Finite("initial_noise", spec_.initial_noise);
      if (spec_.initial_noise.shape() == noise) return;
      if (spec_.count == 1 && spec_.initial_noise.shape() == state) {
        spec_.initial_noise = spec_.initial_noise.Reshape(noise);
      } else if (count_ok_) {
        Violate("initial_noise", "has shape {}; expected {}",
                spec_.initial_noise.shape().ToString(), noise.ToString());
      }
    }
  }

  void Mask() {
    const ImageTraits& traits = model_.images;
    if (!spec_.mask) {
      if (traits.mask_required)
        Violate("mask", "is missing: model '{}' draws the part that a mask names", model_.name);
      return;
    }
    if (!traits.mask) {
      Violate("mask", "is set, but model '{}' takes none; leave it out", model_.name);
      return;
    }
    if (!spec_.init_image)
      Violate("mask", "is set, but there is no init_image that it could keep a part of");
    // A model that reads the mask draws all anew, as diffusers' pipelines do.
    job_.puts_back = !traits.mask_required;
    Finite("mask", spec_.mask);
    const Shape shape{spec_.height, spec_.width};
    if (!(spec_.mask.shape() == shape))
      Violate("mask", "has shape {}; expected {}", spec_.mask.shape().ToString(), shape.ToString());
  }

  /// F32 numbers in host memory, all finite.
  void Finite(const char* field, const Tensor& tensor) {
    if (tensor.dtype() != DType::kF32 || tensor.device() != Device::kCpu || !tensor.contiguous()) {
      Violate(field, "is {}{}{}; pass a contiguous F32 tensor in host memory", Name(tensor.dtype()),
              tensor.device() == Device::kCpu ? "" : " on a device",
              tensor.contiguous() ? "" : ", not contiguous");
      return;
    }
    for (const float value : tensor.span<float>())
      if (!std::isfinite(value)) {
        Violate(field, "holds {}; use finite numbers", value);
        return;
      }
  }

  std::shared_ptr<const StepPlan> Plan() {
    SamplerParams& params = spec_.sampler;
    if (params.steps == 0) params.steps = model_.default_steps;
    if (!params.sampler) params.sampler = model_.default_sampler;
    std::vector<ParamViolation> wrong;
    auto plan = model_.scheduler->Compile(params, &wrong);
    for (const ParamViolation& violation : wrong)
      violations_->push_back({violation.field, violation.description});
    if (!plan.ok()) return nullptr;
    if (static_cast<int>(plan->evaluations.size()) > model_.max_evaluations)
      Violate("steps", "is {}, which takes {} evaluations; at most {} are allowed", params.steps,
              plan->evaluations.size(), model_.max_evaluations);
    if (model_.logarithmic_time) PositiveConditions(*plan);
    params = model_.scheduler->WithDefaults(params);
    job_.steps = plan->steps;
    job_.evaluations = static_cast<int>(plan->evaluations.size());
    return std::make_shared<const StepPlan>(*std::move(plan));
  }

  void PositiveConditions(const StepPlan& plan) {
    for (const auto& evaluation : plan.evaluations) {
      if (evaluation.condition > 0) continue;
      Violate("sampler",
              "is {}, which has the timestep {} among its {} steps; the model's Fourier embedding "
              "takes the logarithm, so all must be above 0; use another sampler, or a model with "
              "another scheduler",
              Name(*spec_.sampler.sampler), evaluation.condition, spec_.sampler.steps);
      return;
    }
  }

  const ModelInfo& model_;
  JobSpec spec_;
  std::vector<FieldViolation>* violations_;
  bool count_ok_ = true;  // of a count that was refused, nobody knows how many entries it needs
  EffectiveJob job_;
};

}  // namespace

void ResolveJob(const ModelInfo& model, const JobSpec& spec, EffectiveJob* job,
                std::vector<FieldViolation>* violations) {
  violations->clear();
  *job = Resolver(model, spec, violations).Run();
  job->precision = model.precision;
  job->spec.model = model.name;
}

}  // namespace denoised
