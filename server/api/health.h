#pragma once

#include <grpcpp/health_check_service_interface.h>

#include <mutex>

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
  /// Stop, and not live either: the device is lost and only a restart helps.
  void Die();

 private:
  void Set(bool serving);

  grpc::HealthCheckServiceInterface* const service_;
  std::mutex mutex_;
  bool stopped_ = false;  // guarded by mutex_
};

}  // namespace denoised
