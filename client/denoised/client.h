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

  /// Begins a generation and returns; `listener` is told as it happens. Keep the returned call:
  /// destroying it cancels.
  [[nodiscard]] std::unique_ptr<StreamCall> StreamGenerate(
      const Generation& generation, const std::optional<PreviewOptions>& preview,
      StreamListener listener, const CallOptions& options = {}) const {
    return connection_->StreamGenerate(generation, preview, std::move(listener), options);
  }

  /// All models, in the order the server loaded them.
  absl::StatusOr<std::vector<Model>> ListModels(const CallOptions& options = {}) const {
    return connection_->ListModels(options);
  }

  /// One model; an empty name means the only one.
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
