// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace denoised::training {

/// Prepares the next batch on threads of its own during a step. A batch depends on its step alone,
/// so threads and timing change no bits.
class Prefetcher {
 public:
  /// Writes `sample` of `step` to `to`. Called by several threads at a time, in any order.
  using Prepare = std::function<void(int64_t step, int64_t sample, uint8_t* to)>;

  /// A batch is `samples` samples of `bytes` bytes each. Two batches are in memory. Nothing is
  /// prepared before the first Take().
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
  void Work();

  const int64_t samples_, bytes_;
  const Prepare prepare_;
  std::mutex mutex_;
  std::condition_variable work_, progress_;
  std::vector<uint8_t> batches_[kBatches];  // of step s: s modulo kBatches
  int64_t prepared_[kBatches] = {};         // samples
  int64_t taken_ = -1;                      // the step whose batch is in use
  int64_t next_step_ = 0, next_sample_ = 0;
  int64_t busy_ = 0;  // threads that prepare
  bool paused_ = true, stop_ = false;
  std::vector<std::thread> threads_;  // last, since they use all members above
};

}  // namespace denoised::training
