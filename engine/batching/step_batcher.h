#pragma once

#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/batching/admission.h"
#include "engine/batching/evaluator.h"
#include "engine/batching/job_queue.h"
#include "engine/job.h"

namespace denoised {

/// A model on the device, as the step batcher runs it.
struct BatchedModel {
  std::string name;
  /// The queue of its evaluations, which then overlap with those of other models; null: the
  /// batcher's. On the batcher's device, and its thread's alone.
  std::shared_ptr<Backend> backend;
  std::shared_ptr<const Denoiser> denoiser;
  int null_label = -1;  // the class of unconditional rows; −1: guidance is not offered
  int max_rows = 0;     // of one evaluation
  int slots = 0;        // images in flight, per size
  int max_evaluations = 0;
};

/// Decides what runs on one device. Every evaluation of a model carries all rows that are ready,
/// from any job, at any noise level: images take a slot when one is free and leave it after their
/// own last evaluation, whatever their neighbours do. Not thread-safe: the device's thread owns it.
///
/// Who gets a slot, and which lane the next evaluation, follows from Admission's order; images come
/// from the JobQueue, which all devices share. When all slots are taken, an image that goes first
/// there gets the slot of one that goes last, which is parked: its state goes to host memory and
/// comes back, here or on another device, with its bits unchanged.
class StepBatcher {
 public:
  struct Options {
    int device = 0;  // as the queue knows it
    Batching batching = Batching::kStep;
    int keep_evaluations = 4;      // an image with no more of them to go is not parked
    bool allow_nonfinite = false;  // as EngineOptions::allow_nonfinite
    /// Step() did a part that may take as long as an evaluation, and goes on; may be null.
    std::function<void()> part_done;
  };

  /// `admission` and `queue` outlive the batcher; `observer` may be null.
  StepBatcher(Backend& backend, Admission& admission, JobQueue& queue, EngineObserver* observer,
              const Options& options);
  ~StepBatcher();

  /// Takes memory for the model at its native size.
  absl::Status AddModel(const BatchedModel& model, int height, int width);
  /// One part of what makes its first evaluations as quick as later ones; whether more is to do.
  absl::StatusOr<bool> WarmUp(const std::string& model);
  /// Gives up a model without jobs and all its memory.
  absl::Status RemoveModel(const std::string& model);
  /// Bytes taken for a model: activations, and images in flight.
  size_t ActivationBytes(const std::string& model) const;
  size_t SlotBytes(const std::string& model) const;

  /// Whether Step() has anything to do.
  bool busy() const;
  /// One turn: ends jobs that are to end, does one part of taking memory and warming up for a size
  /// that came up for the first time, gives slots to waiting images, enqueues one evaluation and
  /// reports an earlier one. The error is the device's, and final.
  absl::Status Step();
  /// The first error of the device, in any queue.
  absl::Status status() const;

 private:
  using Job = JobQueue::Job;
  using Image = JobQueue::Image;
  struct Lane;
  struct Evaluated;
  struct Opening;

  absl::StatusOr<bool> OpenSizes();
  absl::StatusOr<bool> OpenPart();
  absl::StatusOr<std::unique_ptr<Lane>> MakeLane(const BatchedModel& model, int height, int width);
  absl::StatusOr<bool> WarmUp(Lane& lane);
  bool EvictIdleLane(const std::string* model);
  Backend& BackendOf(const BatchedModel& model) const;
  void FreeEnded();
  absl::Status Admit(Lane& lane);
  std::vector<int> Victims(const Lane& lane, const Job& job, size_t most) const;
  size_t RoomToPark(const Lane& lane) const;
  void Park(Lane& lane, int slot);
  void Begin(Lane& lane, int slot, std::shared_ptr<Image> image);
  absl::Status Launch(Lane& lane);
  absl::StatusOr<Evaluated> NextToEnd();
  absl::Status Report();

  Backend& backend_;
  Admission& admission_;
  JobQueue& queue_;
  EngineObserver* observer_;
  const Options options_;
  const std::string device_name_;
  std::map<std::string, BatchedModel> models_;
  std::list<std::unique_ptr<Lane>> lanes_;      // the longest unused first
  std::unique_ptr<Opening> opening_;            // null: no size is
  std::vector<std::shared_ptr<Image>> parked_;  // since the last launch
  std::deque<Evaluated> evaluated_;             // enqueued, not yet reported
  std::unique_ptr<Marker> last_end_;            // of what was reported
};

}  // namespace denoised
