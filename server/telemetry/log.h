// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

/// Structured logs on stderr: a message and fields, as one line of text or of JSON.
///
///   log::Info("model ready", {{"model", name}, {"seconds", 1.5}});
///
/// Thread-safe after Configure.

namespace denoised::log {

enum class Format { kText, kJson };
enum class Level { kDebug, kInfo, kWarning, kError };

struct Field {
  Field(const char* name, std::string value) : name(name), text(std::move(value)) {}
  Field(const char* name, const char* value) : name(name), text(value) {}
  Field(const char* name, double value) : name(name), number(value), is_number(true) {}
  Field(const char* name, int value) : Field(name, static_cast<double>(value)) {}

  const char* name;
  std::string text;
  double number = 0;
  bool is_number = false;
};
using Fields = std::vector<Field>;

void Configure(Format format, Level level);

void Debug(const std::string& message, const Fields& fields = {});
void Info(const std::string& message, const Fields& fields = {});
void Warning(const std::string& message, const Fields& fields = {});
void Error(const std::string& message, const Fields& fields = {});

/// One line as the configured logger writes it, without the newline; `time` is ISO 8601.
std::string Render(Format format, const std::string& time, Level level, const std::string& message,
                   const Fields& fields);

}  // namespace denoised::log
