// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace denoised {

struct FakeEngineOptions {
  std::chrono::microseconds evaluation_cost{200};
  /// Open calls these with the directory: before the model is there, and after.
  std::function<void(const std::string&)> on_open, on_opened;
  int max_rows = 16;
  int max_slots = 64;
  int max_queued_images = 4096;
  int size = 32;  // pixels, both edges
  int channels = 1;
  /// Open says NotFound for directories that contain this.
  std::string broken = "broken";
};

/// An Engine without devices that says it has two, for tests of the server and for load tests:
/// batches rows of all jobs as the real one does, and every evaluation costs what it is told. Every
/// model that is opened is a class-conditional one of ten classes; its images are stripes that
/// depend on the seed and the label alone; what a mask keeps is that of the init image.
class FakeEngine : public Engine {
 public:
  explicit FakeEngine(const FakeEngineOptions& options = {});
  ~FakeEngine() override;

  absl::Status Open(const std::string& name, const std::string& directory,
                    std::optional<Precision> precision) override;
  absl::Status Close(const std::string& name) override;
  std::shared_ptr<const ModelInfo> Find(const std::string& name) const override;
  std::vector<std::shared_ptr<const ModelInfo>> Models() const override;
  absl::StatusOr<EffectiveJob> Resolve(const JobSpec& spec,
                                       std::vector<FieldViolation>* violations) const override;
  absl::StatusOr<JobId> Submit(EffectiveJob job, std::shared_ptr<JobListener> listener,
                               Estimate* estimate) override;
  int QueuedImages(const std::string& model) const override;
  void Cancel(JobId id, EndReason reason) override;
  void Drain(std::chrono::steady_clock::time_point deadline) override;
  std::vector<EngineStats> Stats() const override;
  void SetObserver(EngineObserver* observer) override;
  absl::Status Health() const override;
  std::vector<DeviceState> Devices() const override;

  /// The one that the server set; null before.
  EngineObserver* observer();
  void set_evaluation_cost(std::chrono::microseconds cost) { cost_ = cost.count(); }
  /// While paused nothing is admitted or evaluated.
  void Pause(bool paused);
  /// Goes on for so many evaluations, and is paused again. For events that are to be seen before
  /// more come.
  void PauseAfter(int evaluations);
  /// The jobs that are there now end with this.
  void FailJobs(const absl::Status& error);
  /// Tells every job that waits that its place is this.
  void TellPlaces(const Estimate& estimate);
  /// What Close says from now on, though it closes; NotFound is said all the same.
  void set_close_error(const absl::Status& error);
  /// As FakeEngineOptions::broken, from now on.
  void set_broken(const std::string& part);
  /// Calls of Open.
  int opens() const { return opens_; }
  /// One of its two devices is lost.
  void BreakDevice(int device, const absl::Status& status);
  /// Calls of Cancel for jobs that were running.
  int cancels() const { return cancels_; }
  int evaluations() const { return evaluations_; }
  /// The spec that was submitted last.
  JobSpec last_spec() const;
  /// Submit calls `hook` first, on the caller's thread.
  void OnSubmit(std::function<void(const JobSpec&)> hook);

 private:
  struct Job {
    JobId id;
    EffectiveJob job;
    std::shared_ptr<JobListener> listener;
    std::chrono::steady_clock::time_point submitted;
    double queued_seconds = 0, first_preview_seconds = -1;
    bool started = false, cancelled = false;
    absl::Status failure;
    int admitted = 0, finished = 0, evaluations = 0;
  };
  struct Slot {
    std::shared_ptr<Job> job;
    int index;
    int done = 0;
  };

  void Run();
  void Admit(std::vector<std::shared_ptr<Job>>* started);
  void Evaluate(const std::vector<Slot*>& rows);
  absl::Status ReasonToEnd(const Job& job) const;
  void End(const std::shared_ptr<Job>& job, const absl::Status& status);
  int Queued() const;
  ImageResult Draw(const Job& job, int index, double noise) const;

  const FakeEngineOptions options_;
  std::atomic<int64_t> cost_;  // microseconds
  std::atomic<int> cancels_{0}, evaluations_{0}, opens_{0};

  mutable std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<std::shared_ptr<const ModelInfo>> models_;
  std::deque<std::shared_ptr<Job>> jobs_;  // in the order of Submit, until they end
  std::deque<Slot> slots_;                 // touched by the engine's thread, sized under mutex_
  std::string broken_;
  absl::Status close_error_;
  EngineObserver* observer_ = nullptr;
  std::array<absl::Status, 2> health_;
  JobSpec last_spec_;
  std::function<void(const JobSpec&)> on_submit_;
  JobId next_id_ = 1;
  int evaluations_left_ = -1;  // until it pauses; negative: it does not
  bool paused_ = false, draining_ = false, expired_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace denoised
