// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <google/protobuf/descriptor.h>
#include <grpcpp/server_context.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"
#include "server/jobs/generation.h"
#include "server/security/clients.h"
#include "server/telemetry/trace_context.h"

namespace denoised {

class Metrics;

/// What the records of all calls share, and how many calls are running, which a drain waits for.
/// Thread-safe; all pointers must outlive it.
class Calls {
 public:
  Calls(const Clients* clients, Metrics* metrics) : clients_(clients), metrics_(metrics) {}

  /// Returns false if calls are still running at `deadline`.
  bool WaitForNone(std::chrono::steady_clock::time_point deadline);

 private:
  friend class CallRecord;
  void Enter();
  void Leave();

  const Clients* const clients_;
  Metrics* const metrics_;
  Mutex mutex_;
  ConditionVariable none_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
};

/// Where a call comes from, whatever carries it.
struct CallOrigin {
  std::shared_ptr<const Caller> caller;
  std::string peer;         // as gRPC writes addresses: "ipv4:192.0.2.7:34152"
  std::string traceparent;  // as it was sent, or empty
  const char* via;          // "grpc" or "http"
};

/// One call, from its arrival to its end: writes one log line and the metrics. Not synchronised:
/// one thread at a time uses the fields.
class CallRecord {
 public:
  /// `method` is its full name, "denoised.v1.ImageGeneration.Generate".
  CallRecord(Calls* calls, const char* method, CallOrigin origin);
  /// Identifies the caller, and sends `traceparent` in the initial metadata.
  CallRecord(Calls* calls, const char* method, grpc::CallbackServerContext* context);

  /// Adds the request and its waiting time to the log line.
  void Describe(const Generation& generation);

  /// Call once, when nothing more will be sent.
  void End(grpc::StatusCode code, const std::string& message);

  std::chrono::steady_clock::time_point arrival() const { return arrival_; }
  double SecondsSinceArrival() const;
  const Caller& caller() const { return *caller_; }
  /// As gRPC writes addresses.
  const std::string& peer() const { return peer_; }
  const TraceContext& trace() const { return trace_; }

  /// The client has gone. Any thread may set and read it.
  std::atomic<bool> gone{false};

  std::string request_id, model, sampler;
  int count = 0, steps = 0;
  double queued_seconds = -1;  // < 0: no image got a slot

 private:
  Calls* const calls_;
  const google::protobuf::MethodDescriptor* const method_;
  const std::string peer_;
  const std::shared_ptr<const Caller> caller_;
  const TraceContext trace_;
  const char* const via_;
  const std::chrono::steady_clock::time_point arrival_;
};

/// "OK", "INVALID_ARGUMENT", …
std::string CodeName(grpc::StatusCode code);

}  // namespace denoised
