// SPDX-License-Identifier: Apache-2.0
#include "command/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

namespace denoised::command {

std::optional<Character> ControlAt(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) -> char32_t {
    return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0;
  };
  if (byte(0) < 0x20 || byte(0) == 0x7f) return Character{byte(0), 1};
  if (byte(0) == 0xc2 && byte(1) >= 0x80 && byte(1) < 0xa0) return Character{byte(1), 2};
  if (byte(0) != 0xe2 || (byte(1) != 0x80 && byte(1) != 0x81) || (byte(2) & 0xc0) != 0x80) {
    return std::nullopt;
  }
  const char32_t code = 0x2000 | (byte(1) & 0x3f) << 6 | (byte(2) & 0x3f);
  const bool control = (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
  return control ? std::optional(Character{code, 3}) : std::nullopt;
}

std::string Printable(std::string_view text) {
  std::string printable;
  for (size_t i = 0; i < text.size();) {
    const auto control = ControlAt(text, i);
    if (!control) {
      printable += text[i++];
      continue;
    }
    const auto code = static_cast<uint32_t>(control->code);
    printable += code < 0x100 ? fmt::format("\\x{:02x}", code) : fmt::format("\\u{:04x}", code);
    i += control->bytes;
  }
  return printable;
}

std::string Shortened(std::string_view text, size_t bytes) {
  if (text.size() <= bytes) return Printable(text);
  // Not within a character of UTF-8, which has up to four bytes.
  size_t end = bytes;
  for (int i = 0; i < 3 && end > 0 && (text[end] & 0xc0) == 0x80; ++i) --end;
  return Printable(text.substr(0, end)) + "…";
}

std::string Table(std::vector<std::vector<std::string>> rows) {
  for (auto& row : rows) {
    for (std::string& cell : row) cell = Printable(cell);
  }
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < widths.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string table;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < widths.size(); ++i) line += fmt::format("{:<{}}  ", row[i], widths[i]);
    table += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return table;
}

}  // namespace denoised::command
