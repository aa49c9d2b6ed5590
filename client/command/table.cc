// SPDX-License-Identifier: Apache-2.0
#include "command/table.h"

#include <fmt/format.h>

#include <algorithm>

#include "flags/printable.h"

namespace denoised::command {

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
