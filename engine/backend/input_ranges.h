// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <string>

#include "engine/core/mutex.h"
#include "engine/core/status.h"

namespace denoised {

/// The largest magnitude of the inputs of each layer that has a name (E4m3Layer), for calibration.
/// Thread-safe.
class InputRanges {
 public:
  /// What is computed before does not count: warming up computes with whatever is in memory.
  void Start() { started_ = true; }
  bool started() const { return started_; }

  void Add(const std::string& layer, float largest) {
    MutexLock lock(&mutex_);
    float& known = largest_[layer];
    known = std::max(known, largest);
  }
  /// What was added is not all.
  void Fail(const absl::Status& status) {
    MutexLock lock(&mutex_);
    status_.Update(status);
  }
  /// Complete when the backends that were opened with it are gone; or the first error.
  absl::StatusOr<std::map<std::string, float>> largest() const {
    MutexLock lock(&mutex_);
    if (!status_.ok()) return status_;
    return largest_;
  }

 private:
  std::atomic<bool> started_ = false;
  mutable Mutex mutex_;
  std::map<std::string, float> largest_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace denoised
