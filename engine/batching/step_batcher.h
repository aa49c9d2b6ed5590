// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/batching/admission.h"
#include "engine/batching/conditioner.h"
#include "engine/batching/evaluator.h"
#include "engine/batching/job_queue.h"
#include "engine/batching/latent_preview.h"
#include "engine/job.h"

namespace denoised {

/// A model on the device, as the step batcher runs it.
struct BatchedModel {
  std::string name;
  /// The queue of its evaluations, which then overlap with those of other models. Null: the
  /// batcher's backend. On the same device; only the device's thread may use it.
  std::shared_ptr<Backend> backend;
  std::shared_ptr<const Denoiser> denoiser;
  std::shared_ptr<const Codec> codec;  // null: the state is the image
  ImageInput image_input = ImageInput::kNone;
  Conditioner::Encoders text_encoders;         // none: the model reads no text
  int max_images = 1;                          // that are decoded after one evaluation, and that
                                               // the codec encodes or decodes side by side
  LatentPreview preview;                       // with a codec
  std::shared_ptr<const Codec> preview_codec;  // for PreviewDecoder::kTiny; null: there is none
  int null_label = -1;  // the class of unconditional rows; −1: guidance is not offered
  int max_rows = 0;     // of one evaluation
  int slots = 0;        // images in flight at the model's own size
  int max_evaluations = 0;
  bool measures_outputs = false;  // see Evaluator::Options
};

/// Decides what runs on one device. Every evaluation of a model carries all rows that are ready,
/// from any job, at any noise level, unless padding them would waste time (Chosen()). An image
/// takes a slot when one is free and leaves it after its own last evaluation, whatever its
/// neighbours do. Not thread-safe: the device's thread owns it.
///
/// Admission's order decides which image gets a slot and which batch is evaluated next. Images come
/// from the JobQueue, which all devices share. When all slots are taken, the first image in the
/// order gets the slot of the last one. That image is parked: its state goes to host memory and
/// comes back, here or on another device, with its bits unchanged.
///
/// Sizes. A model's own size has its memory from the start. The others use the same activations in
/// turns, and take a few slots each when they are first requested (kSizesMemory, SlotsOfNewSize()).
/// Their graphs are captured when they are first needed. An idle size is evicted when another needs
/// room or when it was not used for a long time.
class StepBatcher {
 public:
  /// A size that nobody has requested for this long is evicted.
  static constexpr std::chrono::minutes kUnused{10};

  struct Options {
    int device = 0;  // its number in the queue
    Batching batching = Batching::kStep;
    int keep_evaluations = 4;      // an image with this many left, or fewer, is not parked
    bool allow_nonfinite = false;  // as EngineOptions::allow_nonfinite
    /// Called in the middle of a Step() that opened a size. May be null.
    std::function<void()> part_done;
  };

  /// `admission` and `queue` must outlive the batcher; `observer` may be null.
  StepBatcher(Backend& backend, Admission& admission, JobQueue& queue, EngineObserver* observer,
              const Options& options);
  ~StepBatcher();

  /// Takes memory for the model at its native size, in pixels, and for its prompts.
  absl::Status AddModel(const BatchedModel& model, int height, int width);
  /// One step of warming up the prompts, then the codec and the row buckets (see
  /// Evaluator::WarmUp()), so that no request has to wait for it. False after the last.
  absl::StatusOr<bool> WarmUp(const std::string& model);
  /// Frees a model that has no jobs, and all its memory.
  absl::Status RemoveModel(const std::string& model);
  /// Bytes taken for a model: activations, images in flight, and prompts.
  size_t ActivationBytes(const std::string& model) const;
  size_t SlotBytes(const std::string& model) const;
  size_t PromptBytes(const std::string& model) const;

  /// Frees the memory of all idle sizes. False if there are none.
  bool EvictIdle();
  /// When the next idle size will have been unused for kUnused.
  std::optional<JobQueue::Clock::time_point> NextEviction() const;
  /// Evicts a size that has been unused for kUnused, if there is one. Step() does it too.
  void EvictUnused();

  /// Whether Step() has anything to do.
  bool busy() const;
  /// Ends jobs that are due to end, takes memory for a size that is requested for the first time,
  /// gives slots to waiting images, enqueues one evaluation and reports an earlier one. An error is
  /// the device's, and final.
  absl::Status Step();
  /// The first error of the device, in any queue.
  absl::Status status() const;

 private:
  using Job = JobQueue::Job;
  using Image = JobQueue::Image;
  struct Batch;
  struct Evaluated;
  struct StageRun;
  struct Starting;

  absl::StatusOr<bool> OpenSizes();
  absl::StatusOr<std::unique_ptr<Batch>> MakeBatch(const BatchedModel& model, int height, int width,
                                                   int slots);
  Batch& OwnSizeOf(const std::string& model);
  int SlotsOfNewSize(const JobQueue::Size& size);
  template <typename Take>
  auto MakingRoom(Take take) -> decltype(take());
  bool IsIdle(const Batch& batch) const;
  bool CanMakeRoom() const;
  bool EvictIdleBatch(const std::string* model);
  bool EvaluationsWait() const;
  absl::Status Decode(Batch& batch, Evaluated* evaluated);
  absl::Status DecodeNext(Batch& batch, int count, Evaluated* evaluated);
  absl::Status Preview(Batch& batch, Evaluated* evaluated);
  Backend& BackendOf(const BatchedModel& model) const;
  void FreeEnded();
  bool Admits(const Batch& batch) const;
  absl::Status Admit(Batch& batch);
  std::vector<int> Victims(const Batch& batch, const Job& job, size_t most) const;
  size_t RoomToPark(const Batch& batch) const;
  void Park(Batch& batch, int slot);
  static Evaluator::Start StartOf(Job& job, int image);
  static int MissingPictures(Batch& batch, Job& job);
  absl::Status Begin(Batch& batch, const std::vector<int>& slots);
  absl::Status Encode(Batch& batch, const std::vector<Starting>& starting);
  std::vector<int> Chosen(const Batch& batch) const;
  double LeastSeconds(const Admission::Lane& lane, const std::vector<int>& buckets, int rows) const;
  absl::Status Launch(Batch& batch);
  absl::StatusOr<Evaluated> NextToEnd();
  absl::Status Report();

  Backend& backend_;
  Admission& admission_;
  JobQueue& queue_;
  EngineObserver* observer_;
  const Options options_;
  const std::string device_name_;
  std::map<std::string, BatchedModel> models_;
  std::map<std::string, std::unique_ptr<Conditioner>> conditioners_;  // of models that read text
  std::list<std::unique_ptr<Batch>> batches_;                         // least recently used first
  std::vector<std::shared_ptr<Image>> parked_;                        // since the last launch
  std::deque<Evaluated> evaluated_;                                   // enqueued, not yet reported
  std::unique_ptr<Marker> last_end_;  // of the evaluation reported last
};

}  // namespace denoised
