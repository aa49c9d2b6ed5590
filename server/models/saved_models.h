// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/core/status.h"

namespace denoised {

/// How admins changed the models, relative to the configuration.
struct SavedModels {
  struct Version {
    std::string version;
    std::string directory;
  };
  struct Model {
    std::string name;
    /// The model's directory in the configuration at the time of saving; nothing if it was not in
    /// the configuration. If the configuration has changed since, it wins over what is saved here.
    std::optional<std::string> configured;
    std::vector<Version> versions;  // in the order of loading; empty: the model was unloaded
    std::string current;            // one of `versions`; empty when there are none
  };
  std::vector<Model> models;                   // those that differ from the configuration
  std::map<std::string, std::string> aliases;  // to "name" or "name@version"
};

/// The file models.json in --state-dir, which keeps SavedModels across restarts. Only one server at
/// a time can hold it. Thread-compatible.
class SavedModelsFile {
 public:
  /// Creates the directory if needed and locks it until destruction. Errors name --state-dir and
  /// the remedy: InvalidArgument, or Unavailable if another server holds it.
  static absl::StatusOr<std::unique_ptr<SavedModelsFile>> Open(const std::string& state_dir);
  ~SavedModelsFile();

  /// OK if Open could create `state_dir`, which does not exist yet; else InvalidArgument. Creates
  /// nothing.
  static absl::Status CheckCreatable(const std::string& state_dir);

  /// Returns no changes if there is no file. InvalidArgument names the file, field and remedy if
  /// the file is invalid.
  absl::StatusOr<SavedModels> Read() const;

  /// Replaces the file atomically: after a crash it is either the old or the new one. On an error
  /// (Internal) the old one stays.
  absl::Status Write(const SavedModels& models) const;

 private:
  SavedModelsFile(std::string path, int directory)
      : path_(std::move(path)), directory_(directory) {}

  const std::string path_;
  const int directory_;  // descriptor, which holds the lock
};

}  // namespace denoised
