// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <functional>
#include <thread>
#include <unordered_map>

#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"

namespace denoised {

/// Cancels calls whose write does not finish in time. Without it, gRPC would buffer a few megabytes
/// for a client that does not read, and then block the write and the call for ever. Thread-safe.
class WriteWatch {
 public:
  /// Calls `on_stall`, without locks held, for every call that it cancels.
  WriteWatch(std::chrono::milliseconds timeout, std::function<void()> on_stall);
  ~WriteWatch();

  WriteWatch(const WriteWatch&) = delete;
  WriteWatch& operator=(const WriteWatch&) = delete;

  /// Call before a write. `context` must live until Disarm.
  void Arm(grpc::CallbackServerContext* context);
  /// Call after the write.
  void Disarm(grpc::CallbackServerContext* context);

 private:
  void Run();
  /// Sleeps until the next check. Returns false if the destructor was called meanwhile.
  bool WaitForNextLook() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// How many calls were cancelled.
  int CancelLate() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::chrono::milliseconds timeout_;
  const std::function<void()> on_stall_;
  Mutex mutex_;
  ConditionVariable wake_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_map<grpc::CallbackServerContext*, std::chrono::steady_clock::time_point> deadlines_
      ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

/// A unary call whose reply is watched. It deletes itself when gRPC has sent the reply, unless Done
/// is overridden.
class WatchedReactor : public grpc::ServerUnaryReactor {
 public:
  WatchedReactor(WriteWatch* watch, grpc::CallbackServerContext* context)
      : watch_(watch), context_(context) {}

  /// Instead of Finish.
  void Send(const grpc::Status& status);
  void OnDone() final;

 private:
  virtual void Done() { delete this; }

  WriteWatch* const watch_;
  grpc::CallbackServerContext* const context_;
};

}  // namespace denoised
