// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "engine/core/status.h"
#include "server/models/model_source.h"

namespace denoised {

/// The directories below which admins may load models, so that the right to load is not the right
/// to read any file of the server. Immutable.
class ModelRoots {
 public:
  /// No roots: admins load nothing but what the configuration names.
  ModelRoots() = default;
  /// `roots`, or when there are none the defaults: the directory that each of `models` really lies
  /// in. A model in "/" makes only itself a root, and a model that is not there makes none.
  /// NotFound names a directory of `roots` that cannot be read.
  static absl::StatusOr<ModelRoots> Make(const std::vector<std::string>& roots,
                                         const std::vector<ModelSource>& models);

  /// The canonical path of `directory`: absolute, without symbolic links. The caller opens this
  /// path and not `directory`, which may mean another place by then. InvalidArgument when it is no
  /// directory in one of the roots; the message is the same for what is elsewhere and for what does
  /// not exist, so that it tells nothing of other directories.
  absl::StatusOr<std::string> Resolve(const std::string& directory) const;

  /// The directory of this name right below a root, canonical; the first root that has one. It must
  /// hold model_index.json or config.json. NotFound.
  absl::StatusOr<std::string> Find(const std::string& name) const;

 private:
  explicit ModelRoots(std::vector<std::filesystem::path> roots) : roots_(std::move(roots)) {}
  bool Contains(const std::filesystem::path& canonical) const;
  std::string Names() const;

  std::vector<std::filesystem::path> roots_;  // canonical
};

/// Whether a diffusers model may be there: it holds model_index.json or config.json.
bool IsModelDirectory(const std::filesystem::path& path);

}  // namespace denoised
