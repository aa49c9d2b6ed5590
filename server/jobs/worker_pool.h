#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace denoised {

/// Threads for what must block neither gRPC's threads nor the engine's: checking requests, decoding
/// and encoding images, writing events. First come, first served. Thread-safe.
class WorkerPool {
 public:
  explicit WorkerPool(int threads);
  /// Runs what was posted, then ends the threads.
  ~WorkerPool();

  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  /// Tasks may post further tasks, also while the pool is being destroyed.
  void Post(std::function<void()> task);

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;  // guarded by mutex_
  bool stopping_ = false;                    // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace denoised
