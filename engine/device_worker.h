// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/batching/step_batcher.h"
#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"
#include "engine/device_engine.h"
#include "engine/io/weights.h"

namespace denoised {

/// One device and the thread that owns it, its backend, its models and its step batcher. Between
/// evaluations the thread runs commands of other threads, so none of these is ever shared. Any
/// thread may call the methods.
class DeviceWorker {
 public:
  using Clock = std::chrono::steady_clock;

  /// `lost` is called once if the device fails, on any thread, before waiting commands are
  /// answered. Everything that is passed must outlive the worker.
  DeviceWorker(const BackendOptions& backend, const BackendOpener& open,
               const StepBatcher::Options& batching, Admission* admission, JobQueue* queue,
               EngineObserver* observer, std::function<void()> lost);
  ~DeviceWorker() { Stop(); }

  /// Opens the device and starts its thread.
  absl::Status Start();
  /// Waits for the thread. Never returns if the device hangs.
  void Stop();

  /// Wakes the thread, because the queue may have work.
  void Wake();
  /// Runs `command` with the batcher on the device's thread, between two evaluations, and returns
  /// its Status or StatusOr. Unavailable if the device is lost before or while it runs. The command
  /// may then still be running after the return, so it must own everything that it refers to.
  template <typename Command>
  auto Run(Command command) -> decltype(command(std::declval<StepBatcher&>()));
  /// Another backend on the same device, for another thread. What it packs outlives it.
  absl::StatusOr<std::unique_ptr<Backend>> OpenAnother() const { return open_(backend_options_); }
  /// Runs `work` on a thread of its own and returns its StatusOr; for work on a backend of
  /// OpenAnother(). Unavailable, and what `work` must own, as for Run(). `work` calls the function
  /// that it is given before each part; the first one is kDevice.
  template <typename Work>
  auto RunBeside(Work work) -> decltype(work(LoadProgress()));

  /// Gives up the device as hanging if more than `limit` was spent on one evaluation, one command
  /// (a step of a load, removal of a model), one part of RunBeside() other than kFiles, or one step
  /// of opening a size.
  void LoseIfHanging(std::chrono::duration<double> limit);

  const std::string& name() const { return name_; }
  const std::string& description() const { return description_; }
  /// OK, or Unavailable with the device's error.
  absl::Status health() const;

 private:
  /// A call of Run(): both end it, whichever comes first.
  struct PendingCommand {
    std::function<void(StepBatcher&)> run;
    std::function<void(const absl::Status&)> fail;
  };
  /// A call of RunBeside() whose work has not ended.
  struct Beside {
    std::function<void(const absl::Status&)> fail;
    std::optional<Clock::time_point> since;  // of the part that it is at; none while it reads files
  };
  /// The result of a call; the first one counts.
  template <typename Result>
  struct Answer {
    std::atomic<bool> given{false};
    std::promise<Result> promise;
    void Give(Result result) {
      if (!given.exchange(true)) promise.set_value(std::move(result));
    }
  };

  void Main(std::promise<absl::Status> started);
  void Loop();
  void WatchFrom(std::optional<Clock::time_point> begin);
  void LoseIfBroken();
  void Lose(const absl::Status& status);

  const BackendOptions backend_options_;
  const BackendOpener& open_;
  const StepBatcher::Options batching_;
  Admission* const admission_;
  JobQueue* const queue_;
  EngineObserver* const observer_;
  const std::function<void()> lost_;
  std::string name_, description_;
  bool may_hang_ = false;
  std::thread thread_;

  // Used by the device's thread only.
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<StepBatcher> batcher_;

  mutable Mutex mutex_;
  ConditionVariable wake_;
  std::deque<std::shared_ptr<PendingCommand>> commands_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<PendingCommand> running_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false, woken_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status health_ ABSL_GUARDED_BY(mutex_);
  /// When the thread began what it does now; none while it waits.
  std::optional<Clock::time_point> watched_from_ ABSL_GUARDED_BY(mutex_);
  std::set<std::shared_ptr<Beside>> beside_ ABSL_GUARDED_BY(mutex_);
  /// Threads whose work had not ended when the device was lost.
  std::vector<std::thread> left_behind_ ABSL_GUARDED_BY(mutex_);
};

template <typename Command>
auto DeviceWorker::Run(Command command) -> decltype(command(std::declval<StepBatcher&>())) {
  using Result = decltype(command(std::declval<StepBatcher&>()));
  const auto answer = std::make_shared<Answer<Result>>();
  const auto pending = std::make_shared<PendingCommand>();
  pending->run = [this, answer, command = std::move(command)](StepBatcher& batcher) {
    Result result = command(batcher);
    LoseIfBroken();  // before the answer: the caller may ask for health()
    answer->Give(std::move(result));
  };
  pending->fail = [answer](const absl::Status& device) { answer->Give(device); };
  {
    MutexLock lock(&mutex_);
    DENOISED_RETURN_IF_ERROR(health_);
    commands_.push_back(pending);
  }
  wake_.NotifyAll();
  return answer->promise.get_future().get();
}

template <typename Work>
auto DeviceWorker::RunBeside(Work work) -> decltype(work(LoadProgress())) {
  using Result = decltype(work(LoadProgress()));
  const auto answer = std::make_shared<Answer<Result>>();
  const auto beside = std::make_shared<Beside>();
  beside->fail = [answer](const absl::Status& device) { answer->Give(device); };
  beside->since = Clock::now();
  {
    MutexLock lock(&mutex_);
    DENOISED_RETURN_IF_ERROR(health_);
    beside_.insert(beside);
  }
  std::thread thread([this, answer, beside, work = std::move(work)] {
    Result result = work([this, beside](LoadPart next) {
      MutexLock lock(&mutex_);
      beside->since.reset();
      if (next == LoadPart::kDevice) beside->since = Clock::now();
    });
    {
      MutexLock lock(&mutex_);
      beside_.erase(beside);
    }
    answer->Give(std::move(result));
  });
  Result result = answer->promise.get_future().get();
  {
    MutexLock lock(&mutex_);
    if (beside_.count(beside)) {
      left_behind_.push_back(std::move(thread));
      return result;
    }
  }
  thread.join();
  return result;
}

}  // namespace denoised
