// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "denoised/v1/image_generation.pb.h"
#include "engine/core/mutex.h"
#include "engine/engine.h"
#include "server/jobs/drain.h"
#include "server/jobs/event_log.h"
#include "server/jobs/job_request.h"
#include "server/jobs/queue_wait.h"
#include "server/jobs/rendering.h"
#include "server/jobs/worker_pool.h"
#include "server/security/client_load.h"
#include "server/telemetry/metrics.h"
#include "server/telemetry/timeline.h"

namespace denoised {

class Jobs;

/// What every job uses. All pointers must outlive the jobs.
struct JobContext {
  Engine* engine;
  JobPreparer* preparer;
  WorkerPool* workers;
  ClientLoad* client_load;
  Metrics* metrics;
  QueueWait* queue_wait;
  const DrainProgress* drain;
  double max_previews_per_second;  // of one image; 0: no bound
};

/// A call that streams the events of a generation or waits for its end.
class GenerationWatcher {
 public:
  virtual ~GenerationWatcher() = default;
  /// Says that Next() may return something new. Runs on worker threads, without locks held. One
  /// call can mean several events or none, and one or two calls can arrive after Leave.
  virtual void OnNews() = 0;
};

/// One request for images, from its arrival until its result is dropped. On the wire: a Job.
///
///   gRPC's thread      a call posts itself to the workers
///   a worker           Jobs::Begin makes the Generation; Start checks the request and submits it
///   engine's threads   the JobListener methods put results into an inbox and return
///   workers            encode images in parallel; Deliver moves the inbox to the event log in
///                      order and notifies the watchers; each watcher reads at its own pace
///
/// The inbox keeps only the latest place in the queue, the latest progress and the latest preview
/// of each image. Thread-safe.
class Generation final : public JobListener, public std::enable_shared_from_this<Generation> {
 public:
  using Clock = std::chrono::steady_clock;

  struct Origin {
    Caller caller;     // the owner: only this client sees the job
    std::string peer;  // address of the caller
    std::string traceparent;
    std::string request_id;  // unique among the client's
    Clock::time_point arrival = Clock::now();
    std::optional<Clock::time_point> deadline;  // of the call that began it
    bool survives = false;  // continues without watchers and beyond the deadline
    bool kept = false;      // the result can be fetched after the end
  };

  /// Reports its end to `jobs`.
  Generation(const JobContext& context, Jobs* jobs, Origin origin);

  /// Checks the request and submits it. Call once, on a worker thread. `request` and what it refers
  /// to need only live until this returns.
  void Start(const JobRequest& request);
  /// Requests cancellation; the job ends later. No effect on a job that has ended.
  void Cancel(EndReason reason);

  /// Every watcher must call Leave.
  void Watch(std::shared_ptr<GenerationWatcher> watcher);
  /// As Watch, but returns false if the job failed, was cancelled or is being cancelled. The caller
  /// must then start a new job.
  bool Join(const std::shared_ptr<GenerationWatcher>& watcher);
  /// When the last watcher leaves an unfinished job without `survives`, the job is cancelled.
  void Leave(const GenerationWatcher* watcher);

  /// Either the next event, or the final status if no more events will come, or neither if the
  /// caller must wait for OnNews.
  struct News {
    std::shared_ptr<const EventLog::Event> event;
    std::optional<grpc::Status> end;
  };
  /// The first event after `sequence`. Events up to `sequence` may be dropped, because `watcher`
  /// will not ask for them again.
  News Next(const GenerationWatcher* watcher, uint64_t sequence);

  /// The final status; nothing while the job is running.
  std::optional<grpc::Status> end() const;

  const Origin& origin() const { return origin_; }
  double SecondsSinceArrival() const;
  bool include_timings() const { return include_timings_; }
  /// Once it has events.
  Priority priority() const;
  /// The Job for GetJob, without expire_time.
  v1::Job Describe() const;
  /// As its replies tell them: every default filled in, without uploads.
  v1::GenerationParams Params() const;
  /// For the log.
  struct Summary {
    std::string request_id, model, sampler;
    int count = 0, steps = 0;    // 0: it was refused
    double queued_seconds = -1;  // < 0: no image got a slot
  };
  Summary Summarise() const;
  /// For metrics: the state, and the model's name, which is empty if the model does not exist.
  std::pair<std::string, v1::JobState> ModelAndState() const;
  /// Whether the engine has queued it.
  bool accepted() const;
  /// The number of its latest event, 0 before the first.
  uint64_t last_sequence() const;
  /// Bytes of the events in the log.
  size_t bytes() const;

  void OnQueued(const Estimate& estimate) override;
  void OnStarted() override;
  void OnProgress(int done, int total) override;
  void OnStage(int image, Stage stage, double seconds) override;
  void OnPreview(const ImageResult& image, int evaluation) override;
  void OnImage(ImageResult image) override;
  void OnDone(const absl::Status& status, const JobTiming& timing) override;

 private:
  struct Progress {
    int done, total;
  };
  struct Preview {
    ImageResult image;
    int evaluation;
  };
  struct Inbox {
    std::optional<Estimate> queued;
    std::optional<double> started;  // seconds queued
    std::optional<Progress> progress;
    std::map<int, Preview> previews;  // by image
    std::vector<v1::Image> images;

    bool empty() const {
      return !queued && !started && !progress && previews.empty() && images.empty();
    }
  };
  struct Watching {
    std::shared_ptr<GenerationWatcher> watcher;
    uint64_t sequence = 0;  // of the last event that it took
  };

  /// The client's status if the engine refused the job.
  grpc::Status Refusal(const absl::Status& status, const Estimate& estimate) const;
  /// The client's status if the job failed.
  grpc::Status ToStatus(const absl::Status& status) const;
  /// Logs QueuedEvent, always the first event.
  void LogQueued(const Estimate& estimate) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Whether another preview of this image would exceed the rate limit.
  bool IsTooSoon(int image) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Encode(const ImageResult& image);
  ParallelFor OnWorkers() const;
  /// True if there is something to deliver and nobody does: the caller must have Deliver run.
  bool TakeDelivery() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Has a worker run Deliver if need be.
  void ScheduleDelivery() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Runs on a worker.
  void Deliver() ABSL_LOCKS_EXCLUDED(mutex_);
  /// Whether all has come that will come from the engine and the encoders.
  bool AllIn() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return done_ && encoding_ == 0; }
  /// Moves the inbox to the log. `previews` are rendered already.
  void Write(Inbox inbox, std::vector<v1::PreviewEvent> previews)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Logs CompletedEvent, always the last event.
  void Complete() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::JobState State() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status EndStatus() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const grpc::Status& status);
  void TellWatchers();

  const JobContext context_;
  Jobs* const jobs_;
  const Origin origin_;
  const std::chrono::system_clock::time_point created_ = std::chrono::system_clock::now();

  // Set by Start before the job is submitted, constant from then on.
  Rendering image_rendering_, preview_rendering_;
  EffectiveJob job_;
  bool include_timings_ = false;

  mutable Mutex mutex_;
  std::string model_ ABSL_GUARDED_BY(mutex_);            // the engine's name
  v1::GenerationParams params_ ABSL_GUARDED_BY(mutex_);  // effective
  v1::Run run_ ABSL_GUARDED_BY(mutex_);
  std::string sampler_ ABSL_GUARDED_BY(mutex_);  // for the log
  Priority priority_ ABSL_GUARDED_BY(mutex_) = Priority::kNormal;
  Inbox inbox_ ABSL_GUARDED_BY(mutex_);
  EventLog log_ ABSL_GUARDED_BY(mutex_);
  Timeline timeline_ ABSL_GUARDED_BY(mutex_);
  std::vector<Watching> watchers_ ABSL_GUARDED_BY(mutex_);
  ClientLoad::Lease queue_place_ ABSL_GUARDED_BY(mutex_);
  std::map<int, std::chrono::steady_clock::time_point> last_preview_
      ABSL_GUARDED_BY(mutex_);  // by image
  std::chrono::steady_clock::time_point last_progress_
      ABSL_GUARDED_BY(mutex_);                // that was delivered alone, or the start
  int encoding_ ABSL_GUARDED_BY(mutex_) = 0;  // images between OnImage and the inbox
  std::optional<absl::Status> done_ ABSL_GUARDED_BY(mutex_);  // what the engine ended with
  absl::Status encode_error_ ABSL_GUARDED_BY(mutex_);
  std::optional<JobId> id_ ABSL_GUARDED_BY(mutex_);
  std::optional<Progress> progress_ ABSL_GUARDED_BY(mutex_);
  int images_done_ ABSL_GUARDED_BY(mutex_) = 0;
  double queued_seconds_ ABSL_GUARDED_BY(mutex_) = -1;  // < 0: no image got a slot
  std::chrono::system_clock::time_point started_ ABSL_GUARDED_BY(mutex_);  // epoch: not yet
  std::chrono::system_clock::time_point ended_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
  std::optional<EndReason> cancelled_ ABSL_GUARDED_BY(mutex_);
  bool images_dropped_ ABSL_GUARDED_BY(mutex_) = false;  // as the job was cancelled
  bool accepted_ ABSL_GUARDED_BY(mutex_) = false;  // QueuedEvent is in the log: the rest may follow
  bool delivering_ ABSL_GUARDED_BY(mutex_) = false;  // a worker runs Deliver or is going to
};

}  // namespace denoised
