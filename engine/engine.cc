// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <numeric>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "engine/backend/counting.h"
#include "engine/batching/job_queue.h"
#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"
#include "engine/device_engine.h"
#include "engine/device_worker.h"
#include "engine/pipelines/pipeline.h"
#include "engine/pipelines/prompt_reader.h"
#include "engine/resolve.h"

namespace denoised {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxEdgeOverNative = 4;
// Images that are encoded or decoded side by side. More are hardly faster for each.
constexpr int kMaxImages = 8;

/// The engine over one or more devices of one kind, each with every model. All share one queue.
class DeviceEngine final : public Engine {
 public:
  DeviceEngine(const EngineOptions& options, BackendOpener open)
      : options_(options),
        open_backend_(std::move(open)),
        admission_({.requests = options.max_queued_requests,
                    .images = options.max_queued_images,
                    .bytes = options.max_queued_bytes,
                    .weights = options.priority_weights}),
        queue_(admission_) {}
  ~DeviceEngine() override;

  absl::Status Start();

  absl::Status Open(const std::string& name, const std::string& directory,
                    std::optional<Precision> precision) override;
  absl::Status Close(const std::string& name) override;
  std::shared_ptr<const ModelInfo> Find(const std::string& name) const override;
  std::vector<std::shared_ptr<const ModelInfo>> Models() const override;
  absl::StatusOr<EffectiveJob> Resolve(const JobSpec& spec,
                                       std::vector<FieldViolation>* violations) const override;
  absl::StatusOr<JobId> Submit(EffectiveJob job, std::shared_ptr<JobListener> listener,
                               Estimate* estimate) override;
  int QueuedImages(const std::string& model) const override;
  void Cancel(JobId id, EndReason reason) override;
  void Drain(Clock::time_point deadline) override;
  std::vector<EngineStats> Stats() const override;
  void SetObserver(EngineObserver* observer) override;
  absl::Status Health() const override;
  std::vector<DeviceState> Devices() const override;

 private:
  /// Forwards to the observer that is set now.
  class Observer : public EngineObserver {
   public:
    explicit Observer(DeviceEngine* engine) : engine_(engine) {}
    void OnEvaluation(const std::string& model, const std::string& device, int rows, int bucket,
                      double seconds) override {
      if (EngineObserver* observer = engine_->observer_.load())
        observer->OnEvaluation(model, device, rows, bucket, seconds);
    }
    void OnStage(const std::string& model, const std::string& device, Stage stage, int count,
                 double seconds) override {
      if (EngineObserver* observer = engine_->observer_.load())
        observer->OnStage(model, device, stage, count, seconds);
    }
    void OnPrompts(const std::string& model, const std::string& device, int known,
                   int made) override {
      if (EngineObserver* observer = engine_->observer_.load())
        observer->OnPrompts(model, device, known, made);
    }
    void OnNonfiniteImage(const std::string& model, const std::string& device) override {
      if (EngineObserver* observer = engine_->observer_.load())
        observer->OnNonfiniteImage(model, device);
    }

   private:
    DeviceEngine* engine_;
  };

  void OnLost(int device);
  void Watch();
  absl::Status Load(const std::string& path, std::optional<Precision> precision, ModelInfo* info);
  absl::Status LoadOn(DeviceWorker& worker, const PipelineFiles& files, ModelInfo* info) const;
  absl::StatusOr<BatchedModel> Pack(const DeviceWorker& worker, const PipelineFiles& files,
                                    const LoadProgress& progress, ModelInfo* info) const;
  absl::Status RemoveFromDevices(const std::string& name);
  int LiveDevices() const;
  void Publish(const ModelInfo& info);
  std::shared_ptr<const ModelInfo>* FindLocked(const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const EngineOptions options_;
  const BackendOpener open_backend_;
  Admission admission_;
  JobQueue queue_;
  std::atomic<EngineObserver*> observer_{nullptr};
  Observer worker_observer_{this};
  std::vector<std::unique_ptr<DeviceWorker>> workers_;  // by the queue's numbers; fixed by Start
  std::thread watchdog_;

  mutable Mutex mutex_;
  ConditionVariable stop_watching_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false, draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status health_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<const ModelInfo>> models_ ABSL_GUARDED_BY(mutex_);
};

DeviceEngine::~DeviceEngine() {
  Drain(Clock::now());
  {
    MutexLock lock(&mutex_);
    stop_ = true;
  }
  stop_watching_.NotifyAll();
  if (watchdog_.joinable()) watchdog_.join();
  for (const auto& worker : workers_) worker->Stop();  // they wake each other: all, then none
}

absl::Status DeviceEngine::Start() {
  for (int i = 0; i < static_cast<int>(options_.devices.size()); ++i)
    workers_.push_back(std::make_unique<DeviceWorker>(
        BackendOptions{.device = options_.device,
                       .number = options_.devices[i],
                       .cpu_dtype = options_.cpu_dtype,
                       .fp32 = options_.fp32,
                       .generic_kernels = options_.generic_kernels,
                       .autotune = options_.autotune,
                       .autotune_cache = options_.autotune_cache,
                       .notify = options_.notify},
        open_backend_,
        StepBatcher::Options{.device = i,
                             .batching = options_.batching,
                             .keep_evaluations = options_.keep_evaluations,
                             .allow_nonfinite = options_.allow_nonfinite},
        &admission_, &queue_, &worker_observer_, [this, i] { OnLost(i); }));
  queue_.SetWake([this] {
    for (const auto& worker : workers_) worker->Wake();
  });
  for (const auto& worker : workers_) {
    DENOISED_RETURN_IF_ERROR(worker->Start());
    const DeviceWorker& first = *workers_.front();
    if (worker->description() != first.description())
      return InvalidArgument(
          "device {} is \"{}\", but {} is \"{}\"; one server holds devices of one kind, so that "
          "pixels do not depend on the one that draws them; start a server for each kind",
          worker->name(), worker->description(), first.name(), first.description());
  }
  if (options_.watchdog_seconds > 0) watchdog_ = std::thread(&DeviceEngine::Watch, this);
  return absl::OkStatus();
}

/// The watchdog's thread. A device that hangs blocks the thread that owns it, so this thread deals
/// with the consequences.
void DeviceEngine::Watch() {
  const std::chrono::duration<double> limit(options_.watchdog_seconds);
  const auto pause = std::min<std::chrono::duration<double>>(limit / 4, std::chrono::hours(1));
  while (true) {
    {
      MutexLock lock(&mutex_);
      const Clock::time_point look =
          Clock::now() + std::chrono::duration_cast<Clock::duration>(pause);
      while (!stop_ && Clock::now() < look) stop_watching_.WaitUntil(&mutex_, look);
      if (stop_) return;
    }
    for (const auto& worker : workers_) worker->LoseIfHanging(limit);
  }
}

/// The other devices continue the jobs of the lost one. Without any other, all work ends for good.
void DeviceEngine::OnLost(int device) {
  queue_.Lose(device);
  if (LiveDevices() > 0) return;
  const absl::Status cause = workers_[device]->health();
  {
    MutexLock lock(&mutex_);
    if (health_.ok()) health_ = cause;
  }
  queue_.EndAll(cause, EndReason::kFailed);
}

int DeviceEngine::LiveDevices() const {
  return static_cast<int>(std::count_if(workers_.begin(), workers_.end(),
                                        [](const auto& worker) { return worker->health().ok(); }));
}

std::vector<DeviceState> DeviceEngine::Devices() const {
  std::vector<DeviceState> devices;
  for (const auto& worker : workers_)
    devices.push_back({worker->name(), worker->description(), worker->health()});
  return devices;
}

absl::Status DeviceEngine::Open(const std::string& name, const std::string& directory,
                                std::optional<Precision> precision) {
  ModelInfo info{.name = name, .directory = directory};
  {
    MutexLock lock(&mutex_);
    if (name.empty()) return InvalidArgument("a model needs a name; give it as name=directory");
    std::shared_ptr<const ModelInfo>* known = FindLocked(name);
    if (known != nullptr && (*known)->state != ModelState::kFailed)
      return InvalidArgument("model name '{}' is taken by {}; choose another", name,
                             (*known)->directory);
    auto loading = std::make_shared<const ModelInfo>(info);
    if (known != nullptr)
      *known = std::move(loading);
    else
      models_.push_back(std::move(loading));
  }
  const Clock::time_point begin = Clock::now();
  info.error = Load(directory, precision ? precision : options_.precision, &info);
  info.load_seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  info.state = info.error.ok() ? ModelState::kReady : ModelState::kFailed;
  Publish(info);
  return info.error;
}

absl::Status DeviceEngine::Load(const std::string& path, std::optional<Precision> precision,
                                ModelInfo* info) {
  DENOISED_RETURN_IF_ERROR(Health());
  DENOISED_ASSIGN_OR_RETURN(PipelineFiles files, PipelineFiles::Read(path));
  files.precision = precision.value_or(files.precision);
  files.calibrations = options_.calibrations;
  DENOISED_ASSIGN_OR_RETURN(files.defaults.steps, files.DefaultSteps(options_.max_evaluations));
  // On all devices at the same time. Each thread writes to its own element.
  struct Loaded {
    ModelInfo info;
    absl::Status status;
  };
  std::vector<Loaded> loaded(workers_.size(), {*info, absl::OkStatus()});
  std::vector<std::thread> threads;
  for (size_t i = 0; i < workers_.size(); ++i)
    threads.emplace_back(
        [&, i] { loaded[i].status = LoadOn(*workers_[i], files, &loaded[i].info); });
  for (std::thread& thread : threads) thread.join();
  // A device that has no memory fails the load. A device that was lost meanwhile does not.
  absl::Status status;
  bool any = false;
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (loaded[i].status.ok() && !std::exchange(any, true)) *info = loaded[i].info;
    if (!loaded[i].status.ok() && workers_[i]->health().ok())
      status.Update(workers_.size() == 1
                        ? loaded[i].status
                        : Annotate(loaded[i].status, "device " + workers_[i]->name()));
  }
  if (!any) status.Update(loaded.front().status);
  if (!status.ok()) RemoveFromDevices(info->name).IgnoreError();
  return status;
}

/// Packs weights beside the device's thread, which then takes memory and warms up, one part at a
/// time.
absl::Status DeviceEngine::LoadOn(DeviceWorker& worker, const PipelineFiles& files,
                                  ModelInfo* info) const {
  struct Packed {
    BatchedModel model;
    ModelInfo info;
  };
  const auto pack = [&] {
    return worker.RunBeside([this, &worker, files,
                             info = *info](const LoadProgress& progress) -> absl::StatusOr<Packed> {
      Packed result{.info = info};
      DENOISED_ASSIGN_OR_RETURN(result.model, Pack(worker, files, progress, &result.info));
      return result;
    });
  };
  absl::StatusOr<Packed> packed = pack();
  if (absl::IsResourceExhausted(packed.status())) {
    DENOISED_ASSIGN_OR_RETURN(const bool evicted,
                              worker.Run([](StepBatcher& batcher) -> absl::StatusOr<bool> {
                                return batcher.EvictIdle();
                              }));
    if (evicted) packed = pack();
  }
  DENOISED_RETURN_IF_ERROR(packed.status());
  const BatchedModel& model = packed->model;
  *info = packed->info;
  DENOISED_RETURN_IF_ERROR(
      worker.Run([model, height = info->height, width = info->width](StepBatcher& batcher) {
        return batcher.AddModel(model, height, width);
      }));
  bool more = true;
  while (more) {
    DENOISED_ASSIGN_OR_RETURN(more, worker.Run([name = model.name](StepBatcher& batcher) {
      return batcher.WarmUp(name);
    }));
  }
  using Bytes = std::array<size_t, 3>;
  DENOISED_ASSIGN_OR_RETURN(const Bytes bytes, worker.Run([name = model.name](StepBatcher& batcher)
                                                              -> absl::StatusOr<Bytes> {
    return Bytes{batcher.ActivationBytes(name), batcher.SlotBytes(name), batcher.PromptBytes(name)};
  }));
  info->activation_bytes = bytes[0];
  info->slot_bytes = bytes[1];
  info->prompt_bytes = bytes[2];
  info->stage_seconds = admission_.StageSeconds(model.name);
  return absl::OkStatus();
}

/// From all devices that are not lost. Each device's thread frees its own copy of the weights.
absl::Status DeviceEngine::RemoveFromDevices(const std::string& name) {
  absl::Status status;
  for (const auto& worker : workers_) {
    absl::Status removed =
        worker->Run([name](StepBatcher& batcher) { return batcher.RemoveModel(name); });
    if (worker->health().ok()) status.Update(removed);
  }
  return status;
}

absl::Status DeviceEngine::Close(const std::string& name) {
  {
    MutexLock lock(&mutex_);
    std::shared_ptr<const ModelInfo>* known = FindLocked(name);
    if (known == nullptr) return NotFound("there is no model '{}'", name);
    switch ((*known)->state) {
      case ModelState::kLoading:
        return FailedPrecondition("model '{}' is still loading; try again when it is ready", name);
      case ModelState::kUnloading:
        return FailedPrecondition("model '{}' is being unloaded already", name);
      case ModelState::kFailed:
        models_.erase(models_.begin() + (known - models_.data()));
        return absl::OkStatus();
      case ModelState::kReady:
        break;
    }
    ModelInfo closing = **known;
    closing.state = ModelState::kUnloading;
    *known = std::make_shared<const ModelInfo>(std::move(closing));
  }
  queue_.WaitForNone(&name);
  absl::Status status = RemoveFromDevices(name);
  MutexLock lock(&mutex_);
  models_.erase(models_.begin() + (FindLocked(name) - models_.data()));
  return status;
}

/// Uses a backend of its own on the same device, since only the worker's thread may use the
/// worker's. The worker's thread then evaluates the model in the queue of this backend.
absl::StatusOr<BatchedModel> DeviceEngine::Pack(const DeviceWorker& worker,
                                                const PipelineFiles& files,
                                                const LoadProgress& progress,
                                                ModelInfo* info) const {
  const ModelDirectory& directory = files.directory;
  DENOISED_ASSIGN_OR_RETURN(const std::shared_ptr<Backend> backend, worker.OpenAnother());
  progress(LoadPart::kFiles);
  // Before the first weight is packed: a host grants memory that it does not have, and kills the
  // process when it writes there.
  CountingBackend counting(*backend);
  DENOISED_ASSIGN_OR_RETURN(const Pipeline counted, LoadPipeline(counting, files));
  info->weight_bytes = counting.weight_bytes();
  progress(LoadPart::kDevice);
  if (const size_t free = backend->memory().free; info->weight_bytes > free) {
    return ResourceExhausted(
        "{}: its {} parameters need {} bytes of memory on {}, {} are free; choose a smaller model, "
        "or unload another",
        directory.root, counted.parameters, info->weight_bytes, backend->name(), free);
  }
  DENOISED_ASSIGN_OR_RETURN(const Pipeline pipeline, LoadPipeline(*backend, files, progress));
  BatchedModel model{.name = info->name,
                     .denoiser = pipeline.denoiser,
                     .codec = pipeline.codec,
                     .image_input = pipeline.image_input,
                     .text_encoders = {.models = pipeline.text_encoders,
                                       .final_norm = pipeline.final_norm,
                                       .skip_layers = pipeline.skip_layers,
                                       .zeros_without_negative = pipeline.zeros_without_negative,
                                       .max_chunks = options_.max_prompt_chunks},
                     .preview_codec = pipeline.preview_codec};
  const DenoiserTraits& traits = model.denoiser->traits();
  if (model.codec) {
    progress(LoadPart::kDevice);
    DENOISED_ASSIGN_OR_RETURN(model.preview, LatentPreview::Fit(*backend, *model.codec));
  }
  progress(LoadPart::kDevice);
  DENOISED_RETURN_IF_ERROR(backend->Synchronize());
  progress(LoadPart::kFiles);
  // What is freed after an error waits for the device.
  const absl::Cleanup watched = [&] { progress(LoadPart::kDevice); };
  const int classes = traits.condition == ClassCondition::kLabel ? traits.class_embeddings : 0;
  if (directory.null_class >= classes)
    return InvalidArgument(
        "{}/model_index.json, _denoised: field 'null_class' is {}, but the model has {} classes; "
        "{}leave it out",
        directory.root, directory.null_class, classes,
        classes > 0 ? fmt::format("name one from 0 to {}, or ", classes - 1) : "");
  model.null_label = directory.null_class;
  if (traits.text_features > 0) {
    PromptReader::Rules rules{.zeros_without_negative = pipeline.zeros_without_negative,
                              .skip_layers = pipeline.skip_layers,
                              .layers = std::numeric_limits<int>::max(),
                              .size_numbers = traits.size_numbers,
                              .guidance = traits.guidance_embedding,
                              .max_chunks = options_.max_prompt_chunks};
    for (const auto& encoder : pipeline.text_encoders) {
      rules.layers = std::min(rules.layers, encoder->traits().layers);
      rules.encoders.push_back(encoder->traits());
    }
    DENOISED_ASSIGN_OR_RETURN(PromptReader prompts, PromptReader::Load(directory, rules));
    info->text = prompts.traits();
    info->prompts = std::make_shared<const PromptReader>(std::move(prompts));
  }
  const SchedulerConfig& scheduler = files.scheduler;
  const Capabilities device = backend->capabilities();
  if (device.overlaps_streams) model.backend = backend;
  model.max_rows = options_.max_rows ? options_.max_rows : device.default_rows;
  // Guidance by an image takes three rows.
  if (pipeline.image_input == ImageInput::kWhole) model.max_rows = std::max(model.max_rows, 3);
  model.slots = options_.max_slots ? options_.max_slots : model.max_rows;
  model.max_evaluations = options_.max_evaluations;
  if (device.gains_from_batches) model.max_images = kMaxImages;

  const CodecTraits codec = model.codec ? model.codec->traits()
                                        : CodecTraits{.image_channels = traits.channels,
                                                      .factor = 1,
                                                      .encoded_channels = traits.channels};
  info->architecture = directory.unet().class_name;
  info->pipeline = directory.pipeline_class;
  info->parameters = pipeline.parameters;
  info->precision = files.precision == Precision::kFp8         ? "fp8"
                    : backend->product_dtype() == DType::kBF16 ? "bf16"
                                                               : "fp32";
  info->height = traits.height * codec.factor;
  info->width = traits.width * codec.factor;
  info->size_multiple = traits.size_multiple * codec.factor;
  info->max_edge = kMaxEdgeOverNative * std::max(info->height, info->width);
  info->channels = codec.image_channels;
  info->latent_factor = codec.factor;
  info->latent_channels = traits.channels;
  if (info->prompts) info->stages.push_back(Stage::kCondition);
  if (model.codec && codec.encodes()) info->stages.push_back(Stage::kEncode);
  info->stages.push_back(Stage::kDenoise);
  if (model.codec) info->stages.push_back(Stage::kDecode);
  if (model.preview_codec) info->preview_decoders.push_back(PreviewDecoder::kTiny);
  if (model.codec) info->preview_decoders.push_back(PreviewDecoder::kLinear);
  info->condition = traits.condition;
  info->class_vector_size = traits.class_vector_size;
  info->guidance_input = traits.guidance_embedding;
  info->guidance = model.null_label >= 0 || (info->prompts && !info->guidance_input);
  info->guidance_rescale = info->guidance && info->prompts;
  model.measures_outputs = info->guidance_rescale || scheduler.measures_outputs();
  const bool reads_mask = model.image_input == ImageInput::kMasked,
             reads_image = model.image_input == ImageInput::kWhole;
  info->images = {.init = codec.encodes(),
                  .required = reads_mask || reads_image,
                  .strength = codec.encodes() && !reads_image,
                  .mask = codec.encodes() && !reads_image,
                  .mask_required = reads_mask,
                  .guidance = reads_image && info->guidance,
                  .default_strength = files.defaults.strength,
                  .default_masked_strength = files.defaults.masked_strength,
                  .default_guidance_scale = files.defaults.image_guidance_scale};
  // By convention, and in ADM and DiT, the null class is the last. Requests cannot name it.
  info->num_classes = traits.class_embeddings;
  info->logarithmic_time = traits.logarithmic_time;
  if (model.null_label >= 0 && model.null_label == traits.class_embeddings - 1 &&
      info->num_classes > 1)
    --info->num_classes;
  for (const auto& [label, text] : directory.labels) info->labels.push_back(text);
  if (!info->labels.empty() && static_cast<int>(info->labels.size()) != info->num_classes)
    return InvalidArgument("{}: id2label names {} classes, but the model has {}", directory.root,
                           info->labels.size(), info->num_classes);
  info->default_sampler = scheduler.default_sampler();
  info->default_schedule = scheduler.default_schedule();
  info->samplers = scheduler.samplers();
  info->schedules = scheduler.schedules(info->default_sampler);
  info->max_steps = scheduler.max_steps(info->default_sampler, info->default_schedule);
  info->default_steps = files.defaults.steps;
  info->default_guidance_scale =
      info->guidance || info->guidance_input
          ? directory.default_guidance_scale.value_or(files.defaults.guidance_scale)
          : 1.0;
  info->max_evaluations = options_.max_evaluations;
  info->max_count = options_.LargestCount();
  info->scheduler = std::make_shared<const SchedulerConfig>(scheduler);
  info->slots = model.slots;
  return model;
}

void DeviceEngine::Publish(const ModelInfo& info) {
  MutexLock lock(&mutex_);
  *FindLocked(info.name) = std::make_shared<const ModelInfo>(info);
}

std::shared_ptr<const ModelInfo>* DeviceEngine::FindLocked(const std::string& name) {
  for (auto& model : models_)
    if (model->name == name) return &model;
  return nullptr;
}

std::shared_ptr<const ModelInfo> DeviceEngine::Find(const std::string& name) const {
  MutexLock lock(&mutex_);
  for (const auto& model : models_)
    if (model->name == name) return model;
  return nullptr;
}

std::vector<std::shared_ptr<const ModelInfo>> DeviceEngine::Models() const {
  MutexLock lock(&mutex_);
  return models_;
}

absl::StatusOr<EffectiveJob> DeviceEngine::Resolve(const JobSpec& spec,
                                                   std::vector<FieldViolation>* violations) const {
  const std::shared_ptr<const ModelInfo> model = Find(spec.model);
  if (!model)
    return NotFound("there is no model '{}'; ListModels names those there are", spec.model);
  if (model->state == ModelState::kLoading)
    return FailedPrecondition("model '{}' is still loading; try again shortly", spec.model);
  if (model->state == ModelState::kFailed)
    return FailedPrecondition("model '{}' could not be loaded: {}", spec.model,
                              std::string(model->error.message()));
  if (model->state == ModelState::kUnloading)
    return FailedPrecondition("model '{}' is being unloaded; choose another", spec.model);
  EffectiveJob job;
  ResolveJob(*model, spec, &job, violations);
  job.model = model;
  return job;
}

absl::StatusOr<JobId> DeviceEngine::Submit(EffectiveJob job, std::shared_ptr<JobListener> listener,
                                           Estimate* estimate) {
  MutexLock lock(&mutex_);
  DENOISED_RETURN_IF_ERROR(health_);
  if (draining_) return Unavailable("the server is draining; retry on another replica");
  const std::shared_ptr<const ModelInfo>* model = FindLocked(job.spec.model);
  if (model == nullptr || (*model)->state != ModelState::kReady || job.model.lock() != *model)
    return NotFound("model '{}' was unloaded", job.spec.model);
  return queue_.Submit(std::move(job), std::move(listener), estimate);
}

int DeviceEngine::QueuedImages(const std::string& model) const {
  const auto queued = admission_.Read(model, Clock::now()).queued_images;
  return std::accumulate(queued.begin(), queued.end(), 0);
}

void DeviceEngine::Cancel(JobId id, EndReason reason) {
  queue_.End(id, Cancelled("the request was cancelled"), reason);
}

void DeviceEngine::Drain(Clock::time_point deadline) {
  {
    MutexLock lock(&mutex_);
    draining_ = true;
  }
  if (queue_.WaitForNone(nullptr, deadline)) return;
  queue_.EndAll(Unavailable("the server shut down before the images were done; retry with the "
                            "same seed on another replica"),
                EndReason::kDrained);
  queue_.WaitForNone(nullptr);  // another thread may still be calling the last listener
}

std::vector<EngineStats> DeviceEngine::Stats() const {
  const Clock::time_point now = Clock::now();
  const int devices = LiveDevices();
  MutexLock lock(&mutex_);
  std::vector<EngineStats> all;
  for (const auto& model : models_) {
    if (model->state != ModelState::kReady && model->state != ModelState::kUnloading) continue;
    const Admission::Totals totals = admission_.Read(model->name, now);
    all.push_back({.model = model->name,
                   .queued_images =
                       std::accumulate(totals.queued_images.begin(), totals.queued_images.end(), 0),
                   .active_images = totals.active_images,
                   .slots = model->slots * devices,
                   .queued_requests = totals.queued_requests,
                   .queued_images_by_priority = totals.queued_images,
                   .oldest_wait_seconds = totals.oldest_wait_seconds,
                   .evaluations = totals.evaluations,
                   .rows = totals.rows,
                   .padding_rows = totals.padding_rows,
                   .parked_images = totals.parked_images,
                   .wasted_rows = totals.wasted_rows});
  }
  return all;
}

void DeviceEngine::SetObserver(EngineObserver* observer) { observer_ = observer; }

absl::Status DeviceEngine::Health() const {
  MutexLock lock(&mutex_);
  return health_;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options) {
  return CreateEngine(options, OpenBackend);
}

absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options,
                                                     BackendOpener open) {
  const auto within = [](const char* field, int value, int low, int high) -> absl::Status {
    if (value >= low && value <= high) return absl::OkStatus();
    return InvalidArgument("{} is {}; use {} to {}", field, value, low, high);
  };
  if (options.max_rows != 0)  // guidance takes two rows an image
    DENOISED_RETURN_IF_ERROR(within("max_rows", options.max_rows, 2, 1024));
  if (options.max_slots != 0)
    DENOISED_RETURN_IF_ERROR(within("max_slots", options.max_slots, 1, 4096));
  DENOISED_RETURN_IF_ERROR(within("max_evaluations", options.max_evaluations, 1, 100000));
  DENOISED_RETURN_IF_ERROR(within("max_prompt_chunks", options.max_prompt_chunks, 1, 16));
  DENOISED_RETURN_IF_ERROR(within("max_count", options.max_count, 1, 65536));
  DENOISED_RETURN_IF_ERROR(within("max_queued_requests", options.max_queued_requests, 1, 1 << 24));
  DENOISED_RETURN_IF_ERROR(within("max_queued_images", options.max_queued_images, 1, 1 << 24));
  if (options.devices.empty())
    return InvalidArgument("devices is empty; name the devices by their numbers, such as 0");
  for (auto it = options.devices.begin(); it != options.devices.end(); ++it) {
    if (*it < 0) return InvalidArgument("devices holds {}; numbers count from 0", *it);
    if (std::count(options.devices.begin(), it, *it) > 0)
      return InvalidArgument("devices holds {} twice; name each device once", *it);
  }
  DENOISED_RETURN_IF_ERROR(within("keep_evaluations", options.keep_evaluations, 0, 100000));
  for (const double weight : options.priority_weights)
    if (!(weight >= 1e-3 && weight <= 1e3))
      return InvalidArgument("priority_weights holds {}; use 0.001 to 1000", weight);
  if (!(options.watchdog_seconds >= 0))
    return InvalidArgument("watchdog_seconds is {}; use a number of seconds, or 0 for none",
                           options.watchdog_seconds);
  auto engine = std::make_unique<DeviceEngine>(options, std::move(open));
  DENOISED_RETURN_IF_ERROR(engine->Start());
  return engine;
}

}  // namespace denoised
