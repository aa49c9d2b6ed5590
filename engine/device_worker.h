#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "engine/batching/step_batcher.h"
#include "engine/device_engine.h"

namespace denoised {

/// One device and the thread that owns it: its backend, its models and its step batcher. Between
/// evaluations the thread takes commands, so nothing of them is ever shared. Methods may be called
/// from any thread.
class DeviceWorker {
 public:
  using Clock = std::chrono::steady_clock;

  /// `lost` is called once if the device fails, on any thread, when no command runs any more. All
  /// that is passed outlives the worker.
  DeviceWorker(const BackendOptions& backend, const BackendOpener& open,
               const StepBatcher::Options& batching, Admission* admission, JobQueue* queue,
               EngineObserver* observer, std::function<void()> lost);
  ~DeviceWorker() { Stop(); }

  /// Opens the device and starts to work.
  absl::Status Start();
  /// Waits for the thread; for ever, if the device hangs.
  void Stop();

  /// The queue may have work.
  void Wake();
  /// Runs `part` with the batcher on the device's thread, between two evaluations, and waits for
  /// what it returns, a Status or StatusOr; Unavailable without running it when the device is lost.
  template <typename Part>
  auto Run(Part part) -> decltype(part(std::declval<StepBatcher&>()));
  /// A backend of its own on the same device, for another thread. What it packs outlives it.
  absl::StatusOr<std::unique_ptr<Backend>> OpenAnother() const { return open_(backend_options_); }

  /// Ends the work of a device whose evaluation, or part of opening a size, takes longer than
  /// `limit`: it hangs.
  void LoseIfHanging(std::chrono::duration<double> limit);

  const std::string& name() const { return name_; }
  const std::string& description() const { return description_; }
  /// OK, or Unavailable with what the device failed of.
  absl::Status health() const;

 private:
  /// Runs with OK, or is told why it will not.
  using Command = std::function<void(const absl::Status& device)>;

  void Main(std::promise<absl::Status> started);
  void Loop();
  void SetStepBegan(std::optional<Clock::time_point> time);
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
  std::thread thread_;

  // Of the device's thread alone.
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<StepBatcher> batcher_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Command> commands_;
  bool stop_ = false, woken_ = false;
  absl::Status health_;
  std::optional<Clock::time_point> step_began_;
};

template <typename Part>
auto DeviceWorker::Run(Part part) -> decltype(part(std::declval<StepBatcher&>())) {
  using Result = decltype(part(std::declval<StepBatcher&>()));
  // Shared: set_value may still be returning when the waiting thread has gone on.
  const auto done = std::make_shared<std::promise<Result>>();
  {
    std::lock_guard lock(mutex_);
    DENOISED_RETURN_IF_ERROR(health_);
    commands_.push_back([this, done, part = std::move(part)](const absl::Status& device) {
      Result result = device.ok() ? Result(part(*batcher_)) : Result(device);
      if (device.ok()) LoseIfBroken();  // first: who asks next knows why it failed
      done->set_value(std::move(result));
    });
  }
  wake_.notify_all();
  return done->get_future().get();
}

}  // namespace denoised
