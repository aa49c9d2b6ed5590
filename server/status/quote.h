// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace denoised {

/// What a client sent, safe to repeat in a message: in quotes, at most 64 characters, everything
/// but printable ASCII replaced by '?'.
inline std::string Quote(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text.substr(0, 64)) quoted += c >= 0x20 && c < 0x7f ? c : '?';
  return quoted + (text.size() > 64 ? "...\"" : "\"");
}

}  // namespace denoised
