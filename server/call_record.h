#pragma once

#include <grpcpp/support/status_code_enum.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

namespace denoised {

class Metrics;

/// How many calls are running, for the end of a drain. Thread-safe.
class ActiveCalls {
 public:
  void Enter();
  void Leave();
  /// False when calls were still running at `deadline`.
  bool WaitForNone(std::chrono::steady_clock::time_point deadline);

 private:
  std::mutex mutex_;
  std::condition_variable none_;
  int count_ = 0;  // guarded by mutex_
};

/// One call, from its arrival to its end: becomes one log line and its metrics. The fields belong
/// to whoever works on the call at the time.
class CallRecord {
 public:
  /// `method` and `type` ("unary", "server_stream") are literals.
  CallRecord(ActiveCalls* active, Metrics* metrics, const char* method, const char* type,
             std::string peer);

  /// Once, when nothing more will be sent.
  void End(grpc::StatusCode code, const std::string& message);

  std::chrono::steady_clock::time_point arrival() const { return arrival_; }
  double SecondsSinceArrival() const;

  std::string request_id, model, sampler;
  int count = 0, steps = 0;
  double queued_seconds = -1;  // < 0: no image got a slot

 private:
  ActiveCalls* const active_;
  Metrics* const metrics_;
  const char* const method_;
  const char* const type_;
  const std::string peer_;
  const std::chrono::steady_clock::time_point arrival_;
};

/// "OK", "INVALID_ARGUMENT", …
const char* CodeName(grpc::StatusCode code);

}  // namespace denoised
