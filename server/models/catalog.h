// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/support/status.h>

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
  std::vector<std::string> aliases;       // that mean this version now
  std::shared_ptr<const ModelInfo> info;  // never null; its name is the engine's
};

/// What a catalog starts from.
struct CatalogOptions {
  std::vector<ModelSource> models;        // of the configuration
  ModelRoots roots;                       // where Load may load from
  std::unique_ptr<SavedModelsFile> file;  // null: what admins change ends with the process
  SavedModels saved;                      // what the file holds
};
/// `roots` as for ModelRoots::Make; `state_dir` as for SavedModelsFile::Open, or empty for no file.
/// Errors name the flag and the remedy.
absl::StatusOr<CatalogOptions> MakeCatalogOptions(const std::vector<ModelSource>& models,
                                                  const std::vector<std::string>& roots,
                                                  const std::string& state_dir);

/// The models that the server holds, by names, versions and aliases, also those that still load or
/// could not be loaded. A model has one or more versions, of which one is current: requests that
/// name no version get that one. Requests in flight finish with the version they began with.
///
/// The catalog alone decides how far a version is. The engine opens and closes models, but that it
/// has a model says nothing here: a version is ready when the catalog says so, and until then
/// nobody can unload it. Thread-safe; `engine` and `metrics` must outlive the catalog.
class Catalog {
 public:
  /// Lists the versions to load: of each model of the configuration a version "1", or, where admins
  /// changed the model and the configuration did not, what was saved. SavedModels::Model says which
  /// of them wins. What was restored, and what was not, is in the log.
  Catalog(CatalogOptions options, Engine* engine, Metrics* metrics);

  /// Those that the constructor listed and LoadListed has not loaded yet, as "name@version".
  std::vector<std::string> Listed() const ABSL_LOCKS_EXCLUDED(mutex_);
  /// Loads one of Listed(), or the current version of "name". When it cannot be loaded it stays in
  /// the catalog, with the reason. When it was the last of the saved versions of a configured model
  /// and none could be loaded, the directory of the configuration is loaded too, as a new version.
  absl::Status LoadListed(const std::string& name) ABSL_LOCKS_EXCLUDED(load_mutex_, mutex_);

  /// The path to open for a version of `name` in `directory`: canonical and in one of the roots, or
  /// what the configuration says of the model. InvalidArgument when it may not be loaded.
  absl::StatusOr<std::string> Allowed(const std::string& name, const std::string& directory) const;

  struct LoadRequest {
    std::string name;
    /// As Allowed says. Empty: where the current version came from; without one, what the
    /// configuration says; else the directory of this name that ModelRoots::Find finds.
    std::string directory;
    std::string version;  // empty: the number after the highest
    bool keep_current = false;
    bool unload_previous = false;
    /// The files of the current version have changed. No admin's change, so it is not saved: a
    /// restart reads the new files anyway.
    bool reload = false;
  };
  // The four changes are saved before they return. An error of which TookEffect is true says that
  // the change is made, but could not be saved, so that a restart undoes it, or that a version that
  // it took away could not be closed.

  /// Loads a version, while others draw, and makes it current; waits for it. When it cannot be
  /// loaded all stays as it was. AlreadyExists, NotFound (no directory is known), InvalidArgument
  /// (not in one of the roots), or what the engine says of the directory.
  absl::StatusOr<CatalogModel> Load(const LoadRequest& request);
  /// Takes "name@version" or all versions of "name" away, with the aliases that mean them; waits
  /// for the requests they have.
  absl::Status Unload(const std::string& name);
  /// AlreadyExists when a model has that name, unless `target` is one of its versions: then that
  /// becomes current.
  absl::StatusOr<CatalogModel> SetAlias(const std::string& alias, const std::string& target);
  absl::Status DeleteAlias(const std::string& alias);

  /// Loads the models whose directories have changed and settled since the last call, each in place
  /// of its current version, whose aliases then mean the new one. One that cannot be loaded leaves
  /// the old one serving and is tried again when it changes again.
  void ReloadChanged();

  /// By `name`, `name@version`, `alias` or `alias@version`: that version of the model that the
  /// alias means, where the alias does not mean another version. Nothing when the server holds
  /// none.
  std::optional<CatalogModel> Find(const std::string& name) const;
  /// In the order of the configuration and of loading.
  std::vector<CatalogModel> All() const;
  /// The model that a request names, or the only one when it names none. Nothing with `refusal`
  /// set: INVALID_ARGUMENT on `field` when it had to name one, NOT_FOUND.
  std::optional<CatalogModel> Select(const std::string& name, const std::string& field,
                                     const std::string& request_id, grpc::Status* refusal) const;

 private:
  /// kListed: of the constructor, and its LoadListed has not ended. kLoading: of Load. Only
  /// kReady and kFailed become kLeaving, and only kLeaving and a failed Load remove a version.
  enum class State { kListed, kLoading, kReady, kFailed, kLeaving };
  struct Version {
    std::string version, directory;
    State state = State::kListed;
    std::string signature = {};  // of the directory's files as they were loaded
    /// What the file says: the version of which this one is a reload, else its own name.
    std::string saved_as = {};
    absl::Status error = {};  // of kFailed
  };
  struct Model {
    std::string name;
    std::vector<Version> versions;  // in the order of loading; never empty
    std::string current;            // always one of `versions`
    std::string seen, tried;        // signatures: at the last look, and of the last reload
  };

  Model* FindModel(std::string_view name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const Model* FindModel(std::string_view name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static Version* FindVersion(Model& model, std::string_view version);
  CatalogModel Describe(const Model& model, const Version& version) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<CatalogModel> FindLocked(const std::string& name) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Remove(std::string_view name, std::string_view version)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// From now on these versions, which are kReady or kFailed, get no new requests.
  void Leave(Model* model, const std::vector<std::string>& versions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Names() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// What SetAlias changes, but for saving it.
  absl::StatusOr<CatalogModel> SetAliasLocked(const std::string& alias, const std::string& target)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  /// Lists the models of the configuration and what was saved.
  void Restore(const SavedModels& saved) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// What admins have made different from the configuration.
  SavedModels Changes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Save() ABSL_LOCKS_EXCLUDED(save_mutex_, mutex_);
  /// The directory that the configuration says; null without one.
  const std::string* Configured(std::string_view name) const;

  /// Load, but for closing the versions that leave: these are `leaving`.
  absl::StatusOr<CatalogModel> LoadVersion(const LoadRequest& request,
                                           std::vector<std::string>* leaving)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(load_mutex_) ABSL_LOCKS_EXCLUDED(mutex_);
  /// Opens a version that is kListed or kLoading.
  absl::Status Open(const std::string& name, const std::string& version,
                    const std::string& directory) ABSL_EXCLUSIVE_LOCKS_REQUIRED(load_mutex_)
      ABSL_LOCKS_EXCLUDED(mutex_);
  /// Waits for the requests of versions that are kLeaving, and removes them.
  absl::Status CloseVersions(const std::string& name, const std::vector<std::string>& versions)
      ABSL_LOCKS_EXCLUDED(load_mutex_, mutex_);

  const CatalogOptions options_;
  Engine* const engine_;
  Metrics* const metrics_;
  /// One write of the file at a time, each of the newest state.
  Mutex save_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  /// One load at a time, as each takes memory.
  Mutex load_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  mutable Mutex mutex_;
  std::vector<Model> models_ ABSL_GUARDED_BY(mutex_);
  /// To "name" or "name@version".
  std::map<std::string, std::string, std::less<>> aliases_ ABSL_GUARDED_BY(mutex_);
};

/// Whether the change that ended with this error is made all the same.
bool TookEffect(const absl::Status& error);

/// `model` as a caller may see it. Why it could not be loaded names paths of the server, so only
/// admins see it.
CatalogModel ShownTo(bool admin, CatalogModel model);

/// OK, or why `model` cannot draw now: FAILED_PRECONDITION while it loads, when it failed, or while
/// it is being unloaded.
grpc::Status CheckReady(const CatalogModel& model, const std::string& request_id);

}  // namespace denoised
