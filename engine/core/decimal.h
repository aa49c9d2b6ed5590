// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

namespace denoised {

/// What is wrong with a whole number that C and CLI11 would not read in base 10 ("010" is 8, "0x10"
/// 16, "0b11" 3), with what to write instead; empty if nothing is, or if it is no number at all.
inline std::string NotDecimal(std::string_view text) {
  const size_t begin = std::min(text.find_first_not_of("+- \t\n\v\f\r"), text.size());
  const std::string_view digits = text.substr(begin);
  const char* const sign = text.find('-') < begin ? "-" : "";
  if (digits.size() < 2 || digits[0] != '0') return "";
  if (digits.find_first_not_of("0123456789") == std::string_view::npos) {
    const size_t first = std::min(digits.find_first_not_of('0'), digits.size() - 1);
    return fmt::format("{} begins with a zero, which could mean octal; write {}{}", text, sign,
                       digits.substr(first));
  }
  const bool hexadecimal = digits[1] == 'x' || digits[1] == 'X';
  if (!hexadecimal && digits[1] != 'b' && digits[1] != 'B') return "";
  uint64_t value = 0;
  const char* const end = digits.data() + digits.size();
  const auto [read, error] = std::from_chars(digits.data() + 2, end, value, hexadecimal ? 16 : 2);
  if (read != end || error != std::errc()) return "";
  return fmt::format("{} is {}; write {}{}", text, hexadecimal ? "hexadecimal" : "binary", sign,
                     value);
}

}  // namespace denoised
