// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>

#include "engine/core/mutex.h"

namespace denoised {

/// How many requests for images each version of a model had since it was loaded, and how long they
/// took: what Triton's clients ask for as statistics. Only versions between Begin and Forget are
/// counted, so that what reloads and late requests leave behind is bounded. Thread-safe.
class RequestTotals {
 public:
  using Nanoseconds = std::chrono::nanoseconds;

  /// A request that has ended.
  struct Request {
    bool ok = false;
    Nanoseconds total{0};   // from its arrival
    Nanoseconds queued{0};  // until its first image had a slot
    int images = 0;
  };
  struct Totals {
    uint64_t succeeded = 0, failed = 0;
    Nanoseconds succeeded_time{0}, failed_time{0};
    Nanoseconds queued_time{0};  // of those that succeeded
    uint64_t images = 0;         // of those that succeeded
    std::chrono::system_clock::time_point last{};
  };

  /// The version was loaded. `model` is everywhere the engine's name of it, "digits@2".
  void Begin(const std::string& model);
  /// Without effect for a version that is not loaded.
  void Add(const std::string& model, const Request& request);
  Totals Of(const std::string& model) const;
  /// The version was unloaded.
  void Forget(const std::string& model);

 private:
  mutable Mutex mutex_;
  std::map<std::string, Totals> totals_ ABSL_GUARDED_BY(mutex_);  // by the engine's name
};

}  // namespace denoised
