// SPDX-License-Identifier: Apache-2.0
#include "tests/server/fake_engine.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace denoised {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

FakeEngine::FakeEngine(const FakeEngineOptions& options)
    : options_(options),
      cost_(options.evaluation_cost.count()),
      broken_(options.broken),
      thread_([this] { Run(); }) {}

FakeEngine::~FakeEngine() {
  Drain(Clock::now());
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

absl::Status FakeEngine::Open(const std::string& name, const std::string& directory,
                              std::optional<Precision> precision) {
  ++opens_;
  if (options_.on_open) options_.on_open(directory);
  std::unique_lock lock(mutex_);
  if (directory.find(broken_) != std::string::npos) {
    return NotFound("{}/config.json: no such file; give a model in diffusers layout", directory);
  }
  auto info = std::make_shared<ModelInfo>();
  info->name = name;
  info->directory = directory;
  info->state = ModelState::kReady;
  info->architecture = "UNet2DModel";
  info->precision = precision == Precision::kFp8 ? "fp8" : "fp32";
  info->parameters = 1'000'000;
  info->height = info->width = options_.size;
  info->size_multiple = 4;
  info->max_edge = 4096;
  info->channels = info->latent_channels = options_.channels;
  info->condition = ClassCondition::kLabel;
  info->num_classes = 10;
  for (int i = 0; i < 10; ++i) info->labels.push_back(std::to_string(i));
  info->guidance = true;
  info->default_sampler = Sampler::kEdmEuler;
  info->default_schedule = NoiseSchedule::kNative;
  info->samplers = {Sampler::kEdmEuler, Sampler::kHeun, Sampler::kEdmDpmSolver};
  info->schedules = {NoiseSchedule::kNative, NoiseSchedule::kExponential};
  info->default_steps = 10;
  info->images = {.init = true,
                  .strength = true,
                  .mask = true,
                  .default_strength = 0.8,
                  .default_masked_strength = 1};
  info->max_steps = 1000;
  info->max_count = 256;
  info->weight_bytes = 4'000'000;
  info->activation_bytes = 2'000'000;
  info->slot_bytes = 1'000'000;
  models_.push_back(std::move(info));
  lock.unlock();
  if (options_.on_opened) options_.on_opened(directory);
  return absl::OkStatus();
}

absl::Status FakeEngine::Close(const std::string& name) {
  std::unique_lock lock(mutex_);
  const auto model = std::find_if(models_.begin(), models_.end(),
                                  [&](const auto& each) { return each->name == name; });
  if (model == models_.end()) return NotFound("there is no model \"{}\"", name);
  ModelInfo closing = **model;
  closing.state = ModelState::kUnloading;
  *model = std::make_shared<const ModelInfo>(std::move(closing));
  idle_.wait(lock, [&] {
    return std::none_of(jobs_.begin(), jobs_.end(),
                        [&](const auto& job) { return job->job.spec.model == name; });
  });
  std::erase_if(models_, [&](const auto& each) { return each->name == name; });
  return close_error_;
}

std::shared_ptr<const ModelInfo> FakeEngine::Find(const std::string& name) const {
  std::lock_guard lock(mutex_);
  for (const auto& model : models_) {
    if (model->name == name) return model;
  }
  return nullptr;
}

std::vector<std::shared_ptr<const ModelInfo>> FakeEngine::Models() const {
  std::lock_guard lock(mutex_);
  return models_;
}

absl::StatusOr<EffectiveJob> FakeEngine::Resolve(const JobSpec& spec,
                                                 std::vector<FieldViolation>* violations) const {
  const auto model = Find(spec.model);
  if (model == nullptr) return NotFound("there is no model \"{}\"", spec.model);
  const auto violate = [&](std::string field, std::string description) {
    violations->push_back({std::move(field), std::move(description)});
  };
  EffectiveJob job{.spec = spec, .precision = model->precision};
  JobSpec& full = job.spec;
  if (spec.count < 1 || spec.count > model->max_count) {
    violate("count", fmt::format("is {}; use 1 to {}", spec.count, model->max_count));
  }
  for (size_t i = 0; i < spec.class_labels.size(); ++i) {
    if (spec.class_labels[i] < 0 || spec.class_labels[i] >= model->num_classes) {
      violate(fmt::format("class_labels[{}]", i),
              fmt::format("is {}; use 0 to {}", spec.class_labels[i], model->num_classes - 1));
    }
  }
  if (spec.class_labels.size() > 1 && spec.class_labels.size() != size_t(spec.count)) {
    violate("class_labels", fmt::format("has {} labels for {} images; use one, or one each",
                                        spec.class_labels.size(), spec.count));
  }
  if (!spec.seeds.empty() && spec.seeds.size() != size_t(spec.count)) {
    violate("seeds", fmt::format("has {} seeds for {} images", spec.seeds.size(), spec.count));
  }
  if (!spec.class_values.empty()) violate("class_values", "are not for this model; use labels");
  job.steps = spec.sampler.steps > 0 ? spec.sampler.steps : model->default_steps;
  if (job.steps > model->max_steps) {
    violate("steps", fmt::format("is {}; use 1 to {}", job.steps, model->max_steps));
  }
  full.sampler.steps = job.steps;
  full.sampler.sampler = spec.sampler.sampler.value_or(model->default_sampler);
  full.sampler.schedule = spec.sampler.schedule.value_or(model->default_schedule);
  if (std::count(model->samplers.begin(), model->samplers.end(), *full.sampler.sampler) == 0) {
    violate("sampler", "is not for this model; use one of GetModel's samplers");
  }
  if (std::count(model->schedules.begin(), model->schedules.end(), *full.sampler.schedule) == 0) {
    violate("schedule", "is not for this model; use one of GetModel's noise schedules");
  }
  full.width = spec.width > 0 ? spec.width : model->width;
  full.height = spec.height > 0 ? spec.height : model->height;
  if (full.width % model->size_multiple != 0) {
    violate("width", fmt::format("is {}; use a multiple of {}", full.width, model->size_multiple));
  }
  if (full.height % model->size_multiple != 0) {
    violate("height",
            fmt::format("is {}; use a multiple of {}", full.height, model->size_multiple));
  }
  if (!violations->empty()) return job;
  std::random_device random;
  if (!spec.seeds.empty()) full.seed = spec.seeds[0];
  if (!full.seed) full.seed = (uint64_t{random()} << 32) ^ random();
  if (full.class_labels.empty()) {
    for (int i = 0; i < spec.count; ++i) full.class_labels.push_back(random() % 10);
  }
  full.class_labels.resize(spec.count, full.class_labels[0]);
  full.guidance_scale = spec.guidance_scale.value_or(model->default_guidance_scale);
  const int run = std::max(1, static_cast<int>(job.steps * full.sampler.strength));
  job.evaluations = full.sampler.sampler == Sampler::kHeun ? 2 * run - 1 : run;
  return job;
}

int FakeEngine::Queued() const {
  int images = 0;
  for (const auto& job : jobs_) images += job->job.spec.count - job->admitted;
  return images;
}

int FakeEngine::QueuedImages(const std::string& model) const {
  std::lock_guard lock(mutex_);
  return Queued();
}

absl::StatusOr<JobId> FakeEngine::Submit(EffectiveJob job, std::shared_ptr<JobListener> listener,
                                         Estimate* estimate) {
  std::function<void(const JobSpec&)> hook;
  {
    std::lock_guard lock(mutex_);
    hook = on_submit_;
  }
  if (hook) hook(job.spec);
  std::lock_guard lock(mutex_);
  if (estimate) estimate->images_ahead = Queued();
  if (draining_) return Unavailable("the engine is draining");
  const bool ready = std::any_of(models_.begin(), models_.end(), [&](const auto& model) {
    return model->name == job.spec.model && model->state == ModelState::kReady;
  });
  if (!ready) return NotFound("model \"{}\" was unloaded", job.spec.model);
  if (const int queued = Queued(); queued + job.spec.count > options_.max_queued_images) {
    if (estimate && job.spec.count <= options_.max_queued_images) estimate->retry_seconds = 0.5;
    return ResourceExhausted("{} images are queued; {} more would exceed {}; try again later",
                             queued, job.spec.count, options_.max_queued_images);
  }
  last_spec_ = job.spec;
  auto made = std::make_shared<Job>();
  made->id = next_id_++;
  made->job = std::move(job);
  made->listener = std::move(listener);
  made->submitted = Clock::now();
  jobs_.push_back(made);
  wake_.notify_all();
  return made->id;
}

void FakeEngine::OnSubmit(std::function<void(const JobSpec&)> hook) {
  std::lock_guard lock(mutex_);
  on_submit_ = std::move(hook);
}

void FakeEngine::Cancel(JobId id, EndReason) {
  std::lock_guard lock(mutex_);
  for (const auto& job : jobs_) {
    if (job->id != id || job->cancelled) continue;
    job->cancelled = true;
    ++cancels_;
  }
  wake_.notify_all();
}

void FakeEngine::Drain(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  wake_.notify_all();
  idle_.wait_until(lock, deadline, [this] { return jobs_.empty(); });
  expired_ = true;
  wake_.notify_all();
  idle_.wait(lock, [this] { return jobs_.empty(); });
}

std::vector<EngineStats> FakeEngine::Stats() const {
  std::lock_guard lock(mutex_);
  std::vector<EngineStats> all;
  for (const auto& model : models_) {
    EngineStats stats{.model = model->name, .slots = options_.max_slots};
    for (const auto& job : jobs_) {
      if (job->job.spec.model != model->name) continue;
      stats.queued_images += job->job.spec.count - job->admitted;
      stats.active_images += job->admitted - job->finished;
    }
    all.push_back(stats);
  }
  return all;
}

void FakeEngine::SetObserver(EngineObserver* observer) {
  std::lock_guard lock(mutex_);
  observer_ = observer;
}

EngineObserver* FakeEngine::observer() {
  std::lock_guard lock(mutex_);
  return observer_;
}

absl::Status FakeEngine::Health() const {
  std::lock_guard lock(mutex_);
  return health_[0].ok() ? absl::OkStatus() : health_[1];
}

std::vector<DeviceState> FakeEngine::Devices() const {
  std::lock_guard lock(mutex_);
  return {{"fake:0", "no device at all", health_[0]}, {"fake:1", "no device at all", health_[1]}};
}

void FakeEngine::TellPlaces(const Estimate& estimate) {
  std::lock_guard lock(mutex_);
  for (const auto& job : jobs_) {
    if (job->admitted == 0) job->listener->OnQueued(estimate);
  }
}

void FakeEngine::FailJobs(const absl::Status& error) {
  std::lock_guard lock(mutex_);
  for (const auto& job : jobs_) job->failure = error;
  wake_.notify_all();
}

void FakeEngine::Pause(bool paused) {
  std::lock_guard lock(mutex_);
  paused_ = paused;
  evaluations_left_ = -1;
  wake_.notify_all();
}

void FakeEngine::PauseAfter(int evaluations) {
  std::lock_guard lock(mutex_);
  paused_ = false;
  evaluations_left_ = evaluations;
  wake_.notify_all();
}

void FakeEngine::set_close_error(const absl::Status& error) {
  std::lock_guard lock(mutex_);
  close_error_ = error;
}

void FakeEngine::set_broken(const std::string& part) {
  std::lock_guard lock(mutex_);
  broken_ = part;
}

void FakeEngine::BreakDevice(int device, const absl::Status& status) {
  std::lock_guard lock(mutex_);
  health_[device] = status;
}

JobSpec FakeEngine::last_spec() const {
  std::lock_guard lock(mutex_);
  return last_spec_;
}

/// OK while the job should go on. Under mutex_.
absl::Status FakeEngine::ReasonToEnd(const Job& job) const {
  if (!job.failure.ok()) return job.failure;
  if (job.cancelled) return Cancelled("the request was cancelled");
  if (job.job.spec.deadline && Clock::now() >= *job.job.spec.deadline) {
    return DeadlineExceeded("the deadline passed after {} evaluations; allow more time",
                            job.evaluations);
  }
  if (expired_) return Unavailable("the server stopped before the request was done");
  return absl::OkStatus();
}

void FakeEngine::End(const std::shared_ptr<Job>& job, const absl::Status& status) {
  job->listener->OnDone(
      status, {job->queued_seconds, job->first_preview_seconds, SecondsSince(job->submitted)});
  std::lock_guard lock(mutex_);
  jobs_.erase(std::find(jobs_.begin(), jobs_.end(), job));
  idle_.notify_all();
}

void FakeEngine::Admit(std::vector<std::shared_ptr<Job>>* started) {
  for (const auto& job : jobs_) {
    while (job->admitted < job->job.spec.count && int(slots_.size()) < options_.max_slots) {
      if (!job->started) {
        job->started = true;
        started->push_back(job);
      }
      slots_.push_back({job, job->admitted++});
    }
  }
}

ImageResult FakeEngine::Draw(const Job& job, int index, double noise) const {
  const JobSpec& spec = job.job.spec;
  ImageResult result{index, spec.SeedOf(index), spec.class_labels[index],
                     Tensor::Host({spec.height, spec.width, options_.channels}, DType::kF32)};
  std::mt19937_64 random(result.seed);
  std::uniform_real_distribution<double> uniform(-1, 1);
  const double frequency = 0.1 + 0.05 * result.label, phase = 3 * uniform(random);
  float* out = result.pixels.as<float>();
  for (int y = 0; y < spec.height; ++y) {
    for (int x = 0; x < spec.width; ++x) {
      for (int c = 0; c < options_.channels; ++c) {
        const double stripes = std::sin(frequency * (x + (c + 1) * y) + phase);
        const double dirt = noise > 0 ? noise * uniform(random) : 0;
        const auto drawn = static_cast<float>((1 - noise) * stripes + dirt);
        const bool kept = spec.mask && spec.mask.as<float>()[y * spec.width + x] < 0.5f;
        const int64_t at = (int64_t{y} * spec.width + x) * options_.channels + c;
        out[at] = kept ? spec.init_image.as<float>()[at] : drawn;
      }
    }
  }
  return result;
}

void FakeEngine::Evaluate(const std::vector<Slot*>& rows) {
  std::this_thread::sleep_for(std::chrono::microseconds(cost_));
  ++evaluations_;
  EngineObserver* observer;
  {
    std::lock_guard lock(mutex_);
    observer = observer_;
  }
  const std::string& model = rows[0]->job->job.spec.model;
  if (observer) {
    observer->OnEvaluation(model, "fake:0", rows.size(), options_.max_rows, cost_ * 1e-6);
    observer->OnStage(model, "fake:0", Stage::kDecode, 1, cost_ * 1e-6);
    observer->OnPrompts(model, "fake:0", 1, 1);
  }
  std::vector<Job*> touched;
  for (Slot* slot : rows) {
    Job& job = *slot->job;
    ++slot->done;
    ++job.evaluations;
    if (touched.empty() || touched.back() != &job) touched.push_back(&job);
  }
  // As the engine: progress comes before what the evaluation made.
  for (Job* job : touched) {
    job->listener->OnProgress(job->evaluations, job->job.evaluations * job->job.spec.count);
  }
  for (Slot* slot : rows) {
    Job& job = *slot->job;
    const JobSpec& spec = job.job.spec;
    if (slot->done == job.job.evaluations) {
      job.listener->OnImage(Draw(job, slot->index, 0));
    } else if (spec.previews && slot->done % spec.preview_every == 0) {
      if (job.first_preview_seconds < 0) job.first_preview_seconds = SecondsSince(job.submitted);
      job.listener->OnPreview(
          Draw(job, slot->index, 1.0 - static_cast<double>(slot->done) / job.job.evaluations),
          slot->done);
    }
  }
}

void FakeEngine::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    // A paused engine still hears of deadlines, cancels and the end of a drain.
    wake_.wait_for(lock, std::chrono::milliseconds(2),
                   [this] { return stopping_ || (!paused_ && !jobs_.empty()); });
    if (stopping_ && jobs_.empty()) return;
    std::vector<std::pair<std::shared_ptr<Job>, absl::Status>> ended;
    for (const auto& job : jobs_) {
      if (absl::Status reason = ReasonToEnd(*job); !reason.ok()) ended.push_back({job, reason});
    }
    for (const auto& [job, reason] : ended) {
      slots_.erase(std::remove_if(slots_.begin(), slots_.end(),
                                  [&job = job](const Slot& slot) { return slot.job == job; }),
                   slots_.end());
      job->admitted = job->finished = job->job.spec.count;
    }
    std::vector<std::shared_ptr<Job>> started;
    if (!paused_) Admit(&started);
    std::vector<Slot*> rows;
    for (Slot& slot : slots_) {
      if (!paused_ && int(rows.size()) < options_.max_rows &&
          (rows.empty() || rows[0]->job->job.spec.model == slot.job->job.spec.model)) {
        rows.push_back(&slot);
      }
    }
    if (!rows.empty() && evaluations_left_ > 0) paused_ = --evaluations_left_ == 0;
    lock.unlock();
    for (const auto& [job, reason] : ended) End(job, reason);
    for (const auto& job : started) {
      job->queued_seconds = SecondsSince(job->submitted);
      job->listener->OnStarted();
    }
    if (!rows.empty()) Evaluate(rows);
    lock.lock();
    std::vector<std::shared_ptr<Job>> done;
    for (auto it = slots_.begin(); it != slots_.end();) {
      if (it->done < it->job->job.evaluations) {
        ++it;
        continue;
      }
      if (++it->job->finished == it->job->job.spec.count) done.push_back(it->job);
      it = slots_.erase(it);
    }
    // Whoever had no row this time goes first the next.
    if (int(slots_.size()) > options_.max_rows && !rows.empty()) {
      std::rotate(slots_.begin(), slots_.begin() + std::min(slots_.size(), rows.size()),
                  slots_.end());
    }
    lock.unlock();
    for (const auto& job : done) End(job, absl::OkStatus());
    lock.lock();
  }
}

}  // namespace denoised
