// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/batching/admission.h"
#include "engine/batching/evaluator.h"
#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"
#include "engine/job.h"

namespace denoised {

/// All jobs that are not over, and where each of their images is: waiting, or on one of the
/// devices. Devices take images when they have room, in the order of Admission, and report results,
/// which the queue passes on to the listeners. An image stays on the device that took it, with two
/// exceptions: after it was parked, any device may continue it; and if its device is lost, it is
/// drawn again from the start, without repeating events to its listener. Thread-safe. Devices are
/// identified by numbers that their owner chooses.
class JobQueue {
 public:
  using Clock = std::chrono::steady_clock;
  /// For so long a size waits until others make room.
  static constexpr std::chrono::seconds kWaitForRoom{30};
  struct Image;

  struct Job {
    const JobId id;
    const EffectiveJob effective;
    const Clock::time_point submitted;
    const std::shared_ptr<Admission::Ticket> ticket;
    std::atomic<int64_t> rows_launched{0};
    std::atomic<bool> over{false};

    int count() const { return effective.spec.count; }
    int64_t evaluations() const { return int64_t{1} * count() * effective.evaluations; }
    bool guided() const { return effective.guided; }
    int rows() const { return effective.MostRows(); }
    int prompts() const { return guided() ? 2 : 1; }  // of an image
    std::pair<double, JobId> key() const { return Admission::Key(*ticket); }
    /// Computed at the first call, when the first image is about to get a slot.
    const std::vector<DeviceEvaluation>& plan();

   private:
    friend JobQueue;
    Job(JobId id, EffectiveJob effective, Clock::time_point submitted,
        std::shared_ptr<Admission::Ticket> ticket, std::shared_ptr<JobListener> listener);
    int waiting() const { return count() - next_image + static_cast<int>(again.size()); }

    std::once_flag plan_made;
    std::vector<DeviceEvaluation> device_plan;
    // Guarded by the queue's mutex_, which the annotations cannot name here.
    Estimate told;                                  // of OnQueued, or of Submit
    int next_image = 0;                             // the first that no device has taken
    std::deque<std::shared_ptr<Image>> again;       // parked or lost images that wait again
    std::map<std::shared_ptr<Image>, int> devices;  // of the images that do not wait
    bool ending = false;                            // no device takes its images any more
    /// Held while the listener is called. If both are held, it is locked before the queue's mutex_.
    Mutex listener_mutex;
    /// Null: the job is over.
    std::shared_ptr<JobListener> listener ABSL_GUARDED_BY(listener_mutex);
    JobTiming timing ABSL_GUARDED_BY(listener_mutex);
    int64_t evaluations_done ABSL_GUARDED_BY(listener_mutex) = 0;  // over all images
    int images_done ABSL_GUARDED_BY(listener_mutex) = 0;
    bool started ABSL_GUARDED_BY(listener_mutex) = false;
  };

  /// One image of a job, from the time that a device first takes it.
  struct Image {
    const std::shared_ptr<Job> job;
    const int index;  // within the request
    // Used by the device that has the image.
    int evaluation = 0;                         // next in the plan
    std::unique_ptr<Evaluator::Parked> parked;  // its state, while it has lost its slot

    int evaluations_left() const { return job->effective.evaluations - evaluation; }
    /// Its next evaluation was launched.
    void Launched() {
      const int rows = job->effective.RowsAt(evaluation++);
      job->rows_launched += rows;
      rows_launched += rows;
    }

   private:
    friend JobQueue;
    Image(std::shared_ptr<Job> job_in, int index_in, int reported_in)
        : job(std::move(job_in)), index(index_in), reported(reported_in) {}

    std::atomic<int64_t> rows_launched{0};  // wasted if its device is lost
    bool in_slot = false;                   // guarded by the queue's mutex_
    // Guarded by job->listener_mutex.
    int reported;  // evaluations that were reported to the listener, also of images it replaces
    bool delivered = false;
    bool lost = false;  // with its device: another Image has replaced it
  };

  /// `admission` must outlive the queue.
  explicit JobQueue(Admission& admission, std::function<Clock::time_point()> now = Clock::now)
      : admission_(admission), now_(std::move(now)) {}
  ~JobQueue();

  /// `wake` is called when idle devices may have work. Set before the first Submit.
  void SetWake(std::function<void()> wake) { wake_ = std::move(wake); }

  /// Queues a resolved job, or refuses it with the errors of Admission::Enter.
  absl::StatusOr<JobId> Submit(EffectiveJob job, std::shared_ptr<JobListener> listener,
                               Estimate* estimate = nullptr);
  /// Frees the job's place in the queue at once; a device's thread ends the job later. Unknown ids
  /// are ignored.
  void End(JobId id, const absl::Status& status, EndReason reason);
  /// Ends all jobs, on this thread.
  void EndAll(const absl::Status& status, EndReason reason);
  /// Waits until there are no jobs of `model`, or none at all if it is null. False if `deadline`
  /// passed first.
  bool WaitForNone(const std::string* model,
                   std::optional<Clock::time_point> deadline = std::nullopt);

  /// From now on the device draws this model, or no longer does. A lost device draws none, also if
  /// it was adding the model when it was lost.
  void AddModel(const std::string& model, int device);
  void RemoveModel(const std::string& model, int device);
  /// The device takes no more images, ever, and the images it has wait for other devices. Called
  /// from any thread, since the device's own may hang.
  void Lose(int device);

  Clock::time_point Now() const { return now_(); }

  // Called by the devices' threads.
  /// Ends the jobs of End() and the jobs whose deadlines have passed.
  void EndDueJobs();
  /// Whether there is anything to do for a device that has no image.
  bool HasWork(int device) const;

  /// Jobs of one model at one image size.
  struct Size {
    std::shared_ptr<Admission::Lane> lane;
    std::string model;
    int height = 0, width = 0;
    bool waited = false;  // so long for room that it waits no more: OpenLater() must not follow
  };
  /// A size with waiting jobs that this device should take memory for, because no device has memory
  /// for it or those that have cannot hold all its images: the one whose next job is the oldest.
  /// Opened() or OpenLater() must follow.
  std::optional<Size> ToOpen(int device);
  /// The device can draw this size. Otherwise `status` says why not, and jobs that no device can
  /// draw end with it.
  void Opened(const Size& size, int device, const absl::Status& status);
  /// What a size waits for: memory that any other size may give up, or its model's share of the
  /// memory for sizes.
  enum class Lack : uint8_t { kMemory, kShare };
  /// The device has no room for the size now, because other sizes are in use. ToOpen() returns it
  /// again after MayHaveRoom(), or when it has waited for half a minute.
  void OpenLater(const Size& size, int device, Lack lack);
  /// Whether jobs wait because of OpenLater(), for room that a size of this model may give up.
  bool WaitsForRoom(int device, const std::string& of_model) const;
  /// The device may try again to take memory for these.
  void MayHaveRoom(int device, const std::string& of_model);
  /// The device gives up its memory for the size. False if jobs wait for it.
  bool Close(const std::shared_ptr<Admission::Lane>& lane, int device);

  /// The job whose image this device should take next, or null. The device has `own_rows` rows of
  /// the lane; if that is its equal share already, the result is null and others take the rest. If
  /// none of them does so within the time of two evaluations, they hang or do something else, and
  /// this device takes it.
  std::shared_ptr<Job> First(const std::shared_ptr<Admission::Lane>& lane, int device,
                             int own_rows);
  /// Takes an image of the job, which has a slot from now on. Null if other devices have taken all.
  std::shared_ptr<Image> Take(const std::shared_ptr<Job>& job, int device);
  /// An image of the job is in its slot.
  void Began(Job& job);
  /// The image left its slot after its last evaluation.
  void Drawn(const std::shared_ptr<Image>& image);
  /// The image was parked and its state is in host memory: it waits for any device.
  void Requeue(const std::shared_ptr<Image>& image);

  /// What one evaluation did for one image.
  struct Outcome {
    std::shared_ptr<Image> image;
    int evaluation = 0;                            // 1-based
    std::vector<std::pair<Stage, double>> stages;  // the stages that were done, with their seconds
    std::optional<ImageResult> preview, result;
    absl::Status error;  // not OK: the image's job ends with it
  };
  /// Calls the listeners, and those of waiting jobs whose places have changed.
  void Report(std::vector<Outcome> outcomes);

 private:
  struct Model {
    std::set<int> devices;  // those that draw it
    bool lost = false;      // a lost device may have it, and may still return from a hang
  };
  /// A walk over the waiting jobs of a lane that tells them their places: a few after each
  /// evaluation, so that it takes no longer the more jobs wait.
  struct Round {
    std::optional<Clock::time_point> begun;
    std::optional<std::pair<double, JobId>> next;  // null: the walk is over
    int jobs = 0, images = 0;                      // in front of `next`
  };
  /// The jobs of one lane.
  struct LaneQueue {
    Size size;
    std::map<std::pair<double, JobId>, std::shared_ptr<Job>> waiting;  // jobs with images, in order
    std::set<int> open, refused;  // devices that have memory for the size; that could not get it
    std::optional<int> opening;   // the device that is taking it
    std::map<int, Lack> later;    // devices that had no room for it
    std::optional<Clock::time_point> waits;  // for room, since then
    /// The device that leaves images to the others, since then.
    std::optional<std::pair<int, Clock::time_point>> left;
    Round round;
    bool needed() const { return !waiting.empty() || !open.empty() || opening; }
    /// Whether it waits for room that a size of this model may give up.
    bool WaitsFor(int device, const std::string& of_model) const {
      const auto lacks = later.find(device);
      return lacks != later.end() && (lacks->second == Lack::kMemory || size.model == of_model);
    }
  };
  struct Ending {
    std::shared_ptr<Job> job;
    absl::Status status;
    EndReason reason;
  };

  bool HasWaited(const LaneQueue& queue) const {
    return queue.waits && now_() - *queue.waits >= kWaitForRoom;
  }
  bool MayOpen(const LaneQueue& queue, int device) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// All sizes may try again.
  void TryAgain(int device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Wait(const std::shared_ptr<Job>& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StopWaiting(const Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartEnding(Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasJobs(const std::string* model) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Wake();
  void TellPlaces(const std::shared_ptr<Admission::Lane>& lane);
  void Finish(Job& job, const absl::Status& status, std::optional<EndReason> reason);
  void FinishLocked(Job& job, const absl::Status& status, std::optional<EndReason> reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job.listener_mutex);

  Admission& admission_;
  const std::function<Clock::time_point()> now_;
  std::function<void()> wake_;

  mutable Mutex mutex_;
  ConditionVariable job_ended_;
  JobId last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<JobId, std::shared_ptr<Job>> jobs_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<Clock::time_point, JobId>> deadlines_ ABSL_GUARDED_BY(mutex_);
  std::vector<Ending> endings_ ABSL_GUARDED_BY(mutex_);  // for the next EndDueJobs()
  std::set<int> lost_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Model> models_ ABSL_GUARDED_BY(mutex_);
  /// Those that are needed(). So there are few, however many sizes were ever requested.
  std::map<std::shared_ptr<Admission::Lane>, LaneQueue> queues_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace denoised
