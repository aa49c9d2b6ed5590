#pragma once

#include <google/protobuf/descriptor.h>
#include <grpcpp/server_context.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "server/clients.h"
#include "server/trace_context.h"

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

/// Where a request comes from: what of its call outlives the call.
struct CallOrigin {
  std::shared_ptr<const Caller> caller = std::make_shared<const Caller>();
  std::string peer;  // as gRPC writes addresses: "ipv4:192.0.2.7:34152"
  TraceContext trace;
  std::chrono::steady_clock::time_point arrival = std::chrono::steady_clock::now();
};

/// One call, from its arrival to its end: becomes one log line and its metrics. The fields belong
/// to whoever works on the call at the time.
class CallRecord {
 public:
  /// `method` is its full name, "denoised.v1.ImageGeneration.Generate". Finds out who calls, and
  /// tells the caller the trace: `traceparent` in the initial metadata.
  CallRecord(const Serving& serving, ActiveCalls* active, const char* method,
             grpc::CallbackServerContext* context);

  /// Once, when nothing more will be sent.
  void End(grpc::StatusCode code, const std::string& message);

  const CallOrigin& origin() const { return origin_; }
  double SecondsSinceArrival() const;
  const Caller& caller() const { return *origin_.caller; }

  std::string request_id, model, sampler;
  int count = 0, steps = 0;
  double queued_seconds = -1;  // < 0: no image got a slot

 private:
  ActiveCalls* const active_;
  Metrics* const metrics_;
  const google::protobuf::MethodDescriptor* const method_;
  const CallOrigin origin_;
};

/// "OK", "INVALID_ARGUMENT", …
const char* CodeName(grpc::StatusCode code);

}  // namespace denoised
