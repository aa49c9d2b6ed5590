// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "denoised/connection.h"
#include "denoised/error.h"
#include "denoised/generation.h"

namespace denoised::client {

/// Draws images on a denoised server:
///
///   auto connection = Connect("127.0.0.1:50051");
///   Client client(*connection);
///   auto result = client.Generate({.seed = 42, .class_labels = {7}});
///
/// Thread-safe and cheap to copy; copies share the connection. Retries, deadlines and cancellation
/// are the connection's: see denoised/connection.h.
class Client {
 public:
  explicit Client(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {}

  /// Waits for all images. The calling thread blocks.
  absl::StatusOr<GenerationResult> Generate(const Generation& generation,
                                            const CallOptions& options = {}) const {
    return connection_->Generate(generation, options);
  }

  /// Starts a generation and returns; `listener` gets its events. Keep the returned call:
  /// destroying it cancels the generation.
  [[nodiscard]] std::unique_ptr<StreamCall> StreamGenerate(
      const Generation& generation, const std::optional<PreviewOptions>& preview,
      StreamListener listener, const CallOptions& options = {}) const {
    return connection_->StreamGenerate(generation, preview, std::move(listener), options);
  }

  /// Follows the job with this `request_id`: `listener` gets the events after number
  /// `after_sequence` (0: all that the server keeps). NOT_FOUND if there is no such job or its
  /// result is no longer kept.
  [[nodiscard]] std::unique_ptr<StreamCall> WatchJob(const std::string& request_id,
                                                     uint64_t after_sequence,
                                                     StreamListener listener,
                                                     const CallOptions& options = {}) const {
    return connection_->WatchJob(request_id, after_sequence, std::move(listener), options);
  }

  /// NOT_FOUND as WatchJob.
  absl::StatusOr<Job> GetJob(const std::string& request_id, const CallOptions& options = {}) const {
    return connection_->GetJob(request_id, options);
  }

  /// Running jobs, and finished ones whose results are kept, the newest first.
  absl::StatusOr<std::vector<Job>> ListJobs(const JobQuery& query = {},
                                            const CallOptions& options = {}) const {
    return connection_->ListJobs(query, options);
  }

  /// Cancels a job and returns it as it was just before. NOT_FOUND as WatchJob.
  absl::StatusOr<Job> CancelJob(const std::string& request_id,
                                const CallOptions& options = {}) const {
    return connection_->CancelJob(request_id, options);
  }

  /// The server's version, state, features and limits. With replicas, those of any one of them.
  absl::StatusOr<ServerInfo> GetServerInfo(const CallOptions& options = {}) const {
    return connection_->GetServerInfo(options);
  }

  /// For admins: loads a version of a model and waits until it is ready. Not retried.
  absl::StatusOr<Model> LoadModel(const ModelLoad& load, const CallOptions& options = {}) const {
    return connection_->LoadModel(load, options);
  }

  /// For admins: unloads "name" (all its versions) or "name@version", and waits until its requests
  /// have finished. Not retried.
  absl::Status UnloadModel(const std::string& name, const CallOptions& options = {}) const {
    return connection_->UnloadModel(name, options);
  }

  /// For admins: from now on, `alias` stands for `target`, "name" or "name@version". If `alias` is
  /// the name of a model, `target` must be one of its versions, which becomes the current one.
  absl::StatusOr<Model> SetAlias(const std::string& alias, const std::string& target,
                                 const CallOptions& options = {}) const {
    return connection_->SetAlias(alias, target, options);
  }

  /// For admins. NOT_FOUND if there is no such alias. Not retried.
  absl::Status DeleteAlias(const std::string& alias, const CallOptions& options = {}) const {
    return connection_->DeleteAlias(alias, options);
  }

  /// All models, in the order the server loaded them.
  absl::StatusOr<std::vector<Model>> ListModels(const CallOptions& options = {}) const {
    return connection_->ListModels(options);
  }

  /// A model by name, name@version or alias; an empty name means the only one.
  absl::StatusOr<Model> GetModel(const std::string& name, const CallOptions& options = {}) const {
    return connection_->GetModel(name, options);
  }

  /// Health of a service; an empty name means the server. NOT_FOUND when there is no such service.
  absl::StatusOr<ServingStatus> CheckHealth(const std::string& service,
                                            const CallOptions& options = {}) const {
    return connection_->CheckHealth(service, options);
  }

 private:
  std::shared_ptr<Connection> connection_;
};

}  // namespace denoised::client
