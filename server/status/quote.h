// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <google/protobuf/stubs/common.h>

#include <string>
#include <string_view>

namespace denoised {

/// A client's text, made safe for a message: quoted, at most 64 characters, and everything except
/// printable ASCII replaced by '?'.
inline std::string Quote(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text.substr(0, 64)) quoted += c >= 0x20 && c < 0x7f ? c : '?';
  return quoted + (text.size() > 64 ? "...\"" : "\"");
}

/// Whether protobuf takes it as the value of a string field: by its own function, which no public
/// header has, so that the two cannot differ.
inline bool IsUtf8(std::string_view text) {
  return google::protobuf::internal::IsStructurallyValidUTF8(text.data(),
                                                             static_cast<int>(text.size()));
}

}  // namespace denoised
