// SPDX-License-Identifier: Apache-2.0
#include "denoised/read_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "absl/strings/ascii.h"

namespace denoised::client {

absl::StatusOr<std::string> ReadFile(const char* option, const std::string& path) {
  constexpr size_t kMaxBytes = 1 << 20;  // /dev/zero has no end
  const auto failed = [&] {
    const std::string reason = std::strerror(errno);
    return absl::InvalidArgumentError(
        fmt::format("{}: \"{}\" cannot be read: {}", option, path, reason));
  };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  if (file == nullptr) return failed();
  std::string text;
  char buffer[1 << 12];
  while (const size_t count = std::fread(buffer, 1, sizeof buffer, file.get())) {
    text.append(buffer, count);
    if (text.size() > kMaxBytes) {
      return absl::InvalidArgumentError(fmt::format(
          "{}: \"{}\" has more than {} bytes; use a smaller file", option, path, kMaxBytes));
    }
  }
  if (std::ferror(file.get())) return failed();
  if (text.empty()) {
    return absl::InvalidArgumentError(
        fmt::format("{}: \"{}\" is empty; give the right file", option, path));
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
