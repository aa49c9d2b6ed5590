// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace denoised {

/// What names of models and clients are made of. They stand in logs and metrics, and a model's name
/// is looked for as a directory below --model-roots, so no name means a directory itself.
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
