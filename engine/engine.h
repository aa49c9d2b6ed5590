// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/core/class_condition.h"
#include "engine/core/notify.h"
#include "engine/core/precision.h"
#include "engine/core/status.h"
#include "engine/core/tensor.h"
#include "engine/job.h"
#include "engine/sampling/sampler.h"

/// The public interface of the engine, with job.h. It knows no gRPC and no protobuf and can be used
/// as a library:
///
///   auto engine = Engine::Create({.device = "cuda", .devices = {0, 1}});
///   (*engine)->Open("digits", "models/mnist-32");
///   (*engine)->Submit(spec, listener);
///
/// Every device has all models, and a thread of its own that owns it and all its inference state.
/// Images go to any device that has room. All methods may be called from any thread. Only Open,
/// Close, Drain and the destructor wait for a device.

namespace denoised {

struct EngineOptions {
  std::string device = "auto";  // as BackendOptions::device
  /// Numbers of the devices to use, all of one kind. On the CPU each is a worker on the same cores.
  std::vector<int> devices = {0};
  DType cpu_dtype = DType::kF32;  // as BackendOptions::cpu_dtype
  bool fp32 = false;
  /// For models whose Open() gives none. Unset: the precision in the model's directory.
  std::optional<Precision> precision;
  /// Directory of calibrations for Precision::kFp8, beside the models' own; may be empty.
  std::string calibrations;
  bool generic_kernels = false;  // as BackendOptions::generic_kernels
  bool autotune = true;          // as BackendOptions::autotune, and the next two
  std::string autotune_cache;
  Notify notify;               // on any thread
  int max_rows = 0;            // rows of the largest evaluation; 0: 64 on CUDA, 16 on the CPU
  int max_slots = 0;           // images in flight per model and device; 0: max_rows
  int max_evaluations = 2000;  // longest plan, per image
  /// Chunks of a prompt (CLIP: 75 tokens each) that models read, at most. Their memory is planned
  /// for every prompt in flight.
  int max_prompt_chunks = 3;
  int max_count = 256;  // images of one request
  // Limits of the queue. Beyond any of them Submit returns ResourceExhausted.
  int max_queued_requests = 4096;
  int max_queued_images = 4096;
  size_t max_queued_bytes = size_t{1} << 30;  // host memory that waiting jobs hold
  Batching batching = Batching::kStep;
  /// The share of a client by Priority, where clients of several priorities wait.
  std::array<double, kPriorities> priority_weights = {16, 4, 1};
  int keep_evaluations = 4;  // an image with no more left keeps its slot to the end
  /// A device that takes longer for one evaluation, or for one part of loading or removing a model
  /// (such as packing one tensor), is lost; 0: never. Reading files may take any time, and so may a
  /// CPU (Capabilities::may_hang).
  double watchdog_seconds = 60;
  /// Delivers images that have NaN or infinity, for debugging. Otherwise their jobs end.
  bool allow_nonfinite = false;

  /// The largest count of a request. More images than the queue may hold could never be admitted.
  int LargestCount() const { return std::min(max_count, max_queued_images); }
};

class PromptReader;  // pipelines/prompt_reader.h

enum class ModelState { kLoading, kReady, kFailed, kUnloading };

/// A model's properties, limits and defaults. Immutable once ready.
struct ModelInfo {
  std::string name;
  std::string directory;
  ModelState state = ModelState::kLoading;
  absl::Status error;        // why, when kFailed
  std::string architecture;  // of the denoiser: "UNet2DModel"
  std::string pipeline;      // "StableDiffusionPipeline"; empty for a model without a pipeline
  int64_t parameters = 0;
  std::string precision;      // in which the denoiser multiplies: "fp32", "bf16" or "fp8"
  int height = 0, width = 0;  // native size, pixels
  int size_multiple = 1;      // height and width must be multiples of it
  int max_edge = 0;           // and at most this
  int channels = 0;           // of images
  /// The denoiser's state: latents, or the image itself (factor 1).
  int latent_factor = 1;  // pixels that a latent pixel stands for, along each edge
  int latent_channels = 0;
  std::vector<Stage> stages;                     // that it has, in their order
  std::vector<PreviewDecoder> preview_decoders;  // of latents; the first is the default
  std::optional<TextTraits> text;                // of a model that reads text
  std::shared_ptr<const PromptReader> prompts;   // makes tokens of its prompts
  ImageTraits images;
  ClassCondition condition = ClassCondition::kNone;
  int num_classes = 0;  // labels a request may name: [0, num_classes)
  int class_vector_size = 0;
  bool logarithmic_time = false;    // evaluations' conditions must be above 0
  std::vector<std::string> labels;  // human-readable, by index; empty when the model ships none
  bool guidance = false;            // rows without the condition can guide those with it
  bool guidance_input = false;      // the guidance scale is an input of the model instead
  bool guidance_rescale = false;    // guidance may be rescaled
  Sampler default_sampler = Sampler::kEdmEuler;
  NoiseSchedule default_schedule = NoiseSchedule::kNative;
  std::vector<Sampler> samplers;
  std::vector<NoiseSchedule> schedules;  // of the default sampler
  int default_steps = 0, max_steps = 0;
  double default_guidance_scale = 1.0;
  int max_evaluations = 0;  // of one image; a step may take two
  int max_count = 0;        // images of one request
  int slots = 0;            // images in flight at one time, on each device
  std::shared_ptr<const SchedulerConfig> scheduler;
  // Bytes on each device, by purpose: at the native size, and for prompts.
  size_t weight_bytes = 0, activation_bytes = 0, slot_bytes = 0, prompt_bytes = 0;
  size_t bytes() const { return weight_bytes + activation_bytes + slot_bytes + prompt_bytes; }
  /// Seconds of each stage as measured at load, at the native size: of one prompt, of an evaluation
  /// of one row, of one image that is encoded or decoded. 0: not measured.
  std::array<double, kStages> stage_seconds{};
  double load_seconds = 0;
};

/// Numbers for metrics, of one model. Counters start at its load.
struct EngineStats {
  std::string model;
  int queued_images = 0, active_images = 0, slots = 0;
  std::array<int, kPriorities> queued_requests{};  // jobs with waiting images, by Priority
  std::array<int, kPriorities> queued_images_by_priority{};
  double oldest_wait_seconds = 0;       // of jobs that have had no slot yet
  uint64_t evaluations = 0;             // of whole batches
  uint64_t rows = 0, padding_rows = 0;  // of these evaluations
  uint64_t parked_images = 0;           // times that an image lost its slot to another
  /// Rows of jobs that ended early, by EndReason, and of images whose device was lost (kFailed).
  std::array<uint64_t, kEndReasons> wasted_rows{};
};

struct DeviceState {
  std::string name;         // "cpu", "cuda:0"
  std::string description;  // for people
  absl::Status health;      // OK, or why the device is lost
};

class Engine {
 public:
  /// Starts the devices' threads.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options);
  virtual ~Engine() = default;

  /// Loads a diffusers directory on every device, plans memory, captures and warms up every row
  /// bucket. Blocks until the model is ready. InvalidArgument or NotFound name the file and field
  /// at fault; ResourceExhausted says how much memory was needed and how much is free. Other models
  /// continue to draw: weights are read and packed on threads of the call, and the devices' threads
  /// do the rest in parts. A name may be used again after its model failed or was closed.
  /// `precision` wins over EngineOptions and the directory. FailedPrecondition if the device cannot
  /// multiply in it.
  virtual absl::Status Open(const std::string& name, const std::string& directory,
                            std::optional<Precision> precision = std::nullopt) = 0;
  /// Unloads a model. It takes no new jobs; blocks until its jobs are done and its memory is free.
  /// NotFound; FailedPrecondition while it is loading or being closed.
  virtual absl::Status Close(const std::string& name) = 0;

  /// Null if there is no model of that name.
  virtual std::shared_ptr<const ModelInfo> Find(const std::string& name) const = 0;
  /// In the order of Open.
  virtual std::vector<std::shared_ptr<const ModelInfo>> Models() const = 0;

  /// Checks `spec` and fills in its defaults. `violations` is set to all errors in it; the job may
  /// be submitted only if there are none. NotFound; FailedPrecondition while the model is not
  /// ready.
  virtual absl::StatusOr<EffectiveJob> Resolve(const JobSpec& spec,
                                               std::vector<FieldViolation>* violations) const = 0;

  /// Queues a resolved job. NotFound if its model was closed after Resolve; ResourceExhausted if a
  /// limit of the queue is reached; DeadlineExceeded if its deadline cannot be met; Unavailable
  /// while draining or if all devices are lost. `estimate` may be null; it is set for refused jobs
  /// too. The listener may be called before Submit returns.
  virtual absl::StatusOr<JobId> Submit(EffectiveJob job, std::shared_ptr<JobListener> listener,
                                       Estimate* estimate = nullptr) = 0;
  /// Images of the model that wait now.
  virtual int QueuedImages(const std::string& model) const = 0;

  /// Takes effect before the next evaluation; OnDone(Cancelled) follows. Unknown ids are ignored.
  /// `reason` decides where EngineStats::wasted_rows counts the job.
  virtual void Cancel(JobId id, EndReason reason = EndReason::kCancelled) = 0;

  /// Refuses new jobs, waits until all are done or `deadline` passes, then ends the rest with
  /// Unavailable.
  virtual void Drain(std::chrono::steady_clock::time_point deadline) = 0;

  /// Of the models that are ready or being unloaded.
  virtual std::vector<EngineStats> Stats() const = 0;
  /// Must outlive the engine; set before the first Open.
  virtual void SetObserver(EngineObserver* observer) = 0;
  /// OK while a device is left; then the error of the last one, which ended all work. The other
  /// devices draw the images of a lost device again. A device that hangs is lost, and its thread
  /// with it: the destructor waits for that thread and may never return, so the process should
  /// end without it.
  virtual absl::Status Health() const = 0;
  /// In the order of EngineOptions::devices.
  virtual std::vector<DeviceState> Devices() const = 0;
};

/// Draws `count` images and waits for them: seed 1, everything at the model's defaults, a few
/// prompts or as many classes as it has. At most `max_steps` steps, unless that is 0 or too few for
/// the sampler. FailedPrecondition if the model cannot draw at its defaults; else the error of the
/// job, such as DataLoss when images are not finite. The model must be ready.
absl::Status DrawAtDefaults(Engine& engine, const std::string& model, int count, int max_steps = 0);

/// Measures the scales that a model needs for Precision::kFp8: draws images of several seeds and
/// conditions on the first of options.devices, and takes the largest input of each layer at all
/// noise levels. A GPU need not multiply in e4m3. Writes the scales to `fp8.json` in the model's
/// directory, or to <fingerprint of the weights>.json in options.calibrations, and returns the
/// path. The errors of Open(); FailedPrecondition if the file cannot be written.
absl::StatusOr<std::string> Calibrate(const std::string& directory, const EngineOptions& options);

}  // namespace denoised
