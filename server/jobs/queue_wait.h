// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

namespace denoised {

/// The current waiting time of the queue. Thread-safe.
class QueueWait {
 public:
  /// Call when a job starts, with the time that it waited.
  void JobStarted(double seconds) { seconds_ = seconds; }

  /// When a client should retry after a full queue: after a tenth of the current wait, when about a
  /// tenth of the queue has moved on.
  std::chrono::milliseconds RetryDelay() const {
    const double seconds = std::clamp(seconds_.load() / 10, 0.25, 30.0);
    return std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds));
  }

 private:
  std::atomic<double> seconds_{0};  // of the job that started last
};

}  // namespace denoised
