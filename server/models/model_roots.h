// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "engine/core/status.h"
#include "server/models/model_source.h"

namespace denoised {

/// The directories from which admins may load models, so that an admin cannot make the server read
/// arbitrary files. Immutable.
class ModelRoots {
 public:
  /// No roots: admins can load only what the configuration names.
  ModelRoots() = default;
  /// Uses `roots` or, if empty, `directory` (if not empty) and the parent of each model's canonical
  /// directory. A model directly in "/" adds only itself, and a missing model adds nothing.
  /// NotFound names a root that cannot be read.
  static absl::StatusOr<ModelRoots> Make(const std::vector<std::string>& roots,
                                         const std::vector<ModelSource>& models,
                                         const std::string& directory = "");

  /// The canonical path of `directory`: absolute, without symbolic links. Open this path and not
  /// `directory`, whose links may have changed. InvalidArgument if it is not a directory in a root.
  /// The message does not reveal whether a directory outside the roots exists.
  absl::StatusOr<std::string> Resolve(const std::string& directory) const;

  /// The canonical path of ROOT/`name` for the first root where it holds model_index.json or
  /// config.json. NotFound if there is none.
  absl::StatusOr<std::string> Find(const std::string& name) const;

 private:
  explicit ModelRoots(std::vector<std::filesystem::path> roots) : roots_(std::move(roots)) {}
  bool Contains(const std::filesystem::path& canonical) const;
  std::string Names() const;

  std::vector<std::filesystem::path> roots_;  // canonical
};

/// Whether `directory` looks like a diffusers model: it holds model_index.json or config.json.
bool IsModelDirectory(const std::filesystem::path& path);

}  // namespace denoised
