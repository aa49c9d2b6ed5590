// SPDX-License-Identifier: Apache-2.0
#include "command/files.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

namespace denoised::command {
namespace {

absl::Status Failed(const char* what, const std::string& path) {
  const std::string reason = std::strerror(errno);
  return absl::InvalidArgumentError(fmt::format("{} {}: {}", what, path, reason));
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path, size_t limit) {
  errno = 0;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  if (file == nullptr) return Failed("cannot read", path);
  std::string bytes;
  char buffer[1 << 16];
  while (const size_t count = std::fread(buffer, 1, sizeof buffer, file.get())) {
    if (count > limit - bytes.size()) {
      return absl::InvalidArgumentError(fmt::format(
          "cannot read {}: it has more than {} bytes; use a smaller file", path, limit));
    }
    bytes.append(buffer, count);
  }
  if (std::ferror(file.get())) return Failed("cannot read", path);
  return bytes;
}

absl::Status WriteFile(const std::string& path, std::string_view bytes) {
  errno = 0;
  const bool is_stdout = path == "-";
  std::FILE* file = is_stdout ? stdout : std::fopen(path.c_str(), "wb");
  if (file == nullptr) return Failed("cannot write", path);
  const bool written = std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
  // What is buffered may still fail, on a full disk for one.
  const bool flushed = (is_stdout ? std::fflush(file) : std::fclose(file)) == 0;
  return written && flushed ? absl::OkStatus() : Failed("cannot write", path);
}

absl::Status CheckWritable(const std::string& path) {
  if (path == "-" && isatty(STDOUT_FILENO)) {
    return absl::InvalidArgumentError(
        "--out - would write the bytes of a picture into the terminal; send stdout to a file or a "
        "program, or give --out a file");
  }
  if (path == "-") return absl::OkStatus();
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return absl::InvalidArgumentError(
        fmt::format("cannot write {}: it is a folder; name a file in it", path));
  }
  std::string folder = std::filesystem::path(path).parent_path().string();
  if (folder.empty()) folder = ".";
  if (access(folder.c_str(), W_OK | X_OK) == 0) return absl::OkStatus();
  const std::string reason = std::strerror(errno);
  return absl::InvalidArgumentError(fmt::format(
      "cannot write {}: folder {}: {}; create it or write elsewhere", path, folder, reason));
}

absl::StatusOr<std::string> FillPath(const std::string& pattern, const PathFields& fields) {
  const std::string index =
      fmt::format("{:0{}}", fields.index, std::to_string(std::max(fields.count - 1, 0)).size());
  std::string path;
  bool distinct = fields.count == 1;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const size_t end = pattern[i] == '{' ? pattern.find('}', i) : std::string::npos;
    if (end == std::string::npos) {
      path += pattern[i];
      continue;
    }
    const std::string name = pattern.substr(i + 1, end - i - 1);
    distinct = distinct || name == "index" || (name == "seed" && !fields.seeds_repeat);
    if (name == "index") {
      path += index;
    } else if (name == "seed") {
      path += std::to_string(fields.seed);
    } else if (name == "label") {
      path += fields.label;
    } else if (name == "model") {
      // The server says what its model is called, and must not choose the folder.
      if (fields.model.starts_with('.') || fields.model.find('/') != std::string::npos) {
        return absl::InvalidArgumentError(
            fmt::format("the server's name of the model is no part of a path, so {{model}} in {} "
                        "cannot be filled in; write the name yourself",
                        pattern));
      }
      path += fields.model;
    } else {
      return absl::InvalidArgumentError(
          fmt::format("{{{}}} in the path {} means nothing; use {{index}}, {{seed}}, {{label}} or "
                      "{{model}}",
                      name, pattern));
    }
    i = end;
  }
  if (distinct) return path;
  const std::filesystem::path plain(path);
  return (plain.parent_path() / plain.stem()).string() + "-" + index + plain.extension().string();
}

}  // namespace denoised::command
