// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/support/server_callback.h>

#include <functional>
#include <string>

#include "server/api/call_record.h"
#include "server/jobs/drain.h"
#include "server/jobs/worker_pool.h"

namespace denoised {

/// What an admin wants to change, for the log.
struct ModelChange {
  const char* verb;            // "load", "unload", ...
  std::string model = {};      // "name" or "name@version"
  std::string directory = {};  // of a load; empty: where the current version came from
  std::string alias = {};
  bool waits = true;  // for the device, or for requests to end
};

/// The calls that change the models, of all services. They have threads of their own, since a load
/// waits for the device and an unload for requests; changes that wait for neither have a thread
/// that no load keeps busy. What is pointed to must outlive it. Thread-safe.
class AdminCalls {
 public:
  AdminCalls(Calls* calls, const DrainProgress* drain) : calls_(calls), drain_(drain) {}

  /// Runs `work` on a thread that may wait, if the caller is an admin and the server does not shut
  /// down; else refuses at once. `change` goes to the log, with the caller and the result.
  grpc::ServerUnaryReactor* Post(grpc::CallbackServerContext* context, const char* method,
                                 ModelChange change, std::function<grpc::Status()> work);

 private:
  grpc::Status CheckServing() const;

  Calls* const calls_;
  const DrainProgress* const drain_;
  WorkerPool waiting_{4}, quick_{1};  // by ModelChange::waits
};

/// What the catalog refused to do.
grpc::Status ToGrpc(const absl::Status& status);

}  // namespace denoised
