// SPDX-License-Identifier: Apache-2.0
#include "server/http/json.h"

#include <absl/strings/ascii.h>
#include <absl/strings/escaping.h>
#include <absl/strings/numbers.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/type.pb.h>
#include <google/protobuf/util/json_util.h>
#include <google/protobuf/util/type_resolver.h>
#include <google/protobuf/util/type_resolver_util.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "engine/core/mutex.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/security/job_id.h"
#include "server/status/quote.h"
#include "server/status/status_details.h"
#include "server/telemetry/trace_context.h"

namespace denoised {
namespace {

namespace pb = google::protobuf;

constexpr char kPrefix[] = "type.googleapis.com";

/// Resolves types for protobuf's JSON functions, which ask for the type of a message and of every
/// message in it, each time. It caches them, since describing a type takes longer than all the
/// rest.
class CachedTypes final : public pb::util::TypeResolver {
 public:
  pb::util::Status ResolveMessageType(const std::string& url, pb::Type* type) override {
    return Resolve(url, type, &types_, [this](const std::string& url, pb::Type* type) {
      return resolver_->ResolveMessageType(url, type);
    });
  }
  pb::util::Status ResolveEnumType(const std::string& url, pb::Enum* type) override {
    return Resolve(url, type, &enums_, [this](const std::string& url, pb::Enum* type) {
      return resolver_->ResolveEnumType(url, type);
    });
  }

 private:
  template <typename Type, typename Resolver>
  pb::util::Status Resolve(const std::string& url, Type* type, std::map<std::string, Type>* known,
                           Resolver resolve) {
    MutexLock lock(&mutex_);
    auto it = known->find(url);
    if (it == known->end()) {
      Type resolved;
      const pb::util::Status status = resolve(url, &resolved);
      if (!status.ok()) return status;  // not cached: a client's Any may name anything
      it = known->emplace(url, std::move(resolved)).first;
    }
    *type = it->second;
    return {};
  }

  const std::unique_ptr<pb::util::TypeResolver> resolver_{
      pb::util::NewTypeResolverForDescriptorPool(kPrefix, pb::DescriptorPool::generated_pool())};
  Mutex mutex_;
  std::map<std::string, pb::Type> types_;
  std::map<std::string, pb::Enum> enums_;
};

CachedTypes* Types() {
  static CachedTypes* const types = new CachedTypes;
  return types;
}

std::string Url(const pb::Message& message) {
  return std::string(kPrefix) + "/" + message.GetDescriptor()->full_name();
}

/// Stands for bytes, since protobuf takes 80 ns to encode each. Clients cannot guess the first 16
/// of its 24 bytes: RandomHex() would not do, because replies have ids of its generator. The base64
/// of 24 bytes has no padding.
std::string Marker(size_t index) {
  static const std::string* const secret =
      new std::string(MakeJobId().value_or(RandomHex(32)).substr(0, 16));
  return fmt::format("{}{:08x}", *secret, index);
}

/// Takes large `bytes` fields out of a message, in the order in which they are printed.
void TakeBytes(pb::Message* message, std::vector<std::string>* taken) {
  // The bytes of an Any are a message and are printed as one.
  if (message->GetDescriptor()->full_name() == "google.protobuf.Any") return;
  constexpr size_t kLarge = 256;
  const pb::Reflection& reflection = *message->GetReflection();
  std::vector<const pb::FieldDescriptor*> fields;
  reflection.ListFields(*message, &fields);
  for (const pb::FieldDescriptor* field : fields) {
    if (field->is_map()) continue;
    if (field->cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE) {
      const int count = field->is_repeated() ? reflection.FieldSize(*message, field) : 1;
      for (int i = 0; i < count; ++i) {
        TakeBytes(field->is_repeated() ? reflection.MutableRepeatedMessage(message, field, i)
                                       : reflection.MutableMessage(message, field),
                  taken);
      }
    } else if (field->type() == pb::FieldDescriptor::TYPE_BYTES && !field->is_repeated()) {
      std::string bytes = reflection.GetString(*message, field);
      if (bytes.size() < kLarge) continue;
      reflection.SetString(message, field, Marker(taken->size()));
      taken->push_back(std::move(bytes));
    }
  }
}

/// Replaces the markers in the fields of a message by the bytes that were taken out.
void PutBytes(pb::Message* message, TakenBytes* taken) {
  const pb::Reflection& reflection = *message->GetReflection();
  std::vector<const pb::FieldDescriptor*> fields;
  reflection.ListFields(*message, &fields);
  for (const pb::FieldDescriptor* field : fields) {
    if (field->is_map()) continue;
    if (field->cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE) {
      const int size = field->is_repeated() ? reflection.FieldSize(*message, field) : 1;
      for (int i = 0; i < size; ++i) {
        PutBytes(field->is_repeated() ? reflection.MutableRepeatedMessage(message, field, i)
                                      : reflection.MutableMessage(message, field),
                 taken);
      }
    } else if (field->type() == pb::FieldDescriptor::TYPE_BYTES && !field->is_repeated()) {
      std::string bytes = reflection.GetString(*message, field);
      if (taken->PutBack(&bytes)) reflection.SetString(message, field, std::move(bytes));
    }
  }
}

/// What a field takes instead of `value`, by protobuf's name of its type; empty for types that it
/// does not name. Most fields take less than their type, which is told once the type is right.
std::string Takes(std::string_view type, std::string_view value) {
  if (value.size() > 1 && value.front() == '"') value = value.substr(1, value.size() - 2);
  double number = 0;
  const bool is_number = absl::SimpleAtod({value.data(), value.size()}, &number);
  if (type == "TYPE_INT32" || type == "TYPE_INT64") return AnotherWholeNumber(value);
  if (type == "TYPE_UINT32") return WholeNumber<uint32_t>(value);
  if (type == "TYPE_UINT64") return WholeNumber<uint64_t>(value);
  if (type == "TYPE_FLOAT" || type == "TYPE_DOUBLE") {
    const bool large = is_number && std::isfinite(number);
    return large ? "a number within 3.4e38" : "a number";
  }
  if (type == "TYPE_BOOL") return "true or false";
  if (type == "TYPE_BYTES") return "base64";
  if (type == "TYPE_STRING") return "a string";
  constexpr size_t kUrl = sizeof kPrefix;  // with the slash after it
  if (!type.starts_with(kPrefix) || type.size() <= kUrl) return "";
  const auto* const values =
      pb::DescriptorPool::generated_pool()->FindEnumTypeByName(std::string(type.substr(kUrl)));
  if (values == nullptr) return "an object";
  std::string names;
  for (int i = 1; i < values->value_count(); ++i)  // 0 is UNSPECIFIED
    names += (i == 1 ? "" : ", ") + values->value(i)->name();
  return "one of " + names;
}

/// At most 64 bytes of a value, so that what follows it in a message is not cut off.
std::string Shortened(const std::string& value) {
  size_t end = 64;
  if (value.size() <= end) return value;
  while (end > 0 && (static_cast<unsigned char>(value[end]) & 0xc0) == 0x80) --end;
  return value.substr(0, end) + "...";
}

constexpr std::string_view kUnknownField = "Cannot find field.";
constexpr std::string_view kListForOne = "Proto field is not repeating, cannot start list.";

/// What protobuf says of a field, in other words: "invalid value \"x\" for type TYPE_INT32".
FieldViolation Described(const std::string& field, const std::string& problem) {
  constexpr std::string_view kInvalid = "invalid value ", kType = " for type ";
  if (problem == kUnknownField)
    return {field, "is no field here; see /openapi.json for those that there are"};
  if (problem == kListForOne) return {field, "is a list, but takes one value"};
  const size_t at = problem.rfind(kType);
  if (problem.starts_with(kInvalid) && at != std::string::npos) {
    const std::string value = problem.substr(kInvalid.size(), at - kInvalid.size());
    const std::string type = problem.substr(at + kType.size());
    // Protobuf puts the field's name where the type stands. An element's field has it already.
    if (value == "Starting an object on a scalar field") {
      const std::string inner = "." + type;
      const bool whole = field == type || field.ends_with(inner);
      return {whole           ? field
              : field.empty() ? type
                              : field + inner,
              "is an object, but takes one value"};
    }
    if (type == "oneof") return {field, "has two fields of which it takes one; leave one out"};
    if (const std::string takes = Takes(type, value); !takes.empty())
      return {field, fmt::format("is {}; use {}", Shortened(value), takes)};
  }
  if (field.empty()) return {"body", "is no JSON of this message: " + Shortened(problem)};
  return {field, problem};
}

/// Protobuf's "(params.steps): invalid value …" or "(params) stepps: Cannot find field.", as a
/// field and what is wrong with it. In the message itself there is no "(…)".
FieldViolation Violation(const std::string& problem) {
  // What follows a line is a picture of the place; a value that is quoted may have lines, too.
  const size_t type = problem.rfind(" for type ");
  const std::string line =
      problem.substr(0, problem.find('\n', type == std::string::npos ? 0 : type));
  std::string field, rest = line;
  if (const size_t close = line.find(')'); line.starts_with('(') && close != std::string::npos) {
    field = line.substr(1, close - 1);
    rest = line.substr(close + 1);
  }
  if (rest.starts_with(": ")) return Described(field, rest.substr(2));
  if (rest.starts_with(' ')) rest.erase(0, 1);
  const size_t colon = rest.rfind(": ");
  const std::string said = colon == std::string::npos ? "" : rest.substr(colon + 2);
  if (said == kUnknownField || said == kListForOne) {
    const std::string name = rest.substr(0, colon);
    return Described(field.empty() ? name : field + "." + name, said);
  }
  return Described(field, rest);
}

/// The text with invalid UTF-8 replaced, as protobuf and JSON require.
std::string Printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// Checks of a text what its parsers leave open: that it is not nested too deeply, has not too many
/// values and gives no key twice, of which they would take the last. Nothing of it is kept. (A
/// callback of parse() could tell the same, but with one the library takes quadratic time for a
/// list of objects.)
class Checks final : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::optional<FieldViolation> problem;

  bool null() override { return Value(); }
  bool boolean(bool) override { return Value(); }
  bool number_integer(int64_t) override { return Value(); }
  bool number_unsigned(uint64_t) override { return Value(); }
  bool number_float(double, const std::string&) override { return Value(); }
  bool string(std::string&) override { return Value(); }
  bool binary(nlohmann::json::binary_t&) override { return Value(); }
  bool start_object(size_t) override { return Enter(true); }
  bool end_object() override { return Leave(); }
  bool start_array(size_t) override { return Enter(false); }
  bool end_array() override { return Leave(); }
  bool key(std::string& key) override {
    Open& object = open_.back();
    object.key = key;
    if (!object.keys.insert(JsonName(key)).second) return Refuse(Path(), "is given twice");
    return Count();
  }
  bool parse_error(size_t, const std::string& token,
                   const nlohmann::json::exception& error) override {
    constexpr int kNumberOverflow = 406;
    if (error.id == kNumberOverflow) {
      if (!open_.empty()) ++open_.back().index;  // it is a value
      const std::string path = Path();
      return Refuse(path.empty() ? "body" : path,
                    fmt::format("is {}; use a number within 1.7e308", Shortened(token)));
    }
    // "[json.exception.parse_error.101] parse error at line 1, column 2: …"
    const std::string_view what = error.what();
    const size_t bracket = what.find("] ");
    return Refuse(
        "body", "is no JSON: " +
                    std::string(what.substr(bracket == std::string_view::npos ? 0 : bracket + 2)));
  }

 private:
  static constexpr size_t kMaxDepth = 32;
  static constexpr int64_t kMaxValues = 1 << 20;  // each takes many times the memory of its text

  /// An object or a list that has not ended.
  struct Open {
    bool is_object;
    std::string key;             // the latest
    std::set<std::string> keys;  // as JsonName() has them
    int64_t index = -1;          // of the latest value of a list
  };

  /// The one name of a field of a message, which may be given as class_label and as classLabel.
  static std::string JsonName(const std::string& key) {
    std::string name;
    bool capital = false;
    for (const char c : key) {
      if (c != '_') name += capital ? absl::ascii_toupper(static_cast<unsigned char>(c)) : c;
      capital = c == '_';
    }
    return name;
  }
  /// Of the latest key: "params.conditions[2].text".
  std::string Path() const {
    std::string path;
    for (const Open& each : open_) {
      if (!each.is_object) {
        path += fmt::format("[{}]", each.index);
      } else {
        path += (path.empty() ? "" : ".") + each.key;
      }
    }
    return path;
  }
  bool Refuse(std::string field, std::string description) {
    problem = {std::move(field), std::move(description)};
    return false;
  }
  bool Count() {
    return ++values_ <= kMaxValues ||
           Refuse("body", fmt::format("has more than {} values", kMaxValues));
  }
  bool Value() {
    if (!open_.empty()) ++open_.back().index;
    return Count();
  }
  bool Enter(bool is_object) {
    if (!Value()) return false;
    open_.push_back({.is_object = is_object});
    return open_.size() <= kMaxDepth ||
           Refuse("body", fmt::format("is nested deeper than {}", kMaxDepth));
  }
  bool Leave() {
    open_.pop_back();
    return true;
  }

  std::vector<Open> open_;
  int64_t values_ = 0;
};

grpc::Status Check(const std::string& text) {
  Checks checks;
  nlohmann::json::sax_parse(text, &checks);
  return checks.problem ? InvalidFields({*checks.problem}, "") : grpc::Status::OK;
}

grpc::Status Parse(const std::string& text, pb::Message* message) {
  // What is checked has few values, so protobuf, which takes 200 ns for each, cannot hold a worker
  // for seconds. It reads more than JSON, too.
  if (grpc::Status status = Check(text); !status.ok()) return status;
  std::string binary;
  const auto status = pb::util::JsonToBinaryString(Types(), Url(*message), text, &binary);
  if (!status.ok()) return InvalidFields({Violation(std::string(status.message()))}, "");
  if (!message->ParseFromString(binary)) {
    return InvalidFields({{"body", "holds text that is not UTF-8"}}, "");
  }
  return grpc::Status::OK;
}

const char* ErrorType(int code) {
  if (code == 401) return "authentication_error";
  if (code == 403) return "permission_error";
  if (code == 429) return "rate_limit_error";
  return code >= 499 ? "server_error" : "invalid_request_error";
}

google::rpc::Status DetailsOf(const grpc::Status& status) {
  google::rpc::Status rpc;
  if (!rpc.ParseFromString(status.error_details())) rpc.Clear();
  return rpc;
}

/// In seconds; nothing if the status does not ask to come back.
std::optional<double> RetryDelay(const grpc::Status& status) {
  const google::rpc::Status rpc = DetailsOf(status);
  google::rpc::RetryInfo retry;
  for (const auto& detail : rpc.details()) {
    if (!detail.UnpackTo(&retry)) continue;
    return static_cast<double>(retry.retry_delay().seconds()) + retry.retry_delay().nanos() / 1e9;
  }
  return std::nullopt;
}

}  // namespace

std::string ToJson(const pb::Message& message) {
  const std::unique_ptr<pb::Message> copy(message.New());
  copy->CopyFrom(message);
  std::vector<std::string> taken;
  TakeBytes(copy.get(), &taken);
  pb::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string json;
  const auto status = pb::util::BinaryToJsonString(Types(), Url(message), copy->SerializeAsString(),
                                                   &json, options);
  DENOISED_CHECK(status.ok(), "{} is not printed as JSON: {}", message.GetTypeName(),
                 status.ToString());
  if (taken.empty()) return json;
  size_t size = json.size();
  for (const std::string& bytes : taken) size += bytes.size() / 3 * 4 + 4;
  std::string spliced;
  spliced.reserve(size);
  size_t position = 0;
  for (size_t i = 0; i < taken.size(); ++i) {
    const std::string marker = ToBase64(Marker(i));
    const size_t found = json.find(marker, position);
    DENOISED_CHECK(found != std::string::npos, "bytes {} of {} are not printed", i,
                   message.GetTypeName());
    spliced.append(json, position, found - position);
    spliced += ToBase64(taken[i]);
    position = found + marker.size();
  }
  return spliced.append(json, position);
}

TakenBytes::TakenBytes(const std::string& text) {
  constexpr size_t kLarge = 1024, kGroup = 4;
  size_t copied = 0;
  for (size_t open = text.find('"'), close; open != std::string::npos; open = close) {
    close = text.find('"', open + 1);
    if (close == std::string::npos) break;
    std::string_view given(text.data() + open + 1, close - open - 1);
    if (given.starts_with("data:")) given.remove_prefix(given.find(',') + 1);
    std::string bytes;
    if (given.size() < kLarge || given.size() % kGroup != 0 || !FromBase64(given, &bytes)) continue;
    // absl ignores white space and bits after the last byte; leave such text to protobuf.
    const size_t last = (bytes.size() - 1) / 3 * 3;
    if (last / 3 * kGroup + kGroup != given.size() ||
        ToBase64(bytes.substr(last)) != given.substr(given.size() - kGroup)) {
      continue;
    }
    rest_.append(text, copied, close - given.size() - copied)
        .append(ToBase64(Marker(bytes_.size())));
    bytes_.push_back(std::move(bytes));
    copied = close;
  }
  if (!bytes_.empty()) rest_.append(text, copied);
}

bool TakenBytes::PutBack(std::string* bytes) {
  constexpr size_t kDigits = 8;
  if (bytes->size() <= kDigits || put_back_ == bytes_.size()) return false;
  size_t index = 0;
  std::from_chars(bytes->data() + bytes->size() - kDigits, bytes->data() + bytes->size(), index,
                  16);
  if (index >= bytes_.size() || *bytes != Marker(index)) return false;
  *bytes = std::move(bytes_[index]);
  ++put_back_;
  return true;
}

std::string AnotherWholeNumber(std::string_view value) {
  double number = 0;
  const bool is_number = absl::SimpleAtod({value.data(), value.size()}, &number);
  const bool whole = is_number && std::isfinite(number) && std::trunc(number) == number;
  return !whole       ? "a whole number"
         : number > 0 ? "a smaller whole number"
                      : "a larger whole number";
}

grpc::Status FromJson(const std::string& text, pb::Message* message) {
  TakenBytes taken(text);
  if (!taken.none() && Parse(taken.rest(), message).ok()) {
    PutBytes(message, &taken);
    if (taken.all_back()) return grpc::Status::OK;
  }
  // Other fields may contain a marker, and errors show what was sent.
  message->Clear();
  return Parse(text, message);
}

grpc::Status ParseJson(const std::string& text, nlohmann::json* json) {
  if (grpc::Status status = Check(text); !status.ok()) return status;
  *json = nlohmann::json::parse(text);
  return grpc::Status::OK;
}

std::string ToBase64(const std::string& bytes) {
  std::string text;
  absl::Base64Escape(absl::string_view(bytes.data(), bytes.size()), &text);
  return text;
}

bool FromBase64(std::string_view text, std::string* bytes) {
  return absl::Base64Unescape(absl::string_view(text.data(), text.size()), bytes);
}

int HttpCode(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
      return 200;
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::OUT_OF_RANGE:
      return 400;
    case grpc::StatusCode::FAILED_PRECONDITION:
      return ReasonOf(status) == reason::kModelLoading ? 503 : 400;
    case grpc::StatusCode::UNAUTHENTICATED:
      return 401;
    case grpc::StatusCode::PERMISSION_DENIED:
      return 403;
    case grpc::StatusCode::NOT_FOUND:
      return 404;
    case grpc::StatusCode::ABORTED:
    case grpc::StatusCode::ALREADY_EXISTS:
      return 409;
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      // Memory of the device may be free later, though nobody can say when.
      return RetryDelay(status) || ReasonOf(status) == reason::kDeviceMemory ? 429 : 413;
    case grpc::StatusCode::CANCELLED:
      return 499;
    case grpc::StatusCode::UNIMPLEMENTED:
      return 501;
    case grpc::StatusCode::UNAVAILABLE:
      return 503;
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return 504;
    default:
      return 500;
  }
}

std::string ErrorJson(const grpc::Status& status, int code) {
  const google::rpc::Status rpc = DetailsOf(status);
  const std::string field = FieldOf(status);
  std::string details = "[]";
  if (rpc.details_size() > 0) {
    google::rpc::Status only;
    *only.mutable_details() = rpc.details();
    const std::string json = ToJson(only);
    // {"code":0,"message":"","details":[…]}
    const size_t begin = json.find("\"details\":") + 10;
    details = json.substr(begin, json.rfind('}') - begin);
  }
  const std::string reason = absl::AsciiStrToLower(ReasonOf(status));
  return fmt::format(
      R"({{"error":{{"message":{},"type":"{}","param":{},"code":{},"status":"{}","details":{}}}}})",
      Printable(status.error_message()), ErrorType(code), field.empty() ? "null" : Printable(field),
      reason.empty() ? "null" : "\"" + reason + "\"",
      absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code())), details);
}

HttpReply ErrorReply(int code, const grpc::Status& status) {
  HttpReply reply = JsonReply(ErrorJson(status, code) + "\n");
  reply.code = code;
  std::optional<double> seconds = RetryDelay(status);
  if (code == 503 && !seconds) seconds = 1;
  if (seconds) {
    const auto rounded = [](double number) {
      return std::to_string(static_cast<int64_t>(std::ceil(number)));
    };
    reply.headers.emplace_back("Retry-After", rounded(*seconds));
    // OpenAI's clients prefer this one, since it need not be whole seconds.
    reply.headers.emplace_back("Retry-After-Ms", rounded(*seconds * 1000));
  }
  // OpenAI's clients would retry every 409, 429 and 5xx.
  reply.headers.emplace_back("X-Should-Retry", seconds ? "true" : "false");
  if (code == 401) reply.headers.emplace_back("WWW-Authenticate", "Bearer");
  return reply;
}

HttpReply ErrorReply(const grpc::Status& status) { return ErrorReply(HttpCode(status), status); }

HttpReply JsonReply(std::string json) {
  return {.code = 200,
          .headers = {{"Content-Type", "application/json"}, {"Cache-Control", "no-store"}},
          .body = std::move(json)};
}

}  // namespace denoised
