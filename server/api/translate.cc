// SPDX-License-Identifier: Apache-2.0
#include "server/api/translate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "server/encoding/formats.h"
#include "server/encoding/webp.h"
#include "server/jobs/job_request.h"
#include "server/security/clients.h"
#include "server/status/model_name.h"
#include "server/status/quote.h"

namespace denoised {
namespace {

template <typename Ours, typename Wire>
struct Pair {
  Ours ours;
  Wire wire;
};

constexpr std::array<Pair<Sampler, v1::Sampler>, 22> kSamplers = {{
    {Sampler::kDdpm, v1::SAMPLER_DDPM},
    {Sampler::kDdim, v1::SAMPLER_DDIM},
    {Sampler::kPndm, v1::SAMPLER_PNDM},
    {Sampler::kEuler, v1::SAMPLER_EULER},
    {Sampler::kEulerAncestral, v1::SAMPLER_EULER_ANCESTRAL},
    {Sampler::kLms, v1::SAMPLER_LMS},
    {Sampler::kHeun, v1::SAMPLER_HEUN},
    {Sampler::kDpmSolver, v1::SAMPLER_DPM_SOLVER},
    {Sampler::kDpmSolverSde, v1::SAMPLER_DPM_SOLVER_SDE},
    {Sampler::kUniPc, v1::SAMPLER_UNI_PC},
    {Sampler::kLcm, v1::SAMPLER_LCM},
    {Sampler::kEdmEuler, v1::SAMPLER_EDM_EULER},
    {Sampler::kEdmDpmSolver, v1::SAMPLER_EDM_DPM_SOLVER},
    {Sampler::kDpmppSde, v1::SAMPLER_DPMPP_SDE},
    {Sampler::kDeis, v1::SAMPLER_DEIS},
    {Sampler::kKdpm2, v1::SAMPLER_KDPM2},
    {Sampler::kKdpm2Ancestral, v1::SAMPLER_KDPM2_ANCESTRAL},
    {Sampler::kTcd, v1::SAMPLER_TCD},
    {Sampler::kDpmSolverSinglestep, v1::SAMPLER_DPM_SOLVER_SINGLESTEP},
    {Sampler::kFlowMatchEuler, v1::SAMPLER_FLOW_MATCH_EULER},
    {Sampler::kConsistency, v1::SAMPLER_CONSISTENCY},
    {Sampler::kSaSolver, v1::SAMPLER_SA_SOLVER},
}};

constexpr std::array<Pair<NoiseSchedule, v1::NoiseSchedule>, 4> kSchedules = {{
    {NoiseSchedule::kNative, v1::NOISE_SCHEDULE_NATIVE},
    {NoiseSchedule::kKarras, v1::NOISE_SCHEDULE_KARRAS},
    {NoiseSchedule::kExponential, v1::NOISE_SCHEDULE_EXPONENTIAL},
    {NoiseSchedule::kBeta, v1::NOISE_SCHEDULE_BETA},
}};

constexpr std::array<Pair<Priority, v1::Priority>, 3> kPriorityNames = {{
    {Priority::kInteractive, v1::PRIORITY_INTERACTIVE},
    {Priority::kNormal, v1::PRIORITY_NORMAL},
    {Priority::kBatch, v1::PRIORITY_BATCH},
}};

template <typename Table, typename Ours>
auto ToWire(const Table& table, Ours ours) {
  for (const auto& pair : table) {
    if (pair.ours == ours) return pair.wire;
  }
  DENOISED_CHECK(false, "enum value {}", static_cast<int>(ours));
  return table[0].wire;
}

/// One request on its way to a JobSpec; collects every violation.
class Translator {
 public:
  Translator(const v1::GenerationParams& params, const ModelInfo& model,
             const RequestLimits& limits, MemoryBudget* memory,
             std::vector<FieldViolation>* violations)
      : params_(params),
        model_(model),
        limits_(limits),
        memory_(*memory),
        violations_(*violations) {}

  Translation Run(const v1::PreviewOptions* preview, bool together, const std::string& request_id) {
    JobSpec& spec = result_.spec;
    spec.model = model_.name;
    spec.request_id = request_id;
    if (!params_.request_id().empty()) {
      if (IsRequestId(params_.request_id())) {
        spec.request_id = params_.request_id();
      } else {
        Violate("params.request_id", "{} is not 1 to 128 printable ASCII characters",
                Quote(params_.request_id()));
      }
    }
    if (params_.has_seed()) spec.seed = params_.seed();
    spec.seeds.assign(params_.seeds().begin(), params_.seeds().end());
    if (params_.has_count()) {
      count_ok_ = OneTo(limits_.max_count, "params.count", params_.count(), &spec.count);
    }
    Condition();
    Text();
    ReadNumber("params.guidance_scale", params_.has_guidance_scale(), params_.guidance_scale(), 0,
               100, &spec.guidance_scale);
    SamplerFields();
    Handling();
    Size();
    InitialNoise();
    InitImage();
    result_.image = ReadOutput();
    CheckReplySize(together);
    if (preview != nullptr) result_.preview = ReadPreview(*preview);
    return std::move(result_);
  }

 private:
  template <typename... Args>
  void Violate(std::string field, fmt::format_string<Args...> format, Args&&... args) {
    violations_.push_back({std::move(field), fmt::format(format, std::forward<Args>(args)...)});
  }

  bool AtLeastOne(const char* field, int value, int* out) { return OneTo(0, field, value, out); }

  /// `limit` 0: none.
  bool OneTo(int limit, const char* field, int value, int* out) {
    if (value >= 1 && (limit == 0 || value <= limit)) {
      *out = value;
      return true;
    }
    if (limit == 0) {
      Violate(field, "is {}; use at least 1", value);
    } else {
      Violate(field, "is {}; use 1 to {}", value, limit);
    }
    return false;
  }

  void ReadNumber(const char* field, bool present, double value, double low, double high,
                  std::optional<double>* out) {
    if (!present) return;
    if (!(value >= low && value <= high)) {  // false for NaN too
      Violate(field, "is {}; use {} to {}", value, low, high);
      return;
    }
    *out = value;
  }

  void Condition() {
    if (params_.has_class_labels()) {
      const auto& labels = params_.class_labels().labels();
      if (labels.empty()) {
        Violate("params.class_labels.labels",
                "is empty; give one label or one for each image, or leave the condition unset");
      }
      result_.spec.class_labels.assign(labels.begin(), labels.end());
    }
    if (params_.has_class_vectors()) {
      const auto& values = params_.class_vectors().values();
      if (values.empty()) {
        Violate("params.class_vectors.values",
                "is empty; give the numbers, or leave the condition unset");
      }
      const auto bad = std::find_if(values.begin(), values.end(),
                                    [](float value) { return !std::isfinite(value); });
      if (bad != values.end()) {
        Violate(fmt::format("params.class_vectors.values[{}]", bad - values.begin()),
                "is {}; use a finite number", *bad);
        return;
      }
      result_.spec.class_values.assign(values.begin(), values.end());
    }
  }

  void Text() {
    if (!params_.has_text()) return;
    const v1::TextPrompts& text = params_.text();
    JobSpec& spec = result_.spec;
    if (text.prompts().empty())
      Violate("params.text.prompts", "is empty; give one for all images, or one for each");
    for (const v1::TextPrompt& prompt : text.prompts()) {
      TextPrompt& read = spec.prompts.emplace_back();
      read.text = prompt.text();
      if (prompt.has_negative()) read.negative = prompt.negative();
      if (prompt.has_text_2()) read.text_2 = prompt.text_2();
      if (prompt.has_negative_2()) read.negative_2 = prompt.negative_2();
      if (!prompt.cut_off().empty())
        Violate("params.text.prompts.cut_off", "is set, but only replies have it; leave it out");
    }
    if (text.has_clip_skip()) spec.clip_skip = text.clip_skip();
    if (text.has_original_size())
      spec.sizes.original_size = {text.original_size().height(), text.original_size().width()};
    if (text.has_crop()) spec.sizes.crop = {text.crop().top(), text.crop().left()};
    if (text.has_target_size())
      spec.sizes.target_size = {text.target_size().height(), text.target_size().width()};
  }

  template <typename Table, typename Wire, typename Ours>
  void ReadEnum(const char* field, const Table& table, Wire wire, const std::string& names,
                std::optional<Ours>* out) {
    if (static_cast<int>(wire) == 0) return;
    for (const auto& pair : table) {
      if (pair.wire == wire) *out = pair.ours;
    }
    if (!*out) {
      Violate(field, "is {}, which this server does not know; use {}", static_cast<int>(wire),
              names);
    }
  }

  void SamplerFields() {
    SamplerParams& sampler = result_.spec.sampler;
    ReadEnum("params.sampler", kSamplers, params_.sampler(), "one of GetModel's samplers",
             &sampler.sampler);
    ReadEnum("params.noise_schedule", kSchedules, params_.noise_schedule(),
             "one of GetModel's noise schedules", &sampler.schedule);
    if (params_.has_steps()) {
      OneTo(limits_.max_steps, "params.steps", params_.steps(), &sampler.steps);
    } else if (limits_.max_steps > 0 && model_.default_steps > limits_.max_steps) {
      Violate("params.steps", "is not set, and the model's own is {}; use 1 to {}",
              model_.default_steps, limits_.max_steps);
    }
    // Proto: s_tmax defaults to infinity, so infinity may be said; the others are finite.
    constexpr double kLarge = std::numeric_limits<float>::max();
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    ReadNumber("params.eta", params_.has_eta(), params_.eta(), 0, 1, &sampler.eta);
    ReadNumber("params.s_churn", params_.has_s_churn(), params_.s_churn(), 0, kLarge,
               &sampler.s_churn);
    ReadNumber("params.s_tmin", params_.has_s_tmin(), params_.s_tmin(), 0, kLarge, &sampler.s_tmin);
    ReadNumber("params.s_tmax", params_.has_s_tmax(), params_.s_tmax(), 0, kInfinity,
               &sampler.s_tmax);
    ReadNumber("params.s_noise", params_.has_s_noise(), params_.s_noise(),
               std::numeric_limits<double>::min(), kLarge, &sampler.s_noise);
    if (params_.has_solver_order()) {
      if (params_.solver_order() < 1 || params_.solver_order() > 3) {
        Violate("params.solver_order", "is {}; use 1 to 3", params_.solver_order());
      } else {
        sampler.solver_order = params_.solver_order();
      }
    }
  }

  /// What decides when the images are drawn and not how.
  void Handling() {
    std::optional<Priority> priority;
    ReadEnum("params.priority", kPriorityNames, params_.priority(),
             "PRIORITY_INTERACTIVE, PRIORITY_NORMAL or PRIORITY_BATCH", &priority);
    result_.spec.priority = priority.value_or(Priority::kNormal);
    if (!v1::DisconnectPolicy_IsValid(params_.disconnect_policy())) {
      Violate("params.disconnect_policy",
              "is {}, which this server does not know; use DISCONNECT_POLICY_CANCEL or "
              "DISCONNECT_POLICY_CONTINUE",
              static_cast<int>(params_.disconnect_policy()));
    }
  }

  void Size() {
    JobSpec& spec = result_.spec;
    if (params_.has_width()) size_ok_ &= AtLeastOne("params.width", params_.width(), &spec.width);
    if (params_.has_height()) {
      size_ok_ &= AtLeastOne("params.height", params_.height(), &spec.height);
    }
    width_ = spec.width > 0 ? spec.width : model_.width;
    height_ = spec.height > 0 ? spec.height : model_.height;
    if (size_ok_ && int64_t{width_} * height_ > limits_.max_image_pixels) {
      Violate(params_.has_width() ? "params.width" : "params.height",
              "asks for {}×{} pixels; use at most {} in all", width_, height_,
              limits_.max_image_pixels);
      spec.width = spec.height = 0;
      size_ok_ = false;
    }
    // The engine says so; nothing is to be scaled to such a size before it does.
    if (std::max(width_, height_) > model_.max_edge) size_ok_ = false;
  }

  static std::string ShapeText(const v1::Tensor& tensor) {
    std::string text = "[";
    const int shown = std::min(tensor.shape_size(), 6);
    for (int i = 0; i < shown; ++i) text += fmt::format("{}{}", i ? ", " : "", tensor.shape(i));
    return text + (tensor.shape_size() > shown ? ", ...]" : "]");
  }

  /// Whether there is room for `bytes` more. Else it is a violation of `field`, or, when waiting
  /// helps, the status of the whole request.
  bool Reserve(const std::string& field, int64_t bytes) {
    const absl::Status status = memory_.Reserve(bytes, &result_.memory);
    if (absl::IsInvalidArgument(status)) {
      Violate(field, "{}; use a smaller one", std::string(status.message()));
    } else if (!status.ok()) {
      result_.memory_status = Annotate(status, field);
    }
    return status.ok();
  }

  /// Checks that the data fill the shape; F32 values in host memory, undefined when they do not.
  Tensor ReadTensor(const std::string& field, const v1::Tensor& tensor, const Shape& shape,
                    bool bytes_allowed) {
    const bool floats = tensor.data_type() == v1::DATA_TYPE_FLOAT32;
    if (!floats && !(bytes_allowed && tensor.data_type() == v1::DATA_TYPE_UINT8)) {
      Violate(field + ".data_type", "is {}; use DATA_TYPE_FLOAT32{}",
              static_cast<int>(tensor.data_type()), bytes_allowed ? " or DATA_TYPE_UINT8" : "");
      return {};
    }
    const size_t expected = static_cast<size_t>(shape.elements()) * (floats ? 4 : 1);
    if (tensor.data().size() != expected) {
      Violate(field + ".data", "has {} bytes, but {} {} needs {}", tensor.data().size(),
              shape.ToString(), floats ? "float32" : "uint8", expected);
      return {};
    }
    if (!Reserve(field, shape.elements() * 4)) return {};
    Tensor result = Tensor::Host(shape, DType::kF32);
    float* values = result.as<float>();
    if (!floats) {
      for (int64_t i = 0; i < result.elements(); ++i) {
        values[i] = static_cast<uint8_t>(tensor.data()[i]) / 127.5f - 1.0f;
      }
      return result;
    }
    std::memcpy(values, tensor.data().data(), expected);  // little-endian, as all our hosts
    for (int64_t i = 0; i < result.elements(); ++i) {
      if (!std::isfinite(values[i])) {
        Violate(field + ".data", "holds {} at element {}; use finite numbers", values[i], i);
        return {};
      }
    }
    return result;
  }

  void InitialNoise() {
    if (!params_.has_initial_noise() || !size_ok_ || !count_ok_) return;
    const v1::Tensor& noise = params_.initial_noise();
    const int count = result_.spec.count;
    const std::vector<int64_t> all = {count, height_ / model_.latent_factor,
                                      width_ / model_.latent_factor, model_.latent_channels};
    std::vector<int64_t> given(noise.shape().begin(), noise.shape().end());
    if (given.size() == 3 && count == 1) given.insert(given.begin(), 1);
    if (given != all) {
      Violate("params.initial_noise.shape",
              "is {}; use [{}, {}, {}, {}]: count, height, width, "
              "channels",
              ShapeText(noise), all[0], all[1], all[2], all[3]);
      return;
    }
    result_.spec.initial_noise =
        ReadTensor("params.initial_noise", noise, Shape(std::span<const int64_t>(all)), false);
  }

  /// Undefined when it was refused.
  Tensor ReadInitTensor(const v1::Tensor& tensor) {
    const bool image = tensor.shape_size() == 3 && tensor.shape(2) == model_.channels;
    // Bounded one by one first, so that the product cannot overflow.
    const bool sane = image && tensor.shape(0) >= 1 && tensor.shape(1) >= 1 &&
                      tensor.shape(0) <= limits_.max_init_pixels &&
                      tensor.shape(1) <= limits_.max_init_pixels / tensor.shape(0);
    if (!sane) {
      Violate("params.init_image.tensor.shape",
              "is {}; use [height, width, {}] of at most {} pixels", ShapeText(tensor),
              model_.channels, limits_.max_init_pixels);
      return {};
    }
    return ReadTensor("params.init_image.tensor", tensor,
                      {tensor.shape(0), tensor.shape(1), tensor.shape(2)}, true);
  }

  Tensor ReadInitFile(const std::string& file) {
    if (model_.channels != 1 && model_.channels != 3) {
      Violate("params.init_image.encoded",
              "is a picture, but the model has {} channels; use params.init_image.tensor",
              model_.channels);
      return {};
    }
    constexpr char kField[] = "params.init_image.encoded";
    bool reserved = true;
    auto pixels = DecodeFile(file, limits_.max_init_pixels, [&](int64_t bytes) {
      reserved = Reserve(kField, bytes);
      return reserved ? absl::OkStatus() : ResourceExhausted("no memory");
    });
    if (!reserved) return {};
    if (!pixels.ok()) {
      Violate(kField, "{}", std::string(pixels.status().message()));
      return {};
    }
    const int64_t floats = int64_t{pixels->width} * pixels->height * model_.channels * 4;
    if (!Reserve(kField, floats)) return {};
    return FromPixels(*pixels, model_.channels);
  }

  void InitImage() {
    if (!params_.has_init_image()) return;
    const v1::InitImage& init = params_.init_image();
    double strength = 0.8;
    if (init.has_strength()) {
      strength = init.strength();
      if (!(strength > 0 && strength <= 1)) {
        Violate("params.init_image.strength", "is {}; use more than 0 and at most 1", strength);
        strength = 1;
      }
    }
    Tensor image;
    if (init.has_encoded()) {
      image = ReadInitFile(init.encoded());
    } else if (init.has_tensor()) {
      image = ReadInitTensor(init.tensor());
    } else {
      Violate("params.init_image",
              "has no picture; set encoded or tensor, or leave init_image unset");
    }
    // At strength 1 nothing of the picture is left: that is drawing from noise.
    if (!image || !size_ok_ || strength == 1) return;
    // The image of the model's size, and what lies between the two passes of Resize, which is no
    // larger than one of its sides.
    const int64_t resized = int64_t{height_} * width_ * model_.channels * 4;
    if (!Reserve("params.init_image", resized + std::max<int64_t>(resized, image.bytes()))) return;
    result_.spec.init_image = Resize(image, height_, width_);
    result_.spec.sampler.strength = strength;
  }

  v1::ImageFormat ReadFormat(const char* field, v1::ImageFormat format, v1::ImageFormat unset) {
    const bool picture = model_.channels == 1 || model_.channels == 3;
    if (format == v1::IMAGE_FORMAT_UNSPECIFIED) {
      return picture ? unset : v1::IMAGE_FORMAT_RAW_FLOAT32;
    }
    if (!v1::ImageFormat_IsValid(format)) {
      Violate(field, "is {}, which this server does not know; use a value of ImageFormat",
              static_cast<int>(format));
    } else if (!picture && IsFile(format)) {
      Violate(field, "is {}, but the model has {} channels; use IMAGE_FORMAT_RAW_FLOAT32",
              v1::ImageFormat_Name(format), model_.channels);
    }
    return format;
  }

  Rendering ReadOutput() {
    const v1::OutputOptions& output = params_.output();
    Rendering rendering;
    rendering.format = ReadFormat("params.output.format", output.format(), v1::IMAGE_FORMAT_PNG);
    if (rendering.format == v1::IMAGE_FORMAT_WEBP && std::max(width_, height_) > kMaxWebpEdge) {
      Violate("params.output.format", "is WebP, which holds at most {} pixels an edge; use PNG",
              kMaxWebpEdge);
    }
    if (output.has_quality()) {
      if (output.quality() < 1 || output.quality() > 100) {
        Violate("params.output.quality", "is {}; use 1 to 100", output.quality());
      }
      rendering.quality = output.quality();
    }
    if (output.has_embed_metadata()) rendering.metadata = output.embed_metadata();
    return rendering;
  }

  void CheckReplySize(bool together) {
    if (!size_ok_ || !count_ok_) return;
    const int64_t floats = int64_t{width_} * height_ * std::max(model_.channels, 1) * 4;
    if (floats > limits_.max_tensor_bytes / result_.spec.count) {
      Violate("params.count", "asks for {} images of {} bytes as float32; use at most {} bytes",
              result_.spec.count, floats, limits_.max_tensor_bytes);
      return;
    }
    const int64_t sample = result_.image.format == v1::IMAGE_FORMAT_RAW_FLOAT32 ? 4 : 1;
    const int64_t image = int64_t{width_} * height_ * std::max(model_.channels, 1) * sample;
    const int64_t count = together ? result_.spec.count : 1;
    if (image <= limits_.max_reply_bytes / count) return;
    Violate("params.count", "asks for {} images of {} bytes in one reply of at most {}; {}", count,
            image, limits_.max_reply_bytes,
            together ? "use StreamGenerate, which sends one by one" : "use a smaller size");
  }

  Rendering ReadPreview(const v1::PreviewOptions& preview) {
    JobSpec& spec = result_.spec;
    spec.previews = true;
    Rendering rendering;
    rendering.metadata = false;
    rendering.max_edge = 256;
    switch (preview.kind()) {
      case v1::PREVIEW_KIND_UNSPECIFIED:
      case v1::PREVIEW_KIND_PREDICTED_X0:
        spec.preview_kind = PreviewKind::kPredictedX0;
        break;
      case v1::PREVIEW_KIND_NOISY_STATE:
        spec.preview_kind = PreviewKind::kNoisyState;
        break;
      default:
        Violate("preview.kind",
                "is {}, which this server does not know; use a value of PreviewKind",
                static_cast<int>(preview.kind()));
    }
    if (preview.has_every_evaluations()) {
      AtLeastOne("preview.every_evaluations", preview.every_evaluations(), &spec.preview_every);
    }
    if (preview.has_max_edge()) {
      AtLeastOne("preview.max_edge", preview.max_edge(), &rendering.max_edge);
    }
    rendering.format = ReadFormat("preview.format", preview.format(), v1::IMAGE_FORMAT_JPEG);
    return rendering;
  }

  const v1::GenerationParams& params_;
  const ModelInfo& model_;
  const RequestLimits& limits_;
  MemoryBudget& memory_;
  std::vector<FieldViolation>& violations_;
  Translation result_;
  bool count_ok_ = true, size_ok_ = true;
  int width_ = 0, height_ = 0;  // effective, pixels
};

v1::ModelState ToWire(ModelState state) {
  switch (state) {
    case ModelState::kLoading:
      return v1::MODEL_STATE_LOADING;
    case ModelState::kReady:
      return v1::MODEL_STATE_AVAILABLE;
    case ModelState::kUnloading:
      return v1::MODEL_STATE_UNLOADING;
    case ModelState::kFailed:
      return v1::MODEL_STATE_FAILED;
  }
  return v1::MODEL_STATE_UNSPECIFIED;
}

v1::ClassConditionKind ToWire(ClassCondition condition) {
  switch (condition) {
    case ClassCondition::kNone:
      return v1::CLASS_CONDITION_KIND_NONE;
    case ClassCondition::kLabel:
      return v1::CLASS_CONDITION_KIND_LABEL;
    case ClassCondition::kValue:
      return v1::CLASS_CONDITION_KIND_VALUE;
    case ClassCondition::kVector:
      return v1::CLASS_CONDITION_KIND_VECTOR;
  }
  return v1::CLASS_CONDITION_KIND_UNSPECIFIED;
}

}  // namespace

Priority ReadPriority(const v1::GenerationParams& params) {
  for (const auto& [ours, wire] : kPriorityNames) {
    if (wire == params.priority()) return ours;
  }
  return Priority::kNormal;
}

Translation Translate(const v1::GenerationParams& params, const v1::PreviewOptions* preview,
                      bool together, const std::string& request_id, const ModelInfo& model,
                      const RequestLimits& limits, MemoryBudget* memory,
                      std::vector<FieldViolation>* violations) {
  return Translator(params, model, limits, memory, violations).Run(preview, together, request_id);
}

std::string ProtoField(const std::string& job_field) {
  std::string field = job_field;
  if (field.rfind("sampler.", 0) == 0) field.erase(0, 8);
  const size_t end = field.find_first_of("[.");
  const std::string name = field.substr(0, end);
  const std::string rest = end == std::string::npos ? "" : field.substr(end);
  constexpr std::pair<const char*, const char*> kRenamed[] = {
      {"class_labels", "params.class_labels.labels"},
      {"class_values", "params.class_vectors.values"},
      {"schedule", "params.noise_schedule"},
      {"prompts", "params.text.prompts"},
      {"clip_skip", "params.text.clip_skip"},
      {"original_size", "params.text.original_size"},
      {"crop", "params.text.crop"},
      {"target_size", "params.text.target_size"},
      {"strength", "params.init_image.strength"},
      {"preview_every", "preview.every_evaluations"},
      {"preview_kind", "preview.kind"},
      {"previews", "preview"},
  };
  for (const auto& [ours, wire] : kRenamed) {
    if (name == ours) return wire + rest;
  }
  return "params." + field;
}

v1::EffectiveParams ToProto(const EffectiveJob& job) {
  const JobSpec& spec = job.spec;
  v1::EffectiveParams params;
  params.set_model(ModelOf(spec.model));
  params.set_model_version(VersionOf(spec.model));
  params.set_request_id(spec.request_id);
  params.set_seed(spec.seed.value_or(0));
  params.mutable_seeds()->Add(spec.seeds.begin(), spec.seeds.end());
  params.set_count(spec.count);
  params.mutable_class_labels()->Add(spec.class_labels.begin(), spec.class_labels.end());
  params.mutable_class_values()->Add(spec.class_values.begin(), spec.class_values.end());
  if (!spec.prompts.empty()) {
    v1::TextPrompts& text = *params.mutable_text();
    for (size_t i = 0; i < spec.prompts.size(); ++i) {
      v1::TextPrompt& prompt = *text.add_prompts();
      prompt.set_text(spec.prompts[i].text);
      if (spec.prompts[i].negative) prompt.set_negative(*spec.prompts[i].negative);
      if (spec.prompts[i].text_2) prompt.set_text_2(*spec.prompts[i].text_2);
      if (spec.prompts[i].negative_2) prompt.set_negative_2(*spec.prompts[i].negative_2);
      prompt.set_cut_off(job.prompts_cut_off[i]);
    }
    text.set_clip_skip(spec.clip_skip);
    if (const auto& size = spec.sizes.original_size) {
      text.mutable_original_size()->set_height((*size)[0]);
      text.mutable_original_size()->set_width((*size)[1]);
    }
    if (const auto& point = spec.sizes.crop) {
      text.mutable_crop()->set_top((*point)[0]);
      text.mutable_crop()->set_left((*point)[1]);
    }
    if (const auto& size = spec.sizes.target_size) {
      text.mutable_target_size()->set_height((*size)[0]);
      text.mutable_target_size()->set_width((*size)[1]);
    }
  }
  params.set_guidance_scale(std::max(1.0, spec.guidance_scale.value_or(1.0)));
  params.set_steps(job.steps);
  params.set_evaluations(job.evaluations);
  const SamplerParams& sampler = spec.sampler;
  if (sampler.sampler) params.set_sampler(ToWire(kSamplers, *sampler.sampler));
  if (sampler.schedule) params.set_noise_schedule(ToWire(kSchedules, *sampler.schedule));
  params.set_width(spec.width);
  params.set_height(spec.height);
  params.set_strength(sampler.strength);
  params.set_eta(sampler.eta.value_or(0));
  params.set_s_churn(sampler.s_churn.value_or(0));
  if (sampler.s_tmin) params.set_s_tmin(*sampler.s_tmin);
  if (sampler.s_tmax) params.set_s_tmax(*sampler.s_tmax);
  if (sampler.s_noise) params.set_s_noise(*sampler.s_noise);
  if (sampler.solver_order) params.set_solver_order(*sampler.solver_order);
  params.set_priority(ToWire(kPriorityNames, spec.priority));
  return params;
}

v1::Model ToProto(const CatalogModel& listed, const std::string& device,
                  const RequestLimits& limits) {
  const ModelInfo& info = *listed.info;
  v1::Model model;
  model.set_name(listed.name);
  model.set_version(listed.version);
  model.set_current(listed.current);
  model.mutable_aliases()->Add(listed.aliases.begin(), listed.aliases.end());
  model.set_state(ToWire(info.state));
  model.set_device(device);
  if (info.state == ModelState::kFailed) model.set_error(std::string(info.error.message()));
  if (info.state != ModelState::kReady) return model;
  model.set_architecture(info.architecture);
  model.set_parameters(info.parameters);
  model.set_pipeline(info.pipeline);
  model.set_condition(info.text ? v1::CLASS_CONDITION_KIND_TEXT : ToWire(info.condition));
  model.mutable_labels()->Add(info.labels.begin(), info.labels.end());
  v1::ModelDefaults& defaults = *model.mutable_defaults();
  defaults.set_sampler(ToWire(kSamplers, info.default_sampler));
  defaults.set_noise_schedule(ToWire(kSchedules, info.default_schedule));
  defaults.set_steps(info.default_steps);
  defaults.set_guidance_scale(info.default_guidance_scale);
  defaults.set_width(info.width);
  defaults.set_height(info.height);
  v1::ModelLimits& bounds = *model.mutable_limits();
  bounds.set_max_steps(LowerLimit(info.max_steps, limits.max_steps));
  bounds.set_max_count(LowerLimit(info.max_count, limits.max_count));
  bounds.set_max_evaluations(info.max_evaluations);
  bounds.set_max_edge(info.max_edge);
  bounds.set_max_pixels(limits.max_image_pixels);
  bounds.set_max_tensor_bytes(limits.max_tensor_bytes);
  if (limits.max_previews_per_second > 0) {
    bounds.set_max_previews_per_second(limits.max_previews_per_second);
  }
  bounds.set_num_classes(info.num_classes);
  bounds.set_class_vector_size(info.class_vector_size);
  bounds.set_guidance(info.guidance || info.guidance_input);
  bounds.set_latent_factor(info.latent_factor);
  bounds.set_latent_channels(info.latent_channels);
  if (info.text) {
    bounds.set_max_clip_skip(info.text->max_clip_skip);
    bounds.set_two_texts(info.text->two_encoders);
    bounds.set_size_conditions(info.text->sizes);
  }
  bounds.set_size_multiple(info.size_multiple);
  bounds.set_channels(info.channels);
  bounds.set_max_request_bytes(limits.max_request_bytes);
  for (const Sampler sampler : info.samplers) model.add_samplers(ToWire(kSamplers, sampler));
  for (const NoiseSchedule schedule : info.schedules) {
    model.add_noise_schedules(ToWire(kSchedules, schedule));
  }
  model.set_memory_bytes(
      static_cast<int64_t>(info.weight_bytes + info.activation_bytes + info.slot_bytes));
  return model;
}

}  // namespace denoised
