// SPDX-License-Identifier: Apache-2.0
#include "server/models/catalog.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <set>
#include <utility>

#include "server/status/model_name.h"
#include "server/status/quote.h"
#include "server/status/status_details.h"
#include "server/telemetry/log.h"
#include "server/telemetry/metrics.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;

/// Names, sizes and times of all files below `directory`: changes whenever one of them changes.
/// Empty if it cannot be read.
std::string Signature(const std::string& directory) {
  std::set<std::string> files;
  std::error_code error;
  for (fs::recursive_directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code gone;
    if (!it->is_regular_file(gone)) continue;
    const auto time = it->last_write_time(gone).time_since_epoch().count();
    files.insert(fmt::format("{} {} {}", it->path().string(), it->file_size(gone), time));
  }
  return error ? "" : fmt::format("{}", fmt::join(files, "\n"));
}

/// "name@version" → "version"; empty if there is no '@'.
std::string_view VersionPart(std::string_view name) {
  const size_t at = name.find('@');
  return at == std::string_view::npos ? std::string_view() : name.substr(at + 1);
}

std::string_view NamePart(std::string_view name) { return name.substr(0, name.find('@')); }

/// Marks the error of a change that took effect.
constexpr char kTookEffect[] = "denoised/took-effect";

/// Marks the error of a change to a model that is being loaded or unloaded.
constexpr char kBusy[] = "denoised/busy";

absl::Status Busy(const std::string& message) {
  absl::Status status = FailedPrecondition("{}", message);
  status.SetPayload(kBusy, absl::Cord());
  return status;
}

/// The status of a change that took effect: OK, or the later errors, with the code of the first.
absl::Status EndOfChange(const absl::Status& saved, const absl::Status& closed = {}) {
  if (saved.ok() && closed.ok()) return absl::OkStatus();
  const absl::Status& first = saved.ok() ? closed : saved;
  const std::string also = saved.ok() || closed.ok() ? "" : "; " + std::string(closed.message());
  absl::Status status(first.code(), std::string(first.message()) + also);
  status.SetPayload(kTookEffect, absl::Cord());
  return status;
}

}  // namespace

absl::StatusOr<CatalogOptions> MakeCatalogOptions(const std::vector<ModelSource>& models,
                                                  const std::vector<std::string>& roots,
                                                  const std::string& state_dir,
                                                  const std::string& directory) {
  CatalogOptions options{.models = models};
  DENOISED_ASSIGN_OR_RETURN(options.roots, ModelRoots::Make(roots, models, directory));
  if (!state_dir.empty()) {
    DENOISED_ASSIGN_OR_RETURN(options.file, SavedModelsFile::Open(state_dir));
    DENOISED_ASSIGN_OR_RETURN(options.saved, options.file->Read());
  }
  return options;
}

std::optional<CatalogModel> OnlyModel(std::vector<CatalogModel> models, const ModelFilter& takes) {
  std::erase_if(models, [](const CatalogModel& model) { return !model.current; });
  const auto added = [](const CatalogModel& model) { return model.added; };
  if (!std::all_of(models.begin(), models.end(), added)) std::erase_if(models, added);
  if (models.size() == 1) return models.front();
  if (!takes) return std::nullopt;
  std::optional<CatalogModel> loading, taking;
  for (const CatalogModel& model : models) {
    if (model.info->state == ModelState::kLoading) {
      loading = model;  // nobody knows yet what it takes
    } else if (takes(*model.info)) {
      if (taking) return std::nullopt;
      taking = model;
    }
  }
  return loading ? loading : taking;
}

Catalog::Catalog(CatalogOptions options, Engine* engine, Metrics* metrics)
    : options_(std::move(options)), engine_(engine), metrics_(metrics) {
  MutexLock lock(&mutex_);
  Restore(options_.saved);
}

void Catalog::Restore(const SavedModels& saved) {
  const auto list = [&](const std::string& name, std::vector<SavedModels::Version> versions,
                        const std::string& current) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Model& model = models_.emplace_back();
    model.name = name;
    model.current = current;
    for (SavedModels::Version& version : versions) {
      model.versions.push_back({.version = version.version,
                                .directory = std::move(version.directory),
                                .saved_as = version.version});
    }
  };
  const auto restore = [&](const SavedModels::Model& model) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::vector<std::string> versions;
    for (const SavedModels::Version& version : model.versions) versions.push_back(version.version);
    log::Info("model restored from --state-dir",
              {{"model", model.name},
               {"versions", versions.empty() ? "none: it was unloaded"
                                             : fmt::format("{}", fmt::join(versions, " "))},
               {"current", model.current}});
    if (!versions.empty()) list(model.name, model.versions, model.current);
  };
  const auto unchanged = [&](const SavedModels::Model& model) {
    const std::string* const configured = Configured(model.name);
    return configured ? model.configured == *configured : !model.configured;
  };
  for (const ModelSource& source : options_.models) {
    const auto model =
        std::find_if(saved.models.begin(), saved.models.end(),
                     [&](const SavedModels::Model& each) { return each.name == source.name; });
    if (model != saved.models.end() && unchanged(*model)) {
      restore(*model);
    } else {
      list(source.name, {{"1", source.directory}}, "1");
    }
  }
  for (const SavedModels::Model& model : saved.models) {
    if (!unchanged(model)) {
      log::Warning("model not restored from --state-dir: its configuration has changed since",
                   {{"model", model.name}, {"configured_then", model.configured.value_or("")}});
    } else if (Configured(model.name) == nullptr) {
      restore(model);
    }
  }
  for (const auto& [alias, target] : saved.aliases) {
    const absl::Status status = FindModel(alias) != nullptr
                                    ? absl::AlreadyExistsError("a model has this name")
                                    : SetAliasLocked(alias, target).status();
    if (status.ok()) {
      log::Info("alias restored from --state-dir", {{"alias", alias}, {"target", target}});
    } else {
      log::Warning(
          "alias not restored from --state-dir",
          {{"alias", alias}, {"target", target}, {"error", std::string(status.message())}});
    }
  }
}

SavedModels Catalog::Changes() const {
  SavedModels changes;
  const auto stays = [](const Version& version) {
    return version.state != State::kLoading && version.state != State::kLeaving;
  };
  const auto add = [&](const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    SavedModels::Model saved{.name = name};
    const std::string* const configured = Configured(name);
    if (configured != nullptr) saved.configured = *configured;
    const Model* const model = FindModel(name);
    for (const Version& version : model ? model->versions : std::vector<Version>()) {
      if (!stays(version)) continue;
      saved.versions.push_back({version.saved_as, version.directory});
      if (saved.current.empty() || version.version == model->current) {
        saved.current = version.saved_as;
      }
    }
    const bool as_configured =
        configured == nullptr ? saved.versions.empty()
                              : saved.versions.size() == 1 && saved.versions[0].version == "1" &&
                                    saved.versions[0].directory == *configured;
    if (!as_configured) changes.models.push_back(std::move(saved));
  };
  for (const ModelSource& source : options_.models) add(source.name);
  for (const Model& model : models_) {
    if (Configured(model.name) == nullptr) add(model.name);
  }
  for (const auto& [alias, target] : aliases_) {
    const Model* const model = FindModel(NamePart(target));
    const std::string_view wanted = VersionPart(target);
    for (const Version& version : model ? model->versions : std::vector<Version>()) {
      if (!stays(version) || (!wanted.empty() && version.version != wanted)) continue;
      changes.aliases[alias] = wanted.empty() ? target : EngineName(model->name, version.saved_as);
      break;
    }
  }
  return changes;
}

absl::Status Catalog::Save() {
  if (options_.file == nullptr) return absl::OkStatus();
  MutexLock saving(&save_mutex_);
  SavedModels changes;
  {
    MutexLock lock(&mutex_);
    changes = Changes();
  }
  absl::Status status = options_.file->Write(changes);
  if (status.ok()) return status;
  log::Error("change of the models not saved", {{"error", std::string(status.message())}});
  return Internal(
      "the change is made, but not saved, so that a restart undoes it: --state-dir: {}; when that "
      "is repaired, the next change saves this one too",
      std::string(status.message()));
}

const std::string* Catalog::Configured(std::string_view name) const {
  for (const ModelSource& source : options_.models) {
    if (source.name == name) return &source.directory;
  }
  return nullptr;
}

absl::StatusOr<std::string> Catalog::Allowed(const std::string& name,
                                             const std::string& directory) const {
  const std::string* const configured = Configured(name);
  // Not resolved: the operator may change a symbolic link between loads.
  if (configured != nullptr && *configured == directory) return directory;
  return options_.roots.Resolve(directory);
}

std::vector<std::string> Catalog::Listed() const {
  MutexLock lock(&mutex_);
  std::vector<std::string> listed;
  for (const Model& model : models_) {
    for (const Version& version : model.versions) {
      if (version.state == State::kListed)
        listed.push_back(EngineName(model.name, version.version));
    }
  }
  return listed;
}

absl::Status Catalog::LoadListed(const std::string& name) {
  MutexLock loading(&load_mutex_);
  const std::string model_name(NamePart(name));
  std::string version(VersionPart(name)), directory;
  {
    MutexLock lock(&mutex_);
    Model* const model = FindModel(model_name);
    if (model != nullptr && version.empty()) version = model->current;
    const Version* const listed = model == nullptr ? nullptr : FindVersion(*model, version);
    if (listed == nullptr || listed->state != State::kListed) {
      return NotFound("model {} is not listed to be loaded", Quote(name));
    }
    directory = listed->directory;
  }
  const auto allowed = Allowed(model_name, directory);
  const absl::Status status = allowed.ok() ? Open(model_name, version, *allowed) : allowed.status();
  const std::string* const configured = Configured(model_name);
  const bool saved = configured == nullptr || *configured != directory;
  std::string instead;
  {
    MutexLock lock(&mutex_);
    Model& model = *FindModel(model_name);
    Version& listed = *FindVersion(model, version);
    listed.state = status.ok() ? State::kReady : State::kFailed;
    listed.error = status.ok() || !saved ? status : Annotate(status, "saved in --state-dir");
    const bool lost =
        std::all_of(model.versions.begin(), model.versions.end(), [&](const Version& each) {
          return each.state == State::kFailed && configured && each.directory != *configured;
        });
    if (!lost) return listed.error;
    int number = 1;
    while (FindVersion(model, std::to_string(number)) != nullptr) ++number;
    instead = std::to_string(number);
    model.versions.push_back({.version = instead, .directory = *configured, .saved_as = instead});
  }
  log::Warning("no version saved in --state-dir could be loaded; loading the configured directory",
               {{"model", model_name},
                {"version", instead},
                {"directory", *configured},
                {"error", std::string(status.message())}});
  absl::Status fallback = Open(model_name, instead, *configured);
  MutexLock lock(&mutex_);
  Model& model = *FindModel(model_name);
  Version& opened = *FindVersion(model, instead);
  opened.state = fallback.ok() ? State::kReady : State::kFailed;
  opened.error = fallback;
  if (fallback.ok()) model.current = instead;
  return fallback;
}

absl::StatusOr<CatalogModel> Catalog::Load(const LoadRequest& request) {
  std::vector<std::string> leaving;
  absl::StatusOr<CatalogModel> loaded;
  {
    MutexLock loading(&load_mutex_);
    loaded = LoadVersion(request, &leaving);
  }
  if (!loaded.ok()) return loaded;
  const absl::Status saved = request.reload ? absl::OkStatus() : Save();
  // Without load_mutex_: the next load must not wait for the requests of the versions that leave.
  const absl::Status end = EndOfChange(saved, CloseVersions(request.name, leaving));
  if (!end.ok()) return end;
  return loaded;
}

absl::StatusOr<CatalogModel> Catalog::LoadVersion(const LoadRequest& request,
                                                  std::vector<std::string>* leaving) {
  const std::string& name = request.name;
  std::string version = request.version, directory = request.directory;
  if (directory.empty()) {
    MutexLock lock(&mutex_);
    if (Model* const model = FindModel(name)) {
      directory = FindVersion(*model, model->current)->directory;
    } else if (const std::string* const configured = Configured(name)) {
      directory = *configured;  // the model was unloaded
    }
  }
  // Without the lock, because it accesses the file system.
  absl::StatusOr<std::string> found;
  if (directory.empty()) {
    found = options_.roots.Find(name);
  } else {
    found = Allowed(name, directory);
    if (!found.ok()) return Annotate(found.status(), "directory");
  }
  {
    MutexLock lock(&mutex_);
    if (const auto alias = aliases_.find(name); alias != aliases_.end()) {
      return absl::AlreadyExistsError(fmt::format(
          "{}: \"{}\" is an alias of {}; choose another name, or delete the alias first",
          request.name_field, name, alias->second));
    }
    Model* model = FindModel(name);
    if (!found.ok()) return Annotate(found.status(), request.name_field);
    directory = *found;
    if (version.empty()) {
      // Versions that are whole numbers; one of more digits than that is only a name.
      constexpr int64_t kMost = 1'000'000'000'000'000;
      int64_t highest = 0;
      for (const Version& there : model ? model->versions : std::vector<Version>()) {
        int64_t number = 0;
        const char* const end = there.version.data() + there.version.size();
        const auto read = std::from_chars(there.version.data(), end, number);
        if (read.ec == std::errc() && read.ptr == end && number < kMost)
          highest = std::max(highest, number);
      }
      version = std::to_string(highest + 1);
    }
    if (model != nullptr && FindVersion(*model, version) != nullptr) {
      return absl::AlreadyExistsError(fmt::format(
          "version: \"{}\" has a version \"{}\"; choose another, or unload that one first", name,
          version));
    }
    if (model == nullptr) {
      model = &models_.emplace_back();
      model->name = name;
      model->current = version;
    }
    model->versions.push_back({.version = version,
                               .directory = directory,
                               .state = State::kLoading,
                               .saved_as = version});
  }

  const absl::Status status = Open(name, version, directory);
  MutexLock lock(&mutex_);
  if (!status.ok()) {
    Remove(name, version);
    // NotFound would mean that the model does not exist.
    return absl::IsNotFound(status) ? InvalidArgument("{}", std::string(status.message())) : status;
  }
  Model& model = *FindModel(name);
  Version& loaded = *FindVersion(model, version);
  loaded.state = State::kReady;
  // No two versions may be saved under one name.
  for (Version& other : model.versions) {
    if (other.saved_as == version) other.saved_as = other.version;
  }
  if (request.reload) {
    loaded.saved_as = std::exchange(FindVersion(model, model.current)->saved_as, model.current);
    for (auto& [alias, target] : aliases_) {
      if (target == EngineName(name, model.current)) target = EngineName(name, version);
    }
  }
  for (const Version& other : model.versions) {
    const bool failed = other.state == State::kFailed;
    // A version that is still listed stays; one that is already leaving needs nothing.
    const bool replaced = request.unload_previous && other.state == State::kReady &&
                          other.version == model.current && other.version != version;
    if (failed || replaced) leaving->push_back(other.version);
  }
  const State current = FindVersion(model, model.current)->state;
  const bool useless = current == State::kFailed || current == State::kLeaving;
  if (!request.keep_current || useless) model.current = version;
  Leave(&model, *leaving);
  return Describe(model, loaded);
}

absl::Status Catalog::Open(const std::string& name, const std::string& version,
                           const std::string& directory) {
  log::Info("loading model", {{"model", name}, {"version", version}, {"directory", directory}});
  const std::string signature = Signature(directory);
  {
    MutexLock lock(&mutex_);
    FindVersion(*FindModel(name), version)->signature = signature;
  }
  const auto start = std::chrono::steady_clock::now();
  std::optional<Precision> precision;
  for (const ModelSource& source : options_.models) {
    if (source.name == name) precision = source.precision;
  }
  absl::Status status = engine_->Open(EngineName(name, version), directory, precision);
  if (!status.ok()) {
    // The engine keeps failed models. Remove it: the catalog keeps the failures that matter.
    engine_->Close(EngineName(name, version)).IgnoreError();
    log::Error("model failed",
               {{"model", name}, {"version", version}, {"error", std::string(status.message())}});
    return status;
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const auto info = engine_->Find(EngineName(name, version));
  metrics_->ModelLoaded(EngineName(name, version), info ? info->precision : "", seconds);
  metrics_->totals().Begin(EngineName(name, version));
  log::Info("model ready", {{"model", name}, {"version", version}, {"seconds", seconds}});
  return status;
}

absl::Status Catalog::Unload(const std::string& name, const char* field) {
  const std::string model_name(NamePart(name));
  std::vector<std::string> versions;
  {
    MutexLock lock(&mutex_);
    Model* model = FindModel(model_name);
    const std::string_view wanted = VersionPart(name);
    for (const Version& version : model ? model->versions : std::vector<Version>()) {
      if (!wanted.empty() && version.version != wanted) continue;
      if (version.state != State::kReady && version.state != State::kFailed) {
        return Busy(fmt::format("model {} is still {}; try again when it is not",
                                EngineName(model_name, version.version),
                                version.state == State::kLeaving ? "being unloaded" : "loading"));
      }
      versions.push_back(version.version);
    }
    if (versions.empty()) {
      return NotFound("{}: there is no model {}; this server holds: {}", field, Quote(name),
                      Names());
    }
    Leave(model, versions);
  }
  // Save before waiting, or a server that ends meanwhile would load them again.
  const absl::Status saved = Save();
  return EndOfChange(saved, CloseVersions(model_name, versions));
}

void Catalog::Leave(Model* model, const std::vector<std::string>& versions) {
  for (const std::string& version : versions) {
    FindVersion(*model, version)->state = State::kLeaving;
  }
  // Of the remaining versions, the one that was loaded last becomes current.
  if (FindVersion(*model, model->current)->state != State::kLeaving) return;
  for (const Version& version : model->versions) {
    if (version.state == State::kReady) model->current = version.version;
  }
}

absl::Status Catalog::CloseVersions(const std::string& name,
                                    const std::vector<std::string>& versions) {
  absl::Status first_error;
  for (const std::string& version : versions) {
    const absl::Status status = engine_->Close(EngineName(name, version));
    // The engine does not hold versions that failed to load.
    if (status.ok() || absl::IsNotFound(status)) {
      log::Info("model unloaded", {{"model", name}, {"version", version}});
    } else if (first_error.ok()) {
      first_error = Annotate(status, fmt::format("the change is made, but {} could not be closed",
                                                 EngineName(name, version)));
    }
    metrics_->totals().Forget(EngineName(name, version));
    MutexLock lock(&mutex_);
    Remove(name, version);
  }
  return first_error;
}

void Catalog::Remove(std::string_view name, std::string_view version) {
  const auto model = std::find_if(models_.begin(), models_.end(),
                                  [&](const Model& each) { return each.name == name; });
  if (model == models_.end()) return;
  std::erase_if(model->versions, [&](const Version& each) { return each.version == version; });
  const bool gone = model->versions.empty();
  const std::string engine_name = EngineName(name, version);
  std::erase_if(aliases_, [&](const auto& alias) {
    return alias.second == engine_name || (gone && alias.second == name);
  });
  if (gone) {
    models_.erase(model);
  } else if (FindVersion(*model, model->current) == nullptr) {
    model->current = model->versions.back().version;
  }
}

absl::StatusOr<CatalogModel> Catalog::SetAlias(const std::string& alias,
                                               const std::string& target) {
  absl::StatusOr<CatalogModel> model;
  {
    MutexLock lock(&mutex_);
    if (aliases_.count(target) == 0) {  // SetAliasLocked refuses aliases as targets
      if (const auto found = FindLocked(target)) {
        const grpc::Status ready = CheckReady(*found, "");
        if (!ready.ok())
          return found->info->state == ModelState::kFailed
                     ? FailedPrecondition("{}", ready.error_message())
                     : Busy(ready.error_message());
      }
    }
    model = SetAliasLocked(alias, target);
  }
  if (!model.ok()) return model;
  const absl::Status end = EndOfChange(Save());
  if (!end.ok()) return end;
  return model;
}

absl::StatusOr<CatalogModel> Catalog::SetAliasLocked(const std::string& alias,
                                                     const std::string& target) {
  Model* model = FindModel(NamePart(target));
  const std::string_view wanted = VersionPart(target);
  Version* version =
      model ? FindVersion(*model, wanted.empty() ? model->current : wanted) : nullptr;
  if (version == nullptr) {
    return NotFound("target: there is no model {}; this server holds: {}", Quote(target), Names());
  }
  if (model->name == alias && !wanted.empty()) {
    model->current = version->version;
  } else if (FindModel(alias) != nullptr) {
    return absl::AlreadyExistsError(fmt::format(
        "alias: \"{}\" is the name of a model; choose another, or make one of its versions current "
        "with a target of {}@version",
        alias, alias));
  } else {
    aliases_[alias] = target;
  }
  return Describe(*model, *version);
}

absl::Status Catalog::DeleteAlias(const std::string& alias) {
  {
    MutexLock lock(&mutex_);
    if (aliases_.erase(alias) == 0) {
      return NotFound("alias: there is no alias {}; ListModels tells those there are",
                      Quote(alias));
    }
  }
  return EndOfChange(Save());
}

bool Catalog::ReloadChanged() {
  struct Look {
    std::string name, directory, loaded;
  };
  std::vector<Look> looks;
  {
    MutexLock lock(&mutex_);
    for (Model& model : models_) {
      const Version& current = *FindVersion(model, model.current);
      if (current.state != State::kLeaving && !current.signature.empty()) {
        looks.push_back({model.name, current.directory, current.signature});
      }
    }
  }
  bool changing = false;
  for (const Look& look : looks) {
    const std::string now = Signature(look.directory);
    {
      MutexLock lock(&mutex_);
      Model* model = FindModel(look.name);
      if (model == nullptr) continue;
      // Two equal signatures in a row: nobody is writing.
      const bool settled = std::exchange(model->seen, now) == now;
      changing = changing || (!settled && now != look.loaded);
      if (now.empty() && settled && !model->missed) {
        log::Warning("model directory cannot be read, or is empty; the loaded version stays",
                     {{"model", look.name}, {"directory", look.directory}});
      }
      model->missed = now.empty() && (settled || model->missed);
      // What failed was taken back: if it comes again, it is a new attempt.
      if (now == look.loaded) model->tried.clear();
      if (now.empty() || now == look.loaded || now == model->tried || !settled) continue;
      model->tried = now;
    }
    log::Info("model directory changed", {{"model", look.name}, {"directory", look.directory}});
    Load({.name = look.name, .unload_previous = true, .reload = true})
        .IgnoreError();  // the log says why
  }
  return changing;
}

Catalog::Model* Catalog::FindModel(std::string_view name) {
  for (Model& model : models_) {
    if (model.name == name) return &model;
  }
  return nullptr;
}

const Catalog::Model* Catalog::FindModel(std::string_view name) const {
  for (const Model& model : models_) {
    if (model.name == name) return &model;
  }
  return nullptr;
}

Catalog::Version* Catalog::FindVersion(Model& model, std::string_view version) {
  for (Version& each : model.versions) {
    if (each.version == version) return &each;
  }
  return nullptr;
}

CatalogModel Catalog::Describe(const Model& model, const Version& version) const {
  CatalogModel described{.name = model.name,
                         .version = version.version,
                         .current = version.version == model.current,
                         .added = version.state == State::kLoading};
  const std::string engine_name = EngineName(model.name, version.version);
  for (const auto& [alias, target] : aliases_) {
    if (target == engine_name || (target == model.name && described.current)) {
      described.aliases.push_back(alias);
    }
  }
  const bool opened = version.state == State::kReady || version.state == State::kLeaving;
  if (opened) described.info = engine_->Find(engine_name);
  if (version.state == State::kLeaving && described.info != nullptr &&
      described.info->state == ModelState::kReady) {
    ModelInfo leaving = *described.info;  // the engine closes it in a moment
    leaving.state = ModelState::kUnloading;
    described.info = std::make_shared<const ModelInfo>(std::move(leaving));
  }
  if (described.info == nullptr) {
    described.info = std::make_shared<const ModelInfo>(
        ModelInfo{.name = engine_name,
                  .directory = version.directory,
                  .state = opened                            ? ModelState::kUnloading
                           : version.state == State::kFailed ? ModelState::kFailed
                                                             : ModelState::kLoading,
                  .error = version.error});
  }
  return described;
}

std::optional<CatalogModel> Catalog::FindLocked(const std::string& name) const {
  const bool any = name.find('@') == std::string::npos;
  const auto alias = aliases_.find(NamePart(name));
  const std::string target = alias == aliases_.end() ? name : alias->second;
  const Model* model = FindModel(NamePart(target));
  if (model == nullptr) return std::nullopt;
  std::string_view wanted = any ? model->current : VersionPart(name);
  if (target.find('@') != std::string::npos) {
    if (!any && VersionPart(target) != wanted) return std::nullopt;
    wanted = VersionPart(target);
  }
  for (const Version& version : model->versions) {
    if (version.version == wanted) return Describe(*model, version);
  }
  return std::nullopt;
}

std::optional<CatalogModel> Catalog::Find(const std::string& name) const {
  MutexLock lock(&mutex_);
  return FindLocked(name);
}

std::vector<CatalogModel> Catalog::All() const {
  MutexLock lock(&mutex_);
  return AllLocked();
}

std::vector<CatalogModel> Catalog::AllLocked() const {
  std::vector<CatalogModel> all;
  for (const Model& model : models_) {
    for (const Version& version : model.versions) all.push_back(Describe(model, version));
  }
  return all;
}

std::string Catalog::Names() const {
  std::string names;
  for (const Model& model : models_) names += (names.empty() ? "" : ", ") + model.name;
  return names.empty() ? "none" : names;
}

std::optional<CatalogModel> Catalog::Select(const std::string& name, const std::string& field,
                                            const std::string& request_id, grpc::Status* refusal,
                                            const ModelFilter& takes) const {
  MutexLock lock(&mutex_);
  if (name.empty()) {
    if (auto only = OnlyModel(AllLocked(), takes)) return only;
    *refusal = InvalidFields(
        {{field, fmt::format("is not set, and the server holds {} models; use one of: {}",
                             models_.empty() ? "no" : "several", Names())}},
        request_id);
    return std::nullopt;
  }
  auto model = FindLocked(name);
  if (!model) {
    *refusal = FieldStatus(
        absl::StatusCode::kNotFound,
        {field, fmt::format("there is no model {}; this server holds: {}", Quote(name), Names())},
        reason::kModelNotFound, request_id);
  }
  return model;
}

bool TookEffect(const absl::Status& error) { return error.GetPayload(kTookEffect).has_value(); }
bool IsBusy(const absl::Status& error) { return error.GetPayload(kBusy).has_value(); }

CatalogModel ShownTo(bool admin, CatalogModel model) {
  if (admin || model.info->error.ok()) return model;
  auto info = std::make_shared<ModelInfo>(*model.info);
  info->directory.clear();
  info->error =
      absl::Status(info->error.code(), "the server's log says why, and its admins can see it");
  model.info = std::move(info);
  return model;
}

grpc::Status CheckReady(const CatalogModel& model, const std::string& request_id) {
  const std::string name = EngineName(model.name, model.version);
  switch (model.info->state) {
    case ModelState::kReady:
      return grpc::Status::OK;
    case ModelState::kLoading:
      return ToGrpcStatus(
          FailedPrecondition(
              "model \"{}\" is still loading; ask again when GetModel says AVAILABLE", name),
          reason::kModelLoading, request_id, std::chrono::seconds(2));
    case ModelState::kFailed:
      return ToGrpcStatus(FailedPrecondition("model \"{}\" could not be loaded: {}", name,
                                             std::string(model.info->error.message())),
                          reason::kModelFailed, request_id);
    case ModelState::kUnloading:
      return ToGrpcStatus(
          FailedPrecondition("model \"{}\" is being unloaded; choose another", name),
          reason::kModelUnloading, request_id);
  }
  return grpc::Status(grpc::StatusCode::INTERNAL, "model state");
}

}  // namespace denoised
