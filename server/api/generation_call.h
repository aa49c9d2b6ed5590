// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <optional>

#include "denoised/v1/image_generation.pb.h"
#include "engine/core/mutex.h"
#include "server/api/call_record.h"
#include "server/api/write_watch.h"
#include "server/jobs/generation.h"
#include "server/jobs/jobs.h"
#include "server/jobs/queue_wait.h"
#include "server/jobs/worker_pool.h"
#include "server/security/client_load.h"

namespace denoised {

/// What calls for images work with. What is pointed to must outlive them.
struct GenerationCallContext {
  Calls* calls;
  Jobs* jobs;
  WorkerPool* workers;
  ClientLoad* client_load;
  const QueueWait* queue_wait;
  WriteWatch* write_watch;
};

/// A call that follows a generation. gRPC's reactor and the generation share it, so it keeps itself
/// alive until OnDone.
class GenerationCall : public GenerationWatcher,
                       public std::enable_shared_from_this<GenerationCall> {
 public:
  /// Finds or makes the generation, watched by the call. Null with `refusal` set.
  using Beginning = std::function<std::shared_ptr<Generation>(
      const std::shared_ptr<GenerationWatcher>& watcher, grpc::Status* refusal)>;

  /// Runs `begin` on a worker, unless the client has too many calls.
  void Post(Priority priority, Beginning begin);

  void OnNews() final { Advance(); }

  const CallRecord& record() const { return record_; }

 protected:
  /// `method` is its full name. `grpc_context` must outlive the call.
  GenerationCall(const GenerationCallContext& context, const char* method,
                 grpc::CallbackServerContext* grpc_context)
      : context_(context),
        grpc_context_(grpc_context),
        record_(context.calls, method, grpc_context) {}

  /// Takes the next step that gRPC allows, if there is one. Calls gRPC without the lock.
  virtual void Advance() ABSL_LOCKS_EXCLUDED(mutex_) = 0;

  /// The client has gone: stops waiting and leaves the generation.
  void Break();

  /// The status when the call ends without the generation: it was refused, or its client has gone.
  std::optional<grpc::Status> EndWithoutGeneration() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  /// From OnDone.
  void End();

  const GenerationCallContext context_;
  grpc::CallbackServerContext* const grpc_context_;
  CallRecord record_;
  grpc::Status status_;  // what Finish said

  Mutex mutex_;
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;  // the client has gone
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  // Set with begun_, constant from then on.
  std::shared_ptr<Generation> generation_;
  grpc::Status refusal_;  // why there is no generation

 private:
  void Begin(const Beginning& begin);

  ClientLoad::Lease stream_;
  std::shared_ptr<GenerationCall> self_;
};

/// A call that is answered once, with all images.
class UnaryCall final : public grpc::ServerUnaryReactor, public GenerationCall {
 public:
  /// Makes the reply of the images, which are in the order of their indices; on a worker, before
  /// gRPC sends it, and only when all went well.
  using Reply = std::function<void(v1::GenerateResponse* images)>;

  UnaryCall(const GenerationCallContext& context, const char* method,
            grpc::CallbackServerContext* grpc_context, Reply reply)
      : GenerationCall(context, method, grpc_context), reply_(std::move(reply)) {}

  void OnCancel() override { Break(); }
  void OnDone() override {
    context_.write_watch->Disarm(grpc_context_);
    End();
  }

 private:
  void Advance() override;
  v1::GenerateResponse Collect();

  const Reply reply_;
};

/// What a call asks Jobs for. `params` and `preview` (null: none) must live until Jobs::Begin has
/// returned.
JobRequest MakeJobRequest(const grpc::CallbackServerContext& context, const CallRecord& record,
                          const v1::GenerationParams& params, const v1::PreviewOptions* preview,
                          bool together);

}  // namespace denoised
