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
#include "server/call_record.h"
#include "server/client_load.h"
#include "server/serving.h"
#include "server/translate.h"

namespace denoised {

/// Takes what becomes of a request: the call that came with it. Called from worker threads, one at
/// a time, in order; OnEnd is the last, exactly once, after which the sink may be gone.
class GenerationSink {
 public:
  virtual ~GenerationSink() = default;
  virtual void OnQueued(const v1::EffectiveParams& params, int images_ahead) = 0;
  virtual void OnStarted(double queued_seconds) = 0;
  virtual void OnProgress(int done, int total) = 0;
  virtual void OnPreview(int evaluation, int evaluations, v1::Image image) = 0;
  virtual void OnImage(v1::Image image) = 0;
  /// OK: all images were given.
  virtual void OnEnd(const grpc::Status& status, const v1::Timing& timing) = 0;
};

/// One request on its way through the engine:
///
///   gRPC's thread      a call makes a Generation and posts Start
///   a worker           Start checks the request and submits the job
///   the engine's       JobListener's methods leave what happened in an inbox and return
///   workers            encode images side by side; Deliver hands the inbox to the sink in order
///
/// Of progress and of each image's previews the inbox keeps the latest. Thread-safe.
class Generation : public JobListener, public std::enable_shared_from_this<Generation> {
 public:
  /// `params` and `preview` (null: none), `record` and `sink` must live until OnEnd. `together`:
  /// all images leave in one message.
  Generation(Serving* serving, const v1::GenerationParams& params,
             const v1::PreviewOptions* preview, bool together,
             std::optional<std::chrono::steady_clock::time_point> deadline, CallRecord* record,
             GenerationSink* sink);

  /// On a worker thread, once.
  void Start();
  /// Nobody wants the images any more. OnEnd still follows.
  void Cancel();

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

  /// The job that is asked for, or nothing and why.
  std::optional<EffectiveJob> Prepare(grpc::Status* refusal);
  /// Whether a preview of this image would be more than the limit allows. Under mutex_.
  bool IsTooSoon(int image);
  void Encode(const ImageResult& image);
  /// Sees to it that a worker delivers the inbox. Under mutex_.
  void ScheduleDelivery();
  void Deliver();
  void End(const grpc::Status& status);

  Serving* const serving_;
  const v1::GenerationParams& params_;
  const v1::PreviewOptions* const preview_;
  const bool together_;
  const std::optional<std::chrono::steady_clock::time_point> deadline_;
  CallRecord* const record_;
  GenerationSink* const sink_;

  // Set by Start before the job is submitted, constant from then on.
  ClientLoad::Lease lease_;
  Rendering image_rendering_, preview_rendering_;
  EffectiveJob job_;

  std::mutex mutex_;
  Inbox inbox_;
  std::map<int, std::chrono::steady_clock::time_point> last_preview_;  // by image
  int encoding_ = 0;                  // images between OnImage and the inbox
  std::optional<absl::Status> done_;  // what the engine ended with
  absl::Status encode_error_;
  std::optional<JobId> id_;
  bool cancelled_ = false;
  bool images_dropped_ = false;  // since nobody wanted them
  bool accepted_ = false;        // OnQueued was called: the rest may follow
  bool delivering_ = false;      // a worker runs Deliver or is going to
};

}  // namespace denoised
