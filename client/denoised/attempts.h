#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "absl/status/status.h"
#include "denoised/retry.h"

namespace denoised::client {

/// How many retries that fail the calls of a connection may still make, so that servers which fail
/// everybody are not asked ever more often. First attempts are not counted: when a server is lost
/// with a thousand calls, all thousand go to another one. Thread-safe.
class RetryBudget {
 public:
  /// Holds `size` at first and at most.
  explicit RetryBudget(int size) : size_(10 * int64_t{size}), left_(size_) {}

  /// Gives back a tenth of one.
  void Succeeded();
  void RetryFailed();
  bool empty() const;

 private:
  const int64_t size_;  // in tenths, as left_
  mutable std::mutex mutex_;
  int64_t left_;  // guarded by mutex_
};

/// The attempts of one call. Used by one thread at a time.
class Attempts {
 public:
  Attempts(const RetryPolicy& policy, std::shared_ptr<RetryBudget> budget,
           std::optional<std::chrono::system_clock::time_point> deadline);

  /// The latest attempt has brought something new: failures before this count no more.
  void Renew() { count_ = 1; }
  /// The latest attempt ended with `status`. The wait before the next one, or nullopt when `status`
  /// is to be returned.
  std::optional<std::chrono::nanoseconds> Ended(const absl::Status& status);

 private:
  const RetryPolicy policy_;
  const std::shared_ptr<RetryBudget> budget_;
  const std::optional<std::chrono::system_clock::time_point> deadline_;
  int count_ = 1;
};

}  // namespace denoised::client
