// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/training/backend.h"
#include "engine/training/exchange.h"
#include "engine/training/objective.h"
#include "engine/training/prefetcher.h"
#include "engine/training/schedule.h"
#include "engine/training/task.h"

namespace denoised::training {

struct TrainerOptions {
  int64_t steps = 10000;
  int64_t batch = 64;  // samples of a step, over all ranks
  int64_t chunks = 8;  // a power of two that divides the batch; part of what the bits depend on
  int64_t accumulation = 1;  // micro-batches of a step; the bits do not depend on it
  uint64_t seed = 0;
  ObjectiveOptions objective;
  RateSchedule rate;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
  double clip = 1;  // the largest norm of the gradient; 0: no clipping
  std::vector<AverageOptions> averages = {{}};
  double dropout = 0;        // in the resnets
  double class_dropout = 0;  // the share of samples that get null_class, or the empty caption
  int null_class = -1;
  bool flip = false;   // half of the samples are mirrored; not with augment, which does so itself
  double augment = 0;  // probability of each of EDM's augmentations (augment.h); 0: none
  /// This many threads prepare the pictures of the next step during the current one. 0: two if the
  /// pictures are on disk, do not fit the device's memory, or are augmented; else none, and all
  /// pictures are in that memory. The bits do not depend on it.
  int prefetch_threads = 0;
  /// Whether the backward pass computes the outputs of norms again: less memory, a little slower,
  /// the same bits. Default: from 100 million parameters on, where it costs about 2 % of a step.
  std::optional<bool> recompute_norms;

  /// InvalidArgument names the field, its value and the remedy.
  absl::Status Check(int ranks) const;
};

/// Pictures of one size. The trainer keeps what it needs.
struct Dataset {
  Tensor images;                // U8 [M, H, W, C] on the host
  bool on_disk = false;         // images are a mapped file, which takes no memory
  std::vector<int32_t> labels;  // one each, or empty
  Tensor vectors;               // F32 [M, D] on the host: a class vector each; or undefined
  /// [M]: the relative frequency of each picture; not all 0. Empty: each picture comes once per
  /// epoch.
  std::vector<double> weights;

  // For text to image, instead of images and labels:
  /// F32 [M, h, w, 2C] on the host: the encoded pictures, as the network reads them; mean, then
  /// deviation. With flip [2M, …]: the mirrored pictures follow.
  Tensor posteriors;
  Tensor tokens;  // I32 [captions + 1, tokens] on the host; the last is the empty caption
  std::vector<int32_t> first_caption;  // [M + 1]: picture i has those from [i] to [i + 1]

  int64_t size() const {
    return first_caption.empty() ? images.dim(0) : static_cast<int64_t>(first_caption.size()) - 1;
  }
};

struct StepReport {
  int64_t step = 0;  // how many steps are done
  double loss = 0;   // mean over the batch
  double gradient_norm = 0;
  double rate = 0;
  bool skipped = false;  // the gradient was not finite, and nothing was changed
  bool stop = false;     // some rank wants to stop: all learn it at the same step
};

/// The state of a run, without its configuration. Host tensors; averages in the order of
/// TrainerOptions::averages.
struct TrainerState {
  int64_t step = 0;
  int64_t skipped = 0;          // steps whose gradient was not finite
  int64_t skipped_in_row = 0;   // up to now
  Tensor trained, fixed, m, v;  // flat, F32
  std::vector<Tensor> averages;
};

/// The memory and work of a run, from a pass that only counts. With a GPU it is that of the GPU.
struct TrainerPlan {
  int64_t parameters = 0;
  size_t weight_bytes = 0;      // masters, gradients, moments, averages, packed weights
  size_t activation_bytes = 0;  // of all passes at one time, without scratch memory of ops
  size_t dataset_bytes = 0;     // of the pictures in the device's memory
  size_t state_bytes = 0;       // of State(), on the host
  double step_flops = 0;        // of a whole step
};

/// What can be refused before there is a data set. InvalidArgument if options and network do not
/// fit together.
absl::Status CheckSettings(const NetworkConfig& config, const TrainerOptions& options);

/// InvalidArgument if the network cannot be trained with the labels or vectors of `dataset`, whose
/// pictures need not be there yet.
absl::Status CheckLabels(const UNet2DConfig& config, const TrainerOptions& options,
                         const Dataset& dataset);

/// What LoadWeights() of such a trainer refuses. Reads all weights, since each must be finite.
absl::Status CheckWeights(const NetworkConfig& config, const TrainerOptions& options,
                          const std::string& prefix, const Weights& weights);

/// InvalidArgument if nothing can be drawn by these Dataset::weights.
absl::Status CheckPictureWeights(const std::vector<double>& weights);

/// InvalidArgument if a pass has more samples than the kernels of `device` take.
absl::Status CheckPassRows(denoised::Device device, int64_t rows);

/// Runs steps: plans samples, runs passes, adds gradients as a tree, also over ranks, and updates
/// the weights. A step depends on (options, dataset, state) alone. Not thread-safe.
class Trainer {
 public:
  /// `backend` and `exchange` must outlive it. InvalidArgument if options, network and dataset do
  /// not fit together; ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<Trainer>> Make(Backend& backend, Exchange& exchange,
                                                       const NetworkConfig& config,
                                                       const TrainerOptions& options,
                                                       const Dataset& dataset);
  /// CheckPassRows() of the passes that `backend` makes of a step.
  static absl::Status CheckPasses(const Backend& backend, const TrainerOptions& options, int ranks);
  /// The memory and work of a run on `backend`, without allocating it.
  static absl::StatusOr<TrainerPlan> Plan(const Backend& backend, const NetworkConfig& config,
                                          const TrainerOptions& options, const Dataset& dataset,
                                          int ranks);
  ~Trainer();

  /// `wants_stop`: this rank wants to stop after the step. Unavailable when a rank or the device is
  /// lost.
  absl::StatusOr<StepReport> Step(bool wants_stop = false);

  const Parameters& parameters() const { return parameters_; }
  /// Copies everything to the host.
  absl::StatusOr<TrainerState> State() const;
  /// Continues from a state of a run with the same network and averages.
  absl::Status Restore(const TrainerState& state);
  /// Starts from a checkpoint's weights instead of random ones, averages too: the parameters whose
  /// names begin with `prefix`, which the checkpoint's names lack.
  absl::Status LoadWeights(const std::string& prefix, const Weights& weights);

  /// For tests: multiplies the first parameter's gradient in the next step.
  void ScaleNextGradient(float factor) { gradient_factor_ = factor; }

 private:
  class Tree;

  Trainer(Backend& backend, Exchange& exchange, const NetworkConfig& config,
          const TrainerOptions& options, Objective objective, const Dataset& dataset);
  absl::Status Allocate();
  static absl::Status CheckDataset(const NetworkConfig& config, const TrainerOptions& options,
                                   const Dataset& dataset);
  absl::Status AllocatePictures();
  int64_t PictureOf(int64_t step, int64_t local_sample) const;
  void PreparePicture(int64_t step, int64_t local_sample, uint8_t* to) const;
  void PlanSample(int64_t local_sample);
  void UploadSamples();
  void RunPass(int64_t pass, Arena& arena, const Tensor& gradient) const;
  /// Enqueues the rank's passes, whose sum goes to sum_.
  absl::Status RunPasses();
  /// Enqueues the samples and the passes of step `step_` + 1.
  absl::Status EnqueuePasses();
  void Pack();
  void Update();
  absl::Status AddOtherRanks();
  absl::Status UploadFlat(const Tensor& from, const Tensor& to) const;
  int64_t local_samples() const { return options_.batch / exchange_.ranks(); }
  int64_t pass_rows() const { return pass_chunks_ * options_.batch / options_.chunks; }

  Backend& backend_;
  Exchange& exchange_;
  const NetworkConfig config_;
  const TrainerOptions options_;
  const Objective objective_;
  const Dataset dataset_;
  const std::vector<double> cumulative_;  // of the dataset's weights
  Parameters parameters_;
  std::unique_ptr<Task> task_;
  int64_t pass_chunks_ = 1;
  int64_t step_ = 0, skipped_ = 0, skipped_in_row_ = 0;
  int64_t passes_enqueued_ = 0;
  std::optional<absl::Status> ahead_;  // what EnqueuePasses() said, if the next step's are enqueued
  float gradient_factor_ = 1;

  Tensor images_;              // all pictures, or with a prefetcher those of a step
  Samples samples_, planned_;  // on the device, and on the host
  std::optional<Prefetcher> prefetcher_;
  Tensor step_tensor_, squared_norm_, scalars_, received_, sum_;
  Tensor trained_, fixed_, m_, v_;
  std::vector<Tensor> averages_;
  std::vector<Arena> free_arenas_;  // one for each pass that may run at one time
  std::unique_ptr<Tree> tree_;
  std::unique_ptr<Recording> passes_recording_, update_recording_;
};

}  // namespace denoised::training
