// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/backend/backend.h"
#include "engine/batching/captured_run.h"
#include "engine/batching/codec_stage.h"
#include "engine/batching/init_images.h"
#include "engine/batching/warm_runs.h"
#include "engine/core/arena.h"
#include "engine/job.h"
#include "engine/models/codec.h"
#include "engine/models/denoiser.h"

namespace denoised {

/// One model at one image size, with the state of its images in flight and one captured graph per
/// row bucket: gather → model → guidance and sampler step → scatter. With a codec the state is
/// latents: init_images() encodes what images begin with, and DownloadImages() decodes the result.
/// Used by the thread that owns the device. Calls enqueue work and do not wait for it, unless they
/// say so.
class Evaluator {
 public:
  struct Options {
    int height = 0, width = 0;  // of the state
    int max_rows = 0;
    int slots = 0;
    int max_evaluations = 0;  // longest plan
    // The most that may be under way at a time:
    int downloads = 0;                           // of states and predictions
    int flag_downloads = 0;                      // of DownloadNonfinite()
    int parks = 0;                               // of Parked images
    int decodes = 0;                             // Decodes() with a codec, of max_images each
    int previews = 0;                            // calls of DownloadPreview()
    std::shared_ptr<const Codec> codec;          // null: the state is the image
    int max_images = 1;                          // that the codec encodes or decodes side by side
    std::shared_ptr<const Codec> preview_codec;  // a small one, for DownloadPreview(); may be null
    /// activations() of another evaluator of the backend, to use the same memory in turns. An
    /// evaluation then has as many rows as fit into it. If `least_rows` rows, or one image in the
    /// codec, do not fit, the evaluator takes memory of its own for these.
    Tensor activations;
    int least_rows = 4;
    ImageInput image_input = ImageInput::kNone;
    bool measures_outputs = false;  // plans or guidance need SamplerOps::MeasureOutputs()
    /// The condition sets that the labels of rows refer to, for denoisers that read text. Must
    /// outlive the evaluator.
    ConditionSets sets;
  };

  /// Plans memory by a dry run of every bucket, then allocates it. ResourceExhausted says how much
  /// was needed and how much is free.
  static absl::StatusOr<std::unique_ptr<Evaluator>> Create(Backend& backend,
                                                           std::shared_ptr<const Denoiser> denoiser,
                                                           const Options& options);

  struct Warmed {
    Stage stage = Stage::kDenoise;
    int count = 0;       // rows of the evaluation, or images in the codec
    double seconds = 0;  // of one evaluation; negative: not measured
    bool more = false;   // call again
  };
  /// Runs one evaluation of the next bucket, so that no request pays for its first: first one that
  /// captures the graph, then a few that are measured (WarmRuns). Buckets larger than one that
  /// fills the device are captured but not run, so that large models do not run for seconds before
  /// they serve. Before the buckets comes the codec: see CodecStage::WarmUp(). Waits for the
  /// device. One evaluation a call, so that evaluations of other models can run in between. Without
  /// WarmUp(), graphs are captured when they are first needed.
  absl::StatusOr<Warmed> WarmUp();

  /// The state of an image that lost its slot between two evaluations: everything that cannot be
  /// computed from its Start. Arrive() waits until it is in host memory.
  struct Parked {
    std::unique_ptr<Download> x_download, registers_download, nonfinite_download;
    Tensor x, registers, nonfinite;
    absl::Status Arrive();
    /// Bytes of host memory, after Arrive().
    size_t bytes() const { return x.bytes() + registers.bytes(); }
  };

  struct Start {
    const std::vector<DeviceEvaluation>* plan = nullptr;
    uint64_t seed = 0;
    Guidance guidance;
    std::span<const float> embedding;  // class value or vector; empty otherwise
    const float* source = nullptr;     // optional pixels [H, W, C] in host memory
    uint64_t source_id = 0;            // equal ids: equal sources and masks
    const float* mask = nullptr;   // optional pixels [H, W] with a source: redrawn if ½ or more
    const float* noise = nullptr;  // optional, host memory, of the state's shape
    float source_scale = 0, noise_scale = 1, churn_scale = 0, shift = 0;
    /// The image lost its slot after so many evaluations; null: it is new. It must have arrived,
    /// and may come from another device. Its bits are the same as without the break.
    const Parked* parked = nullptr;
    int evaluations_done = 0;
  };

  /// The pictures that an image needs encoded before it begins: none, or its init image, whole,
  /// masked or both.
  std::vector<InitImages::Picture> PicturesOf(const Start& start) const;
  /// With a codec that encodes. Before Begin() of an image, its pictures must be kept.
  InitImages& init_images() { return *init_images_; }
  /// Puts an image into `slot`, whatever was there before.
  void Begin(int slot, const Start& start);

  size_t parked_bytes() const { return (1 + kRegisters) * source_.bytes(); }
  /// The slot may be used again at once.
  std::unique_ptr<Parked> Park(int slot);

  /// One evaluation of these rows, at most max_rows. Returns the bucket that they were padded to.
  absl::StatusOr<int> Evaluate(std::span<const EvaluationRow> rows, CapturedRun::Ran* ran);

  /// The slot's state, or its predicted x0, at this point of the queue: F32 [H, W, C].
  std::unique_ptr<Download> DownloadState(int slot);
  /// The sizes of the next calls of DownloadImages() for `drawn` images, at most max_images in
  /// total: see CodecStage::NextRuns().
  std::vector<int> Decodes(int drawn, double seconds) const;
  /// The pixels of the slots' states. With a codec they are decoded first; pass as many slots as
  /// Decodes() says then. `ran`: when decoding ran.
  absl::StatusOr<std::vector<std::unique_ptr<Download>>> DownloadImages(std::span<const int> slots,
                                                                        CapturedRun::Ran* ran);
  /// With a preview_codec: the slot's predicted x0, decoded by it, or the state times `scale`.
  absl::StatusOr<std::unique_ptr<Download>> DownloadPreview(int slot, bool predicted, float scale);
  std::unique_ptr<Download> DownloadX0(int slot);
  /// For each slot the first evaluation (1-based) that was not finite, or 0: I32 [slots].
  std::unique_ptr<Download> DownloadNonfinite();

  /// The row counts that rows are padded to, ascending.
  const std::vector<int>& buckets() const { return buckets_; }
  /// Rows of an evaluation, at most.
  int max_rows() const { return buckets_.back(); }
  /// The memory of activations, which nothing uses between two calls.
  const Tensor& activations() const { return activations_; }
  /// Bytes of device memory: the peak of activations, 0 if they use another evaluator's memory, and
  /// the images in flight.
  size_t activation_bytes() const { return activation_bytes_; }
  size_t slot_bytes() const { return slot_bytes_; }

 private:
  Evaluator(Backend& backend, std::shared_ptr<const Denoiser> denoiser, const Options& options);
  absl::Status Allocate();
  CapturedRun& RunOf(int bucket);
  void UploadStart(int slot, const Start& start);
  void Enqueue(int bucket);
  /// The network's output for rows [begin, begin + count) of rows_.
  Tensor Predict(Backend& backend, Arena& arena, int begin, int count);
  Tensor SlotOf(const Tensor& per_slot, int slot) const;
  bool ReadsSource(const Start& start) const;
  bool KeepsSource(const Start& start) const;
  void ReadSource(int slot, const Start& start);
  void SampleSource(const Start& start, const InitImages::Picture& picture, uint32_t draw);
  std::vector<float> MaskOf(const Start& start) const;
  absl::StatusOr<size_t> PlanActivations();
  absl::StatusOr<Warmed> CaptureNext();

  Backend& backend_;
  std::shared_ptr<const Denoiser> denoiser_;
  Options options_;
  std::vector<int> buckets_;
  SlotState state_;
  Tensor rows_;                                         // I32 [max_rows, 6]
  std::vector<std::shared_ptr<const void>> downloads_;  // their memory
  Tensor source_, noise_;                               // F32 [H, W, C]: uploaded by Begin()
  Tensor factors_;              // F32 [max_rows, 2], of models whose whole outputs may be measured
  Tensor outputs_;              // F32 [max_rows, H, W, output channels], where rows are split
  std::optional<Arena> arena_;  // for rows computed together
  std::optional<InitImages> init_images_;         // with a codec that encodes
  std::optional<CodecStage> decoding_, preview_;  // with a codec, and a preview_codec
  std::vector<Arena> part_arenas_;   // by worker, for rows computed in parts; in the same memory
  std::map<int, CapturedRun> runs_;  // by bucket
  std::vector<EvaluationRow> uploaded_rows_;
  Tensor activations_;
  size_t part_bytes_ = 0;  // of one worker, for rows computed in parts
  int workers_ = 0;
  size_t warm_buckets_ = 0;
  bool filled_ = false;  // the bucket that was measured last fills the device
  WarmRuns warm_runs_;   // of what WarmUp() measures
  size_t activation_bytes_ = 0, slot_bytes_ = 0;
};

}  // namespace denoised
