// SPDX-License-Identifier: Apache-2.0
#include "server/http/openai.h"

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <fmt/format.h>
#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <climits>
#include <cmath>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/api/request_preparer.h"
#include "server/http/form.h"
#include "server/http/http_calls.h"
#include "server/http/json.h"
#include "server/status/quote.h"
#include "server/status/status_details.h"

namespace denoised {
namespace {

using nlohmann::json;

template <typename Number>
std::optional<Number> ParseNumber(const std::string& text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

/// A whole number, also as 2.0 or "2"; nothing if it is none, or has more than 64 bits.
std::optional<int64_t> ToWhole(const json& value) {
  if (value.is_string()) return ParseNumber<int64_t>(value.get_ref<const std::string&>());
  if (value.is_number_float()) {
    const auto number = value.get<double>();
    constexpr double kExact = 9007199254740992;  // 2^53
    const bool whole = std::trunc(number) == number && std::abs(number) <= kExact;
    return whole ? std::optional(static_cast<int64_t>(number)) : std::nullopt;
  }
  const bool wraps = value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX;
  return value.is_number_integer() && !wraps ? std::optional(value.get<int64_t>()) : std::nullopt;
}

/// What a client sent, for a message.
std::string Shown(const json& value) {
  if (value.is_string()) return Quote(value.get<std::string>());
  const std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return value.is_structured() ? Quote(text) : text;
}

/// What an edit brings beside its fields.
struct OpenAiFiles {
  std::string image, mask;      // empty: none
  int images = 0, masks = 0;    // how many there were
  TakenBytes* taken = nullptr;  // out of the body's text; null: nothing
};

class Reader {
 public:
  Reader(const json& body, OpenAiRequest* out, const Catalog& catalog, const Caller& caller)
      : body_(body),
        reply_(out->reply),
        message_(out->message),
        params_(*out->message.mutable_params()),
        catalog_(catalog),
        caller_(caller) {}

  grpc::Status Run(OpenAiFiles files) {
    if (!body_.is_object()) return InvalidFields({{"body", "is no JSON object"}}, "");
    if (grpc::Status status = ReadExtensions(); !status.ok()) return status;
    ReadModel();
    ReadSize();
    ReadOutput();
    ReadStream();
    for (const OpenAiHint& hint : OpenAiHints()) {
      if (reply_.edit ? hint.edits : hint.generations) ReadHint(hint);
    }
    if (const std::string background = ReadString("background");
        !background.empty() && background != "auto" && background != "opaque") {
      Violate("background", "is {}; images here are opaque: use \"opaque\" or \"auto\"",
              Quote(background));
    }
    if (reply_.edit) ReadImages(std::move(files));
    for (const auto& [name, value] : body_.items()) {
      if (known_.count(name) > 0 || value.is_null()) continue;
      if (name == "image" || name == "images" || name == "mask" || name == "input_fidelity") {
        Violate(name, "is for /v1/images/edits; send it there, or leave it out");
        continue;
      }
      Violate(name,
              "is no field of OpenAI's API here; what denoised has beyond it goes into the object "
              "\"denoised\"");
    }
    if (!violations_.empty()) return InvalidFields(violations_, "");
    return ReadPrompt();
  }

 private:
  template <typename... Arguments>
  void Violate(const std::string& field, fmt::format_string<Arguments...> text,
               Arguments&&... arguments) {
    // A body of a few bytes a mistake must not become one of a hundred.
    constexpr size_t kMost = 20;
    if (violations_.size() == kMost) return;
    violations_.push_back({field, fmt::format(text, std::forward<Arguments>(arguments)...)});
  }
  void Both(const char* a, const char* b) { Violate(a, "is given, and {} too; give one", b); }

  /// Null when it is not given.
  const json* Find(const char* name) {
    known_.insert(name);
    const auto it = body_.find(name);
    return it == body_.end() || it->is_null() ? nullptr : &*it;
  }

  std::string ReadString(const char* name) {
    const json* value = Find(name);
    if (value == nullptr) return "";
    if (value->is_string()) return value->get<std::string>();
    Violate(name, "is {}; use a string", Shown(*value));
    return "";
  }

  template <typename Use>
  void ReadInt(const char* name, int low, int high, Use use) {
    const json* value = Find(name);
    if (value == nullptr) return;
    const std::optional<int64_t> number = ToWhole(*value);
    if (!number || *number < low || *number > high) {
      return Violate(name, "is {}; use a whole number from {} to {}", Shown(*value), low, high);
    }
    use(static_cast<int>(*number));
  }

  bool ReadBool(const char* name) {
    const json* value = Find(name);
    if (value == nullptr) return false;
    if (value->is_boolean()) return value->get<bool>();
    if (*value == "true" || *value == "True") return true;
    if (*value != "false" && *value != "False") {
      Violate(name, "is {}; use true or false", Shown(*value));
    }
    return false;
  }

  void ReadHint(const OpenAiHint& hint) {
    const std::string value = ReadString(hint.name);
    if (value.empty() || hint.values.empty()) return;
    if (std::find(hint.values.begin(), hint.values.end(), value) == hint.values.end()) {
      return Violate(hint.name, "is {}; use {}", Quote(value), fmt::join(hint.values, ", "));
    }
    // Replies do not have the qualities of retired models.
    if (std::string_view(hint.name) == "quality" && value != "standard" && value != "hd") {
      reply_.quality = value;
    }
  }

  grpc::Status ReadExtensions() {
    const json* given = Find("denoised");
    if (given == nullptr) return grpc::Status::OK;
    json fields = *given;
    if (fields.is_string()) {
      const grpc::Status status = ParseJson(given->get<std::string>(), &fields);
      if (FieldOf(status) == "body") {
        return InvalidFields({{"denoised", "is text that is no JSON"}}, "");
      }
      if (!status.ok()) return RefuseExtensions(status);
    }
    if (!fields.is_object()) {
      return InvalidFields({{"denoised", "is no object, such as {\"seed\": 1}"}}, "");
    }
    negative_ = Take(&fields, "negative_prompt");
    strength_ = Take(&fields, "strength");
    labels_ = Take(&fields, "labels");
    const json label = Take(&fields, "label");
    if (!label.is_null()) {
      if (!labels_.is_null()) Both("denoised.label", "denoised.labels");
      labels_ = json::array({label});
      labels_name_ = "denoised.label";
    }
    // "ddim" is short for SAMPLER_DDIM.
    for (const auto& [name, prefix] :
         {std::pair{"sampler", "SAMPLER_"}, {"noise_schedule", "NOISE_SCHEDULE_"}}) {
      const auto it = fields.find(name);
      if (it == fields.end() || !it->is_string()) continue;
      std::string value = it->get<std::string>();
      std::transform(value.begin(), value.end(), value.begin(), [](unsigned char c) {
        return c == '-' || c == ' ' ? '_' : static_cast<char>(std::toupper(c));
      });
      if (!value.starts_with(prefix)) value.insert(0, prefix);
      const auto* const known = params_.GetDescriptor()->FindFieldByName(name)->enum_type();
      if (known->FindValueByName(value) != nullptr) *it = value;  // else refused as it was given
    }
    if (fields.empty()) return grpc::Status::OK;
    grpc::Status status =
        FromJson(fields.dump(-1, ' ', false, json::error_handler_t::replace), &params_);
    return status.ok() ? grpc::Status::OK : RefuseExtensions(status);
  }

  /// `status` is of the object `denoised` alone.
  grpc::Status RefuseExtensions(const grpc::Status& status) {
    google::rpc::Status rpc;
    google::rpc::BadRequest bad;
    rpc.ParseFromString(status.error_details());
    for (const auto& detail : rpc.details()) {
      if (!detail.UnpackTo(&bad)) continue;
      for (const auto& violation : bad.field_violations()) {
        Violate("denoised." + violation.field(), "{}", violation.description());
      }
    }
    return InvalidFields(violations_, "");
  }

  static json Take(json* object, const char* name) {
    const auto it = object->find(name);
    if (it == object->end()) return nullptr;
    json value = std::move(*it);
    object->erase(it);
    return value;
  }

  void ReadModel() {
    const std::string model = ReadString("model");
    if (model.empty()) return;
    if (!params_.model().empty()) return Both("model", "denoised.model");
    params_.set_model(model);
  }

  void ReadSize() {
    const std::string size = ReadString("size");
    if (size.empty() || size == "auto") return;
    if (params_.has_width() || params_.has_height()) {
      return Both("size", "denoised.width or denoised.height");
    }
    const size_t x = size.find('x');
    const auto width = ParseNumber<int>(size.substr(0, x));
    const auto height =
        x == std::string::npos ? std::nullopt : ParseNumber<int>(size.substr(x + 1));
    if (!width || !height) {
      return Violate("size", "is {}; use WIDTHxHEIGHT, such as 64x64, or auto", Quote(size));
    }
    params_.set_width(*width);
    params_.set_height(*height);
  }

  void ReadOutput() {
    v1::OutputOptions& output = *params_.mutable_output();
    static const std::map<std::string, v1::ImageFormat> kFormats = {
        {"png", v1::IMAGE_FORMAT_PNG},
        {"jpeg", v1::IMAGE_FORMAT_JPEG},
        {"webp", v1::IMAGE_FORMAT_WEBP}};
    const std::string format = ReadString("output_format");
    if (!format.empty()) {
      const auto it = kFormats.find(format);
      if (it == kFormats.end()) {
        Violate("output_format", "is {}; use png, jpeg or webp", Quote(format));
      } else if (output.format() != v1::IMAGE_FORMAT_UNSPECIFIED) {
        Both("output_format", "denoised.output.format");
      } else {
        output.set_format(it->second);
      }
    }
    if (output.format() == v1::IMAGE_FORMAT_UNSPECIFIED) output.set_format(v1::IMAGE_FORMAT_PNG);
    const auto it = std::find_if(kFormats.begin(), kFormats.end(),
                                 [&](const auto& each) { return each.second == output.format(); });
    if (it == kFormats.end()) {
      Violate("denoised.output.format",
              "is a tensor, for which OpenAI's API has no place; use /v1/generate");
    } else {
      reply_.output_format = it->first;
    }
    ReadInt("output_compression", 0, 100, [&](int quality) {
      if (output.has_quality()) return Both("output_compression", "denoised.output.quality");
      // As OpenAI's API. Some clients send 100 with every format.
      if (output.format() == v1::IMAGE_FORMAT_PNG && quality < 100) {
        return Violate("output_compression",
                       "is {}, but PNG loses nothing; use output_format jpeg or webp, or leave it "
                       "out",
                       quality);
      }
      output.set_quality(std::max(1, quality));  // OpenAI's begins at 0, and ours at 1
    });
    const std::string response = ReadString("response_format");
    if (!response.empty() && response != "b64_json" && response != "url") {
      Violate("response_format", "is {}; use b64_json or url", Quote(response));
    }
    reply_.urls = response == "url";
  }

  void ReadStream() {
    reply_.stream = ReadBool("stream");
    constexpr int kMost = 100;
    ReadInt("partial_images", 0, kMost, [this](int count) { reply_.partial_images = count; });
    if (reply_.stream && reply_.urls) {
      Violate("response_format", "is url, but a stream has the images in its events; use b64_json");
    }
    if (!reply_.stream && reply_.partial_images > 0) {
      Violate("partial_images",
              "is {}, and stream is not true; images come in parts only in a "
              "stream",
              reply_.partial_images);
    }
  }

  void ReadImages(OpenAiFiles files) {
    const size_t violations = violations_.size();
    taken_ = files.taken;
    ReadDataUrls("images", &files.image, &files.images);
    ReadDataUrls("image", &files.image, &files.images);
    const bool bad_image = violations_.size() > violations;
    ReadDataUrls("mask", &files.mask, &files.masks);
    if (files.masks > 1) {
      Violate("mask", "is given {} times; send one PNG", files.masks);
    } else if (files.masks == 1 && params_.has_mask()) {
      Both("mask", "denoised.mask");
    } else if (files.masks == 1) {
      params_.mutable_mask()->set_transparency(std::move(files.mask));
    }
    if (files.images > 1) {
      Violate("image", "has {} images; models here begin with one", files.images);
    } else if (files.images == 0 && !bad_image && !HasInitImage()) {
      Violate("image", "is missing; send a PNG, JPEG or WebP file");
    } else if (files.images == 1 && !bad_image && files.image.empty()) {
      Violate("image", "is an empty file; send a PNG, JPEG or WebP file");
    } else if (files.images == 1 && HasInitImage()) {
      Both("image", "denoised.init_image");
    } else if (files.images == 1) {
      params_.mutable_init_image()->set_encoded(std::move(files.image));
    }
    if (strength_.is_null()) return;
    if (params_.init_image().has_strength()) {
      return Both("denoised.strength", "denoised.init_image.strength");
    }
    std::optional<double> strength;
    if (strength_.is_number()) strength = strength_.get<double>();
    if (strength_.is_string()) strength = ParseNumber<double>(strength_.get<std::string>());
    if (!strength) {
      return Violate("denoised.strength", "is {}; use a number above 0, up to 1", Shown(strength_));
    }
    params_.mutable_init_image()->set_strength(*strength);
  }

  bool HasInitImage() const {
    return params_.has_init_image() &&
           params_.init_image().source_case() != v1::InitImage::SOURCE_NOT_SET;
  }

  /// "data:image/png;base64,…", an object with it as image_url, or a list of these. Adds to
  /// `count`.
  void ReadDataUrls(const char* name, std::string* file, int* count) {
    const json* given = Find(name);
    if (given == nullptr) return;
    if (given->is_array() && given->empty()) return Violate(name, "is an empty list");
    if (given->is_array() && given->size() != 1) {  // refused by the caller
      *count += static_cast<int>(std::min<size_t>(given->size(), INT_MAX / 2));
      return;
    }
    const json& one = given->is_array() ? given->front() : *given;
    const json& url = one.is_object() && one.contains("image_url") ? one["image_url"] : one;
    ++*count;
    const std::string_view text =
        url.is_string() ? std::string_view(url.get_ref<const std::string&>()) : "";
    const size_t comma = text.find(";base64,");
    if (!text.starts_with("data:") || comma == std::string_view::npos ||
        !FromBase64(text.substr(comma + 8), file)) {
      Violate(name,
              "is no data URL, such as \"data:image/png;base64,…\"; this server fetches nothing "
              "from elsewhere");
    } else if (taken_ != nullptr) {
      taken_->PutBack(file);
    }
  }

  /// When all else is right: what a prompt is, and how many images there may be, depends on the
  /// model.
  grpc::Status ReadPrompt() {
    grpc::Status refusal;
    const std::string prompt = body_.value("prompt", json()).is_string()
                                   ? body_["prompt"].get<std::string>()
                                   : std::string();
    // As for params.model: by what the request says.
    v1::GenerationParams asked;
    *asked.mutable_conditions() = params_.conditions();
    if (asked.conditions().empty() && !prompt.empty()) asked.add_conditions()->set_text(prompt);
    const auto model = catalog_.Select(params_.model(), "model", "", &refusal,
                                       [&](const ModelInfo& info) { return Takes(info, asked); });
    if (!model) return refusal;
    if (params_.model().empty()) params_.set_model(model->name);
    refusal = CheckReady(ShownTo(caller_.admin, *model), "");
    if (!refusal.ok()) return refusal;
    const ModelInfo& info = *model->info;
    const int most = LowerLimit(info.max_count, caller_.limits.max_count);
    ReadInt("n", 1, most, [this](int n) {
      if (params_.has_count()) return Both("n", "denoised.count");
      params_.set_count(n);
    });
    if (const json given = body_.value("prompt", json()); !given.is_null() && !given.is_string()) {
      Violate("prompt", "is {}; use a string", Shown(given));
    }
    if (info.text) {
      ReadText(prompt);
    } else if (info.num_classes > 0) {
      ReadClass(prompt, info, most);
    } else if (!prompt.empty() && params_.conditions().empty()) {
      Violate("prompt", "is given, but model '{}' reads none; leave it empty", model->name);
    }
    if (!info.text && !negative_.is_null()) {
      Violate("denoised.negative_prompt", "is given, but model '{}' reads no text", model->name);
    }
    if (!info.text && info.num_classes == 0 && !labels_.is_null()) {
      Violate(labels_name_, "is given, but model '{}' has no classes", model->name);
    }
    if (!reply_.edit && !strength_.is_null()) {
      Violate("denoised.strength", "is for /v1/images/edits");
    }
    if (!violations_.empty()) return InvalidFields(violations_, "");
    AskForPreviews(info);
    return grpc::Status::OK;
  }

  void ReadText(const std::string& prompt) {
    if (!labels_.is_null()) {
      Violate(labels_name_, "is given, but this model reads text; use prompt");
    }
    if (!params_.conditions().empty()) {
      if (!prompt.empty()) Both("prompt", "denoised.conditions");
      if (!negative_.is_null()) Both("denoised.negative_prompt", "denoised.conditions");
      return;
    }
    if (body_.value("prompt", json()).is_null())
      Violate("prompt", "is missing; give a text, \"\" for an empty one");
    v1::Condition& condition = *params_.add_conditions();
    condition.set_text(prompt);
    if (negative_.is_null()) return;
    if (negative_.is_string()) {
      condition.set_negative_text(negative_.get<std::string>());
    } else {
      Violate("denoised.negative_prompt", "is {}; use a string", Shown(negative_));
    }
  }

  void ReadClass(const std::string& prompt, const ModelInfo& info, int most) {
    if (!params_.conditions().empty()) {
      if (!labels_.is_null()) Both(labels_name_, "denoised.conditions");
      if (!prompt.empty()) Both("prompt", "denoised.conditions");
      return;
    }
    if (!labels_.is_null() && !prompt.empty()) {
      return Violate("prompt",
                     "is {}, and {} is given too; give one, \"\" for the prompt where a client "
                     "insists on it",
                     Quote(prompt), labels_name_);
    }
    if (labels_.is_null()) {
      if (prompt.empty()) return;  // classes at random
      labels_ = json::array({prompt});
    }
    if (!labels_.is_array()) labels_ = json::array({labels_});
    if (static_cast<int64_t>(labels_.size()) > most) {
      return Violate(labels_name_, "has {} entries; send at most {}", labels_.size(), most);
    }
    std::unordered_map<std::string, int64_t> numbers;  // of names; of two alike the first
    for (size_t i = 0; i < info.labels.size(); ++i) {
      numbers.emplace(absl::AsciiStrToLower(info.labels[i]), i);
    }
    for (const json& label : labels_) {
      std::optional<int64_t> number = ToWhole(label);
      if (label.is_string()) {
        const auto it = numbers.find(absl::AsciiStrToLower(label.get_ref<const std::string&>()));
        if (it != numbers.end()) number = it->second;
      }
      if (!number || *number < 0 || *number >= info.num_classes) {
        const bool of_prompt = label.is_string() && label == prompt;
        Violate(of_prompt ? "prompt" : labels_name_, "is {}, which is no class; use {}",
                Shown(label), Classes(info));
        continue;
      }
      params_.add_conditions()->set_class_label(static_cast<int32_t>(*number));
    }
  }

  static std::string Classes(const ModelInfo& info) {
    constexpr size_t kMost = 20;
    std::string numbers = fmt::format("0 to {}", info.num_classes - 1);
    if (info.labels.empty()) return numbers;
    const std::vector<std::string> some(info.labels.begin(),
                                        info.labels.begin() + std::min(kMost, info.labels.size()));
    return fmt::format("{}{}, or {}", fmt::join(some, ", "),
                       info.labels.size() > kMost ? ", …" : "", numbers);
  }

  /// As seldom as the even spacing of partial_images allows.
  void AskForPreviews(const ModelInfo& info) {
    if (reply_.partial_images == 0) return;
    v1::PreviewOptions& preview = *message_.mutable_preview();
    int steps = params_.has_steps() ? params_.steps() : info.default_steps;
    if (params_.has_init_image() && info.images.strength) {
      const v1::InitImage& image = params_.init_image();
      const double strength = image.has_strength() ? image.strength()
                              : params_.has_mask() ? info.images.default_masked_strength
                                                   : info.images.default_strength;
      // As Request::FirstStep of engine/sampling/samplers.h. The strength is not checked yet.
      if (strength > 0 && strength < 1) steps = static_cast<int>(steps * strength);
    }
    preview.set_every_evaluations(std::max(1, steps / (reply_.partial_images + 1)));
    preview.set_max_edge(1 << 14);  // the whole image
    preview.set_format(params_.output().format());
  }

  const json& body_;
  OpenAiReplyOptions& reply_;
  v1::StreamGenerateRequest& message_;
  v1::GenerationParams& params_;
  const Catalog& catalog_;
  const Caller& caller_;
  std::set<std::string> known_ = {"prompt", "n"};  // those that ReadPrompt() reads
  json negative_, strength_, labels_;
  const char* labels_name_ = "denoised.labels";  // as the request calls it
  TakenBytes* taken_ = nullptr;
  std::vector<FieldViolation> violations_;
};

grpc::Status ReadForm(std::string_view content_type, std::string_view body, json* fields,
                      OpenAiFiles* files) {
  std::vector<FormPart> parts;
  if (grpc::Status status = ParseForm(content_type, body, &parts); !status.ok()) return status;
  *fields = json::object();
  for (const FormPart& part : parts) {
    if (part.name == "image" || part.name == "image[]") {
      files->image = std::string(part.body);
      ++files->images;
    } else if (part.name == "mask") {
      files->mask = std::string(part.body);
      ++files->masks;
    } else if (!IsUtf8(part.body)) {
      return InvalidFields({{part.name, "is not UTF-8; encode the text so"}}, "");
    } else if (!SetField(part.name, std::string(part.body), fields)) {
      return InvalidFields({{part.name, "comes twice or has no form that is known here"}}, "");
    }
  }
  return grpc::Status::OK;
}

std::string SizeText(int width, int height) { return fmt::format("{}x{}", width, height); }

int64_t Now() { return std::chrono::system_clock::to_time_t(std::chrono::system_clock::now()); }

/// As a JSON string. Bytes that are no UTF-8, as headers may have them, are replaced.
std::string Quoted(const std::string& text) {
  return json(text).dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string Own(const v1::Image& image) {
  std::string own = fmt::format(R"("index":{},"seed":"{}")", image.index(), image.seed());
  if (image.has_class_label()) own += fmt::format(R"(,"class_label":{})", image.class_label());
  return own;
}

}  // namespace

const std::vector<OpenAiHint>& OpenAiHints() {
  static const auto* const hints = new std::vector<OpenAiHint>{
      {"quality", {"auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"}},
      {"complexity", {"low", "medium", "high"}},
      {"moderation", {"auto", "low"}},
      {.name = "style", .values = {"vivid", "natural"}, .edits = false},
      {.name = "input_fidelity", .values = {"high", "low"}, .generations = false},
      {"safety_identifier", {}},
      {"user", {}},
  };
  return *hints;
}

grpc::Status ReadOpenAi(std::string_view content_type, std::string body, bool edit,
                        const Catalog& catalog, const Caller& caller, OpenAiRequest* request) {
  const auto read = [&](const json& fields, OpenAiFiles files) {
    *request = {};
    request->reply.edit = edit;
    return Reader(fields, request, catalog, caller).Run(std::move(files));
  };
  json fields;
  if (absl::StartsWithIgnoreCase(absl::string_view(content_type.data(), content_type.size()),
                                 "multipart/form-data")) {
    OpenAiFiles files;
    if (grpc::Status status = ReadForm(content_type, body, &fields, &files); !status.ok()) {
      return status;
    }
    body = std::string();  // as what follows may keep it for long
    return read(fields, std::move(files));
  }
  TakenBytes taken(body);
  if (!taken.none() && ParseJson(taken.rest(), &fields).ok()) {
    if (read(fields, {.taken = &taken}).ok() && taken.all_back()) return grpc::Status::OK;
  }
  if (grpc::Status status = ParseJson(body, &fields); !status.ok()) return status;
  body = std::string();
  return read(fields, {});
}

std::string OpenAiField(const std::string& field) {
  static const std::vector<std::pair<std::string, std::string>> kNames = {
      {"params.count", "n"},
      {"params.width", "size"},
      {"params.height", "size"},
      {"params.model", "model"},
      {"params.output.format", "output_format"},
      {"params.output.quality", "output_compression"},
      {"params.conditions[0].text", "prompt"},
      {"params.conditions[0].negative_text", "denoised.negative_prompt"},
      {"params.init_image.encoded", "image"},
      {"params.init_image.tensor", "denoised.init_image.tensor"},
      {"params.init_image.strength", "denoised.strength"},
      {"params.init_image", "image"},
      {"params.mask.encoded", "denoised.mask.encoded"},
      {"params.mask.tensor", "denoised.mask.tensor"},
      {"params.mask.transparency", "mask"},
      {"params.mask", "mask"},
      {"preview", "partial_images"},
      {"params", "denoised"},
  };
  for (const auto& [ours, theirs] : kNames) {
    if (field.rfind(ours, 0) != 0) continue;
    const std::string rest = field.substr(ours.size());
    if (rest.empty() || rest[0] == '.' || rest[0] == '[') {
      return theirs == "partial_images" ? theirs : theirs + rest;
    }
  }
  return field;
}

std::string OpenAiReply(const OpenAiReplyOptions& options, v1::GenerateResponse* images,
                        const MakeLink& link) {
  std::string data;
  for (v1::Image& image : *images->mutable_images()) {
    std::string url;
    if (options.urls) url = link(image.mime_type(), image.encoded());
    const std::string content = url.empty() ? "\"b64_json\":\"" + ToBase64(image.encoded()) + "\""
                                            : "\"url\":" + Quoted(url);
    data.append(data.empty() ? "{" : ",{").append(content);
    data.append(",\"denoised\":{").append(Own(image)).append("}}");
  }
  v1::GenerateResponse rest;
  rest.mutable_params()->Swap(images->mutable_params());
  rest.mutable_run()->Swap(images->mutable_run());
  rest.mutable_timing()->Swap(images->mutable_timing());
  const v1::GenerationParams& params = rest.params();
  std::string reply =
      fmt::format(R"({{"created":{},"background":"opaque","output_format":"{}","size":"{}",)",
                  Now(), options.output_format, SizeText(params.width(), params.height()));
  // Events may have the quality "auto", but this may not.
  if (options.quality != "auto") reply += fmt::format(R"("quality":"{}",)", options.quality);
  reply.reserve(reply.size() + data.size() + 4096);
  reply.append("\"data\":[").append(data);
  reply.append("],\"denoised\":{\"request_id\":").append(Quoted(params.request_id()));
  reply.append(",\"params\":").append(ToJson(params));
  reply.append(",\"run\":").append(ToJson(rest.run()));
  reply.append(",\"timing\":").append(ToJson(rest.timing())).append("}}");
  return reply;
}

std::string OpenAiEvents::Event(const std::string& type, const v1::Image& image,
                                const std::string& more, const std::string& own) {
  const std::string name = (options_.edit ? "image_edit." : "image_generation.") + type;
  std::string data = fmt::format(
      R"({{"type":"{}",{}"created_at":{},"size":"{}","quality":"{}","background":"opaque",)"
      R"("output_format":"{}","denoised":{{{}{},"request_id":{}}},"b64_json":")",
      name, more, Now(), size_, options_.quality, options_.output_format, Own(image), own,
      Quoted(request_id_));
  data.append(ToBase64(image.encoded())).append("\"}");
  return ServerSentEvent(0, name, data);
}

std::string OpenAiEvents::Format(const v1::StreamGenerateResponse& event) {
  if (event.has_queued()) {
    const v1::GenerationParams& params = event.queued().params();
    request_id_ = params.request_id();
    size_ = SizeText(params.width(), params.height());
  } else if (event.has_preview()) {
    const v1::PreviewEvent& preview = event.preview();
    int& sent = partial_images_[preview.image().index()];
    const int count = options_.partial_images;
    // The first that is k/(count + 1) of the way or more, for k = 1 … count.
    if (sent >= count ||
        int64_t{preview.evaluation()} * (count + 1) < int64_t{sent + 1} * preview.evaluations()) {
      return "";
    }
    const std::string more = fmt::format(R"("partial_image_index":{},)", sent++);
    const std::string own = fmt::format(R"(,"evaluation":{},"evaluations":{})",
                                        preview.evaluation(), preview.evaluations());
    return Event("partial_image", preview.image(), more, own);
  } else if (event.has_image()) {
    constexpr char kUsage[] = R"("usage":{"total_tokens":0,"input_tokens":0,"output_tokens":0,)"
                              R"("input_tokens_details":{"text_tokens":0,"image_tokens":0}},)";
    return Event("completed", event.image().image(), kUsage, "");
  }
  return "";
}

}  // namespace denoised
