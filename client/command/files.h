// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace denoised::command {

/// As much as the library sends in one message, so a larger picture would be of no use.
constexpr size_t kMaxFileBytes = 256 << 20;
/// Of tokens, certificates and contexts.
constexpr size_t kMaxSmallFileBytes = 1 << 20;

/// The whole file. Errors name the path and the reason. More than `limit` bytes are an error, too:
/// a device such as /dev/zero has no end.
absl::StatusOr<std::string> ReadFile(const std::string& path, size_t limit = kMaxFileBytes);

/// Writes the whole file, or leaves the one that is there; "-" is stdout. A new file has `mode`
/// within the umask, and one that is replaced keeps what `mode` allows of its own. A file that
/// cannot be replaced, such as a mount point, is written in place. INTERNAL: the path has been
/// found good before.
absl::Status WriteFile(const std::string& path, std::string_view bytes, mode_t mode = 0666);

/// Whether WriteFile could write `path`, so that it is known before the work is done.
absl::Status CheckWritable(const std::string& path);

/// Whether two of the images have the same one.
struct Repeats {
  bool seeds = false, labels = false;
};
/// What a path may name with {index}, {seed}, {label} and {model}.
struct PathFields {
  int index = 0, count = 1;
  uint64_t seed = 0;
  std::string label, model;
  Repeats repeats;
};

/// `pattern` with its placeholders filled in. When it would give the same path to all of several
/// images, "-{index}" goes before the extension. The index has as many digits as the last one.
/// INVALID_ARGUMENT for an unknown placeholder, and for a model whose name would be a folder.
absl::StatusOr<std::string> FillPath(const std::string& pattern, const PathFields& fields);

}  // namespace denoised::command
