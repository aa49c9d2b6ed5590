// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"

namespace denoised::training {

/// Prepares the next batch on threads of its own during a step. A batch depends on its step alone,
/// so threads and timing change no bits.
class Prefetcher {
 public:
  /// Writes `sample` of `step` to `to`. Called by several threads at a time, in any order.
  using Prepare = std::function<void(int64_t step, int64_t sample, uint8_t* to)>;

  /// A batch is `samples` samples of `bytes` bytes each. Two batches are in memory. Nothing is
  /// prepared before the first Take(). Throws std::system_error if a thread cannot be started.
  Prefetcher(int threads, int64_t samples, int64_t bytes, Prepare prepare);
  ~Prefetcher();

  /// Waits for the batch of `step` and starts preparing the next one. The result is valid until the
  /// next call. `step` is usually one more than in the last call; any other step starts afresh.
  /// Only one thread may call it.
  const uint8_t* Take(int64_t step);

  static size_t MemoryFor(int64_t samples, int64_t bytes) {
    return static_cast<size_t>(kBatches * samples * bytes);
  }

 private:
  static constexpr int64_t kBatches = 2;
  /// Samples [begin, end) of a step's batch.
  struct Block {
    int64_t step, begin, end;
  };
  void Work();
  /// Ends the threads.
  void Stop();
  /// Waits for something to prepare. False if the threads are to end.
  bool Begin(Block* block);
  void End(const Block& block);

  const int64_t samples_, bytes_;
  const Prepare prepare_;
  std::vector<uint8_t> batches_[kBatches];  // of step s: s modulo kBatches
  Mutex mutex_;
  ConditionVariable work_, progress_;
  int64_t prepared_[kBatches] ABSL_GUARDED_BY(mutex_) = {};  // samples
  int64_t taken_ ABSL_GUARDED_BY(mutex_) = -1;               // the step whose batch is in use
  int64_t next_step_ ABSL_GUARDED_BY(mutex_) = 0, next_sample_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t busy_ ABSL_GUARDED_BY(mutex_) = 0;  // threads that prepare
  bool paused_ ABSL_GUARDED_BY(mutex_) = true, stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // last, since they use all members above
};

}  // namespace denoised::training
