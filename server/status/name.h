// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace denoised {

/// The rule for names of models and clients. They appear in logs and metrics, and a model's name
/// can be looked up as a directory in --model-roots, so "." and ".." are not names.
inline constexpr char kNameRule[] =
    "use 1 to 64 letters, digits, '.', '_' or '-', but not \".\" or \"..\"";

inline bool IsName(std::string_view name) {
  if (name.empty() || name.size() > 64 || name == "." || name == "..") return false;
  for (const char c : name) {
    const bool good = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                      c == '.' || c == '_' || c == '-';
    if (!good) return false;
  }
  return true;
}

}  // namespace denoised
