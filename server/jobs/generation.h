#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "denoised/v1/image_generation.pb.h"
#include "engine/engine.h"
#include "server/api/call_record.h"
#include "server/api/translate.h"
#include "server/jobs/event_log.h"
#include "server/security/client_load.h"
#include "server/security/clients.h"
#include "server/serving.h"
#include "server/telemetry/timeline.h"

namespace denoised {

/// Follows a generation: a call that streams its events or waits for its end.
class GenerationWatcher {
 public:
  virtual ~GenerationWatcher() = default;
  /// Next() has something new, or may have. Called from worker threads, without locks held, also
  /// when several things happened at once or nothing did, and once or twice after Leave.
  virtual void OnNews() = 0;
};

/// One request for images from its arrival until its result is no longer kept; on the wire a Job.
///
///   gRPC's thread      a call posts itself to the workers
///   a worker           Jobs::Begin makes the Generation; Start checks the request and submits it
///   the engine's       JobListener's methods leave what happened in an inbox and return
///   workers            encode images side by side; Deliver writes the inbox into the event log in
///                      order and tells the watchers, who take events each at their own pace
///
/// Of progress and of each image's previews the inbox keeps the latest. Thread-safe.
class Generation final : public JobListener, public std::enable_shared_from_this<Generation> {
 public:
  using Clock = std::chrono::steady_clock;

  struct Origin {
    Caller caller;     // whose it is: only this client sees it
    std::string peer;  // from where it came
    std::string traceparent;
    std::string request_id;  // unique among the client's
    Clock::time_point arrival = Clock::now();
    std::optional<Clock::time_point> deadline;  // of the call that began it
    bool survives = false;  // goes on when nobody watches it, also beyond the deadline
    bool kept = false;      // may be asked for after its end
    /// What the caller's protocol calls a field of denoised.v1: "params.steps". Null: the same.
    std::string (*field_name)(const std::string& field) = nullptr;
  };

  Generation(Serving* serving, Origin origin);

  /// On a worker thread, once: checks the request and submits it. `preview` (null: none) and
  /// `params` are not used afterwards. `together`: all images leave in one message.
  void Start(const v1::GenerationParams& params, const v1::PreviewOptions* preview, bool together);
  /// Nobody wants the images any more. The end still follows. Without effect after it.
  void Cancel(EndReason reason);

  /// Whoever watches must leave.
  void Watch(std::shared_ptr<GenerationWatcher> watcher);
  /// Watches, unless it failed or was cancelled or is about to be: then a retry must begin anew.
  bool Join(const std::shared_ptr<GenerationWatcher>& watcher);
  /// A generation that does not survive is cancelled when the last watcher leaves before its end.
  void Leave(const GenerationWatcher* watcher);

  /// The first event after `sequence`, or, when there will be none, how it ended, or neither yet.
  struct News {
    std::shared_ptr<const EventLog::Event> event;
    std::optional<grpc::Status> end;
  };
  /// `watcher` will not ask for what is up to `sequence` again.
  News Next(const GenerationWatcher* watcher, uint64_t sequence);

  /// How it ended, once it has.
  std::optional<grpc::Status> end() const;

  const Origin& origin() const { return origin_; }
  double SecondsSinceArrival() const;
  bool include_timings() const { return include_timings_; }
  /// What GetJob says of it, but for how long it is kept.
  v1::Job Describe() const;
  /// What the log says of it.
  void Describe(CallRecord* record) const;
  /// Whether the engine took it.
  bool accepted() const;
  /// Of the events that are kept.
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
    uint64_t sequence = 0;  // it knows events up to here
  };

  /// The job that is asked for, or nothing and why. `replaced`: the model left meanwhile.
  std::optional<EffectiveJob> Prepare(const v1::GenerationParams& params,
                                      const v1::PreviewOptions* preview, bool together,
                                      grpc::Status* refusal, bool* replaced);
  /// What the client is told when the engine did not take the job.
  grpc::Status Refusal(const absl::Status& status, const Estimate& estimate) const;
  /// QueuedEvent, the first of all. Under mutex_.
  void Accept(const Estimate& estimate);
  /// Whether a preview of this image would be more than the limit allows. Under mutex_.
  bool IsTooSoon(int image);
  void Encode(const ImageResult& image);
  /// Sees to it that a worker delivers the inbox. Under mutex_.
  void ScheduleDelivery();
  void Deliver();
  /// Inbox to log. `previews` are rendered. Under mutex_.
  void Write(Inbox inbox, std::vector<v1::PreviewEvent> previews);
  /// CompletedEvent, the last of all. Under mutex_.
  void Complete();
  absl::Status EndStatus() const;
  void End(const grpc::Status& status);
  void TellWatchers();

  Serving* const serving_;
  const Origin origin_;
  const std::chrono::system_clock::time_point created_ = std::chrono::system_clock::now();

  // Set by Start before the job is submitted, constant from then on.
  Rendering image_rendering_, preview_rendering_;
  EffectiveJob job_;
  bool include_timings_ = false;

  mutable std::mutex mutex_;
  v1::EffectiveParams params_;
  std::string sampler_;  // for the log
  Inbox inbox_;
  EventLog log_;
  Timeline timeline_;
  std::vector<Watching> watchers_;
  ClientLoad::Lease queue_place_;
  std::map<int, std::chrono::steady_clock::time_point> last_preview_;  // by image
  std::chrono::steady_clock::time_point last_progress_;                // that was delivered alone
  int encoding_ = 0;                  // images between OnImage and the inbox
  std::optional<absl::Status> done_;  // what the engine ended with
  absl::Status encode_error_;
  std::optional<JobId> id_;
  std::optional<Progress> progress_;
  int images_done_ = 0;
  double queued_seconds_ = -1;                             // < 0: no image got a slot
  std::chrono::system_clock::time_point started_, ended_;  // epoch: not yet
  std::optional<grpc::Status> end_;
  std::optional<EndReason> cancelled_;
  bool images_dropped_ = false;  // since nobody wanted them
  bool accepted_ = false;        // QueuedEvent is in the log: the rest may follow
  bool delivering_ = false;      // a worker runs Deliver or is going to
};

}  // namespace denoised
