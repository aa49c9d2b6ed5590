// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

/// Text of others, such as names of files, on a terminal.

namespace denoised {

/// A character, and its size in UTF-8.
struct Character {
  char32_t code = 0;
  size_t bytes = 0;
};
/// The character at `text[at]` if a terminal would obey it instead of showing it: a control
/// character (U+0000 to U+001F, U+007F to U+009F), a line separator (U+2028, U+2029), or one that
/// changes the direction of text (U+202A to U+202E, U+2066 to U+2069).
std::optional<Character> ControlAt(std::string_view text, size_t at);

/// Text of others with its control characters as "\x1b" or "\u202e", since a terminal would obey
/// them.
std::string Printable(std::string_view text);

/// The same of a message that may have several lines.
std::string PrintableLines(std::string_view text);

}  // namespace denoised
