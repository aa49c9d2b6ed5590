// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/core/status.h"

namespace denoised {

/// What admins changed about the models, relative to the configuration.
struct SavedModels {
  struct Version {
    std::string version;
    std::string directory;
  };
  struct Model {
    std::string name;
    /// The directory that the configuration said when this was saved; nothing when the model was
    /// not in it. While the configuration says the same, what is saved here holds. Once it says
    /// something else, its author has changed the model after the admin, and it wins.
    std::optional<std::string> configured;
    std::vector<Version> versions;  // in the order of loading; empty: the model was unloaded
    std::string current;            // one of `versions`; empty when there are none
  };
  std::vector<Model> models;                   // those that differ from the configuration
  std::map<std::string, std::string> aliases;  // to "name" or "name@version"
};

/// The file models.json in --state-dir, which keeps SavedModels over a restart. One server at a
/// time has it. Thread-compatible.
class SavedModelsFile {
 public:
  /// Makes the directory when it is not there and locks it until destruction. InvalidArgument or
  /// Unavailable (another server has it) name --state-dir, what is wrong and the remedy.
  static absl::StatusOr<std::unique_ptr<SavedModelsFile>> Open(const std::string& state_dir);
  ~SavedModelsFile();

  /// Whether Open could make `state_dir`, which is not there yet: OK, or InvalidArgument. Makes
  /// nothing.
  static absl::Status CheckCreatable(const std::string& state_dir);

  /// Nothing changed when there is no file. InvalidArgument names the file, the field and the
  /// remedy when it cannot be understood.
  absl::StatusOr<SavedModels> Read() const;

  /// Replaces the file in one step: after a crash it is either the former or the new one. Internal
  /// says why it could not; the former stays.
  absl::Status Write(const SavedModels& models) const;

 private:
  SavedModelsFile(std::string path, int directory)
      : path_(std::move(path)), directory_(directory) {}

  const std::string path_;
  const int directory_;  // descriptor, which holds the lock
};

}  // namespace denoised
