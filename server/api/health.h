// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/health_check_service_interface.h>

#include "engine/core/mutex.h"

namespace denoised {

/// The standard grpc.health.v1 service. "" and the services that draw say whether to send requests
/// here: after warm-up, until a drain. "liveness" says that the process need not be restarted, also
/// while it loads or drains. Thread-safe.
class Health {
 public:
  /// Everything but "liveness" starts NOT_SERVING. `service` is the gRPC server's own.
  explicit Health(grpc::HealthCheckServiceInterface* service);

  /// Models are ready. False, and without effect, after Stop.
  bool Serve();
  /// NOT_SERVING for good.
  void Stop();
  /// Whether to send requests here, as "" says.
  bool ready() const;
  /// Whether the process need not be restarted, as "liveness" says.
  bool live() const;

  /// Stop, and not live either: the device is lost and only a restart helps.
  void Die();

 private:
  void Set(bool serving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  grpc::HealthCheckServiceInterface* const service_;
  mutable Mutex mutex_;
  bool serving_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool live_ ABSL_GUARDED_BY(mutex_) = true;
};

}  // namespace denoised
