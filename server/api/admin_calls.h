// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <set>
#include <string>

#include "engine/core/mutex.h"
#include "server/api/call_record.h"
#include "server/api/write_watch.h"
#include "server/jobs/drain.h"
#include "server/jobs/worker_pool.h"

namespace denoised {

/// A change that an admin asks for, as logged.
struct ModelChange {
  const char* verb;            // "load", "unload", ...
  std::string model = {};      // "name" or "name@version"
  std::string directory = {};  // of a load; empty: where the current version came from
  std::string alias = {};
  bool waits = true;  // whether it waits for the device or for requests to end
};

/// What calls that change models are told where nobody may.
grpc::Status NoAdmins();

/// Runs the calls of all services that change models. They have their own threads, because a load
/// waits for the device and an unload for requests. Changes that wait for neither have another
/// thread, so that no load delays them. All pointers must outlive it. Thread-safe.
class AdminCalls {
 public:
  AdminCalls(Calls* calls, const DrainProgress* drain, WriteWatch* write_watch)
      : calls_(calls), drain_(drain), write_watch_(write_watch) {}

  /// Runs `work` on a thread that may block. Refuses at once if the caller is no admin or the
  /// server is shutting down. Logs `change` with the caller and the result. `end` is given what
  /// came of it, after the end of the record; `work` may go on after it, see EndCalls.
  void Post(std::shared_ptr<CallRecord> record, ModelChange change,
            std::function<grpc::Status()> work, std::function<void(const grpc::Status&)> end);
  /// The same for a call of gRPC, whose messages `work` must not use. `reply` makes the response
  /// after `work` has succeeded.
  grpc::ServerUnaryReactor* Post(grpc::CallbackServerContext* context, const char* method,
                                 ModelChange change, std::function<grpc::Status()> work,
                                 std::function<grpc::Status()> reply);

  /// Ends the calls whose changes are not done: a drain cannot wait until models are loaded. The
  /// changes go on.
  void EndCalls();

 private:
  struct Call {
    std::shared_ptr<CallRecord> record;
    ModelChange change;
    std::function<void(const grpc::Status&)> end;
  };

  grpc::Status CheckServing() const;
  /// If it has not ended yet.
  void End(const std::shared_ptr<Call>& call, const grpc::Status& status);

  Calls* const calls_;
  const DrainProgress* const drain_;
  WriteWatch* const write_watch_;
  Mutex mutex_;
  std::set<std::shared_ptr<Call>> running_ ABSL_GUARDED_BY(mutex_);
  WorkerPool waiting_{4}, quick_{1};  // by ModelChange::waits
};

/// The status of a change that the catalog refused.
grpc::Status ToGrpc(const absl::Status& status);

}  // namespace denoised
