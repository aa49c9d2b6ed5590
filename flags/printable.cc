// SPDX-License-Identifier: Apache-2.0
#include "flags/printable.h"

#include <fmt/format.h>

#include <cstdint>

namespace denoised {

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

std::string PrintableLines(std::string_view text) {
  std::string lines;
  for (size_t end = text.find('\n'); end != std::string_view::npos; end = text.find('\n')) {
    lines += Printable(text.substr(0, end)) + "\n";
    text.remove_prefix(end + 1);
  }
  return lines + Printable(text);
}

}  // namespace denoised
