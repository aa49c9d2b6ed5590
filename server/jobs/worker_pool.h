// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"
#include "engine/engine.h"

namespace denoised {

/// Threads for work that must block neither gRPC's threads nor the engine's: checking requests,
/// decoding and encoding images, writing events. Among tasks of the same priority, clients that
/// have some take turns, so that one with many delays another by one task at most for each thread;
/// tasks of one client run in the order in which they were posted. A task goes before tasks of
/// lower priority that wait, or after one of them at most. No priority starves: while all have
/// tasks, of every 21 that start 16 are interactive, 4 normal and 1 batch. Thread-safe.
class WorkerPool {
 public:
  explicit WorkerPool(int threads);
  /// Runs what was posted, then ends the threads.
  ~WorkerPool();

  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  /// Tasks may post further tasks, also while the pool is being destroyed. `client`: ClientKey of
  /// the client that it is for; empty: of none.
  void Post(Priority priority, const std::string& client, std::function<void()> task);
  /// Calls task(0) … task(count − 1) on the calling thread, and on threads that have nothing to do
  /// when it begins; returns when all have returned. Other tasks take their turns between those of
  /// a helping thread. A task may call it.
  void ForEach(Priority priority, const std::string& client, int count,
               const std::function<void(int)>& task);

 private:
  struct Queue {
    void Push(const std::string& client, std::function<void()> task);
    /// Not of an empty queue.
    std::function<void()> Pop();
    bool empty() const { return clients.empty(); }

    std::map<std::string, std::deque<std::function<void()>>> tasks;  // by client; none is empty
    std::deque<std::string> clients;                                 // that have tasks; in turns
    int64_t turn = 0;  // the queue with the lowest runs next
  };

  struct Parts;
  void PostHelper(Priority priority, const std::string& client, std::shared_ptr<Parts> parts);
  void Run();
  bool HasTask() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Waits for a task and takes it. Null when there will be none.
  std::function<void()> Take() ABSL_LOCKS_EXCLUDED(mutex_);

  Mutex mutex_;
  ConditionVariable wake_;
  std::array<Queue, kPriorities> queues_ ABSL_GUARDED_BY(mutex_);  // by priority
  int64_t turn_ ABSL_GUARDED_BY(mutex_) = 0;                       // of the last task
  int idle_ ABSL_GUARDED_BY(mutex_) = 0;                           // threads that wait for tasks
  int waiting_ ABSL_GUARDED_BY(mutex_) = 0;                        // tasks
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

/// Threads of a pool: as many as `asked`; if that is 0, half of AvailableCores(), at least 2.
int WorkerThreads(int asked);

}  // namespace denoised
