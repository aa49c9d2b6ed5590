// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/health_check_service_interface.h>

#include "denoised/v1/image_generation.pb.h"
#include "engine/core/mutex.h"
#include "server/jobs/drain.h"

namespace denoised {

/// Whether the server takes requests, and whether its process need not be restarted. Everything
/// that tells one of these asks here: grpc.health.v1, /readyz and /healthz, ServerReady and
/// ServerLive, GetServerInfo, and denoised_server_state. Thread-safe; what is pointed to must
/// outlive it.
class Health {
 public:
  explicit Health(const DrainProgress* drain) : drain_(drain) {}

  /// Keeps the standard grpc.health.v1 service up to date from now on. "" and the services that
  /// draw are SERVING while ready(), "liveness" while live(). `service` is the gRPC server's own.
  void Attach(grpc::HealthCheckServiceInterface* service);

  /// STARTING until Serve(), then SERVING, whether or not there is a model now: an admin who has
  /// unloaded all of them can load another. LAME_DUCK and DRAINING as DrainProgress says, and
  /// DRAINING after Die().
  v1::ServerState State() const;
  /// Whether to send requests here.
  bool ready() const { return State() == v1::SERVER_STATE_SERVING; }
  /// Whether the process need not be restarted; true while it loads or drains.
  bool live() const;

  /// The models of the start have been loaded, as far as they can be.
  void Serve();
  /// DrainProgress has changed.
  void Update();
  /// The devices are lost, and only a restart helps.
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
