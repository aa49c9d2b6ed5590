// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/core/status.h"
#include "engine/core/tensor.h"
#include "engine/sampling/sampler.h"

namespace denoised {

struct ModelInfo;

enum class PreviewKind { kPredictedX0, kNoisyState };

/// The stages of an image, in order: text encoders make condition sets of its prompts, the codec
/// encodes its init image into latents, the denoiser is evaluated, the codec decodes.
enum class Stage { kCondition, kEncode, kDenoise, kDecode };
constexpr size_t kStages = 4;

/// What makes previews of latents: a linear function, or a small autoencoder.
enum class PreviewDecoder { kDefault, kLinear, kTiny };

/// Which jobs go first. Each priority has a share of the device, so none starves.
enum class Priority { kInteractive, kNormal, kBatch };
constexpr size_t kPriorities = 3;

/// When waiting images may join a batch: at any evaluation, or, as a baseline for comparison, only
/// when every image of the previous batch is done.
enum class Batching { kStep, kRequest };

/// Why a job ended before its images were done.
enum class EndReason { kCancelled, kDisconnected, kDeadline, kDrained, kFailed };
constexpr size_t kEndReasons = 5;

/// An image in flight or done: F32 host tensor [H, W, C], values nominally in [−1, 1].
struct ImageResult {
  int index = 0;  // within the request
  uint64_t seed = 0;
  int label = -1;  // −1 when the model has no labels
  Tensor pixels;
};

/// What an image should show and what it should not, for models that read text. UTF-8.
struct TextPrompt {
  std::string text;
  /// Unset: the model's own way of drawing without a prompt (SDXL: zeros; others: an empty text).
  std::optional<std::string> negative;
  /// For the second text encoder of models that have two; unset or empty: as the first.
  std::optional<std::string> text_2, negative_2;
};

/// Original size and crop, which SDXL takes as conditions: height and width, or top and left.
/// Unset: the image's own size, and no crop.
struct SizeConditions {
  std::optional<std::array<int, 2>> original_size, crop, target_size;
};

/// Fields that requests may use, of a model that reads text.
struct TextTraits {
  int max_clip_skip = 0;
  int max_chunks = 1;         // of a text
  int chunk_tokens = 0;       // of the text, in a chunk
  bool two_encoders = false;  // TextPrompt::text_2 and negative_2
  bool sizes = false;         // SizeConditions
};

/// What a model does with an init image.
struct ImageTraits {
  bool init = false;                   // takes one
  bool required = false;               // and cannot draw without one
  bool strength = false;               // can start from it
  bool mask = false;                   // takes a mask
  bool mask_required = false;          // and cannot draw without one
  bool guidance = false;               // JobSpec::image_guidance_scale
  double default_strength = 0;         // without a mask; unless the model was made for masks
  double default_masked_strength = 0;  // with one
  double default_guidance_scale = 0;
};

/// A prompt as text encoders read it, and all else that a condition set depends on.
struct TokenizedPrompt {
  /// By encoder: `chunks` chunks, each padded. Empty: a chunk of zeros instead of states.
  std::vector<std::vector<int32_t>> ids;
  int chunks = 1;
  std::vector<int> ends;     // by encoder: the token that is pooled, in the first chunk
  int skip_layers = 0;       // clip_skip
  std::vector<float> sizes;  // SDXL: original size, crop, target size
  float guidance = 0;        // for models that take the guidance scale as an input
  auto operator<=>(const TokenizedPrompt&) const = default;
};

/// How much of one text a model reads.
struct TextRead {
  int tokens = 0;       // that it reads
  std::string cut_off;  // the end of the text that it does not read
};

/// The same of all texts of a TextPrompt. Those that the prompt or the job does not have are empty.
struct PromptRead {
  TextRead text, negative, text_2, negative_2;
};

/// A request. Unset fields take the model's defaults.
struct JobSpec {
  std::string model;
  std::string request_id;        // for logs; made unique by the caller
  std::optional<uint64_t> seed;  // image i is drawn with seed + i; random when unset
  std::vector<uint64_t> seeds;   // instead of seed: one for each image
  int count = 1;
  std::vector<int> class_labels;         // one for all images, or one each; empty: random classes
  std::vector<float> class_values;       // kValue: as class_labels. kVector: count × size or size
  std::vector<TextPrompt> prompts;       // one for all images, or one each
  SizeConditions sizes;                  // for models that read them
  int clip_skip = 0;                     // of the prompts: text encoder layers left out at the end
  int max_chunks = 0;                    // of each text; 0: as many as the model allows
  std::optional<double> guidance_scale;  // ≤ 1: no unconditional row, unless an input
  /// Towards the init image, for models with ImageTraits::guidance; ≥ 1, where 1 is none.
  std::optional<double> image_guidance_scale;
  std::optional<double> guidance_rescale;  // in [0, 1]; see SamplerOps::MeasureOutputs()
  /// Parts of the steps, in [0, 1]: those from ⌊start · steps⌋ to before ⌊stop · steps⌋ are guided.
  std::optional<double> guidance_start, guidance_stop;
  SamplerParams sampler;      // steps 0: the model's default
  int height = 0, width = 0;  // pixels; 0: native
  bool previews = false;
  PreviewKind preview_kind = PreviewKind::kPredictedX0;
  PreviewDecoder preview_decoder = PreviewDecoder::kDefault;  // of models that draw latents
  int preview_every = 1;                                      // evaluations
  Tensor initial_noise;  // optional F32 [count, H, W, C] of the state, standard normal scale
  Tensor init_image;     // optional F32 [H, W, C] in [−1, 1]
  Tensor mask;           // optional F32 [H, W], with an init image: drawn anew where at least ½
  std::optional<std::chrono::steady_clock::time_point> deadline;
  Priority priority = Priority::kNormal;
  std::string client;        // clients share the device; all callers without a name are client ""
  double client_weight = 1;  // of the client's share, relative to others of the same priority; > 0

  /// Only for a resolved spec.
  uint64_t SeedOf(int image) const {
    return seeds.empty() ? *seed + static_cast<uint64_t>(image) : seeds[image];
  }
};

/// A JobSpec with every default filled in: what is run and what the reply reports.
struct EffectiveJob {
  JobSpec spec;  // all optionals set, one label or value per image, seed of the first image
  int steps = 0;
  int evaluations = 0;  // model evaluations per image
  std::shared_ptr<const StepPlan> plan;
  bool guided = false;        // an image takes two rows: with its condition, and without
  bool image_guided = false;  // and a third, without the condition and its init image
  bool puts_back = false;     // each evaluation puts back what the mask keeps
  std::string precision;      // ModelInfo::precision
  /// Evaluations that are guided: [first, second).
  std::pair<int, int> guided_evaluations = {0, std::numeric_limits<int>::max()};
  /// Models that read text: one for all images, or one each; `negatives` only if guided.
  std::vector<TokenizedPrompt> prompts, negatives;
  std::vector<PromptRead> prompts_read;  // by prompt
  /// What it was resolved for. Another model of the same name has other labels, tokens and sizes.
  std::weak_ptr<const ModelInfo> model;

  bool GuidedAt(int evaluation) const {
    return guided && evaluation >= guided_evaluations.first &&
           evaluation < guided_evaluations.second;
  }
  /// Rows of an image at its largest evaluation.
  int MostRows() const { return guided ? image_guided ? 3 : 2 : 1; }
  int RowsAt(int evaluation) const { return GuidedAt(evaluation) ? MostRows() : 1; }
  /// Rows of an image's first `done` evaluations.
  int64_t RowsUntil(int done) const {
    const int first = std::min(guided_evaluations.first, done),
              last = std::min(guided_evaluations.second, done);
    return done + (guided ? int64_t{1} * (MostRows() - 1) * (last - first) : 0);
  }

  const TokenizedPrompt& PromptOf(int image) const {
    return prompts[prompts.size() == 1 ? 0 : image];
  }
  const TokenizedPrompt& NegativeOf(int image) const {
    return negatives[negatives.size() == 1 ? 0 : image];
  }
};

/// One error in a request. `field` is a name in JobSpec: "class_labels[2]", "steps".
struct FieldViolation {
  std::string field;
  std::string description;  // its value, and what would be accepted
};

/// When a job will be done, from the measured cost of an evaluation and the work that is queued.
struct Estimate {
  /// What waits in front of it. When a job is submitted, all of the same model and its priority or
  /// above, some of which it may overtake.
  int jobs_ahead = 0, images_ahead = 0;
  // From now; unset before the first measurement.
  std::optional<double> start_seconds;  // until its first image has a slot
  std::optional<double> total_seconds;  // until all its images are done
  /// For a refused job: when to try again; unset if that would never help.
  std::optional<double> retry_seconds;
};

struct JobTiming {
  double queued_seconds = 0;          // from Submit until the first image had a slot
  double first_preview_seconds = -1;  // from Submit; −1 when there was none
  double total_seconds = 0;           // from Submit
};

/// Receives the events of one job. Called on the engine's threads, in order, never two at a time:
/// return quickly and leave work to another thread. OnDone is the last call; then the listener is
/// released.
class JobListener {
 public:
  virtual ~JobListener() = default;
  /// No image has had a slot yet, and there is more or less in front of the job than it was told
  /// last, here or by Submit. At most once a second.
  virtual void OnQueued([[maybe_unused]] const Estimate& estimate) {}
  /// The first image got a slot.
  virtual void OnStarted() {}
  /// `done` of `total` model evaluations, over all images of the job; both are at most what an int
  /// holds.
  virtual void OnProgress([[maybe_unused]] int done, [[maybe_unused]] int total) {}
  /// A stage of an image is done. `seconds` of the device, which images whose stages ran side by
  /// side share; 0 for prompts and init images that were kept; negative for kDenoise, which is many
  /// evaluations.
  virtual void OnStage([[maybe_unused]] int image, [[maybe_unused]] Stage stage,
                       [[maybe_unused]] double seconds) {}
  /// After `evaluation` (1-based) of image.index.
  virtual void OnPreview([[maybe_unused]] const ImageResult& image,
                         [[maybe_unused]] int evaluation) {}
  virtual void OnImage(ImageResult image) = 0;
  /// OK once all images were delivered; Cancelled, DeadlineExceeded, Unavailable (drained away),
  /// DataLoss (an image has NaN or infinity, see EngineOptions::allow_nonfinite), or what the
  /// device reported.
  virtual void OnDone(const absl::Status& status, const JobTiming& timing) = 0;
};

using JobId = uint64_t;

/// Receives events for metrics. Called on the threads of the devices, so it must be thread-safe.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  /// An evaluation on `device`: `rows` rows, padded to `bucket`. `seconds` is its time; time in
  /// which another model was evaluated too counts by half. < 0: not measured.
  virtual void OnEvaluation(const std::string& model, const std::string& device, int rows,
                            int bucket, double seconds) = 0;
  /// A run of a stage that is not an evaluation, of `count` prompts or images side by side.
  virtual void OnStage([[maybe_unused]] const std::string& model,
                       [[maybe_unused]] const std::string& device, [[maybe_unused]] Stage stage,
                       [[maybe_unused]] int count, [[maybe_unused]] double seconds) {}
  /// Images took so many condition sets that were there already, and so many that had to be made.
  virtual void OnPrompts([[maybe_unused]] const std::string& model,
                         [[maybe_unused]] const std::string& device, [[maybe_unused]] int known,
                         [[maybe_unused]] int made) {}
  /// An image of `model` that was drawn on `device` has NaN or infinity: its job ends, or the image
  /// is delivered with EngineOptions::allow_nonfinite.
  virtual void OnNonfiniteImage([[maybe_unused]] const std::string& model,
                                [[maybe_unused]] const std::string& device) {}
};

}  // namespace denoised
