// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/health_check_service_interface.h>

#include "denoised/v1/image_generation.pb.h"
#include "engine/core/mutex.h"
#include "server/jobs/drain.h"

namespace denoised {

/// Whether the server is ready (takes requests) and live (needs no restart). Everything that
/// reports these asks here: grpc.health.v1, /readyz and /healthz, ServerReady and ServerLive,
/// GetServerInfo, and denoised_server_state. Thread-safe; all pointers must outlive it.
class Health {
 public:
  explicit Health(const DrainProgress* drain) : drain_(drain) {}

  /// Keeps the grpc.health.v1 service up to date from now on. The empty name and the services that
  /// draw are SERVING while ready(), "liveness" while live(). The gRPC server owns `service`.
  void Attach(grpc::HealthCheckServiceInterface* service);

  /// STARTING until Serve(), then SERVING, even without a model: an admin who unloaded all models
  /// can load another. LAME_DUCK and DRAINING follow DrainProgress; after Die() it is DRAINING.
  v1::ServerState State() const;
  /// Whether clients should send requests here.
  bool ready() const { return State() == v1::SERVER_STATE_SERVING; }
  /// False if the process must be restarted. True while it loads or drains.
  bool live() const;

  /// Call when loading at startup is over.
  void Serve();
  /// Call when DrainProgress has changed.
  void Update();
  /// Call when all devices are lost: only a restart helps.
  void Die();

 private:
  v1::ServerState StateLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Publish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const DrainProgress* const drain_;
  mutable Mutex mutex_;
  grpc::HealthCheckServiceInterface* service_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool live_ ABSL_GUARDED_BY(mutex_) = true;
};

}  // namespace denoised
