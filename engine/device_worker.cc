// SPDX-License-Identifier: Apache-2.0
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
    MutexLock lock(&mutex_);
    stop_ = true;
  }
  wake_.NotifyAll();
  if (thread_.joinable()) thread_.join();
  std::vector<std::thread> left_behind;
  {
    MutexLock lock(&mutex_);
    left_behind.swap(left_behind_);
  }
  for (std::thread& thread : left_behind) thread.join();
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
  may_hang_ = backend_->capabilities().may_hang;
  // Opening a size between two evaluations does not count as part of either.
  StepBatcher::Options batching = batching_;
  batching.part_done = [this] { WatchFrom(Clock::now()); };
  batcher_ = std::make_unique<StepBatcher>(*backend_, *admission_, *queue_, observer_, batching);
  started.set_value(absl::OkStatus());
  Loop();
  batcher_.reset();
  backend_.reset();
}

void DeviceWorker::Loop() {
  while (true) {
    const bool busy = batcher_->busy();
    const auto eviction = batcher_->NextEviction();
    std::shared_ptr<PendingCommand> command;
    {
      MutexLock lock(&mutex_);
      while (!stop_ && (!health_.ok() || !(busy || woken_ || !commands_.empty()))) {
        if (!health_.ok() || !eviction) {
          wake_.Wait(&mutex_);
        } else if (Clock::now() < *eviction) {
          wake_.WaitUntil(&mutex_, *eviction);
        } else {
          break;
        }
      }
      if (stop_) return;
      woken_ = false;
      if (!commands_.empty()) {
        command = running_ = std::move(commands_.front());
        commands_.pop_front();
        watched_from_ = Clock::now();
      }
    }
    if (command) {
      command->run(*batcher_);
      MutexLock lock(&mutex_);
      running_.reset();
      watched_from_.reset();
      if (!health_.ok()) continue;
    }
    // One command, one step: neither holds up the other for longer.
    WatchFrom(Clock::now());
    absl::Status status;
    if (batcher_->busy()) {
      status = batcher_->Step();
    } else {
      batcher_->EvictUnused();
      status = batcher_->status();
    }
    WatchFrom(std::nullopt);
    if (!status.ok()) Lose(status);
  }
}

void DeviceWorker::WatchFrom(std::optional<Clock::time_point> begin) {
  MutexLock lock(&mutex_);
  watched_from_ = begin;
}

void DeviceWorker::LoseIfHanging(std::chrono::duration<double> limit) {
  if (!may_hang_) return;
  constexpr char kPart[] = "a part of loading or removing a model";
  const char* hanging = nullptr;
  {
    MutexLock lock(&mutex_);
    const Clock::time_point now = Clock::now();
    if (watched_from_ && now - *watched_from_ >= limit)
      hanging = running_ != nullptr ? kPart : "an evaluation";
    for (const auto& beside : beside_) {
      if (beside->since && now - *beside->since >= limit) hanging = kPart;
    }
  }
  if (hanging != nullptr)
    Lose(DeadlineExceeded("{} did not return within {} s", hanging, limit.count()));
}

void DeviceWorker::LoseIfBroken() {
  if (const absl::Status status = batcher_->status(); !status.ok()) Lose(status);
}

void DeviceWorker::Lose(const absl::Status& status) {
  std::deque<std::shared_ptr<PendingCommand>> commands;
  std::set<std::shared_ptr<Beside>> beside;
  absl::Status health;
  {
    MutexLock lock(&mutex_);
    if (!health_.ok()) return;
    health = health_ = Unavailable("device {} failed and needs a restart of the server: {}", name_,
                                   std::string(status.message()));
    commands.swap(commands_);
    if (running_) commands.push_front(running_);
    beside = beside_;
  }
  lost_();  // first: whoever gets an answer finds the engine in its new state
  for (const auto& command : commands) command->fail(health);
  for (const auto& work : beside) work->fail(health);
}

void DeviceWorker::Wake() {
  {
    MutexLock lock(&mutex_);
    woken_ = true;
  }
  wake_.NotifyAll();
}

absl::Status DeviceWorker::health() const {
  MutexLock lock(&mutex_);
  return health_;
}

}  // namespace denoised
