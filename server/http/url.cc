// SPDX-License-Identifier: Apache-2.0
#include "server/http/url.h"

#include <charconv>

namespace denoised {

std::optional<std::string> PercentDecode(std::string_view text, bool query) {
  std::string decoded;
  decoded.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '+' && query) {
      decoded += ' ';
    } else if (text[i] != '%') {
      decoded += text[i];
    } else {
      unsigned value = 0;
      if (text.size() - i < 3) return std::nullopt;
      const char* const end = text.data() + i + 3;
      if (std::from_chars(text.data() + i + 1, end, value, 16).ptr != end) return std::nullopt;
      decoded += static_cast<char>(value);
      i += 2;
    }
  }
  return decoded;
}

std::optional<std::map<std::string, std::string>> ParseQuery(std::string_view query) {
  std::map<std::string, std::string> values;
  while (!query.empty()) {
    const std::string_view pair = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(query.size(), pair.size() + 1));
    if (pair.empty()) continue;
    const size_t equals = pair.find('=');
    const auto name = PercentDecode(pair.substr(0, equals), true);
    const auto value = PercentDecode(
        equals == std::string_view::npos ? std::string_view() : pair.substr(equals + 1), true);
    if (!name || !value) return std::nullopt;
    if (!values.emplace(*name, *value).second) return std::nullopt;
  }
  return values;
}

}  // namespace denoised
