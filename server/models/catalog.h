// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/support/status.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/mutex.h"
#include "engine/engine.h"
#include "server/models/model_roots.h"
#include "server/models/model_source.h"
#include "server/models/saved_models.h"

namespace denoised {

class Metrics;

/// A version of a model as clients see it.
struct CatalogModel {
  std::string name, version;
  bool current = false;                   // `name` alone means this version
  bool added = false;                     // Load has not made it ready yet
  std::vector<std::string> aliases;       // that mean this version now
  std::shared_ptr<const ModelInfo> info;  // never null; its name is the engine's
};

/// Whether a model can take a request.
using ModelFilter = std::function<bool(const ModelInfo& model)>;

/// The model of a request that names none: the only one of `models`, or the only one that `takes`
/// it. If one that the server starts with is still loading, it might take the request, too: then
/// that one, and the request has to wait. A model that Load adds does not count before it is ready,
/// unless there is no other.
std::optional<CatalogModel> OnlyModel(std::vector<CatalogModel> models, const ModelFilter& takes);

/// The initial state of a catalog.
struct CatalogOptions {
  std::vector<ModelSource> models;        // of the configuration
  ModelRoots roots;                       // where Load may load from
  std::unique_ptr<SavedModelsFile> file;  // null: admins' changes are lost at a restart
  SavedModels saved;                      // the file's content
};
/// See ModelRoots::Make for `roots` and `directory`, and SavedModelsFile::Open for `state_dir`;
/// empty: no file. Errors name the flag and the remedy.
absl::StatusOr<CatalogOptions> MakeCatalogOptions(const std::vector<ModelSource>& models,
                                                  const std::vector<std::string>& roots,
                                                  const std::string& state_dir,
                                                  const std::string& directory = "");

/// The server's models by name, version and alias, including those that are loading or failed to
/// load. A model has one or more versions. One of them is current: requests that name no version
/// get it. Requests in flight finish with the version they began with.
///
/// Only the catalog's state of a version counts. The engine may have a model a moment earlier, but
/// the version cannot be used or unloaded before the catalog calls it ready. Thread-safe; `engine`
/// and `metrics` must outlive the catalog.
class Catalog {
 public:
  /// Lists the versions to load: version "1" of each configured model, or what was saved of a model
  /// that admins changed (SavedModels::Model says which wins). Logs what was restored and what was
  /// not.
  Catalog(CatalogOptions options, Engine* engine, Metrics* metrics);

  /// The versions listed by the constructor that LoadListed has not loaded yet, as "name@version".
  std::vector<std::string> Listed() const ABSL_LOCKS_EXCLUDED(mutex_);
  /// Loads one of Listed(), or the current version of "name". If that fails, the version stays in
  /// the catalog with the reason. If no saved version of a configured model can be loaded, the
  /// configured directory is loaded as a new version.
  absl::Status LoadListed(const std::string& name) ABSL_LOCKS_EXCLUDED(load_mutex_, mutex_);

  /// The path to open for `name` in `directory`: canonical and in one of the roots, or the
  /// configured directory of the model. InvalidArgument if it must not be loaded.
  absl::StatusOr<std::string> Allowed(const std::string& name, const std::string& directory) const;

  struct LoadRequest {
    std::string name;
    /// Must pass Allowed. Empty: the directory of the current version; else the configured one;
    /// else what ModelRoots::Find finds.
    std::string directory;
    std::string version;  // empty: the number after the highest
    bool keep_current = false;
    bool unload_previous = false;
    /// Reload because files of the current version changed. Not saved, as a restart reads the new
    /// files anyway.
    bool reload = false;
    const char* name_field = "name";  // what the caller's protocol calls it, for errors
  };
  // The four changes below are saved before they return. If TookEffect(error), the change was made,
  // but it could not be saved (a restart undoes it), or a version that it removed could not be
  // closed.

  /// Loads a version and makes it current; blocks until it is ready. Other models keep drawing. If
  /// loading fails nothing changes. AlreadyExists, NotFound (no directory is known),
  /// InvalidArgument (not in one of the roots), or the engine's error.
  absl::StatusOr<CatalogModel> Load(const LoadRequest& request);
  /// Removes "name@version" or all versions of "name", and their aliases. Blocks until their
  /// requests have finished. `field` is what the caller's protocol calls the name.
  absl::Status Unload(const std::string& name, const char* field = "name");
  /// If a model has the name `alias`, `target` must be one of its versions, which becomes current;
  /// otherwise AlreadyExists.
  absl::StatusOr<CatalogModel> SetAlias(const std::string& alias, const std::string& target);
  absl::Status DeleteAlias(const std::string& alias);

  /// Reloads models whose directories have changed and not changed again since the last call. The
  /// new version replaces the current one and takes over its aliases. If loading fails, the old
  /// version keeps serving until the next change. Whether a directory has changed since the last
  /// call, so that it is worth while to look again soon.
  bool ReloadChanged();

  /// Looks up `name`, `name@version`, `alias` or `alias@version`. The last is that version of the
  /// alias's model, unless the alias means another version. Nothing if there is no such model.
  std::optional<CatalogModel> Find(const std::string& name) const;
  /// In the order of the configuration and of loading.
  std::vector<CatalogModel> All() const;
  /// The model that a request names, or OnlyModel if it names none. Returns nothing and sets
  /// `refusal` to NOT_FOUND, or to INVALID_ARGUMENT on `field` if the request must name one.
  std::optional<CatalogModel> Select(const std::string& name, const std::string& field,
                                     const std::string& request_id, grpc::Status* refusal,
                                     const ModelFilter& takes = nullptr) const;

 private:
  /// kListed: listed by the constructor, LoadListed has not finished. kLoading: in Load. Only
  /// kReady and kFailed become kLeaving. A version is removed after kLeaving, or when Load fails.
  enum class State { kListed, kLoading, kReady, kFailed, kLeaving };
  struct Version {
    std::string version, directory;
    State state = State::kListed;
    std::string signature = {};  // of the directory's files when they were loaded
    /// Its name in the file: if it is a reload, the name of the version that it replaced.
    std::string saved_as = {};
    absl::Status error = {};  // of kFailed
  };
  struct Model {
    std::string name;
    std::vector<Version> versions;  // in the order of loading; never empty
    std::string current;            // always one of `versions`
    std::string seen, tried;        // signatures at the last check and at the last reload
    bool missed = false;            // whether the log says that its directory cannot be read
  };

  Model* FindModel(std::string_view name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const Model* FindModel(std::string_view name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static Version* FindVersion(Model& model, std::string_view version);
  CatalogModel Describe(const Model& model, const Version& version) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<CatalogModel> FindLocked(const std::string& name) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<CatalogModel> AllLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Remove(std::string_view name, std::string_view version)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Stops new requests for these versions, which are kReady or kFailed.
  void Leave(Model* model, const std::vector<std::string>& versions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Names() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// SetAlias without saving.
  absl::StatusOr<CatalogModel> SetAliasLocked(const std::string& alias, const std::string& target)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  /// Lists the configured and the saved models.
  void Restore(const SavedModels& saved) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// How the models now differ from the configuration.
  SavedModels Changes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Save() ABSL_LOCKS_EXCLUDED(save_mutex_, mutex_);
  /// The configured directory; null if the model is not configured.
  const std::string* Configured(std::string_view name) const;

  /// Load without closing the versions that leave; adds them to `leaving`.
  absl::StatusOr<CatalogModel> LoadVersion(const LoadRequest& request,
                                           std::vector<std::string>* leaving)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(load_mutex_) ABSL_LOCKS_EXCLUDED(mutex_);
  /// Opens a version that is kListed or kLoading.
  absl::Status Open(const std::string& name, const std::string& version,
                    const std::string& directory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(load_mutex_)
      ABSL_LOCKS_EXCLUDED(mutex_);
  /// Waits for the requests of kLeaving versions, then removes them.
  absl::Status CloseVersions(const std::string& name, const std::vector<std::string>& versions)
      ABSL_LOCKS_EXCLUDED(load_mutex_, mutex_);

  const CatalogOptions options_;
  Engine* const engine_;
  Metrics* const metrics_;
  /// Serialises writes of the file. Each writes the newest state.
  Mutex save_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  /// Serialises loads, because each needs memory.
  Mutex load_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  mutable Mutex mutex_;
  std::vector<Model> models_ ABSL_GUARDED_BY(mutex_);
  /// To "name" or "name@version".
  std::map<std::string, std::string, std::less<>> aliases_ ABSL_GUARDED_BY(mutex_);
};

/// Whether the change took effect although it ended with this error.
bool TookEffect(const absl::Status& error);
/// Whether the change can be made once the model is loaded or unloaded.
bool IsBusy(const absl::Status& error);

/// `model` as the caller may see it. Load errors contain paths of the server, so only admins see
/// them.
CatalogModel ShownTo(bool admin, CatalogModel model);

/// OK if `model` can draw now. FAILED_PRECONDITION if it is loading, failed or being unloaded.
grpc::Status CheckReady(const CatalogModel& model, const std::string& request_id);

}  // namespace denoised
