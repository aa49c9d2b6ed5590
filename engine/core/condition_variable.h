// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>

#include "engine/core/mutex.h"

namespace denoised {

/// Waits for what a Mutex guards to change. All methods need the mutex held, and hold it again when
/// they return; they may return without a notification, so callers wait in a loop.
class ConditionVariable {
 public:
  void Wait(Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Lockable lockable{mutex};
    condition_.wait(lockable);
  }
  /// Returns at `deadline` at the latest.
  template <typename Clock, typename Duration>
  void WaitUntil(Mutex* mutex, std::chrono::time_point<Clock, Duration> deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Lockable lockable{mutex};
    condition_.wait_until(lockable, deadline);
  }
  /// These two need no lock.
  void NotifyOne() { condition_.notify_one(); }
  void NotifyAll() { condition_.notify_all(); }

 private:
  /// A Mutex under the names that the standard library uses.
  struct Lockable {
    void lock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex->Lock(); }
    void unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex->Unlock(); }
    Mutex* mutex;
  };

  std::condition_variable_any condition_;
};

}  // namespace denoised
