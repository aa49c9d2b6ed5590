// SPDX-License-Identifier: Apache-2.0
#include "server/api/inference.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <type_traits>

#include "engine/images/formats.h"
#include "engine/images/pixels.h"
#include "server/api/translate.h"
#include "server/security/clients.h"
#include "server/status/quote.h"
#include "server/status/status_details.h"

namespace denoised {
namespace {

using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::RepeatedField;
using Shape64 = std::vector<int64_t>;

bool ArePictures(const ModelInfo& model) { return model.channels == 1 || model.channels == 3; }
bool HasLabels(const ModelInfo& model) { return model.condition == ClassCondition::kLabel; }
bool HasVectors(const ModelInfo& model) {
  return model.condition == ClassCondition::kValue || model.condition == ClassCondition::kVector;
}
bool HasGuidance(const ModelInfo& model) { return model.guidance || model.guidance_input; }
/// Not those that read the scale as an input and evaluate no second row, as LCM.
bool HasGuidedSteps(const ModelInfo& model) { return model.guidance; }
bool Always(const ModelInfo&) { return true; }

bool ReadsText(const ModelInfo& model) { return model.text.has_value(); }
bool HasTwoTexts(const ModelInfo& model) { return model.text && model.text->two_encoders; }
bool TakesPicture(const ModelInfo& model) { return ArePictures(model) && model.images.init; }
bool TakesStrength(const ModelInfo& model) { return TakesPicture(model) && model.images.strength; }
bool TakesMask(const ModelInfo& model) { return ArePictures(model) && model.images.mask; }
bool NeedsPicture(const ModelInfo& model) { return model.images.required; }
bool NeedsMask(const ModelInfo& model) { return model.images.mask_required; }
bool Never(const ModelInfo&) { return false; }
bool HasImageGuidance(const ModelInfo& model) { return model.images.guidance; }
bool HasRescale(const ModelInfo& model) { return model.guidance_rescale; }

/// `path` of a field in v1::GenerationParams. Seeds and what is in `conditions` have an entry for
/// each image.
struct Input {
  const char* name;
  const char* path;
  bool (*is_for)(const ModelInfo& model);
  bool (*is_required)(const ModelInfo& model) = Never;  // of those that it is for
};

constexpr Input kInputs[] = {
    {"seed", "seeds", Always},
    {"label", "conditions.class_label", HasLabels},
    {"class_vector", "conditions.class_vector", HasVectors, Always},
    {"prompt", "conditions.text", ReadsText, Always},
    {"negative_prompt", "conditions.negative_text", ReadsText},
    {"prompt_2", "conditions.text_2", HasTwoTexts},
    {"negative_prompt_2", "conditions.negative_text_2", HasTwoTexts},
    {"clip_skip", "text_options.clip_skip", ReadsText},
    {"max_chunks", "text_options.max_chunks", ReadsText},
    {"steps", "steps", Always},
    {"guidance_scale", "guidance_scale", HasGuidance},
    {"image_guidance_scale", "image_guidance_scale", HasImageGuidance},
    {"guidance_rescale", "guidance_rescale", HasRescale},
    {"guidance_start", "guidance_start", HasGuidedSteps},
    {"guidance_stop", "guidance_stop", HasGuidedSteps},
    {"width", "width", Always},
    {"height", "height", Always},
    {"sampler", "sampler", Always},
    {"noise_schedule", "noise_schedule", Always},
    {"eta", "eta", Always},
    {"s_churn", "s_churn", Always},
    {"s_tmin", "s_tmin", Always},
    {"s_tmax", "s_tmax", Always},
    {"s_noise", "s_noise", Always},
    {"solver_order", "solver_order", Always},
    {"init_image", "init_image.encoded", TakesPicture, NeedsPicture},
    {"strength", "init_image.strength", TakesStrength},
    {"mask", "mask.encoded", TakesMask, NeedsMask},
    {"format", "output.format", ArePictures},
    {"quality", "output.quality", ArePictures},
};

bool EachImage(const Input& input) {
  const std::string_view path = input.path;
  return path == "seeds" || path.rfind("conditions.", 0) == 0;
}

/// The message that holds a field of `params`, and the field. Of `conditions`: of the entry
/// `image`, which is made if it is missing.
struct Place {
  Message* message;
  const FieldDescriptor* field;
};

Place Find(const char* path, v1::GenerationParams* params, int image = 0) {
  Message* message = params;
  std::string_view rest = path;
  for (size_t dot; (dot = rest.find('.')) != std::string_view::npos; rest.remove_prefix(dot + 1)) {
    const auto* field = message->GetDescriptor()->FindFieldByName(std::string(rest.substr(0, dot)));
    const auto& reflection = *message->GetReflection();
    if (!field->is_repeated()) {
      message = reflection.MutableMessage(message, field);
      continue;
    }
    while (reflection.FieldSize(*message, field) <= image) reflection.AddMessage(message, field);
    message = reflection.MutableRepeatedMessage(message, field, image);
  }
  return {message, message->GetDescriptor()->FindFieldByName(std::string(rest))};
}

const FieldDescriptor& FieldOf(const Input& input) {
  v1::GenerationParams params;
  return *Find(input.path, &params).field;
}

const char* Datatype(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return "INT32";
    case FieldDescriptor::CPPTYPE_UINT64:
      return "UINT64";
    case FieldDescriptor::CPPTYPE_FLOAT:
      return "FP32";
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return "FP64";
    default:
      return "BYTES";  // files, and enums by name
  }
}

Shape64 ShapeOf(const Input& input, const ModelInfo& model) {
  if (!EachImage(input)) return {1};
  if (input.is_for == HasVectors) return {-1, model.class_vector_size};
  return {-1};
}

struct Output {
  const char* name;
  const char* datatype;
  Shape64 shape;
};

std::vector<Output> OutputsOf(const ModelInfo& model) {
  std::vector<Output> outputs;
  if (ArePictures(model)) {
    outputs.push_back({"image", "UINT8", {-1, -1, -1, model.channels}});
    outputs.push_back({"encoded", "BYTES", {-1}});
  } else {
    outputs.push_back({"image", "FP32", {-1, -1, -1, model.channels}});
  }
  outputs.push_back({"seed", "UINT64", {-1}});
  if (HasLabels(model)) outputs.push_back({"label", "INT32", {-1}});
  return outputs;
}

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return text;
}

/// The values of an enum by the names that inputs have for them. Raw pixels are not among them:
/// they are an output of their own.
std::vector<std::pair<std::string, int>> ValuesOf(const EnumDescriptor& type) {
  const std::string prefix = type.value(0)->name();
  const size_t size = prefix.size() - std::strlen("UNSPECIFIED");
  std::vector<std::pair<std::string, int>> values;
  for (int i = 1; i < type.value_count(); ++i) {
    const std::string name = Lower(type.value(i)->name().substr(size));
    if (name.rfind("raw_", 0) != 0) values.emplace_back(name, type.value(i)->number());
  }
  return values;
}

template <typename Shape>
std::string ShapeText(const Shape& shape) {
  constexpr int kShown = 6;
  const int size = static_cast<int>(shape.size());
  return fmt::format("[{}{}]",
                     fmt::join(shape.begin(), shape.begin() + std::min(size, kShown), ", "),
                     size > kShown ? ", ..." : "");
}

/// Whether each extent is what is wanted, or for -1 one that an int can hold.
bool Fits(const RepeatedField<int64_t>& shape, const Shape64& wanted) {
  return std::equal(
      shape.begin(), shape.end(), wanted.begin(), wanted.end(), [](int64_t has, int64_t wants) {
        return wants >= 0 ? has == wants : has >= 1 && has <= std::numeric_limits<int32_t>::max();
      });
}

/// Adds a violation where files of so many pixels are too large to be unpacked for the output
/// `image` too, or both together for one reply of `count` images.
void CheckBoth(int64_t pixels, int channels, int64_t count, int64_t max_reply_bytes,
               const MemoryBudget& memory, std::vector<FieldViolation>* violations) {
  const int64_t bytes = 2 * pixels * channels;
  if (bytes > max_reply_bytes / std::max<int64_t>(count, 1)) {
    violations->push_back(
        {"outputs", fmt::format("image and encoded take {} bytes an image in one reply of at most "
                                "{}; ask for one of them, or for fewer images",
                                bytes, max_reply_bytes)});
  }
  const int64_t unpacked = pixels * kPngDecodingBytesPerPixel;
  if (unpacked > memory.bytes()) {
    violations->push_back(
        {"outputs", fmt::format("image and encoded of one file take {} bytes to unpack it, and "
                                "there are {} for all requests; ask for one of them",
                                unpacked, memory.bytes())});
  }
}

/// Nothing where the parameter is of another type. One that does not fit is the largest.
std::optional<int64_t> WholeNumber(const inference::InferParameter& value) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  if (value.has_int64_param()) return value.int64_param();
  if (!value.has_uint64_param()) return std::nullopt;
  return static_cast<int64_t>(std::min<uint64_t>(value.uint64_param(), kMax));
}

/// One request on its way to GenerationParams; collects every violation.
class RequestReader {
 public:
  RequestReader(const inference::ModelInferRequest& request, const ModelInfo& model,
                const RequestLimits& limits, MemoryBudget* memory,
                std::vector<FieldViolation>* violations)
      : request_(request),
        model_(model),
        limits_(limits),
        memory_(*memory),
        violations_(*violations) {}

  Inference Run() {
    Parameters();
    Inputs();
    Outputs();
    return std::move(result_);
  }

 private:
  using Tensor = inference::ModelInferRequest::InferInputTensor;

  template <typename... Args>
  void Violate(std::string field, fmt::format_string<Args...> format, Args&&... args) {
    violations_.push_back({std::move(field), fmt::format(format, std::forward<Args>(args)...)});
  }

  // A message may hold millions of names: one that is unknown, or too many, is complaint enough.

  void Parameters() {
    for (const auto& [name, value] : request_.parameters()) {
      if (name != "priority" && name != "timeout") {
        return Violate("parameters",
                       "has {}, which this server does not know; use priority, timeout",
                       Quote(name));
      }
      Parameter(name, value);
    }
  }

  void Parameter(const std::string& name, const inference::InferParameter& value) {
    const std::optional<int64_t> number = WholeNumber(value);
    if (!number) {
      return Violate("parameters." + name, "is not a whole number; use int64_param, uint64_param");
    }
    if (name == "priority") {
      if (*number < 0 || *number > v1::Priority_MAX) {
        return Violate("parameters.priority",
                       "is {}; use 1 (interactive), 2 (normal), 3 (batch), or 0 for the default",
                       *number);
      }
      result_.params.set_priority(static_cast<v1::Priority>(*number));
      return;
    }
    constexpr std::chrono::microseconds kYear = std::chrono::hours(24 * 365);
    if (*number < 0) {
      return Violate("parameters.timeout", "is {}; use microseconds, or 0 for none", *number);
    }
    if (*number > 0 && *number < kYear.count()) {
      result_.timeout = std::chrono::microseconds(*number);
    }
  }

  void Inputs() {
    constexpr int kMost = std::size(kInputs);
    if (request_.inputs_size() > kMost) {
      return Violate("inputs", "has {} tensors, and no model takes more than {}; use {}, each once",
                     request_.inputs_size(), kMost, InputNames());
    }
    const int raw = request_.raw_input_contents_size();
    if (raw > 0 && raw != request_.inputs_size()) {
      return Violate("raw_input_contents",
                     "has {} entries for {} inputs; give one for each, or none", raw,
                     request_.inputs_size());
    }
    for (int i = 0; i < request_.inputs_size(); ++i) {
      Read(request_.inputs(i), raw > 0 ? &request_.raw_input_contents(i) : nullptr);
    }
    if (batch_ > 0) result_.params.set_count(static_cast<int32_t>(batch_));
  }

  std::string InputNames() const {
    std::vector<std::string> names;
    for (const Input& input : kInputs) {
      if (input.is_for(model_)) names.emplace_back(input.name);
    }
    return fmt::format("{}", fmt::join(names, ", "));
  }

  /// `raw` is null when the tensor holds its elements itself.
  void Read(const Tensor& tensor, const std::string* raw) {
    const std::string& name = tensor.name();
    const auto input = std::find_if(std::begin(kInputs), std::end(kInputs), [&](const Input& each) {
      return each.name == name && each.is_for(model_);
    });
    if (input == std::end(kInputs)) {
      return Violate("inputs", "has {}, which model '{}' does not take; use {}", Quote(name),
                     model_.name, InputNames());
    }
    if (!given_.insert(name).second) return Violate(name, "is given twice; give it once");
    if (!tensor.parameters().empty()) {
      return Violate(
          name,
          "has the parameter {}, and this server knows none of inputs; leave it out, and "
          "send the elements with the request",
          Quote(tensor.parameters().begin()->first));
    }
    const FieldDescriptor& field = FieldOf(*input);
    if (tensor.datatype() != Datatype(field)) {
      return Violate(name, "is of datatype {}; use {}", Quote(tensor.datatype()), Datatype(field));
    }
    const Shape64 shape = ShapeOf(*input, model_);
    if (!Fits(tensor.shape(), shape)) {
      return Violate(name, "has shape {}; use {}{}", ShapeText(tensor.shape()), ShapeText(shape),
                     EachImage(*input) ? " with the number of images in place of -1" : "");
    }
    if (raw != nullptr && tensor.has_contents()) {
      return Violate(name, "has contents, and raw_input_contents are given too; use one of them");
    }
    if (EachImage(*input)) {
      if (batch_ != 0 && tensor.shape(0) != batch_) {
        return Violate(name, "has {} entries, but {} has {}; give one for each image",
                       tensor.shape(0), batch_input_, batch_);
      }
      batch_ = tensor.shape(0);
      batch_input_ = name;
    }
    Fill(tensor, raw, *input);
  }

  void Fill(const Tensor& tensor, const std::string* raw, const Input& input) {
    const inference::InferTensorContents& contents = tensor.contents();
    switch (FieldOf(input).cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return FillNumbers(input, tensor, Elements<int32_t>(tensor, raw, contents.int_contents()));
      case FieldDescriptor::CPPTYPE_UINT64:
        return FillNumbers(input, tensor,
                           Elements<uint64_t>(tensor, raw, contents.uint64_contents()));
      case FieldDescriptor::CPPTYPE_FLOAT:
        return FillNumbers(input, tensor, Elements<float>(tensor, raw, contents.fp32_contents()));
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return FillNumbers(input, tensor, Elements<double>(tensor, raw, contents.fp64_contents()));
      default:
        return FillBytes(input, tensor, Bytes(tensor, raw));
    }
  }

  /// The request will be refused for its batch size: a condition takes more memory than the bytes
  /// that it came in.
  bool TooMany(size_t entries) const {
    const int most = LowerLimit(model_.max_count, limits_.max_count);
    return most > 0 && entries > static_cast<size_t>(most);
  }

  /// An entry of several numbers goes into one condition.
  template <typename T>
  void FillNumbers(const Input& input, const Tensor& tensor, const std::vector<T>& values) {
    const size_t entry = tensor.shape_size() > 1 ? static_cast<size_t>(tensor.shape(1)) : 1;
    if (TooMany(values.size() / entry)) return;
    for (size_t i = 0; i < values.size(); ++i) {
      const auto [message, field] = Find(input.path, &result_.params, static_cast<int>(i / entry));
      const auto& reflection = *message->GetReflection();
      const bool add = field->is_repeated();
      if constexpr (std::is_same_v<T, int32_t>) {
        add ? reflection.AddInt32(message, field, values[i])
            : reflection.SetInt32(message, field, values[i]);
      } else if constexpr (std::is_same_v<T, uint64_t>) {
        reflection.AddUInt64(message, field, values[i]);
      } else if constexpr (std::is_same_v<T, float>) {
        reflection.AddFloat(message, field, values[i]);
      } else {
        reflection.SetDouble(message, field, values[i]);
      }
    }
  }

  /// Files, texts, and enums by name.
  void FillBytes(const Input& input, const Tensor& tensor,
                 const std::vector<std::string_view>& values) {
    if (TooMany(values.size())) return;
    for (size_t i = 0; i < values.size(); ++i) {
      const Place place = Find(input.path, &result_.params, static_cast<int>(i));
      const std::string field =
          EachImage(input) ? fmt::format("{}[{}]", tensor.name(), i) : tensor.name();
      if (place.field->cpp_type() == FieldDescriptor::CPPTYPE_ENUM) {
        Choose(field, values[i], place);
      } else if (place.field->type() == FieldDescriptor::TYPE_STRING && !IsUtf8(values[i])) {
        Violate(field, "is not UTF-8; encode the text so");
      } else if (Reserve(field, static_cast<int64_t>(values[i].size()))) {
        place.message->GetReflection()->SetString(place.message, place.field,
                                                  std::string(values[i]));
      }
    }
  }

  /// Whether there is room for `bytes` more. Else it is a violation of `field`, or, when waiting
  /// helps, the status of the whole request.
  bool Reserve(const std::string& field, int64_t bytes) {
    const absl::Status status = memory_.Reserve(bytes, &result_.upload);
    if (absl::IsInvalidArgument(status)) {
      Violate(field, "{}; use a smaller one", std::string(status.message()));
    } else if (!status.ok()) {
      result_.memory_status = Annotate(status, field);
    }
    return status.ok();
  }

  /// As many as the shape says; none when there are not so many.
  template <typename T>
  std::vector<T> Elements(const Tensor& tensor, const std::string* raw,
                          const RepeatedField<T>& typed) {
    // Fits has seen to it that this does not overflow.
    uint64_t count = 1;
    for (const int64_t extent : tensor.shape()) count *= static_cast<uint64_t>(extent);
    if (raw == nullptr) {
      if (static_cast<uint64_t>(typed.size()) == count) return {typed.begin(), typed.end()};
      Violate(tensor.name(), "has {} elements of its datatype in contents, but shape {} needs {}",
              typed.size(), ShapeText(tensor.shape()), count);
    } else if (raw->size() % sizeof(T) == 0 && raw->size() / sizeof(T) == count) {
      std::vector<T> values(count);
      std::memcpy(values.data(), raw->data(), raw->size());  // little-endian, as all our hosts
      return values;
    } else {
      Violate(tensor.name(), "has {} bytes, but shape {} of {} needs {} elements of {} bytes",
              raw->size(), ShapeText(tensor.shape()), tensor.datatype(), count, sizeof(T));
    }
    return {};
  }

  /// The elements of a BYTES tensor; none when there are not as many as its shape says.
  std::vector<std::string_view> Bytes(const Tensor& tensor, const std::string* raw) {
    const auto count = static_cast<size_t>(tensor.shape(0));
    std::vector<std::string_view> elements;
    if (raw == nullptr) {
      const auto& typed = tensor.contents().bytes_contents();
      if (static_cast<size_t>(typed.size()) == count) return {typed.begin(), typed.end()};
      Violate(tensor.name(), "has {} elements in bytes_contents, but shape {} needs {}",
              typed.size(), ShapeText(tensor.shape()), count);
      return {};
    }
    std::string_view rest = *raw;
    for (uint32_t size = 0; elements.size() < count && rest.size() >= sizeof(size);) {
      std::memcpy(&size, rest.data(), sizeof(size));
      rest.remove_prefix(sizeof(size));
      if (rest.size() < size) break;
      elements.push_back(rest.substr(0, size));
      rest.remove_prefix(size);
    }
    if (elements.size() == count && rest.empty()) return elements;
    Violate(tensor.name(),
            "has {} bytes that are not {} element{} of BYTES; give each its length as a "
            "little-endian uint32, then so many bytes",
            raw->size(), count, count == 1 ? "" : "s");
    return {};
  }

  void Choose(const std::string& name, std::string_view value, const Place& place) {
    std::vector<std::string> names;
    for (const auto& [known, number] : ValuesOf(*place.field->enum_type())) {
      if (known == value) {
        place.message->GetReflection()->SetEnumValue(place.message, place.field, number);
        return;
      }
      names.push_back(known);
    }
    Violate(name, "is {}; use one of {}", Quote(value), fmt::join(names, ", "));
  }

  void Outputs() {
    const std::vector<Output> outputs = OutputsOf(model_);
    std::vector<std::string> names;
    names.reserve(outputs.size());
    for (const Output& output : outputs) names.emplace_back(output.name);
    if (request_.outputs_size() > static_cast<int>(outputs.size())) {
      return Violate("outputs", "has {} names; use {}, each once", request_.outputs_size(),
                     fmt::join(names, ", "));
    }
    for (const auto& wanted : request_.outputs()) {
      if (std::count(names.begin(), names.end(), wanted.name()) == 0) {
        Violate("outputs", "has {}, which model '{}' does not give; use {}", Quote(wanted.name()),
                model_.name, fmt::join(names, ", "));
      } else if (Wants(wanted.name())) {
        Violate("outputs", "has {} twice; ask for it once", wanted.name());
      } else if (!wanted.parameters().empty()) {
        Violate("outputs", "has the parameter {} of {}, and this server knows none; leave it out",
                Quote(wanted.parameters().begin()->first), wanted.name());
      } else {
        result_.outputs.names.push_back(wanted.name());
      }
    }
    if (request_.outputs().empty()) result_.outputs.names = names;
    result_.outputs.channels = model_.channels;
    if (ArePictures(model_)) Format();
  }

  bool Wants(const std::string& output) const {
    return std::count(result_.outputs.names.begin(), result_.outputs.names.end(), output) != 0;
  }

  /// A request has one format. With pixels and files wanted it is PNG, which holds both.
  void Format() {
    v1::OutputOptions& output = *result_.params.mutable_output();
    if (!Wants("encoded")) {
      for (const char* input : {"format", "quality"}) {
        if (given_.count(input) == 0) continue;
        Violate(input, "is of the output encoded, which is not asked for; leave it out");
      }
      output.set_format(v1::IMAGE_FORMAT_RAW_UINT8);
      return;
    }
    if (!Wants("image")) return;
    if (output.format() == v1::IMAGE_FORMAT_UNSPECIFIED) output.set_format(v1::IMAGE_FORMAT_PNG);
    if (output.format() != v1::IMAGE_FORMAT_PNG) {
      Violate("format",
              "is not png, but the output image is asked for too, which is what a PNG "
              "holds; use png, or ask for the output encoded without image");
    }
    const auto& params = result_.params;
    const int64_t width = params.has_width() ? params.width() : model_.width;
    const int64_t height = params.has_height() ? params.height() : model_.height;
    if (std::min(width, height) < 1 || std::max(width, height) > model_.max_edge) return;
    // An init image's own size is known when it is decoded. Until then it counts as the model's,
    // and WriteInference looks again.
    CheckBoth(width * height, model_.channels, batch_, limits_.max_reply_bytes, memory_,
              &violations_);
  }

  const inference::ModelInferRequest& request_;
  const ModelInfo& model_;
  const RequestLimits& limits_;
  MemoryBudget& memory_;
  std::vector<FieldViolation>& violations_;
  Inference result_;
  std::set<std::string> given_;  // names of inputs
  int64_t batch_ = 0;            // images; 0: no input has said yet
  std::string batch_input_;      // which has
};

template <typename T>
void AppendLittleEndian(T value, std::string* bytes) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

/// `image` has a tensor, or its file passes CheckBoth.
absl::Status AppendPixels(const v1::Image& image, MemoryBudget* memory, std::string* bytes) {
  if (image.has_tensor()) {
    bytes->append(image.tensor().data());
    return absl::OkStatus();
  }
  const int64_t count = int64_t{image.width()} * image.height();
  const MemoryBudget::Lease lease = memory->Wait(count * kPngDecodingBytesPerPixel);
  DENOISED_ASSIGN_OR_RETURN(const auto pixels, DecodeFile(image.encoded(), count));
  bytes->append(pixels.samples.begin(), pixels.samples.end());
  return absl::OkStatus();
}

}  // namespace

void DescribeTensors(const ModelInfo& model, inference::ModelMetadataResponse* metadata) {
  const auto describe = [](auto* tensor, const char* name, const char* type, const Shape64& shape) {
    tensor->set_name(name);
    tensor->set_datatype(type);
    tensor->mutable_shape()->Add(shape.begin(), shape.end());
  };
  for (const Input& input : kInputs) {
    if (!input.is_for(model)) continue;
    const FieldDescriptor& field = FieldOf(input);
    describe(metadata->add_inputs(), input.name, Datatype(field), ShapeOf(input, model));
  }
  for (const Output& output : OutputsOf(model)) {
    describe(metadata->add_outputs(), output.name, output.datatype, output.shape);
  }
}

bool IsRequired(const std::string& input, const ModelInfo& model) {
  return std::any_of(std::begin(kInputs), std::end(kInputs), [&](const Input& each) {
    return each.name == input && each.is_for(model) && each.is_required(model);
  });
}

Priority ReadPriority(const inference::ModelInferRequest& request) {
  v1::GenerationParams params;
  const auto asked = request.parameters().find("priority");
  if (asked != request.parameters().end()) {
    const int64_t number = WholeNumber(asked->second).value_or(0);
    if (v1::Priority_IsValid(static_cast<int>(std::clamp<int64_t>(number, -1, 1000)))) {
      params.set_priority(static_cast<v1::Priority>(number));
    }
  }
  return ReadPriority(params);
}

Inference ReadInference(const inference::ModelInferRequest& request, const ModelInfo& model,
                        const RequestLimits& limits, MemoryBudget* memory,
                        std::vector<FieldViolation>* violations) {
  return RequestReader(request, model, limits, memory, violations).Run();
}

std::string InputName(const std::string& field) {
  // "params.conditions[2].text" is "prompt[2]".
  constexpr std::string_view kConditions = "params.conditions[";
  if (field.rfind(kConditions, 0) == 0) {
    const size_t end = field.find("].");
    if (end == std::string::npos) return "batch size";
    const std::string index = field.substr(kConditions.size() - 1, end + 2 - kConditions.size());
    const std::string_view member = std::string_view(field).substr(end + 2);
    for (const Input& input : kInputs) {
      const std::string path = "conditions." + std::string(member.substr(0, member.find('[')));
      if (path == input.path) return input.name + index;
    }
  }
  const auto renamed = [&](const std::string& path,
                           const char* name) -> std::optional<std::string> {
    const std::string whole = "params." + path;
    if (field.rfind(whole, 0) != 0) return std::nullopt;
    const std::string rest = field.substr(whole.size());
    if (!rest.empty() && rest[0] != '[') return std::nullopt;
    return name + rest;
  };
  for (const Input& input : kInputs) {
    if (const auto name = renamed(input.path, input.name)) return *name;
  }
  constexpr std::pair<const char*, const char*> kOthers[] = {
      {"count", "batch size"},      {"priority", "parameters.priority"},
      {"init_image", "init_image"}, {"mask", "mask"},
      {"model", "model_name"},      {"conditions", "prompt"}};
  for (const auto& [path, name] : kOthers) {
    if (const auto found = renamed(path, name)) return *found;
  }
  return field;
}

grpc::Status WriteInference(const v1::GenerateResponse& images, const InferenceOutputs& outputs,
                            int64_t max_reply_bytes, MemoryBudget* memory,
                            inference::ModelInferResponse* response) {
  const v1::GenerationParams& params = images.params();
  response->set_model_name(params.model());
  response->set_model_version(images.run().model_version());
  (*response->mutable_parameters())["request_id"].set_string_param(params.request_id());
  for (const std::string& name : outputs.names) {
    auto& output = *response->add_outputs();
    std::string& bytes = *response->add_raw_output_contents();
    output.set_name(name);
    output.add_shape(images.images_size());
    if (name == "image") {
      const v1::Image& first = images.images(0);
      const bool floats = first.tensor().data_type() == v1::DATA_TYPE_FLOAT32;
      output.set_datatype(floats ? "FP32" : "UINT8");
      if (!first.has_tensor()) {
        std::vector<FieldViolation> violations;
        CheckBoth(int64_t{first.width()} * first.height(), outputs.channels, images.images_size(),
                  max_reply_bytes, *memory, &violations);
        if (!violations.empty()) return InvalidFields(violations, params.request_id());
      }
      for (const v1::Image& image : images.images()) {
        const absl::Status status = AppendPixels(image, memory, &bytes);
        if (!status.ok()) return JobStatus(status, params.request_id());
      }
      const int64_t pixels = int64_t{images.images_size()} * first.height() * first.width();
      output.add_shape(first.height());
      output.add_shape(first.width());
      output.add_shape(static_cast<int64_t>(bytes.size()) / pixels / (floats ? 4 : 1));
      continue;
    }
    output.set_datatype(name == "seed" ? "UINT64" : name == "label" ? "INT32" : "BYTES");
    for (const v1::Image& image : images.images()) {
      if (name == "seed") {
        AppendLittleEndian<uint64_t>(image.seed(), &bytes);
      } else if (name == "label") {
        AppendLittleEndian<int32_t>(image.class_label(), &bytes);
      } else {
        AppendLittleEndian(static_cast<uint32_t>(image.encoded().size()), &bytes);
        bytes += image.encoded();
      }
    }
  }
  return grpc::Status::OK;
}

}  // namespace denoised
