#include "engine/device_worker.h"

#include <utility>

namespace denoised {

DeviceWorker::DeviceWorker(const BackendOptions& backend, const BackendOpener& open,
                           const StepBatcher::Options& batching, Admission* admission,
                           JobQueue* queue, EngineObserver* observer, std::function<void()> lost)
    : backend_options_(backend),
      open_(open),
      batching_(batching),
      admission_(admission),
      queue_(queue),
      observer_(observer),
      lost_(std::move(lost)) {}

absl::Status DeviceWorker::Start() {
  std::promise<absl::Status> started;
  std::future<absl::Status> result = started.get_future();
  thread_ = std::thread(&DeviceWorker::Main, this, std::move(started));
  return result.get();
}

void DeviceWorker::Stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void DeviceWorker::Main(std::promise<absl::Status> started) {
  auto backend = open_(backend_options_);
  if (!backend.ok()) {
    started.set_value(backend.status());
    return;
  }
  backend_ = *std::move(backend);
  name_ = std::string(backend_->name());
  description_ = backend_->description();
  // A size that is opened between two evaluations is not the time of either.
  StepBatcher::Options batching = batching_;
  batching.part_done = [this] { SetStepBegan(Clock::now()); };
  batcher_ = std::make_unique<StepBatcher>(*backend_, *admission_, *queue_, observer_, batching);
  started.set_value(absl::OkStatus());
  Loop();
  batcher_.reset();
  backend_.reset();
}

void DeviceWorker::Loop() {
  while (true) {
    const bool busy = batcher_->busy();
    std::deque<Command> commands;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock,
                 [&] { return stop_ || (health_.ok() && (busy || woken_ || !commands_.empty())); });
      if (stop_) return;
      woken_ = false;
      commands.swap(commands_);
    }
    for (const Command& command : commands) command(absl::OkStatus());
    if (!batcher_->busy()) continue;
    SetStepBegan(Clock::now());
    const absl::Status status = batcher_->Step();
    SetStepBegan(std::nullopt);
    if (!status.ok()) Lose(status);
  }
}

void DeviceWorker::SetStepBegan(std::optional<Clock::time_point> time) {
  std::lock_guard lock(mutex_);
  step_began_ = time;
}

void DeviceWorker::LoseIfHanging(std::chrono::duration<double> limit) {
  {
    std::lock_guard lock(mutex_);
    if (!step_began_ || Clock::now() - *step_began_ < limit) return;
  }
  Lose(DeadlineExceeded("an evaluation did not return within {} s", limit.count()));
}

void DeviceWorker::LoseIfBroken() {
  if (const absl::Status status = batcher_->status(); !status.ok()) Lose(status);
}

void DeviceWorker::Lose(const absl::Status& status) {
  std::deque<Command> commands;
  absl::Status health;
  {
    std::lock_guard lock(mutex_);
    if (!health_.ok()) return;
    health = health_ = Unavailable("device {} failed and needs a restart of the server: {}", name_,
                                   std::string(status.message()));
    commands.swap(commands_);
  }
  for (const Command& command : commands) command(health);
  lost_();
}

void DeviceWorker::Wake() {
  {
    std::lock_guard lock(mutex_);
    woken_ = true;
  }
  wake_.notify_all();
}

absl::Status DeviceWorker::health() const {
  std::lock_guard lock(mutex_);
  return health_;
}

}  // namespace denoised
