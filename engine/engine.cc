#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <list>
#include <map>
#include <mutex>
#include <thread>

#include "engine/backend/backend.h"
#include "engine/batching/step_batcher.h"
#include "engine/io/model_directory.h"
#include "engine/io/weights.h"
#include "engine/models/unet2d.h"
#include "engine/resolve.h"

namespace denoised {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kFallbackSteps = 50;  // what diffusers' pipelines run when told nothing
constexpr int kMaxEdgeOverNative = 4;

/// The engine over one device. Public methods put commands into a queue; the device's thread takes
/// them between evaluations, so nothing of the backend or the batcher is ever shared.
class DeviceEngine : public Engine {
 public:
  explicit DeviceEngine(const EngineOptions& options) : options_(options) {}
  ~DeviceEngine() override;

  absl::Status Start();

  absl::Status Open(const std::string& name, const std::string& directory) override;
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
  std::string DeviceName() const override { return device_name_; }
  std::string DeviceDescription() const override { return device_description_; }

 private:
  using Command = std::function<void()>;

  /// Forwards evaluations to the observer that is set now.
  class Observer : public EngineObserver {
   public:
    explicit Observer(DeviceEngine* engine) : engine_(engine) {}
    void OnEvaluation(const std::string& model, int rows, int bucket, double seconds) override {
      if (EngineObserver* observer = engine_->observer_.load())
        observer->OnEvaluation(model, rows, bucket, seconds);
    }

   private:
    DeviceEngine* engine_;
  };

  void Run(std::promise<absl::Status> started);
  void Loop();
  void Post(Command command);
  /// Runs `part` on the device's thread, between two evaluations, and waits for what it returns.
  template <typename Part>
  auto OnDevice(Part part) -> decltype(part());
  void RemoveClosed();
  void PublishStats();
  void Fail(const absl::Status& status);
  absl::Status Load(const std::string& directory, ModelInfo* info);
  absl::StatusOr<BatchedModel> ReadModel(const std::string& directory, ModelInfo* info) const;
  absl::Status AddToBatcher(const BatchedModel& model, ModelInfo* info);
  void Publish(const ModelInfo& info);
  std::shared_ptr<const ModelInfo>* FindLocked(const std::string& name);

  const EngineOptions options_;
  std::thread thread_;
  std::string device_name_, device_description_;
  std::atomic<EngineObserver*> observer_{nullptr};

  // Of the device's thread alone.
  std::unique_ptr<Backend> backend_;
  Observer batcher_observer_{this};
  std::unique_ptr<StepBatcher> batcher_;
  struct Closing {
    std::string model;
    std::shared_ptr<std::promise<absl::Status>> done;
  };
  std::list<Closing> closing_;  // models whose last jobs are still to end

  mutable std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<Command> commands_;
  bool stop_ = false, draining_ = false, busy_ = false;
  JobId next_id_ = 1;
  absl::Status health_;
  std::vector<std::shared_ptr<const ModelInfo>> models_;
  struct Waiting {
    std::string model;
    int images = 0;
  };
  std::map<JobId, Waiting> waiting_;  // jobs with images that have no slot, cancelled ones excepted
  JobId last_submitted_ = 0;          // later ids are in commands that the batcher has not seen
  std::map<std::string, int> active_images_;
};

DeviceEngine::~DeviceEngine() {
  Drain(Clock::now());
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

absl::Status DeviceEngine::Start() {
  std::promise<absl::Status> started;
  std::future<absl::Status> result = started.get_future();
  thread_ = std::thread(&DeviceEngine::Run, this, std::move(started));
  return result.get();
}

void DeviceEngine::Run(std::promise<absl::Status> started) {
  auto backend = OpenBackend({.device = options_.device,
                              .fp32 = options_.fp32,
                              .generic_kernels = options_.generic_kernels});
  if (!backend.ok()) {
    started.set_value(backend.status());
    return;
  }
  backend_ = *std::move(backend);
  device_name_ = std::string(backend_->name());
  device_description_ = backend_->description();
  batcher_ = std::make_unique<StepBatcher>(*backend_, &batcher_observer_);
  started.set_value(absl::OkStatus());
  Loop();
  batcher_.reset();
  backend_.reset();
}

void DeviceEngine::Loop() {
  while (true) {
    std::deque<Command> commands;
    {
      std::unique_lock lock(mutex_);
      busy_ = batcher_->busy();
      if (!busy_ && commands_.empty()) idle_.notify_all();
      wake_.wait(lock, [&] { return stop_ || busy_ || !commands_.empty(); });
      if (stop_ && !busy_ && commands_.empty()) return;
      commands.swap(commands_);
      busy_ = true;  // until the commands have run, nobody may take us for idle
    }
    for (const Command& command : commands) command();
    if (batcher_->busy())
      if (const absl::Status status = batcher_->Step(); !status.ok()) Fail(status);
    if (!closing_.empty()) RemoveClosed();
    PublishStats();
  }
}

void DeviceEngine::Post(Command command) {
  {
    std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
  }
  wake_.notify_all();
}

void DeviceEngine::Fail(const absl::Status& status) {
  const absl::Status cause = Unavailable("device {} failed and needs a restart of the server: {}",
                                         device_name_, std::string(status.message()));
  {
    std::lock_guard lock(mutex_);
    if (health_.ok()) health_ = cause;
  }
  batcher_->EndAll(cause);
}

void DeviceEngine::PublishStats() {
  std::lock_guard lock(mutex_);
  for (auto& [id, waiting] : waiting_)
    if (id <= last_submitted_) waiting.images = batcher_->waiting_images(id);
  std::erase_if(waiting_, [](const auto& entry) { return entry.second.images == 0; });
  for (const auto& model : models_)
    active_images_[model->name] = batcher_->active_images(model->name);
}

template <typename Part>
auto DeviceEngine::OnDevice(Part part) -> decltype(part()) {
  // Shared: set_value may still be returning when the waiting thread has gone on.
  const auto done = std::make_shared<std::promise<decltype(part())>>();
  Post([done, part = std::move(part)] { done->set_value(part()); });
  return done->get_future().get();
}

absl::Status DeviceEngine::Open(const std::string& name, const std::string& directory) {
  ModelInfo info{.name = name, .directory = directory};
  {
    std::lock_guard lock(mutex_);
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
  info.error = Load(directory, &info);
  info.load_seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  info.state = info.error.ok() ? ModelState::kReady : ModelState::kFailed;
  Publish(info);
  return info.error;
}

absl::Status DeviceEngine::Load(const std::string& directory, ModelInfo* info) {
  DENOISED_ASSIGN_OR_RETURN(const BatchedModel model, ReadModel(directory, info));
  const absl::Status status = AddToBatcher(model, info);
  if (!status.ok()) {
    // The weights go where they came from: on this thread.
    OnDevice([this, &model] { return batcher_->RemoveModel(model.name); }).IgnoreError();
  }
  return status;
}

absl::Status DeviceEngine::AddToBatcher(const BatchedModel& model, ModelInfo* info) {
  DENOISED_RETURN_IF_ERROR(
      OnDevice([&] { return batcher_->AddModel(model, info->height, info->width); }));
  bool more = true;
  while (more) {
    DENOISED_ASSIGN_OR_RETURN(more, OnDevice([&] { return batcher_->WarmUp(model.name); }));
  }
  return OnDevice([&] {
    info->activation_bytes = batcher_->ActivationBytes(model.name);
    info->slot_bytes = batcher_->SlotBytes(model.name);
    return absl::OkStatus();
  });
}

absl::Status DeviceEngine::Close(const std::string& name) {
  {
    std::lock_guard lock(mutex_);
    std::shared_ptr<const ModelInfo>* known = FindLocked(name);
    if (known == nullptr) return NotFound("there is no model '{}'", name);
    switch ((*known)->state) {
      case ModelState::kLoading:
        return FailedPrecondition("model '{}' is still loading; try again when it is ready", name);
      case ModelState::kUnloading:
        return FailedPrecondition("model '{}' is being unloaded already", name);
      case ModelState::kFailed:
        std::erase(models_, *known);
        return absl::OkStatus();
      case ModelState::kReady:
        break;
    }
    ModelInfo closing = **known;
    closing.state = ModelState::kUnloading;
    *known = std::make_shared<const ModelInfo>(std::move(closing));
  }
  const auto done = std::make_shared<std::promise<absl::Status>>();
  Post([this, name, done] { closing_.push_back({name, done}); });
  return done->get_future().get();
}

void DeviceEngine::RemoveClosed() {
  for (auto closing = closing_.begin(); closing != closing_.end();) {
    if (batcher_->HasJobs(closing->model)) {
      ++closing;
      continue;
    }
    const absl::Status status = batcher_->RemoveModel(closing->model);
    if (!status.ok()) Fail(status);
    {
      std::lock_guard lock(mutex_);
      std::erase(models_, *FindLocked(closing->model));
      active_images_.erase(closing->model);
    }
    closing->done->set_value(status);
    closing = closing_.erase(closing);
  }
}

absl::StatusOr<BatchedModel> DeviceEngine::ReadModel(const std::string& path,
                                                     ModelInfo* info) const {
  DENOISED_RETURN_IF_ERROR(Health());
  DENOISED_ASSIGN_OR_RETURN(const ModelDirectory directory, ModelDirectory::Read(path));
  if (!directory.scheduler_config)
    return InvalidArgument(
        "{}: there is no scheduler_config.json; put the one that the model was published with into "
        "{}/scheduler, or beside config.json",
        path, path);
  DENOISED_ASSIGN_OR_RETURN(
      SchedulerConfig scheduler,
      SchedulerConfig::Parse(*directory.scheduler_config, directory.scheduler_config_file));
  DENOISED_ASSIGN_OR_RETURN(const UNet2DConfig config,
                            UNet2DConfig::Parse(directory.unet_config, directory.unet_config_file));
  if (config.sample_height == 0 || config.sample_width == 0)
    return InvalidArgument(
        "{}: field 'sample_size' is missing; set it to the size of the images "
        "that the model was trained on",
        directory.unet_config_file);
  if (config.out_channels != config.in_channels && config.out_channels != 2 * config.in_channels)
    return InvalidArgument(
        "{}: field 'out_channels' is {}: a model that can be sampled has in_channels ({}), or "
        "twice "
        "as many with a learned variance",
        directory.unet_config_file, config.out_channels, config.in_channels);
  if (scheduler.learns_variance() && config.out_channels != 2 * config.in_channels)
    return InvalidArgument(
        "{}: field 'variance_type' asks for a learned variance, but the model in {} has "
        "out_channels {}; it would need {}",
        directory.scheduler_config_file, directory.unet_config_file, config.out_channels,
        2 * config.in_channels);

  DENOISED_ASSIGN_OR_RETURN(const Weights weights, directory.OpenWeights());
  BatchedModel model{.name = info->name};
  // A second backend on the same device, since the first is the device thread's alone. What it
  // packs outlives it.
  DENOISED_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend,
                            OpenBackend({.device = device_name_, .fp32 = options_.fp32}));
  DENOISED_ASSIGN_OR_RETURN(model.denoiser, LoadUNet2D(*backend, config, weights));
  DENOISED_RETURN_IF_ERROR(backend->Synchronize());
  const DenoiserTraits& traits = model.denoiser->traits();
  if (traits.condition == ClassCondition::kLabel) {
    if (directory.null_class >= traits.class_embeddings)
      return InvalidArgument("{}: null_class is {}, but the model has {} classes", directory.root,
                             directory.null_class, traits.class_embeddings);
    model.null_label = directory.null_class;
  }
  const bool cpu = backend->device() == Device::kCpu;
  model.max_rows = options_.max_rows ? options_.max_rows : cpu ? 16 : 64;
  model.slots = options_.max_slots ? options_.max_slots : model.max_rows;
  model.max_evaluations = options_.max_evaluations;

  info->architecture = "UNet2DModel";
  info->parameters = traits.parameters;
  info->height = traits.height;
  info->width = traits.width;
  info->size_multiple = traits.size_multiple;
  info->max_edge = kMaxEdgeOverNative * std::max(traits.height, traits.width);
  info->channels = traits.channels;
  info->condition = traits.condition;
  info->class_vector_size = traits.class_vector_size;
  info->guidance = model.null_label >= 0;
  // By convention, and in ADM and DiT, the null class is the last: not one to ask for.
  info->num_classes = traits.class_embeddings;
  if (info->guidance && model.null_label == traits.class_embeddings - 1 && info->num_classes > 1)
    --info->num_classes;
  for (const auto& [label, text] : directory.labels) info->labels.push_back(text);
  if (!info->labels.empty() && static_cast<int>(info->labels.size()) != info->num_classes)
    return InvalidArgument("{}: id2label names {} classes, but the model has {}", directory.root,
                           info->labels.size(), info->num_classes);
  info->default_sampler = scheduler.default_sampler();
  info->default_schedule = scheduler.default_schedule();
  info->samplers = scheduler.samplers();
  info->schedules = scheduler.schedules(info->default_sampler);
  info->max_steps = scheduler.max_steps();
  info->default_steps =
      std::min(directory.default_steps ? directory.default_steps : kFallbackSteps, info->max_steps);
  info->default_guidance_scale = info->guidance ? directory.default_guidance_scale : 1.0;
  info->max_evaluations = options_.max_evaluations;
  info->max_count = options_.max_count;
  info->scheduler = std::make_shared<const SchedulerConfig>(std::move(scheduler));
  info->slots = model.slots;
  info->weight_bytes = traits.parameters * SizeOf(backend->activation_dtype());
  return model;
}

void DeviceEngine::Publish(const ModelInfo& info) {
  std::lock_guard lock(mutex_);
  *FindLocked(info.name) = std::make_shared<const ModelInfo>(info);
}

std::shared_ptr<const ModelInfo>* DeviceEngine::FindLocked(const std::string& name) {
  for (auto& model : models_)
    if (model->name == name) return &model;
  return nullptr;
}

std::shared_ptr<const ModelInfo> DeviceEngine::Find(const std::string& name) const {
  std::lock_guard lock(mutex_);
  for (const auto& model : models_)
    if (model->name == name) return model;
  return nullptr;
}

std::vector<std::shared_ptr<const ModelInfo>> DeviceEngine::Models() const {
  std::lock_guard lock(mutex_);
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
  return job;
}

absl::StatusOr<JobId> DeviceEngine::Submit(EffectiveJob job, std::shared_ptr<JobListener> listener,
                                           Estimate* estimate) {
  JobId id;
  {
    std::lock_guard lock(mutex_);
    DENOISED_RETURN_IF_ERROR(health_);
    if (draining_) return Unavailable("the server is draining; retry on another replica");
    const std::shared_ptr<const ModelInfo>* model = FindLocked(job.spec.model);
    if (model == nullptr || (*model)->state != ModelState::kReady)
      return NotFound("model '{}' was unloaded", job.spec.model);
    int queued = 0;
    for (const auto& [waiting_id, waiting] : waiting_) queued += waiting.images;
    const int count = job.spec.count;
    if (estimate) estimate->images_ahead = queued;
    if (queued + count > options_.max_queued_images)
      return ResourceExhausted(
          "{} images are queued, and {} more would exceed the limit of {}; "
          "retry later",
          queued, count, options_.max_queued_images);
    id = next_id_++;
    waiting_[id] = {job.spec.model, count};
    commands_.push_back([this, id, job = std::move(job), listener = std::move(listener),
                         submitted = Clock::now()]() mutable {
      {
        std::lock_guard lock(mutex_);
        last_submitted_ = id;
      }
      batcher_->Submit(id, std::move(job), std::move(listener), submitted);
    });
  }
  wake_.notify_all();
  return id;
}

int DeviceEngine::QueuedImages(const std::string& model) const {
  std::lock_guard lock(mutex_);
  int images = 0;
  for (const auto& [id, waiting] : waiting_)
    if (waiting.model == model) images += waiting.images;
  return images;
}

void DeviceEngine::Cancel(JobId id, EndReason) {
  {
    std::lock_guard lock(mutex_);
    waiting_.erase(id);  // its place in the queue is free at once, its slots at the next evaluation
  }
  Post([this, id] { batcher_->End(id, Cancelled("the request was cancelled")); });
}

void DeviceEngine::Drain(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  if (!thread_.joinable()) return;
  const auto idle = [&] { return !busy_ && commands_.empty(); };
  wake_.notify_all();
  if (idle_.wait_until(lock, deadline, idle)) return;
  commands_.push_back([this] {
    batcher_->EndAll(
        Unavailable("the server shut down before the images were done; retry with the "
                    "same seed on another replica"));
  });
  wake_.notify_all();
  idle_.wait(lock, idle);
}

std::vector<EngineStats> DeviceEngine::Stats() const {
  std::lock_guard lock(mutex_);
  std::vector<EngineStats> all;
  for (const auto& model : models_) {
    if (model->state != ModelState::kReady) continue;
    EngineStats stats{.model = model->name, .slots = model->slots};
    for (const auto& [id, waiting] : waiting_)
      if (waiting.model == model->name) stats.queued_images += waiting.images;
    if (const auto active = active_images_.find(model->name); active != active_images_.end())
      stats.active_images = active->second;
    all.push_back(stats);
  }
  return all;
}

void DeviceEngine::SetObserver(EngineObserver* observer) { observer_ = observer; }

absl::Status DeviceEngine::Health() const {
  std::lock_guard lock(mutex_);
  return health_;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options) {
  const auto within = [](const char* field, int value, int low, int high) -> absl::Status {
    if (value >= low && value <= high) return absl::OkStatus();
    return InvalidArgument("{} is {}; use {} to {}", field, value, low, high);
  };
  if (options.max_rows != 0)  // guidance takes two rows an image
    DENOISED_RETURN_IF_ERROR(within("max_rows", options.max_rows, 2, 1024));
  if (options.max_slots != 0)
    DENOISED_RETURN_IF_ERROR(within("max_slots", options.max_slots, 1, 4096));
  DENOISED_RETURN_IF_ERROR(within("max_evaluations", options.max_evaluations, 1, 100000));
  DENOISED_RETURN_IF_ERROR(within("max_count", options.max_count, 1, 65536));
  DENOISED_RETURN_IF_ERROR(within("max_queued_images", options.max_queued_images, 1, 1 << 24));
  auto engine = std::make_unique<DeviceEngine>(options);
  DENOISED_RETURN_IF_ERROR(engine->Start());
  return engine;
}

}  // namespace denoised
