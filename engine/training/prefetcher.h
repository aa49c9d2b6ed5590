// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace denoised::training {

/// Prepares the batches of coming steps on threads of its own while one step is made. What is in a
/// batch depends on its step alone, so threads and timing change no bits.
class Prefetcher {
 public:
  /// Writes `sample` of `step` to `to`. Called by several threads at a time, in any order.
  using Prepare = std::function<void(int64_t step, int64_t sample, uint8_t* to)>;

  /// A batch is `samples` of `bytes` each; two batches are in memory. Nothing is prepared before
  /// the first Take().
  Prefetcher(int threads, int64_t samples, int64_t bytes, Prepare prepare);
  ~Prefetcher();

  /// Waits for the batch of `step`, which stays until the next call, and has the next one prepared.
  /// Usually the step after the last one; any other starts anew. One thread calls it.
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
  std::vector<std::thread> threads_;  // last: they use all of the above
};

}  // namespace denoised::training
