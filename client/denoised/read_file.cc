// SPDX-License-Identifier: Apache-2.0
#include "denoised/read_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "absl/strings/ascii.h"

namespace denoised::client {

absl::StatusOr<std::string> ReadFile(const char* option, const std::string& path) {
  constexpr size_t kMaxBytes = 1 << 20;  // /dev/zero has no end
  std::ifstream file(path, std::ios::binary);
  std::string text;
  char buffer[1 << 12];
  while (file.read(buffer, sizeof buffer), file.gcount() > 0) {
    text.append(buffer, static_cast<size_t>(file.gcount()));
    if (text.size() > kMaxBytes) {
      return absl::InvalidArgumentError(fmt::format(
          "{}: \"{}\" has more than {} bytes; use a smaller file", option, path, kMaxBytes));
    }
  }
  if (file.bad() || text.empty()) {
    return absl::NotFoundError(fmt::format("{}: \"{}\" cannot be read or is empty", option, path));
  }
  return text;
}

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  auto text = ReadFile("token_file", path);
  if (!text.ok()) return text;
  const size_t end = text->find_last_not_of(" \t\r\n");
  std::string token = text->substr(0, end + 1);
  if (token.empty() || !std::all_of(token.begin(), token.end(), absl::ascii_isgraph)) {
    return absl::InvalidArgumentError(
        fmt::format("token_file: \"{}\" does not hold one token and nothing else", path));
  }
  return token;
}

}  // namespace denoised::client
