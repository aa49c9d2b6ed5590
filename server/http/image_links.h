// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "engine/core/mutex.h"
#include "engine/core/status.h"

namespace denoised {

/// Images that can be fetched for a while by a name that nobody can guess: whoever has the link may
/// see the image. The oldest go first when they take too much memory. Thread-safe.
class ImageLinks {
 public:
  using Clock = std::chrono::steady_clock;

  struct Image {
    std::string mime_type, bytes;
  };

  ImageLinks(std::chrono::milliseconds time, size_t max_bytes)
      : time_(time), max_bytes_(max_bytes) {}

  /// Returns the name, 32 hexadecimal digits. ResourceExhausted if the image alone exceeds the
  /// memory.
  absl::StatusOr<std::string> Add(Image image, Clock::time_point now = Clock::now());
  /// Null if there is no such image or its time is over.
  std::shared_ptr<const Image> Find(const std::string& name, Clock::time_point now = Clock::now());
  /// Drops the images whose time is over. Call it periodically, since Add and Find may never be
  /// called again.
  void Expire(Clock::time_point now = Clock::now());

 private:
  void DropOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropExpired(Clock::time_point now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::chrono::milliseconds time_;
  const size_t max_bytes_;
  Mutex mutex_;
  std::map<std::string, std::shared_ptr<const Image>> images_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::pair<Clock::time_point, std::string>> expiries_ ABSL_GUARDED_BY(mutex_);
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace denoised
