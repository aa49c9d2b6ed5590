#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "denoised/v1/image_generation.pb.h"
#include "server/api/call_record.h"
#include "server/jobs/generation.h"
#include "server/jobs/jobs.h"
#include "server/security/client_load.h"
#include "server/serving.h"

namespace denoised {

/// A call that follows a generation. gRPC's reactor and whoever has news for it share it: it keeps
/// itself alive until OnDone.
class GenerationCall : public GenerationWatcher,
                       public std::enable_shared_from_this<GenerationCall> {
 public:
  /// Finds or makes the generation, watched by the call. Null with the reason set.
  using Beginning = std::function<std::shared_ptr<Generation>(
      const std::shared_ptr<GenerationWatcher>& watcher, grpc::Status* refusal)>;

  /// Runs `begin` on a worker, when the client may have one more call.
  void Post(Beginning begin);

  void OnNews() final { Advance(std::unique_lock(mutex_)); }

  const CallRecord& record() const { return record_; }

 protected:
  /// `method` is its full name. What is pointed to must outlive the call.
  GenerationCall(Serving* serving, const char* method, grpc::CallbackServerContext* context)
      : serving_(serving), context_(context), record_(*serving, method, context) {}

  /// Takes the next step that gRPC allows, if there is one: calls gRPC without the lock.
  virtual void Advance(std::unique_lock<std::mutex> lock) = 0;

  /// Nobody reads any more: the call has nothing to wait for, and the generation has one watcher
  /// less.
  void Break();

  /// What ends the call when no generation does: it was refused, or its client has gone. Under
  /// mutex_.
  std::optional<grpc::Status> EndWithoutGeneration() const;

  /// From OnDone.
  void End();

  Serving* const serving_;
  grpc::CallbackServerContext* const context_;
  CallRecord record_;
  grpc::Status status_;  // what Finish said

  std::mutex mutex_;
  bool begun_ = false;                      // guarded by mutex_
  bool broken_ = false;                     // guarded by mutex_; nobody reads any more
  bool finished_ = false;                   // guarded by mutex_
  std::shared_ptr<Generation> generation_;  // set with begun_
  grpc::Status refusal_;                    // set with begun_; why there is no generation

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

  UnaryCall(Serving* serving, const char* method, grpc::CallbackServerContext* context, Reply reply)
      : GenerationCall(serving, method, context), reply_(std::move(reply)) {}

  void OnCancel() override { Break(); }
  void OnDone() override { End(); }

 private:
  void Advance(std::unique_lock<std::mutex> lock) override;
  v1::GenerateResponse Collect();

  const Reply reply_;
};

/// What a call asks of Jobs. `params` and `preview` (null: none) must live until they were asked.
Jobs::Request Asked(const grpc::CallbackServerContext& context, const CallRecord& record,
                    const v1::GenerationParams& params, const v1::PreviewOptions* preview,
                    bool together);

}  // namespace denoised
