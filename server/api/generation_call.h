// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "denoised/v1/image_generation.pb.h"
#include "engine/core/mutex.h"
#include "server/api/call_record.h"
#include "server/api/write_watch.h"
#include "server/jobs/generation.h"
#include "server/jobs/jobs.h"
#include "server/jobs/queue_wait.h"
#include "server/jobs/worker_pool.h"
#include "server/security/client_load.h"
#include "server/telemetry/timeline.h"

namespace denoised {

/// Shared by calls for images. All pointers must outlive the calls.
struct GenerationCallContext {
  Calls* calls;
  Jobs* jobs;
  WorkerPool* workers;
  ClientLoad* client_load;
  const QueueWait* queue_wait;
  WriteWatch* write_watch;
  MemoryBudget* messages;   // for messages and bodies that are read, until their jobs are begun
  int64_t max_reply_bytes;  // of one reply with all images
};

/// A call that follows a generation, whatever carries it. Its carrier (gRPC's reactor, a request of
/// HTTP) and the generation share it, so it keeps itself alive until the carrier says End.
class GenerationCall : public GenerationWatcher,
                       public std::enable_shared_from_this<GenerationCall> {
 public:
  /// Finds or starts the generation and has the call watch it. Returns null and sets `refusal` on
  /// an error.
  using Beginning = std::function<std::shared_ptr<Generation>(
      const std::shared_ptr<GenerationWatcher>& watcher, grpc::Status* refusal)>;

  /// Counts the call as the client's, unless that was done. Not OK if the client has too many: then
  /// Refuse it.
  grpc::Status Admit();
  /// Runs `begin` on a worker. Refuses the call if the client has too many.
  void Post(Priority priority, Beginning begin);
  /// Ends the call, instead of Post.
  void Refuse(const grpc::Status& status);

  /// For a call that AdmitStream has counted or refused already; `begin` tells a refusal. Call it
  /// before Post.
  void SetStream(ClientLoad::Lease stream) { stream_ = std::move(stream); }

  void OnNews() final { Advance(); }

  const CallRecord& record() const { return record_; }

 protected:
  /// `arguments`: what CallRecord takes.
  template <typename... Arguments>
  explicit GenerationCall(const GenerationCallContext& context, Arguments&&... arguments)
      : context_(context), record_(context.calls, std::forward<Arguments>(arguments)...) {}

  /// Takes the next step that the carrier allows, if there is one. Calls the carrier without the
  /// lock.
  virtual void Advance() ABSL_LOCKS_EXCLUDED(mutex_) = 0;
  /// Whether the deadline of the call has passed.
  virtual bool IsLate() const = 0;
  /// Whether the client had gone before it had all of the reply.
  virtual bool IsLost() const = 0;

  /// The client is gone: stops waiting and leaves the generation.
  void Break();

  /// The status of a call that ends without its generation: it was refused, or its client is gone.
  std::optional<grpc::Status> EndWithoutGeneration() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  /// The carrier will not use the call again.
  void End();

  const GenerationCallContext context_;
  CallRecord record_;
  grpc::Status status_;  // what the client was told in the end

  Mutex mutex_;
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;  // the client is gone
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  // Set with begun_, constant from then on.
  std::shared_ptr<Generation> generation_;
  grpc::Status refusal_;  // why there is no generation

 private:
  /// Goes on with the generation, or ends with `refusal`.
  void Begun(const std::shared_ptr<Generation>& generation, const grpc::Status& refusal);

  std::optional<ClientLoad::Lease> stream_;  // nothing before it is counted
  std::shared_ptr<GenerationCall> self_;
};

/// A call with one reply that holds all images.
class UnaryCall : public GenerationCall {
 protected:
  using GenerationCall::GenerationCall;

  /// Sends the reply. `images` are in the order of their indices, and null when the status is not
  /// OK. Called once, on a worker or by Break; the call may be deleted by it, unless the caller
  /// holds it.
  virtual void Answer(const grpc::Status& status, v1::GenerateResponse* images) = 0;

 private:
  void Advance() final;
  /// Adds all images to `response`, unless they are too many for one reply.
  grpc::Status Collect(v1::GenerateResponse* response);
};

/// A call that is sent the events of a generation. One write is in flight, the rest waits in the
/// generation's log.
class StreamCall : public GenerationCall {
 protected:
  /// `sequence`: events up to it are known.
  template <typename... Arguments>
  StreamCall(const GenerationCallContext& context, uint64_t sequence, Arguments&&... arguments)
      : GenerationCall(context, std::forward<Arguments>(arguments)...), sequence_(sequence) {}

  /// Sends an event, which stays as it is until Written is called.
  virtual void Write(const EventLog::Event& event) = 0;
  /// Ends the stream. Called once; the call may be deleted by it, unless the caller holds it.
  virtual void EndStream(const grpc::Status& status) = 0;

  /// `ok`: the carrier has taken the event. Else the client has gone.
  void Written(bool ok);

 private:
  void Advance() final;
  /// `event`; a timeline in it gets what was sent on this stream.
  std::shared_ptr<const EventLog::Event> Completed(std::shared_ptr<const EventLog::Event> event);

  // The thread that sets writing_ owns message_ and may call the carrier.
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool written_ ABSL_GUARDED_BY(mutex_) = false;    // any event
  uint64_t sequence_ ABSL_GUARDED_BY(mutex_);       // of the last event taken
  std::shared_ptr<const EventLog::Event> message_;  // the write in flight
  Timeline sent_;
};

/// Counts a call for images as the caller's. Refuses if the client has too many.
grpc::Status AdmitStream(const GenerationCallContext& context, const Caller& caller,
                         const std::string& peer, ClientLoad::Lease* stream);

/// The event after which a job is watched, and the name of that field in the caller's protocol.
struct WatchStart {
  const char* field;
  uint64_t sequence;  // events up to it are known
};

/// Watches a job of the caller. Null with `refusal` if there is no such job, or no such event yet:
/// the caller must have seen another job.
std::shared_ptr<Generation> BeginWatch(const GenerationCallContext& context,
                                       const CallRecord& record, const std::string& request_id,
                                       WatchStart start,
                                       const std::shared_ptr<GenerationWatcher>& watcher,
                                       grpc::Status* refusal);

/// Finds or starts the job of a request. Null with `refusal` if it is refused, and for a client
/// that has left, whose uploads would be unpacked for nobody; but a job that is to continue without
/// its client starts without it.
std::shared_ptr<Generation> BeginJob(const GenerationCallContext& context, const CallRecord& record,
                                     const JobRequest& request,
                                     const std::shared_ptr<GenerationWatcher>& watcher,
                                     grpc::Status* refusal);

/// The request of a call. `params` and `preview` (null: none) must live until BeginJob returns.
JobRequest MakeJobRequest(const CallRecord& record,
                          std::optional<std::chrono::steady_clock::time_point> deadline,
                          const v1::GenerationParams& params, const v1::PreviewOptions* preview,
                          bool together);

}  // namespace denoised
