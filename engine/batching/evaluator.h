#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/core/arena.h"
#include "engine/models/denoiser.h"

namespace denoised {

/// One model at one image size, with the state of its images in flight and one captured graph per
/// row bucket: gather → model → guidance and sampler step → scatter. Belongs to the thread that
/// owns the device; calls enqueue.
class Evaluator {
 public:
  struct Options {
    int height = 0, width = 0;
    int max_rows = 0;
    int slots = 0;
    int max_evaluations = 0;  // longest plan
    int downloads = 0;        // of states and predictions, under way at a time
    int flag_downloads = 0;   // of Nonfinite, under way at a time
    int parks = 0;            // on their way to the host at a time
  };

  /// Plans memory by a dry run of every bucket, then takes it. ResourceExhausted says what
  /// was needed and what is free.
  static absl::StatusOr<std::unique_ptr<Evaluator>> Create(Backend& backend,
                                                           std::shared_ptr<const Denoiser> denoiser,
                                                           const Options& options);

  struct Warmed {
    int bucket = 0;
    double seconds = 0;  // of an evaluation of it
    bool more = false;   // buckets are left
  };
  /// Captures the graph of one bucket more and runs it, so that no request pays for it. One a call,
  /// since others may be waiting for the device.
  absl::StatusOr<Warmed> WarmUp();

  struct Start {
    const std::vector<DeviceEvaluation>* plan = nullptr;
    uint64_t seed = 0;
    float guidance_scale = 1;
    std::span<const float> embedding;  // class value or vector; empty otherwise
    const float* source = nullptr;     // optional [H, W, C] host memory
    const float* noise = nullptr;      // optional [H, W, C] host memory
    float source_scale = 0, noise_scale = 1, churn_scale = 0;
  };
  /// Puts an image in `slot`, whatever was there before.
  void Begin(int slot, const Start& start);

  /// An image between two evaluations without a slot: all that Begin cannot make anew of it. First
  /// under way to the host, from Arrive() on there.
  struct Parked {
    std::unique_ptr<Download> x_download, registers_download, nonfinite_download;
    Tensor x, registers, nonfinite;
    absl::Status Arrive();
    /// Of the host's memory, from Arrive() on.
    size_t bytes() const { return x.bytes() + registers.bytes(); }
  };
  size_t parked_bytes() const { return (1 + kRegisters) * source_.bytes(); }
  /// The slot may be used again at once.
  std::unique_ptr<Parked> Park(int slot);
  /// Puts a parked image, begun by `start` and with so many evaluations done, in `slot`: its bits
  /// are those it would have had without a break. It must have arrived, and may come from another
  /// device.
  void Resume(int slot, const Start& start, int evaluations_done, const Parked& parked);

  /// One evaluation of these rows (at most max_rows); returns the bucket they were padded to.
  absl::StatusOr<int> Evaluate(std::span<const EvaluationRow> rows);

  /// The slot's state, or its predicted x0, at this point: F32 [H, W, C].
  std::unique_ptr<Download> DownloadState(int slot);
  std::unique_ptr<Download> DownloadX0(int slot);
  /// For each slot the first evaluation (1-based) that was not finite, or 0: I32 [slots].
  std::unique_ptr<Download> DownloadNonfinite();

  const Options& options() const { return options_; }
  /// What rows are padded to, ascending.
  const std::vector<int>& buckets() const { return buckets_; }
  /// Bytes of device memory: activations at their peak, and the images in flight.
  size_t activation_bytes() const { return activation_bytes_; }
  size_t slot_bytes() const { return slot_bytes_; }
  /// Floating-point operations of one row, as counted by the dry run.
  double flops_per_row() const { return flops_per_row_; }

 private:
  Evaluator(Backend& backend, std::shared_ptr<const Denoiser> denoiser, const Options& options);
  absl::Status Allocate();
  absl::StatusOr<Graph*> GraphFor(int bucket);
  void UploadStart(int slot, const Start& start);
  void Enqueue(int bucket);
  /// The network's output for rows [begin, begin + count) of rows_.
  Tensor Predict(Backend& backend, Arena& arena, int begin, int count);
  Tensor SlotOf(const Tensor& per_slot, int slot) const;

  Backend& backend_;
  std::shared_ptr<const Denoiser> denoiser_;
  Options options_;
  std::vector<int> buckets_;
  SlotState state_;
  Tensor rows_;  // I32 [max_rows, 4]
  std::shared_ptr<const void> downloads_, flag_downloads_, register_downloads_;  // their memory
  Tensor source_, noise_;           // F32 [H, W, C]: what Begin uploads
  Tensor outputs_;                  // F32 [max_rows, H, W, output channels], where rows are split
  std::optional<Arena> arena_;      // for rows computed together
  std::vector<Arena> part_arenas_;  // by worker, for rows computed in parts; in the same memory
  std::map<int, std::unique_ptr<Graph>> graphs_;
  std::vector<EvaluationRow> uploaded_rows_;
  size_t warm_buckets_ = 0;
  size_t activation_bytes_ = 0, slot_bytes_ = 0;
  double flops_per_row_ = 0;
};

}  // namespace denoised
