#pragma once

#include <chrono>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

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
/// Fairness: waiting jobs take turns, an image each; models and sizes take turns, an evaluation
/// each.
class StepBatcher {
 public:
  using Clock = std::chrono::steady_clock;

  /// `observer` may be null.
  StepBatcher(Backend& backend, EngineObserver* observer);
  ~StepBatcher();

  /// Takes memory for the model at its native size, or at `height` × `width` when it names none.
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

  /// Queues a resolved job of a model that was added. Sizes other than the first get memory of
  /// their own now; when there is none, the job ends with ResourceExhausted.
  void Submit(JobId id, EffectiveJob job, std::shared_ptr<JobListener> listener,
              Clock::time_point submitted);
  /// Ends a job with `status`; unknown ids are ignored.
  void End(JobId id, const absl::Status& status);
  void EndAll(const absl::Status& status);

  /// Whether Step() has anything to do.
  bool busy() const;
  /// One turn: ends jobs past their deadline, gives free slots to waiting images, enqueues one
  /// evaluation and reports an earlier one. The error is the device's, and final.
  absl::Status Step();

  /// Images of a job that have not had a slot; 0 for unknown ids.
  int waiting_images(JobId id) const;
  /// Images of a model in flight.
  int active_images(const std::string& model) const;

 private:
  struct Job;
  struct Lane;
  struct Evaluated;

  absl::StatusOr<Lane*> LaneFor(const std::string& model, int height, int width);
  void EndExpired();
  void Admit(Lane& lane);
  void Begin(Lane& lane, int slot, const std::shared_ptr<Job>& job);
  absl::Status Launch(Lane& lane);
  absl::Status Report();
  void Finish(Job& job, const absl::Status& status);

  Backend& backend_;
  EngineObserver* observer_;
  std::map<std::string, BatchedModel> models_;
  std::list<std::unique_ptr<Lane>> lanes_;  // in the order of their turns
  std::map<JobId, std::shared_ptr<Job>> jobs_;
  std::deque<Evaluated> evaluated_;  // enqueued, not yet reported
};

}  // namespace denoised
