// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>

#include "engine/core/mutex.h"

namespace denoised {

/// The number and duration of requests for images, for each version since it was loaded: the
/// statistics of Triton's clients. Versions are counted only between Begin and Forget, so reloads
/// and late requests cannot make this grow without bound. Thread-safe.
class RequestTotals {
 public:
  using Nanoseconds = std::chrono::nanoseconds;

  /// A finished request.
  struct Request {
    bool ok = false;
    Nanoseconds total{0};   // from its arrival
    Nanoseconds queued{0};  // until its first image had a slot
    int images = 0;
  };
  struct Totals {
    uint64_t succeeded = 0, failed = 0;
    Nanoseconds succeeded_time{0}, failed_time{0};
    Nanoseconds queued_time{0};  // of successful requests
    uint64_t images = 0;         // of successful requests
    std::chrono::system_clock::time_point last{};
  };

  /// The version was loaded. `model` is always the engine's name, "digits@2".
  void Begin(const std::string& model);
  /// No effect for a version that is not loaded.
  void Add(const std::string& model, const Request& request);
  Totals Of(const std::string& model) const;
  /// The version was unloaded.
  void Forget(const std::string& model);

 private:
  mutable Mutex mutex_;
  std::map<std::string, Totals> totals_ ABSL_GUARDED_BY(mutex_);  // by the engine's name
};

}  // namespace denoised
