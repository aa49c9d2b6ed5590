#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/batching/admission.h"
#include "engine/batching/evaluator.h"
#include "engine/batching/job.h"

namespace denoised {

/// A model on the device, as the step batcher runs it.
struct BatchedModel {
  std::string name;
  std::shared_ptr<const Denoiser> denoiser;
  int null_label = -1;  // the class of unconditional rows; −1: guidance is not offered
  int max_rows = 0;     // of one evaluation
  int slots = 0;        // images in flight, per size
  int max_evaluations = 0;
};

/// Decides what runs. Every evaluation of a model carries all rows that are ready, from any job, at
/// any noise level: images take a slot when one is free and leave it after their own last
/// evaluation, whatever their neighbours do. Not thread-safe: the engine's thread owns it, and
/// listeners are called from its methods.
///
/// Who gets a slot, and which lane the next evaluation, follows from Admission's order. When all
/// slots are taken, an image that goes first there gets the slot of one that goes last, which is
/// parked: its state goes to host memory and comes back with its bits unchanged. At most
/// Evaluator::kParksPerEvaluation are parked before an evaluation.
class StepBatcher {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    Batching batching = Batching::kStep;
    int keep_evaluations = 4;  // an image with no more of them to go is not parked
    std::function<Clock::time_point()> now = Clock::now;
  };

  /// `admission` outlives the batcher; `observer` may be null.
  StepBatcher(Backend& backend, Admission& admission, EngineObserver* observer,
              const Options& options);
  ~StepBatcher();

  /// Takes memory for the model at its native size.
  absl::Status AddModel(const BatchedModel& model, int height, int width);
  /// One part of what makes its first evaluations as quick as later ones; whether more is to do.
  absl::StatusOr<bool> WarmUp(const std::string& model);
  /// Whether any job of the model waits or is in flight.
  bool HasJobs(const std::string& model) const;
  /// Gives up a model without jobs and all its memory.
  absl::Status RemoveModel(const std::string& model);
  /// Bytes taken for a model: activations, and images in flight.
  size_t ActivationBytes(const std::string& model) const;
  size_t SlotBytes(const std::string& model) const;

  /// Queues a resolved job that `ticket` let in. A size that comes up for the first time gets
  /// memory of its own now; when there is none, the job ends with ResourceExhausted.
  void Submit(JobId id, EffectiveJob job, std::shared_ptr<JobListener> listener,
              Clock::time_point submitted, std::shared_ptr<Admission::Ticket> ticket);
  /// Ends a job with `status`; unknown ids are ignored.
  void End(JobId id, const absl::Status& status, EndReason reason);
  void EndAll(const absl::Status& status, EndReason reason);

  /// Whether Step() has anything to do.
  bool busy() const;
  /// One turn: ends jobs past their deadline, gives slots to waiting images, enqueues one
  /// evaluation and reports an earlier one. The error is the device's, and final.
  absl::Status Step();

 private:
  struct Job;
  struct Lane;
  struct Evaluated;
  struct ParkedImage;

  absl::StatusOr<Lane*> LaneFor(const std::string& model, int height, int width);
  absl::StatusOr<std::unique_ptr<Lane>> MakeLane(const BatchedModel& model, int height, int width);
  absl::StatusOr<bool> WarmUp(Lane& lane);
  bool EvictIdleLane(const std::string* model);
  void EndExpired();
  absl::Status Admit(Lane& lane);
  bool MakeRoom(Lane& lane, const Job& job, int most);
  void Park(Lane& lane, int slot);
  absl::Status Begin(Lane& lane, int slot, const std::shared_ptr<Job>& job);
  absl::Status Launch(Lane& lane);
  absl::Status Report();
  void Finish(Job& job, const absl::Status& status, std::optional<EndReason> reason);

  Backend& backend_;
  Admission& admission_;
  EngineObserver* observer_;
  const Options options_;
  std::map<std::string, BatchedModel> models_;
  std::list<std::unique_ptr<Lane>> lanes_;  // the longest unused first
  std::map<JobId, std::shared_ptr<Job>> jobs_;
  std::set<std::pair<Clock::time_point, JobId>> deadlines_;
  std::vector<std::shared_ptr<ParkedImage>> parked_;  // since the last launch
  std::deque<Evaluated> evaluated_;                   // enqueued, not yet reported
};

}  // namespace denoised
