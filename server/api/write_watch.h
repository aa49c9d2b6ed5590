#pragma once

#include <grpcpp/server_context.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace denoised {

/// Cancels calls whose write does not end in time: gRPC accepts a few megabytes for a reader that
/// reads nothing and then holds the write, and with it the call, forever. Thread-safe.
class WriteWatch {
 public:
  /// `on_stall` is called, without locks held, for every call that was cancelled.
  WriteWatch(std::chrono::milliseconds timeout, std::function<void()> on_stall);
  ~WriteWatch();

  WriteWatch(const WriteWatch&) = delete;
  WriteWatch& operator=(const WriteWatch&) = delete;

  /// Before a write. `context` must live until Disarm.
  void Arm(grpc::CallbackServerContext* context);
  /// After the write.
  void Disarm(grpc::CallbackServerContext* context);

 private:
  void Run();

  const std::chrono::milliseconds timeout_;
  const std::function<void()> on_stall_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;  // guarded by mutex_
  std::unordered_map<grpc::CallbackServerContext*, std::chrono::steady_clock::time_point>
      deadlines_;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace denoised
