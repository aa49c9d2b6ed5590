#pragma once

#include <grpcpp/support/status.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "server/config.h"

namespace denoised {

class Metrics;

/// The engine knows each version of a model as a model of its own, "name@version".
std::string EngineName(std::string_view name, std::string_view version);
/// "digits" and "2" of the engine's "digits@2".
std::string ModelOf(std::string_view engine_name);
std::string VersionOf(std::string_view engine_name);

/// A version of a model as clients see it.
struct CatalogModel {
  std::string name, version;
  bool current = false;                   // `name` alone means this version
  std::vector<std::string> aliases;       // that mean this version now
  std::shared_ptr<const ModelInfo> info;  // never null; its name is the engine's
};

/// The models that the server holds, by names, versions and aliases, also those that still load or
/// could not: the engine learns of a model only when its turn comes. A model has one or more
/// versions, of which one is current; requests that name no version get that one, and those in
/// flight finish with the version they began with. Thread-safe; `engine` and `metrics` must outlive
/// it.
class Catalog {
 public:
  /// Lists `sources` as versions "1" that still load.
  Catalog(std::vector<ModelSource> sources, Engine* engine, Metrics* metrics);

  /// Loads what the constructor listed under this name. When it cannot be loaded it stays listed,
  /// with the reason.
  absl::Status LoadListed(const std::string& name);

  struct LoadRequest {
    std::string name;
    std::string directory;  // empty: where the current version came from
    std::string version;    // empty: the number after the highest
    bool keep_current = false;
    bool unload_previous = false;
  };
  /// Loads a version, while others draw, and makes it current; waits for it. When it cannot be
  /// loaded all stays as it was. AlreadyExists, NotFound (a reload of nothing), or what the engine
  /// says of the directory.
  absl::StatusOr<CatalogModel> Load(const LoadRequest& request);
  /// Takes "name@version" or all versions of "name" away, with the aliases that mean them; waits
  /// for the requests they have.
  absl::Status Unload(const std::string& name);
  /// AlreadyExists when a model has that name, unless `target` is one of its versions: then that
  /// becomes current.
  absl::StatusOr<CatalogModel> SetAlias(const std::string& alias, const std::string& target);
  absl::Status DeleteAlias(const std::string& alias);
  /// Loads the models whose directories have changed and settled since the last call, each in place
  /// of its current version. One that cannot be loaded leaves the old one serving and is tried
  /// again when it changes again.
  void ReloadChanged();

  /// By `name`, `name@version` or alias; nothing when the server holds none of that name.
  std::optional<CatalogModel> Find(const std::string& name) const;
  /// In the order of the configuration and of loading.
  std::vector<CatalogModel> All() const;
  /// The model that a request names, or the only one when it names none. Nothing with `refusal`
  /// set: INVALID_ARGUMENT on `field` when it had to name one, NOT_FOUND.
  std::optional<CatalogModel> Select(const std::string& name, const std::string& field,
                                     const std::string& request_id, grpc::Status* refusal) const;

 private:
  struct Version {
    std::string version, directory;
    std::string signature;  // of the directory's files as they were loaded
    absl::Status error;     // why it could not be loaded
    bool unloading = false;
  };
  struct Model {
    std::string name;
    std::vector<Version> versions;  // in the order of loading; never empty
    std::string current;
    std::string seen, tried;  // signatures: at the last look, and of the last reload
  };

  // Under mutex_.
  Model* FindModel(std::string_view name);
  const Model* FindModel(std::string_view name) const;
  static Version* FindVersion(Model& model, std::string_view version);
  CatalogModel Describe(const Model& model, const Version& version) const;
  std::optional<CatalogModel> FindLocked(const std::string& name) const;
  void Remove(std::string_view name, std::string_view version);
  /// OK, or FailedPrecondition: it is still loading, or leaves already.
  absl::Status CheckCanLeave(const Model& model, const Version& version) const;
  /// From now on these versions get no new requests.
  void Leave(Model* model, const std::vector<std::string>& versions);
  std::string Names() const;

  /// Opens a version that is listed. Without mutex_.
  absl::Status Open(const std::string& name, const std::string& version,
                    const std::string& directory);
  /// Waits for the requests of versions that leave, and forgets them. Without mutex_.
  absl::Status CloseVersions(const std::string& name, const std::vector<std::string>& versions);

  Engine* const engine_;
  Metrics* const metrics_;
  std::mutex load_mutex_;  // one load at a time, as each takes memory
  mutable std::mutex mutex_;
  std::vector<Model> models_;                   // guarded by mutex_
  std::map<std::string, std::string> aliases_;  // guarded by mutex_; to "name" or "name@version"
};

/// OK, or why `model` cannot draw now: FAILED_PRECONDITION while it loads, when it failed, or while
/// it is being unloaded.
grpc::Status CheckReady(const CatalogModel& model, const std::string& request_id);

}  // namespace denoised
