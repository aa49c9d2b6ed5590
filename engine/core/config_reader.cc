// SPDX-License-Identifier: Apache-2.0
#include "engine/core/config_reader.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string_view>
#include <utility>

namespace denoised {
namespace {

/// What ReadJsonFile() makes of a bare word: a value of a type that no field has.
constexpr std::pair<std::string_view, std::string_view> kBareWords[] = {
    {"Infinity", "[\"Infinity\"]"}, {"NaN", "[\"NaN\"]"}};

std::string Abbreviated(const nlohmann::json& value) {
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  for (const auto& [word, stored] : kBareWords)
    for (size_t at = 0; (at = text.find(stored, at)) != std::string::npos;)
      text.replace(at, stored.size(), word);
  return text.size() > 80 ? text.substr(0, 77) + "..." : text;
}

bool FitsInt(const nlohmann::json& value) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() && value.get<uint64_t>() > std::numeric_limits<int>::max())
    return false;
  const int64_t wide = value.get<int64_t>();
  return wide >= std::numeric_limits<int>::min() && wide <= std::numeric_limits<int>::max();
}

}  // namespace

ConfigReader::ConfigReader(const nlohmann::json& object, std::string file)
    : object_(object), file_(std::move(file)) {}

const nlohmann::json* ConfigReader::Find(const char* field) {
  read_.insert(field);
  const auto it = object_.find(field);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

template <typename T>
void ConfigReader::ReadAs(const char* field, const char* expected,
                          bool (nlohmann::json::*is)() const noexcept, T* value) {
  const nlohmann::json* found = Find(field);
  if (!found) return;
  if (!(found->*is)()) {
    Complain(field, fmt::format("expected {}", expected));
    return;
  }
  if (std::is_same_v<T, int> && !FitsInt(*found)) {
    Complain(field, fmt::format("expected an integer from {} to {}",
                                std::numeric_limits<int>::min(), std::numeric_limits<int>::max()));
    return;
  }
  *value = found->get<T>();
}

template <typename T>
void ConfigReader::ReadList(const char* field, const char* expected,
                            bool (nlohmann::json::*is)() const noexcept, std::vector<T>* value) {
  const nlohmann::json* found = Find(field);
  if (!found) return;
  bool good = found->is_array();
  if (good)
    for (const auto& item : *found)
      good = good && (item.*is)() && (!std::is_same_v<T, int> || FitsInt(item));
  if (!good) {
    Complain(field, fmt::format("expected a list of {}", expected));
    return;
  }
  *value = found->get<std::vector<T>>();
}

using json = nlohmann::json;

void ConfigReader::Read(const char* field, bool* value) {
  if (const auto it = object_.find(field); it != object_.end() && it->is_null()) *value = false;
  ReadAs(field, "true or false", &json::is_boolean, value);
}
void ConfigReader::Read(const char* field, int* value) {
  ReadAs(field, "an integer", &json::is_number_integer, value);
}
void ConfigReader::Read(const char* field, double* value) {
  ReadAs(field, "a number", &json::is_number, value);
}
void ConfigReader::Read(const char* field, std::string* value) {
  ReadAs(field, "a string", &json::is_string, value);
}

template <typename T>
void ConfigReader::ReadOptional(const char* field, std::optional<T>* value) {
  if (Find(field) == nullptr) return;
  T read{};
  const size_t complaints = complaints_.size();
  Read(field, &read);
  if (complaints_.size() == complaints) *value = read;
}

void ConfigReader::Read(const char* field, std::optional<bool>* value) {
  bool read = false;
  Read(field, &read);
  if (object_.contains(field)) *value = read;  // null, too
}
void ConfigReader::Read(const char* field, std::optional<int>* value) {
  ReadOptional(field, value);
}
void ConfigReader::Read(const char* field, std::optional<double>* value) {
  ReadOptional(field, value);
}
void ConfigReader::Read(const char* field, std::optional<std::string>* value) {
  ReadOptional(field, value);
}
void ConfigReader::Read(const char* field, std::vector<int>* value) {
  ReadList(field, "integers", &json::is_number_integer, value);
}
void ConfigReader::Read(const char* field, std::vector<double>* value) {
  ReadList(field, "numbers", &json::is_number, value);
}
void ConfigReader::Read(const char* field, std::vector<std::string>* value) {
  ReadList(field, "strings", &json::is_string, value);
}

const nlohmann::json& ConfigReader::Raw(const char* field) {
  static const json kNull;
  const json* found = Find(field);
  return found ? *found : kNull;
}

bool ConfigReader::Has(const char* field) const {
  const auto it = object_.find(field);
  return it != object_.end() && !it->is_null();
}

void ConfigReader::Refuse(const char* field, const nlohmann::json& harmless) {
  const json* found = Find(field);
  if (found && *found != harmless)
    Complain(field, fmt::format("not supported; only {} is", Abbreviated(harmless)));
}

void ConfigReader::RefuseNull(const char* field) {
  const auto it = object_.find(field);
  if (it != object_.end() && it->is_null())
    Complain(field, "expected a value; leave the field out for its default");
}

void ConfigReader::Ignore(std::initializer_list<const char*> fields) {
  for (const char* field : fields) read_.insert(field);
}

void ConfigReader::Complain(const char* field, const std::string& what) {
  const auto it = object_.find(field);
  complaints_.push_back(it == object_.end() ? fmt::format("{}: field '{}': {}", file_, field, what)
                                            : fmt::format("{}: field '{}' is {}: {}", file_, field,
                                                          Abbreviated(*it), what));
}

void ConfigReader::CheckRange(const char* field, double value, double low, double high) {
  if (!(value >= low && value <= high))
    Complain(field, fmt::format("must be between {} and {}", low, high));
}

absl::Status ConfigReader::Finish() {
  for (const auto& [field, value] : object_.items())
    if (!read_.count(field) && !field.empty() && field[0] != '_' && !value.is_null())
      complaints_.push_back(
          fmt::format("{}: field '{}' is {}: unknown field, so it cannot be "
                      "honoured; remove it if it has no effect",
                      file_, field, Abbreviated(value)));
  if (complaints_.empty()) return absl::OkStatus();
  return InvalidArgument("{}", fmt::join(complaints_, "\n"));
}

namespace {

/// Python's json module, and so diffusers, writes infinities and NaN as bare words, which are not
/// JSON. In published files only -Infinity appears: lambda_min_clipped without a limit, as null.
/// The others become values of a type that no field has, so that whoever reads the field refuses
/// it.
std::string WithoutBareWords(std::string_view text) {
  std::string cleaned;
  cleaned.reserve(text.size());
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (in_string && text[i] == '\\') {
      cleaned.append(text, i++, 2);
      continue;
    }
    if (text[i] == '"') in_string = !in_string;
    bool replaced = false;
    const auto replace = [&](std::string_view word, std::string_view stored) {
      if (in_string || replaced || text.compare(i, word.size(), word) != 0) return;
      cleaned += stored;
      i += word.size() - 1;
      replaced = true;
    };
    replace("-Infinity", "null");
    for (const auto& [word, stored] : kBareWords) replace(word, stored);
    if (!replaced) cleaned += text[i];
  }
  return cleaned;
}

/// " (line 3)" of `text`, which is not valid JSON, if it has several lines and the parser tells.
std::string WhereInvalid(const std::string& text) {
  try {
    [[maybe_unused]] const json valid = json::parse(text);  // throws
  } catch (const json::parse_error& error) {
    // Its byte, counted from 1, may be the end of the line or of the text.
    const size_t last = text.find_last_not_of(" \t\r\n");
    const size_t wrong = std::min(error.byte > 0 ? error.byte - 1 : 0, last + 1);
    if (text.find('\n') != std::string::npos)
      return fmt::format(
          " (line {})",
          1 + std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(wrong), '\n'));
  } catch (const json::exception&) {  // a number that no double holds
  }
  return "";
}

}  // namespace

absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& file,
                                               int max_depth) {
  // The parser takes it for the end of the text.
  if (text.find('\0') != std::string_view::npos)
    return InvalidArgument("{}: is not valid JSON, since it has a zero byte; write the file again",
                           file);
  // The parser bounds no depth, and of two equal keys it silently keeps the last.
  std::vector<std::set<std::string>> keys;  // of the objects that have not ended
  std::optional<std::string> twice;
  bool too_deep = false;
  const auto inspect = [&](int depth, json::parse_event_t event, json& parsed) {
    using Event = json::parse_event_t;
    if ((event == Event::object_start || event == Event::array_start) && depth >= max_depth) {
      too_deep = true;
      return false;  // it is not stored
    }
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key && !too_deep) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(key).second && !twice) twice = key;
    }
    return true;
  };
  const std::string cleaned = WithoutBareWords(text);
  json parsed = json::parse(cleaned, inspect, /*allow_exceptions=*/false);
  if (too_deep)
    return InvalidArgument("{}: is nested deeper than {}; write the file again", file, max_depth);
  if (parsed.is_discarded())
    return InvalidArgument("{}: is not valid JSON{}; mend it or write the file again", file,
                           WhereInvalid(cleaned));
  if (!parsed.is_object())
    return InvalidArgument("{}: is not a JSON object, such as {{\"key\": 1}}", file);
  if (twice) return InvalidArgument("{}: has {} twice; give it once", file, Abbreviated(*twice));
  return parsed;
}

absl::StatusOr<nlohmann::json> ReadJsonFile(const std::string& path) {
  constexpr uintmax_t kMaxBytes = 64u << 20;
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    if (!std::filesystem::exists(path, error)) return NotFound("{}: no such file", path);
    return InvalidArgument("{}: is not a regular file; put a JSON file there", path);
  }
  const uintmax_t size = std::filesystem::file_size(path, error);
  if (error || size > kMaxBytes)
    return InvalidArgument("{}: {} bytes is more than a config may have (64 MiB)", path, size);
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  if (!stream) return InvalidArgument("{}: cannot be read; check its permissions", path);
  return ParseJsonObject(text.str(), path);
}

std::optional<std::string> FlagText(const nlohmann::json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_number() && !value.is_boolean()) return std::nullopt;
  if (value.is_number_float()) {
    constexpr double kExact = 9007199254740992;  // beyond 2^53 not every whole number is a double
    const double number = value.get<double>();
    if (number == std::trunc(number) && std::abs(number) <= kExact)
      return fmt::format("{}", static_cast<int64_t>(number));
  }
  return value.dump();
}

}  // namespace denoised
