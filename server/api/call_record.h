#pragma once

#include <google/protobuf/descriptor.h>
#include <grpcpp/server_context.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "server/security/clients.h"
#include "server/telemetry/trace_context.h"

namespace denoised {

class Metrics;
struct Serving;

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
  /// `method` is its full name, "denoised.v1.ImageGeneration.Generate". Finds out who calls, and
  /// tells the caller the trace: `traceparent` in the initial metadata.
  CallRecord(const Serving& serving, const char* method, grpc::CallbackServerContext* context);

  /// Once, when nothing more will be sent.
  void End(grpc::StatusCode code, const std::string& message);

  std::chrono::steady_clock::time_point arrival() const { return arrival_; }
  double SecondsSinceArrival() const;
  const Caller& caller() const { return *caller_; }
  /// As gRPC writes addresses: "ipv4:192.0.2.7:34152".
  const std::string& peer() const { return peer_; }
  const TraceContext& trace() const { return trace_; }

  std::string request_id, model, sampler;
  int count = 0, steps = 0;
  double queued_seconds = -1;  // < 0: no image got a slot

 private:
  ActiveCalls* const active_;
  Metrics* const metrics_;
  const google::protobuf::MethodDescriptor* const method_;
  const std::string peer_;
  const std::shared_ptr<const Caller> caller_;
  const TraceContext trace_;
  const std::chrono::steady_clock::time_point arrival_;
};

/// Ends a call that has nothing to wait for, and its record.
grpc::ServerUnaryReactor* Reply(grpc::CallbackServerContext* context, CallRecord* record,
                                const grpc::Status& status);

/// "OK", "INVALID_ARGUMENT", …
const char* CodeName(grpc::StatusCode code);

}  // namespace denoised
