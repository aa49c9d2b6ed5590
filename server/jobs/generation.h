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

/// What every job works with. What is pointed to must outlive the jobs.
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

/// Follows a generation: a call that streams its events or waits for its end.
class GenerationWatcher {
 public:
  virtual ~GenerationWatcher() = default;
  /// Next() may have something new. Called from worker threads, without locks held. One call may
  /// stand for several events or for none, and one or two may come after Leave.
  virtual void OnNews() = 0;
};

/// One request for images from its arrival until its result is no longer kept; on the wire a Job.
///
///   gRPC's thread      a call posts itself to the workers
///   a worker           Jobs::Begin makes the Generation; Start checks the request and submits it
///   the engine's       JobListener's methods leave what happened in an inbox and return
///   workers            encode images side by side; Deliver writes the inbox into the event log in
///                      order and notifies the watchers; each takes events at its own pace
///
/// Of progress and of each image's previews the inbox keeps the latest. Thread-safe.
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
    bool survives = false;  // goes on without watchers, also beyond the deadline
    bool kept = false;      // may be asked for after its end
  };

  /// `jobs` is told of the end.
  Generation(const JobContext& context, Jobs* jobs, Origin origin);

  /// On a worker thread, once: checks the request and submits it. What `request` refers to is not
  /// used afterwards.
  void Start(const JobRequest& request);
  /// Stops the job. Its end still follows. Has no effect after the end.
  void Cancel(EndReason reason);

  /// Every watcher must call Leave.
  void Watch(std::shared_ptr<GenerationWatcher> watcher);
  /// Watch, unless the job failed or was cancelled or is being cancelled. Then it returns false,
  /// and a retry must begin a new job.
  bool Join(const std::shared_ptr<GenerationWatcher>& watcher);
  /// A generation that does not survive is cancelled when the last watcher leaves before its end.
  void Leave(const GenerationWatcher* watcher);

  /// The first event after `sequence`, or, when there will be none, how it ended, or neither yet.
  struct News {
    std::shared_ptr<const EventLog::Event> event;
    std::optional<grpc::Status> end;
  };
  /// Events up to `sequence` may be dropped: `watcher` does not ask for them again.
  News Next(const GenerationWatcher* watcher, uint64_t sequence);

  /// How it ended, once it has.
  std::optional<grpc::Status> end() const;

  const Origin& origin() const { return origin_; }
  double SecondsSinceArrival() const;
  bool include_timings() const { return include_timings_; }
  /// For GetJob, without the time until which it is kept.
  v1::Job Describe() const;
  /// For the log.
  struct Summary {
    std::string request_id, model, sampler;
    int count = 0, steps = 0;    // 0: it was refused
    double queued_seconds = -1;  // < 0: no image got a slot
  };
  Summary Summarise() const;
  /// For metrics: the model's name, empty when there is none of that name, and the state.
  std::pair<std::string, v1::JobState> ModelAndState() const;
  /// Whether the engine has queued it.
  bool accepted() const;
  /// The size of the events that are kept.
  size_t bytes() const;

  void OnStarted() override;
  void OnProgress(int done, int total) override;
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
    std::optional<double> started;  // seconds queued
    std::optional<Progress> progress;
    std::map<int, Preview> previews;  // by image
    std::vector<v1::Image> images;

    bool empty() const { return !started && !progress && previews.empty() && images.empty(); }
  };
  struct Watching {
    std::shared_ptr<GenerationWatcher> watcher;
    uint64_t sequence = 0;  // it has taken events up to here
  };

  /// The status for the client when the engine refused the job.
  grpc::Status Refusal(const absl::Status& status, const Estimate& estimate) const;
  /// QueuedEvent, the first of all.
  void Accept(const Estimate& estimate) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Whether a preview of this image would be more than the limit allows.
  bool IsTooSoon(int image) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Encode(const ImageResult& image);
  /// Makes a worker deliver the inbox.
  void ScheduleDelivery() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Deliver();
  /// Inbox to log. `previews` are rendered.
  void Write(Inbox inbox, std::vector<v1::PreviewEvent> previews)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// CompletedEvent, the last of all.
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
  std::string model_ ABSL_GUARDED_BY(mutex_);  // the engine's name
  v1::EffectiveParams params_ ABSL_GUARDED_BY(mutex_);
  std::string sampler_ ABSL_GUARDED_BY(mutex_);  // for the log
  Inbox inbox_ ABSL_GUARDED_BY(mutex_);
  EventLog log_ ABSL_GUARDED_BY(mutex_);
  Timeline timeline_ ABSL_GUARDED_BY(mutex_);
  std::vector<Watching> watchers_ ABSL_GUARDED_BY(mutex_);
  ClientLoad::Lease queue_place_ ABSL_GUARDED_BY(mutex_);
  std::map<int, std::chrono::steady_clock::time_point> last_preview_
      ABSL_GUARDED_BY(mutex_);  // by image
  std::chrono::steady_clock::time_point last_progress_
      ABSL_GUARDED_BY(mutex_);                // that was delivered alone
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
