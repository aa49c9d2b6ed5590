#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
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
#include "engine/job.h"

namespace denoised {

/// All jobs that are not over, and where each of their images is: waiting, or with one of the
/// devices. Every device takes images when it has room for them, in the order of Admission, and
/// tells what became of them; the listeners hear of it from here. An image stays with the device
/// that took it, unless it is parked, and then any may go on with it, or the device is lost, and
/// then it is drawn again: what its listener has heard is not repeated. Thread-safe; devices are
/// numbers that whoever owns them chooses.
class JobQueue {
 public:
  using Clock = std::chrono::steady_clock;
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
    bool guided() const { return *effective.spec.guidance_scale > 1; }
    int rows() const { return guided() ? 2 : 1; }
    std::pair<double, JobId> key() const { return Admission::Key(*ticket); }
    /// Made when the first image has a slot.
    const std::vector<DeviceEvaluation>& plan();

   private:
    friend JobQueue;
    Job(JobId id, EffectiveJob effective, Clock::time_point submitted,
        std::shared_ptr<Admission::Ticket> ticket);
    int waiting() const { return count() - next_image + static_cast<int>(again.size()); }

    std::once_flag plan_made;
    std::vector<DeviceEvaluation> device_plan;
    // Under the queue's mutex.
    int next_image = 0;                             // the first that no device has had
    std::deque<std::shared_ptr<Image>> again;       // that one had, and that wait once more
    std::map<std::shared_ptr<Image>, int> devices;  // where those are that do not wait
    bool ending = false;                            // it is about to be over
    // Under `telling`, which is locked before the queue's mutex if both are.
    std::mutex telling;
    std::shared_ptr<JobListener> listener;  // null: the job is over
    JobTiming timing;
    int64_t evaluations_done = 0;  // over all images
    int images_done = 0;
    bool started = false;
  };

  /// One image on its way.
  struct Image {
    const std::shared_ptr<Job> job;
    const int index;  // within the request
    // Of the device that has it.
    int evaluation = 0;                         // next in the plan
    std::unique_ptr<Evaluator::Parked> parked;  // its state, when it lost its slot

    int evaluations_left() const { return job->effective.evaluations - evaluation; }

   private:
    friend JobQueue;
    Image(std::shared_ptr<Job> job_in, int index_in, int told_in)
        : job(std::move(job_in)), index(index_in), told(told_in) {}

    bool in_slot = false;  // under the queue's mutex
    // Under job->telling.
    int told;           // evaluations that the listener has heard of
    bool lost = false;  // with its device: another Image has taken its place
  };

  /// `admission` outlives the queue.
  explicit JobQueue(Admission& admission, std::function<Clock::time_point()> now = Clock::now)
      : admission_(admission), now_(std::move(now)) {}
  ~JobQueue();

  /// `wake` is called when devices without work may have some. Set before there are jobs.
  void SetWake(std::function<void()> wake) { wake_ = std::move(wake); }

  /// Queues a resolved job, or says why not, as Admission::Enter.
  absl::StatusOr<JobId> Submit(EffectiveJob job, std::shared_ptr<JobListener> listener,
                               Estimate* estimate = nullptr);
  /// Frees the job's place in the queue at once; a device's thread ends it. Unknown ids are
  /// ignored.
  void End(JobId id, const absl::Status& status, EndReason reason);
  /// Ends all there are, on this thread.
  void EndAll(const absl::Status& status, EndReason reason);
  /// Waits until no job is left, of `model` unless it is null; false at the deadline.
  bool WaitForNone(const std::string* model,
                   std::optional<Clock::time_point> deadline = std::nullopt);

  /// The device draws the model from now on, or no longer.
  void AddModel(const std::string& model, int device);
  void RemoveModel(const std::string& model, int device);
  /// The device takes no image from now on, and those that it has wait for others. Called from any
  /// thread: the device's own may hang.
  void Lose(int device);

  // Of the devices' threads.
  /// Ends the jobs that were to end and those past their deadlines.
  void Settle();
  /// Whether there is anything for a device that has no image.
  bool HasWork(int device) const;

  /// Jobs of one model at one image size.
  struct Size {
    Admission::Lane* lane = nullptr;
    std::string model;
    int height = 0, width = 0;
  };
  /// A size with waiting jobs that the device has no memory for yet and that it should take memory
  /// for: nobody has, or those who have cannot carry all. Opened() must follow.
  std::optional<Size> ToOpen(int device);
  /// The device can draw this size, or why it cannot: jobs that no device can draw end with that.
  void Opened(const Size& size, int device, const absl::Status& status);
  /// The device gives up its memory for the size; false when jobs wait for it.
  bool Close(Admission::Lane* lane, int device);

  /// The job of which an image goes next, unless the others should take it: the device has
  /// `own_rows` rows of the lane, and all shall have alike. Null when there is none.
  std::shared_ptr<Job> First(Admission::Lane* lane, int device, int own_rows) const;
  /// An image of it, with a slot from now on; null when others took them all.
  std::shared_ptr<Image> Take(const std::shared_ptr<Job>& job, int device);
  /// The image has begun.
  void Began(Job& job);
  /// It left its slot after its last evaluation.
  void Drawn(const std::shared_ptr<Image>& image);
  /// It was parked, and its state has arrived on the host.
  void GiveBack(std::shared_ptr<Image> image);

  /// What an evaluation brought.
  struct Outcome {
    std::shared_ptr<Image> image;
    int evaluation = 0;  // 1-based
    std::optional<ImageResult> preview, result;
    absl::Status error;  // not OK: the image's job ends with it
  };
  void Tell(std::vector<Outcome> outcomes);

 private:
  struct Model {
    std::set<int> devices;  // that draw it
    bool lost = false;      // one that is lost may come back from where it hangs
  };
  struct Line {
    Size size;
    std::map<std::pair<double, JobId>, std::shared_ptr<Job>> waiting;  // jobs with images, in order
    std::set<int> open, refused;  // devices that have memory for it, and that cannot
    std::optional<int> opening;   // the one that is taking it
  };
  struct Ending {
    std::shared_ptr<Job> job;
    absl::Status status;
    EndReason reason;
  };

  Line& LineOf(const Job& job) { return lines_.at(Admission::LaneOf(*job.ticket)); }
  bool MayOpen(const Line& line, int device) const;
  void Wait(const std::shared_ptr<Job>& job);
  void StopWaiting(const Job& job);
  void StartEnding(Job& job);
  void Wake();
  void Finish(const std::shared_ptr<Job>& job, const absl::Status& status,
              std::optional<EndReason> reason);
  void FinishLocked(const std::shared_ptr<Job>& job, const absl::Status& status,
                    std::optional<EndReason> reason);

  Admission& admission_;
  const std::function<Clock::time_point()> now_;
  std::function<void()> wake_;

  mutable std::mutex mutex_;
  std::condition_variable none_;
  JobId last_id_ = 0;
  std::map<JobId, std::shared_ptr<Job>> jobs_;
  std::set<std::pair<Clock::time_point, JobId>> deadlines_;
  std::vector<Ending> ended_;  // that no device's thread has seen yet
  std::map<std::string, Model> models_;
  std::map<Admission::Lane*, Line> lines_;
};

}  // namespace denoised
