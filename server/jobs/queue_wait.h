// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

namespace denoised {

/// How long jobs wait for the device now. Thread-safe.
class QueueWait {
 public:
  /// A job starts that has waited so long.
  void JobStarted(double seconds) { seconds_ = seconds; }

  /// When a client should try again after a full queue: a tenth of the present wait, in which about
  /// a tenth of the queue has moved on.
  std::chrono::milliseconds RetryDelay() const {
    const double seconds = std::clamp(seconds_.load() / 10, 0.25, 30.0);
    return std::chrono::milliseconds(static_cast<int64_t>(1000 * seconds));
  }

 private:
  std::atomic<double> seconds_{0};  // of the job that started last
};

}  // namespace denoised
