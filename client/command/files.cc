// SPDX-License-Identifier: Apache-2.0
#include "command/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

namespace denoised::command {
namespace {

namespace fs = std::filesystem;

absl::Status Failed(const char* what, const std::string& path) {
  const std::string reason = std::strerror(errno);
  return absl::InvalidArgumentError(fmt::format("{} {}: {}", what, path, reason));
}

absl::Status NotWritten(const std::string& path) {
  const std::string reason = std::strerror(errno);
  return absl::InternalError(fmt::format("cannot write {}: {}", path, reason));
}

bool WriteAll(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(file, bytes.data(), bytes.size());
    if (count < 0 && errno != EINTR) return false;
    bytes.remove_prefix(static_cast<size_t>(std::max<ssize_t>(count, 0)));
  }
  return true;
}

/// Opens a new file in `folder` for writing, under a name of its own.
int OpenDraft(const fs::path& folder, mode_t mode, std::string* path) {
  for (int i = 0;; ++i) {
    *path = folder / fmt::format(".denoise-{}-{}", getpid(), i);
    const int file = open(path->c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (file >= 0 || errno != EEXIST) return file;
  }
}

/// Writes into what is at `path`; `create` is O_CREAT or 0.
absl::Status WriteInPlace(const std::string& path, std::string_view bytes, int create,
                          mode_t mode) {
  const int file = open(path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC | create, mode);
  if (file < 0) return NotWritten(path);
  bool written = WriteAll(file, bytes);
  // A network's file system may tell only now that its disk is full.
  written = close(file) == 0 && written;
  return written ? absl::OkStatus() : NotWritten(path);
}

/// Whether `error` may mean that the file can be written but not replaced: a mount point, a file of
/// somebody else in a sticky folder, a folder that takes no new files.
bool IsIrreplaceable(int error) {
  return error == EBUSY || error == EPERM || error == EACCES || error == ENOENT;
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

absl::Status WriteFile(const std::string& path, std::string_view bytes, mode_t mode) {
  if (path == "-") return WriteAll(STDOUT_FILENO, bytes) ? absl::OkStatus() : NotWritten(path);
  struct stat old = {};
  const bool exists = stat(path.c_str(), &old) == 0;
  std::error_code error;
  const bool link = fs::is_symlink(path, error);
  // A pipe, a device.
  if (exists && !S_ISREG(old.st_mode)) return WriteInPlace(path, bytes, /*create=*/0, mode);
  // A link whose target does not exist yet stays a link.
  if (!exists && link) return WriteInPlace(path, bytes, O_CREAT, mode);
  // A file that may not be written is not replaced either.
  if (exists && access(path.c_str(), W_OK) != 0) return NotWritten(path);
  const fs::path target = link ? fs::weakly_canonical(path, error) : fs::path(path);
  std::string draft;
  const int file = OpenDraft(target.parent_path(), mode, &draft);
  if (file < 0) {
    if (!exists || !IsIrreplaceable(errno)) return NotWritten(path);
    return WriteInPlace(path, bytes, /*create=*/0, mode);
  }
  if (exists) fchmod(file, old.st_mode & mode);
  bool written = WriteAll(file, bytes);
  written = close(file) == 0 && written;
  if (written && std::rename(draft.c_str(), target.c_str()) == 0) return absl::OkStatus();
  const bool in_place = written && exists && IsIrreplaceable(errno);
  absl::Status status = NotWritten(path);
  unlink(draft.c_str());
  return in_place ? WriteInPlace(path, bytes, /*create=*/0, mode) : status;
}

absl::Status CheckWritable(const std::string& path) {
  if (path == "-" && isatty(STDOUT_FILENO)) {
    return absl::InvalidArgumentError(
        "--out - would write the bytes of a picture into the terminal; send stdout to a file or a "
        "program, or give --out a file");
  }
  if (path == "-") return absl::OkStatus();
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    return absl::InvalidArgumentError(
        fmt::format("cannot write {}: it is a folder; name a file in it", path));
  }
  // Also in a folder that takes no new files: WriteFile writes in place there.
  if (access(path.c_str(), W_OK) == 0) return absl::OkStatus();
  // A file that may not be written is not replaced either.
  if (errno != ENOENT) return Failed("cannot write", path);
  std::string folder = fs::path(path).parent_path().string();
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
    distinct = distinct || name == "index" || (name == "seed" && !fields.repeats.seeds) ||
               (name == "label" && !fields.repeats.labels);
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
  const fs::path plain(path);
  return (plain.parent_path() / plain.stem()).string() + "-" + index + plain.extension().string();
}

}  // namespace denoised::command
