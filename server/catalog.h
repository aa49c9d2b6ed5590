#pragma once

#include <grpcpp/support/status.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "server/config.h"

namespace denoised {

/// The models that the server was told to hold, also those that still load or could not: the engine
/// learns of a model only when its turn comes. Thread-safe; `engine` must outlive it.
class Catalog {
 public:
  Catalog(std::vector<ModelSource> sources, const Engine* engine);

  const std::vector<ModelSource>& sources() const { return sources_; }
  /// Notes why a model could not be loaded.
  void Fail(const std::string& name, const absl::Status& error);

  /// Null when the server holds none of that name.
  std::shared_ptr<const ModelInfo> Find(const std::string& name) const;
  /// In the order of the configuration.
  std::vector<std::shared_ptr<const ModelInfo>> All() const;

  /// The model that a request names, or the only one when it names none. Null with `refusal` set:
  /// INVALID_ARGUMENT on `field` when it had to name one, NOT_FOUND.
  std::shared_ptr<const ModelInfo> Select(const std::string& name, const std::string& field,
                                          const std::string& request_id,
                                          grpc::Status* refusal) const;

 private:
  std::string Names() const;

  const std::vector<ModelSource> sources_;
  const Engine* const engine_;
  mutable std::mutex mutex_;
  std::map<std::string, absl::Status> errors_;  // guarded by mutex_
};

/// OK, or why `model` cannot draw now: FAILED_PRECONDITION while it loads or when it failed.
grpc::Status CheckReady(const ModelInfo& model, const std::string& request_id);

}  // namespace denoised
