// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/log.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>

namespace denoised::log {
namespace {

std::atomic<Format> current_format{Format::kText};

spdlog::logger& Logger() {
  static const std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>("denoised",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%v");  // Render writes the whole line
    made->flush_on(spdlog::level::info);
    return made;
  }();
  return *logger;
}

spdlog::level::level_enum SpdlogLevel(Level level) {
  switch (level) {
    case Level::kDebug:
      return spdlog::level::debug;
    case Level::kInfo:
      return spdlog::level::info;
    case Level::kWarning:
      return spdlog::level::warn;
    case Level::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

const char* LevelName(Level level) {
  switch (level) {
    case Level::kDebug:
      return "debug";
    case Level::kInfo:
      return "info";
    case Level::kWarning:
      return "warning";
    case Level::kError:
      return "error";
  }
  return "";
}

std::string Now() {
  const auto now = std::chrono::system_clock::now();
  const auto seconds = std::chrono::floor<std::chrono::seconds>(now);
  const auto millis = std::chrono::duration_cast<std::chrono::milliseconds>(now - seconds).count();
  return fmt::format("{:%FT%T}.{:03}Z", fmt::gmtime(std::chrono::system_clock::to_time_t(seconds)),
                     millis);
}

void Write(Level level, const std::string& message, const Fields& fields) {
  spdlog::logger& logger = Logger();
  if (!logger.should_log(SpdlogLevel(level))) return;
  logger.log(SpdlogLevel(level), "{}", Render(current_format, Now(), level, message, fields));
}

/// What a terminal obeys or an editor does not show as it is: DEL, the C1 controls (U+009B begins
/// an escape sequence), the line separators and the bidirectional controls. JSON escapes the C0
/// controls itself.
bool IsControl(uint32_t code) {
  return (code >= 0x7f && code <= 0x9f) || code == 0x61c || code == 0x200e || code == 0x200f ||
         (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
}

/// `json` in one line of UTF-8, with control characters as \uXXXX.
template <typename Json>
std::string Dump(const Json& json) {
  const std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::string escaped;
  for (size_t at = 0; at < text.size();) {
    const auto first = static_cast<unsigned char>(text[at]);
    const size_t size = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    uint32_t code = size == 1 ? first : first & (0x7fu >> size);
    for (size_t i = 1; i < size; ++i) code = code << 6 | (text[at + i] & 0x3fu);
    escaped += IsControl(code) ? fmt::format("\\u{:04x}", code) : text.substr(at, size);
    at += size;
  }
  return escaped;
}

/// A text line must stay one line, and a value one word.
std::string TextValue(const std::string& value) {
  const std::string quoted = Dump(nlohmann::json(value));
  const bool plain = !value.empty() && value.find_first_of(" =") == std::string::npos &&
                     quoted.size() == value.size() + 2 && quoted.substr(1, value.size()) == value;
  return plain ? value : quoted;
}

}  // namespace

std::string Render(Format format, const std::string& time, Level level, const std::string& message,
                   const Fields& fields) {
  if (format == Format::kJson) {
    nlohmann::ordered_json line = {
        {"time", time}, {"level", LevelName(level)}, {"message", message}};
    for (const Field& field : fields) {
      if (field.is_number && field.number == static_cast<double>(std::llround(field.number))) {
        line[field.name] = std::llround(field.number);  // 3, not 3.0
      } else if (field.is_number) {
        line[field.name] = field.number;
      } else {
        line[field.name] = field.text;
      }
    }
    return Dump(line);
  }
  std::string line = fmt::format("{} {:<7} {}", time, LevelName(level), message);
  for (const Field& field : fields) {
    line +=
        fmt::format(" {}={}", field.name,
                    field.is_number ? fmt::format("{:.10g}", field.number) : TextValue(field.text));
  }
  return line;
}

void Configure(Format format, Level level) {
  current_format = format;
  Logger().set_level(SpdlogLevel(level));
}

void Debug(const std::string& message, const Fields& fields) {
  Write(Level::kDebug, message, fields);
}
void Info(const std::string& message, const Fields& fields) {
  Write(Level::kInfo, message, fields);
}
void Warning(const std::string& message, const Fields& fields) {
  Write(Level::kWarning, message, fields);
}
void Error(const std::string& message, const Fields& fields) {
  Write(Level::kError, message, fields);
}

}  // namespace denoised::log
