// SPDX-License-Identifier: Apache-2.0
#include "server/api/translate.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "absl/strings/ascii.h"
#include "engine/images/formats.h"
#include "engine/images/webp.h"
#include "server/jobs/job_request.h"
#include "server/security/clients.h"
#include "server/status/model_name.h"
#include "server/status/quote.h"
#include "server/telemetry/timeline.h"

namespace denoised {
namespace {

// A sampler and a noise schedule have the engine's name on the wire, in upper case behind a prefix.
// A value that one side lacks becomes unset; tests/server/translate_test.cc fails then.
constexpr std::string_view kSamplerPrefix = "SAMPLER_", kSchedulePrefix = "NOISE_SCHEDULE_";

std::string WireName(std::string_view prefix, std::string_view name) {
  std::string upper(name);
  absl::AsciiStrToUpper(&upper);
  return fmt::format("{}{}", prefix, upper);
}

/// protobuf names an unknown number ""; the result is "" too.
std::string OurName(std::string_view prefix, std::string wire_name) {
  wire_name.erase(0, prefix.size());
  absl::AsciiStrToLower(&wire_name);
  return wire_name;
}

v1::Sampler ToWire(Sampler sampler) {
  v1::Sampler wire = v1::SAMPLER_UNSPECIFIED;
  v1::Sampler_Parse(WireName(kSamplerPrefix, Name(sampler)), &wire);
  return wire;
}

v1::NoiseSchedule ToWire(NoiseSchedule schedule) {
  v1::NoiseSchedule wire = v1::NOISE_SCHEDULE_UNSPECIFIED;
  v1::NoiseSchedule_Parse(WireName(kSchedulePrefix, Name(schedule)), &wire);
  return wire;
}

v1::Priority ToWire(Priority priority) {
  switch (priority) {
    case Priority::kInteractive:
      return v1::PRIORITY_INTERACTIVE;
    case Priority::kNormal:
      return v1::PRIORITY_NORMAL;
    case Priority::kBatch:
      return v1::PRIORITY_BATCH;
  }
  return v1::PRIORITY_UNSPECIFIED;
}

std::optional<Sampler> FromWire(v1::Sampler wire) {
  return SamplerFromName(OurName(kSamplerPrefix, v1::Sampler_Name(wire)));
}

std::optional<NoiseSchedule> FromWire(v1::NoiseSchedule wire) {
  return NoiseScheduleFromName(OurName(kSchedulePrefix, v1::NoiseSchedule_Name(wire)));
}

std::optional<Priority> FromWire(v1::Priority wire) {
  for (const Priority priority : {Priority::kInteractive, Priority::kNormal, Priority::kBatch})
    if (ToWire(priority) == wire) return priority;
  return std::nullopt;
}

struct Range {
  float low, high;
};

/// Far beyond standard normal noise, images in [-1, 1] and class vectors. Much larger values
/// overflow inside the model, and then its image is not finite, which is for the operator to look
/// into.
constexpr Range kSamples{-1e4f, 1e4f};

/// Whether the init image says how large the images are, at least along one edge. As in diffusers:
/// its pipelines for inpainting alone draw the model's native size.
bool TakesPicturesSize(const v1::GenerationParams& params, const ModelInfo& model) {
  return params.has_init_image() && model.images.init && !params.has_mask() &&
         !(params.has_width() && params.has_height());
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
      spec.count = params_.count();  // also if it is refused: the engine compares lists with it
      count_ok_ = OneTo(LowerLimit(model_.max_count, limits_.max_count), "params.count",
                        params_.count(), &spec.count);
    }
    Conditions();
    TextOptions();
    Sizes();
    ReadNumber("params.guidance_scale", params_.has_guidance_scale(), params_.guidance_scale(), 0,
               100, &spec.guidance_scale);
    ReadNumber("params.image_guidance_scale", params_.has_image_guidance_scale(),
               params_.image_guidance_scale(), 1, 100, &spec.image_guidance_scale);
    ReadNumber("params.guidance_rescale", params_.has_guidance_rescale(),
               params_.guidance_rescale(), 0, 1, &spec.guidance_rescale);
    ReadNumber("params.guidance_start", params_.has_guidance_start(), params_.guidance_start(), 0,
               1, &spec.guidance_start);
    ReadNumber("params.guidance_stop", params_.has_guidance_stop(), params_.guidance_stop(), 0, 1,
               &spec.guidance_stop);
    SamplerFields();
    Handling();
    Size();
    InitImage();
    InitialNoise();
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

  void Conditions() {
    // Before they are copied; whether there are as many as images is checked later.
    constexpr int kMostConditions = 65536;
    const int most = limits_.max_count > 0 ? limits_.max_count : kMostConditions;
    if (params_.conditions_size() > most) {
      return Violate("params.conditions", "has {} entries; send at most {}",
                     params_.conditions_size(), most);
    }
    for (int i = 0; i < params_.conditions_size(); ++i) {
      const std::string field = fmt::format("params.conditions[{}]", i);
      const v1::Condition& condition = params_.conditions(i);
      const Kinds kinds = KindsOf(condition);
      if (kinds == Kinds{}) {
        Violate(field, "is empty; set text, class_label or class_vector");
      } else if (kinds != KindsOf(params_.conditions(0))) {
        Violate(field, "is of another kind than params.conditions[0]; use one kind for all images");
      } else if (kinds.text && !model_.text) {
        return RefuseText(field, condition);  // one complaint is enough
      } else {
        if (kinds.text) Text(field, condition);
        if (kinds.label) result_.spec.class_labels.push_back(condition.class_label());
        if (kinds.vector) Vector(field, condition);
      }
    }
  }

  struct Kinds {
    bool text = false, label = false, vector = false;
    bool operator==(const Kinds&) const = default;
  };

  static Kinds KindsOf(const v1::Condition& condition) {
    return {.text = condition.has_text() || condition.has_negative_text() ||
                    condition.has_text_2() || condition.has_negative_text_2(),
            .label = condition.has_class_label(),
            .vector = !condition.class_vector().empty()};
  }

  void Text(const std::string& field, const v1::Condition& condition) {
    if (!condition.has_text()) Violate(field + ".text", "is not set; use \"\" for an empty text");
    TextPrompt& read = result_.spec.prompts.emplace_back();
    read.text = condition.text();
    if (condition.has_negative_text()) read.negative = condition.negative_text();
    if (condition.has_text_2()) read.text_2 = condition.text_2();
    if (condition.has_negative_text_2()) read.negative_2 = condition.negative_text_2();
  }

  /// For a model that reads no text. The engine would refuse all conditions, and say no more.
  void RefuseText(const std::string& field, const v1::Condition& condition) {
    const char* const given = condition.has_text()            ? "text"
                              : condition.has_negative_text() ? "negative_text"
                              : condition.has_text_2()        ? "text_2"
                                                              : "negative_text_2";
    const bool more = condition.has_class_label() || !condition.class_vector().empty();
    const char* const remedy = more                                         ? "leave it out"
                               : model_.condition == ClassCondition::kLabel ? "use class_label"
                               : model_.condition == ClassCondition::kNone  ? "leave conditions out"
                                                                            : "use class_vector";
    Violate(fmt::format("{}.{}", field, given), "is not for model '{}', which reads no text; {}",
            model_.name, remedy);
  }

  void Vector(const std::string& field, const v1::Condition& condition) {
    const auto& values = condition.class_vector();
    if (model_.class_vector_size > 0 && values.size() != model_.class_vector_size) {
      Violate(field + ".class_vector", "has {} numbers; use {}", values.size(),
              model_.class_vector_size);
    }
    const auto bad = std::find_if(values.begin(), values.end(), [](float value) {
      return !(value >= kSamples.low && value <= kSamples.high);  // NaN too
    });
    if (bad != values.end()) {
      Violate(fmt::format("{}.class_vector[{}]", field, bad - values.begin()),
              "is {}; use {} to {}", *bad, kSamples.low, kSamples.high);
      return;
    }
    result_.spec.class_values.insert(result_.spec.class_values.end(), values.begin(), values.end());
  }

  void TextOptions() {
    const v1::TextOptions& options = params_.text_options();
    if (options.has_clip_skip()) result_.spec.clip_skip = options.clip_skip();
    if (options.has_max_chunks()) {
      result_.spec.max_chunks = options.max_chunks();
      if (options.max_chunks() == 0)
        Violate("params.text_options.max_chunks", "is 0; use 1 or more");
    }
  }

  void Sizes() {
    const v1::SizeConditions& sizes = params_.size_conditions();
    SizeConditions& read = result_.spec.sizes;
    if (sizes.has_original_size())
      read.original_size = {sizes.original_size().height(), sizes.original_size().width()};
    if (sizes.has_crop()) read.crop = {sizes.crop().top(), sizes.crop().left()};
    if (sizes.has_target_size())
      read.target_size = {sizes.target_size().height(), sizes.target_size().width()};
  }

  /// The engine checks the sampler's own limit. A refusal here names that of GetModel, if the
  /// server's is higher.
  void Steps(int* steps) {
    const int given = params_.steps();
    if (given >= 1 && (limits_.max_steps == 0 || given <= limits_.max_steps)) {
      *steps = given;
    } else {
      Violate("params.steps", "is {}; use 1 to {}", given,
              LowerLimit(model_.max_steps, limits_.max_steps));
    }
  }

  template <typename Wire, typename Ours>
  void ReadEnum(const char* field, Wire wire, const std::string& names, std::optional<Ours>* out) {
    if (static_cast<int>(wire) == 0) return;
    *out = FromWire(wire);
    if (!*out) {
      Violate(field, "is {}, which this server does not know; use {}", static_cast<int>(wire),
              names);
    }
  }

  void SamplerFields() {
    SamplerParams& sampler = result_.spec.sampler;
    ReadEnum("params.sampler", params_.sampler(), "one of GetModel's samplers", &sampler.sampler);
    ReadEnum("params.noise_schedule", params_.noise_schedule(), "one of GetModel's noise schedules",
             &sampler.schedule);
    if (params_.has_steps()) {
      Steps(&sampler.steps);
    } else if (limits_.max_steps > 0 && model_.default_steps > limits_.max_steps) {
      Violate("params.steps", "is not set, and the model's own is {}; use 1 to {}",
              model_.default_steps, limits_.max_steps);
    }
    // Proto: s_tmax defaults to infinity, so infinity may be said; the others are finite, and in
    // the range of float32, rounded, because messages print it.
    constexpr double kSmall = 1e-38, kLarge = 1e38;
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    ReadNumber("params.eta", params_.has_eta(), params_.eta(), 0, 1, &sampler.eta);
    ReadNumber("params.s_churn", params_.has_s_churn(), params_.s_churn(), 0, kLarge,
               &sampler.s_churn);
    ReadNumber("params.s_tmin", params_.has_s_tmin(), params_.s_tmin(), 0, kLarge, &sampler.s_tmin);
    ReadNumber("params.s_tmax", params_.has_s_tmax(), params_.s_tmax(), 0, kInfinity,
               &sampler.s_tmax);
    ReadNumber("params.s_noise", params_.has_s_noise(), params_.s_noise(), kSmall, kLarge,
               &sampler.s_noise);
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
    ReadEnum("params.priority", params_.priority(),
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
    if (TakesPicturesSize(params_, model_)) return;  // InitImage() does, which knows it
    width_ = spec.width > 0 ? spec.width : model_.width;
    height_ = spec.height > 0 ? spec.height : model_.height;
    if (std::max(width_, height_) > model_.max_edge) {
      // The engine says so; nothing is to be scaled to such a size before it does.
      size_ok_ = false;
    } else if (size_ok_ && int64_t{width_} * height_ > limits_.max_image_pixels) {
      Violate(params_.has_width() ? "params.width" : "params.height",
              "asks for {}×{} pixels; use at most {} in all", width_, height_,
              limits_.max_image_pixels);
      spec.width = spec.height = 0;
      size_ok_ = false;
    }
  }

  /// The size of the request from that of its init image. One that is larger than the model draws
  /// is scaled down; if one side is given, the other keeps the picture's proportions.
  void PicturesSize(int64_t picture_height, int64_t picture_width) {
    if (!size_ok_) return;
    JobSpec& spec = result_.spec;
    const auto picture_y = static_cast<double>(picture_height),
               picture_x = static_cast<double>(picture_width);
    const double scale =
        params_.has_width() ? spec.width / picture_x
        : params_.has_height()
            ? spec.height / picture_y
            : std::min({1.0, model_.max_edge / picture_x, model_.max_edge / picture_y});
    const auto scaled = [&](double pixels) {
      constexpr double kRounding = 1e-9;  // of the scale
      const auto whole =
          static_cast<int64_t>(pixels * scale / model_.size_multiple * (1 + kRounding));
      return std::max<int64_t>(whole, 1) * model_.size_multiple;
    };
    const int64_t width = params_.has_width() ? spec.width : scaled(picture_x);
    const int64_t height = params_.has_height() ? spec.height : scaled(picture_y);
    if (std::max(spec.width, spec.height) > model_.max_edge) {
      size_ok_ = false;  // the engine says so
    } else if (std::max(width, height) > model_.max_edge ||
               width * height > limits_.max_image_pixels) {
      size_ok_ = false;
      Violate(params_.has_width() ? "params.height" : "params.width",
              "is not set, and the proportions of init_image make it {}; give it: a multiple of {} "
              "up to {}, and at most {} pixels in all",
              params_.has_width() ? height : width, model_.size_multiple, model_.max_edge,
              limits_.max_image_pixels);
    } else {
      spec.width = width_ = static_cast<int>(width);
      spec.height = height_ = static_cast<int>(height);
    }
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
      result_.memory_status = status;
      result_.memory_field = field;
    }
    return status.ok();
  }

  /// Checks that the data fill the shape, and that floats are in `range`; F32 values in host
  /// memory, undefined when they are refused.
  Tensor ReadTensor(const std::string& field, const v1::Tensor& tensor, const Shape& shape,
                    Range range, bool bytes_allowed) {
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
      if (!(values[i] >= range.low && values[i] <= range.high)) {  // false for NaN too
        Violate(field + ".data", "holds {} at element {}; use {} to {}", values[i], i, range.low,
                range.high);
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
    result_.spec.initial_noise = ReadTensor("params.initial_noise", noise,
                                            Shape(std::span<const int64_t>(all)), kSamples, false);
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
                      {tensor.shape(0), tensor.shape(1), tensor.shape(2)}, kSamples, true);
  }

  Tensor ReadInitFile(const std::string& file) {
    if (model_.channels != 1 && model_.channels != 3) {
      Violate("params.init_image.encoded",
              "is a picture, but the model has {} channels; use params.init_image.tensor",
              model_.channels);
      return {};
    }
    return ReadPicture("params.init_image.encoded", file, model_.channels,
                       [](auto picture, auto max_pixels, const auto& reserve) {
                         return DecodeFile(picture, max_pixels, reserve);
                       });
  }

  /// A file as F32 [H, W, channels] in [−1, 1]; undefined when it was refused.
  Tensor ReadPicture(const char* field, const std::string& file, int channels,
                     decltype(DecodePngTransparency) decode) {
    bool reserved = true;
    auto pixels = decode(file, limits_.max_init_pixels, [&](int64_t bytes) {
      reserved = Reserve(field, bytes);
      return reserved ? absl::OkStatus() : ResourceExhausted("no memory");
    });
    if (!reserved) return {};
    if (!pixels.ok()) {
      Violate(field, "{}", std::string(pixels.status().message()));
      return {};
    }
    const int64_t floats = int64_t{pixels->width} * pixels->height * channels * 4;
    if (!Reserve(field, floats)) return {};
    return FromPixels(*pixels, channels);
  }

  void InitImage() {
    if (!params_.has_init_image()) {
      if (params_.has_mask())
        Violate("params.mask",
                "is set, but init_image is not; give the picture that the mask is for");
      return;
    }
    const v1::InitImage& init = params_.init_image();
    const ImageTraits& traits = model_.images;
    if (!traits.init) {
      Violate("params.init_image",
              "is set, but the autoencoder of model '{}' has no encoder; leave it out",
              model_.name);
      return;
    }
    // A model that starts from noise keeps to it.
    double strength = !traits.strength     ? 1
                      : params_.has_mask() ? traits.default_masked_strength
                                           : traits.default_strength;
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
    if (TakesPicturesSize(params_, model_)) {
      if (image) PicturesSize(image.dim(0), image.dim(1));
      size_ok_ &= !!image;
    }
    if (!image || !size_ok_) return;
    // At strength 1 nothing of the picture is left, unless a mask keeps a part or the model reads
    // it: that is drawing from noise.
    if (strength == 1 && !params_.has_mask() && !traits.required) return;
    // The image of the model's size, and what lies between the two passes of Resize, which is no
    // larger than one of its sides.
    const int64_t resized = int64_t{height_} * width_ * model_.channels * 4;
    if (!Reserve("params.init_image", resized + std::max<int64_t>(resized, image.bytes()))) return;
    if (params_.has_mask()) Mask(image.dim(0), image.dim(1));
    result_.spec.init_image = Resize(image, height_, width_, ResizeFilter::kLanczos);
    result_.spec.sampler.strength = strength;
  }

  /// The mask of an init image of this size, scaled with it: the nearest pixel decides.
  void Mask(int64_t height, int64_t width) {
    const v1::Mask& wire = params_.mask();
    const char* field = "params.mask";
    Tensor mask;
    switch (wire.source_case()) {
      case v1::Mask::kEncoded:
        field = "params.mask.encoded";
        mask = ReadPicture(field, wire.encoded(), 1,
                           [](auto picture, auto max_pixels, const auto& reserve) {
                             return DecodeFile(picture, max_pixels, reserve, Alpha::kIgnored);
                           });
        break;
      case v1::Mask::kTensor:
        field = "params.mask.tensor";
        mask = ReadMaskTensor(wire.tensor());
        break;
      case v1::Mask::kTransparency:
        field = "params.mask.transparency";
        mask = ReadPicture(field, wire.transparency(), 1, DecodePngTransparency);
        break;
      case v1::Mask::SOURCE_NOT_SET:
        Violate(field, "has no picture; set encoded, tensor or transparency, or leave mask unset");
        break;
    }
    if (!mask) return;
    if (mask.dim(0) != height || mask.dim(1) != width) {
      Violate(field, "is {}×{}, but init_image is {}×{} pixels; use a mask of the same size",
              mask.dim(1), mask.dim(0), width, height);
      return;
    }
    if (!Reserve(field, int64_t{height_} * width_ * 4)) return;
    Tensor scaled = Tensor::Host({height_, width_}, DType::kF32);
    for (int64_t y = 0; y < height_; ++y)
      for (int64_t x = 0; x < width_; ++x)
        scaled.as<float>()[y * width_ + x] =
            mask.as<float>()[y * height / height_ * width + x * width / width_] / 2 + 0.5f;
    result_.spec.mask = std::move(scaled);
  }

  /// F32 [H, W, 1] in [−1, 1]; undefined when it was refused.
  Tensor ReadMaskTensor(const v1::Tensor& tensor) {
    const bool plane =
        tensor.shape_size() == 2 || (tensor.shape_size() == 3 && tensor.shape(2) == 1);
    const bool sane = plane && tensor.shape(0) >= 1 && tensor.shape(1) >= 1 &&
                      tensor.shape(0) <= limits_.max_init_pixels &&
                      tensor.shape(1) <= limits_.max_init_pixels / tensor.shape(0);
    if (!sane) {
      Violate("params.mask.tensor.shape", "is {}; use [height, width] of at most {} pixels",
              ShapeText(tensor), limits_.max_init_pixels);
      return {};
    }
    Tensor mask = ReadTensor("params.mask.tensor", tensor, {tensor.shape(0), tensor.shape(1), 1},
                             {0, 1}, true);
    if (!mask || tensor.data_type() == v1::DATA_TYPE_UINT8) return mask;
    for (float& value : mask.span<float>()) value = 2 * value - 1;
    return mask;
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
      const int64_t most = limits_.max_tensor_bytes / floats;
      Violate("params.count",
              "asks for {} images of {} bytes each as float32; together they may have {}; {}",
              result_.spec.count, floats, limits_.max_tensor_bytes,
              most > 0 ? fmt::format("use 1 to {} of this size", most) : "use a smaller size");
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
    switch (preview.decoder()) {
      case v1::PREVIEW_DECODER_UNSPECIFIED:
        break;
      case v1::PREVIEW_DECODER_LINEAR:
        spec.preview_decoder = PreviewDecoder::kLinear;
        break;
      case v1::PREVIEW_DECODER_TINY:
        spec.preview_decoder = PreviewDecoder::kTiny;
        break;
      default:
        Violate("preview.decoder",
                "is {}, which this server does not know; use a value of PreviewDecoder",
                static_cast<int>(preview.decoder()));
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

/// The conditions of a resolved job.
void SetConditions(const JobSpec& spec, v1::GenerationParams* params) {
  for (const TextPrompt& prompt : spec.prompts) {
    v1::Condition& condition = *params->add_conditions();
    condition.set_text(prompt.text);
    if (prompt.negative) condition.set_negative_text(*prompt.negative);
    if (prompt.text_2) condition.set_text_2(*prompt.text_2);
    if (prompt.negative_2) condition.set_negative_text_2(*prompt.negative_2);
  }
  for (const int label : spec.class_labels) params->add_conditions()->set_class_label(label);
  const size_t size = spec.class_values.size() / static_cast<size_t>(spec.count);
  for (size_t i = 0; i + size <= spec.class_values.size() && size > 0; i += size) {
    const float* const values = spec.class_values.data() + i;
    params->add_conditions()->mutable_class_vector()->Add(values, values + size);
  }
  if (spec.prompts.empty()) return;
  params->mutable_text_options()->set_clip_skip(spec.clip_skip);
  params->mutable_text_options()->set_max_chunks(spec.max_chunks);
}

void SetSizes(const SizeConditions& sizes, v1::SizeConditions* to) {
  const auto set = [](const std::optional<std::array<int, 2>>& size, v1::ImageSize* wire) {
    wire->set_height((*size)[0]);
    wire->set_width((*size)[1]);
  };
  if (sizes.original_size) set(sizes.original_size, to->mutable_original_size());
  if (sizes.target_size) set(sizes.target_size, to->mutable_target_size());
  if (!sizes.crop) return;
  to->mutable_crop()->set_top((*sizes.crop)[0]);
  to->mutable_crop()->set_left((*sizes.crop)[1]);
}

}  // namespace

Priority ReadPriority(const v1::GenerationParams& params) {
  return FromWire(params.priority()).value_or(Priority::kNormal);
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
  std::string rest = end == std::string::npos ? "" : field.substr(end);
  // An entry of a list is a condition's: "class_labels[2]" is "conditions[2].class_label".
  if (name == "prompts") {
    const size_t member = rest.rfind(".negative");
    if (member != std::string::npos) rest.insert(member + 9, "_text");
    return "params.conditions" + rest;
  }
  if (name == "class_labels")
    return "params.conditions" + rest + (rest.empty() ? "" : ".class_label");
  if (name == "class_values") return "params.conditions[0].class_vector";
  constexpr std::pair<const char*, const char*> kRenamed[] = {
      {"schedule", "params.noise_schedule"},
      {"clip_skip", "params.text_options.clip_skip"},
      {"max_chunks", "params.text_options.max_chunks"},
      {"original_size", "params.size_conditions.original_size"},
      {"crop", "params.size_conditions.crop"},
      {"target_size", "params.size_conditions.target_size"},
      {"strength", "params.init_image.strength"},
      {"preview_every", "preview.every_evaluations"},
      {"preview_kind", "preview.kind"},
      {"preview_decoder", "preview.decoder"},
      {"previews", "preview"},
  };
  for (const auto& [ours, wire] : kRenamed) {
    if (name == ours) return wire + rest;
  }
  return "params." + field;
}

v1::GenerationParams ToProto(const EffectiveJob& job, const Rendering& rendering) {
  const JobSpec& spec = job.spec;
  v1::GenerationParams params;
  params.set_model(ModelOf(spec.model));
  params.set_request_id(spec.request_id);
  params.set_seed(spec.seed.value_or(0));
  params.mutable_seeds()->Add(spec.seeds.begin(), spec.seeds.end());
  params.set_count(spec.count);
  SetConditions(spec, &params);
  const SizeConditions& sizes = spec.sizes;
  if (sizes.original_size || sizes.crop || sizes.target_size)
    SetSizes(sizes, params.mutable_size_conditions());
  params.set_guidance_scale(spec.guidance_scale.value_or(1.0));
  if (spec.image_guidance_scale) params.set_image_guidance_scale(*spec.image_guidance_scale);
  if (spec.guidance_rescale) params.set_guidance_rescale(*spec.guidance_rescale);
  if (spec.guidance_start) params.set_guidance_start(*spec.guidance_start);
  if (spec.guidance_stop) params.set_guidance_stop(*spec.guidance_stop);
  const SamplerParams& sampler = spec.sampler;
  params.set_steps(sampler.steps);
  if (sampler.sampler) params.set_sampler(ToWire(*sampler.sampler));
  if (sampler.schedule) params.set_noise_schedule(ToWire(*sampler.schedule));
  params.set_width(spec.width);
  params.set_height(spec.height);
  if (sampler.eta) params.set_eta(*sampler.eta);
  if (sampler.s_churn) params.set_s_churn(*sampler.s_churn);
  if (sampler.s_tmin) params.set_s_tmin(*sampler.s_tmin);
  if (sampler.s_tmax) params.set_s_tmax(*sampler.s_tmax);
  if (sampler.s_noise) params.set_s_noise(*sampler.s_noise);
  if (sampler.solver_order) params.set_solver_order(*sampler.solver_order);
  if (spec.init_image) params.mutable_init_image()->set_strength(sampler.strength);
  if (spec.mask) params.mutable_mask();
  if (const Tensor& noise = spec.initial_noise; noise) {
    v1::Tensor& wire = *params.mutable_initial_noise();
    wire.set_data_type(v1::DATA_TYPE_FLOAT32);
    for (int i = 0; i < noise.shape().rank(); ++i) wire.add_shape(noise.dim(i));
  }
  v1::OutputOptions& output = *params.mutable_output();
  output.set_format(rendering.format);
  output.set_quality(rendering.quality);
  output.set_embed_metadata(rendering.metadata);
  params.set_priority(ToWire(spec.priority));
  return params;
}

v1::Run RunOf(const EffectiveJob& job) {
  v1::Run run;
  run.set_model_version(VersionOf(job.spec.model));
  run.set_steps(job.steps);
  run.set_evaluations(job.evaluations);
  for (const PromptRead& read : job.prompts_read) {
    v1::TextRead& text = *run.add_texts();
    text.set_tokens(read.text.tokens);
    text.set_cut_off(read.text.cut_off);
    text.set_negative_cut_off(read.negative.cut_off);
    text.set_cut_off_2(read.text_2.cut_off);
    text.set_negative_cut_off_2(read.negative_2.cut_off);
  }
  return run;
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
  model.set_precision(info.precision);
  for (const Stage stage : info.stages) model.add_stages(ToWire(stage));
  for (const PreviewDecoder decoder : info.preview_decoders) {
    model.add_preview_decoders(decoder == PreviewDecoder::kTiny ? v1::PREVIEW_DECODER_TINY
                                                                : v1::PREVIEW_DECODER_LINEAR);
  }
  v1::ModelCapabilities& can = *model.mutable_capabilities();
  can.set_text(info.text.has_value());
  can.set_second_text(info.text && info.text->two_encoders);
  can.set_class_label(!info.text && info.condition == ClassCondition::kLabel);
  can.set_class_vector(!info.text && (info.condition == ClassCondition::kValue ||
                                      info.condition == ClassCondition::kVector));
  can.set_size_conditions(info.text && info.text->sizes);
  can.set_guidance(info.guidance || info.guidance_input);
  can.set_guidance_interval(info.guidance);
  can.set_guidance_rescale(info.guidance_rescale);
  can.set_image_guidance(info.images.guidance);
  can.set_init_image(info.images.init);
  can.set_init_image_required(info.images.required);
  can.set_strength(info.images.strength);
  can.set_mask(info.images.mask);
  can.set_mask_required(info.images.mask_required);
  model.mutable_labels()->Add(info.labels.begin(), info.labels.end());
  v1::ModelDefaults& defaults = *model.mutable_defaults();
  defaults.set_sampler(ToWire(info.default_sampler));
  defaults.set_noise_schedule(ToWire(info.default_schedule));
  defaults.set_steps(info.default_steps);
  defaults.set_guidance_scale(info.default_guidance_scale);
  defaults.set_width(info.width);
  defaults.set_height(info.height);
  if (info.images.strength)
    defaults.set_strength(info.images.mask_required ? info.images.default_masked_strength
                                                    : info.images.default_strength);
  if (info.images.guidance) defaults.set_image_guidance_scale(info.images.default_guidance_scale);
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
  bounds.set_latent_factor(info.latent_factor);
  bounds.set_latent_channels(info.latent_channels);
  if (info.text) {
    bounds.set_max_clip_skip(info.text->max_clip_skip);
    bounds.set_max_chunks(info.text->max_chunks);
    bounds.set_chunk_tokens(info.text->chunk_tokens);
  }
  bounds.set_size_multiple(info.size_multiple);
  bounds.set_channels(info.channels);
  bounds.set_max_request_bytes(limits.max_request_bytes);
  for (const Sampler sampler : info.samplers) model.add_samplers(ToWire(sampler));
  for (const NoiseSchedule schedule : info.schedules) {
    model.add_noise_schedules(ToWire(schedule));
  }
  model.set_memory_bytes(static_cast<int64_t>(info.bytes()));
  return model;
}

}  // namespace denoised
