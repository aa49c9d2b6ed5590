// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "denoised/mutex.h"
#include "denoised/retry.h"

namespace denoised::client {

/// How many failed retries the calls of a connection may still make, so that retries do not pile up
/// on servers that fail for everyone. First attempts do not count: when a server with a thousand
/// calls is lost, all thousand go to another one. It also knows whether a server was ever there.
/// Thread-safe.
class RetryBudget {
 public:
  /// Holds `size` at first and at most.
  explicit RetryBudget(int size) : size_(10 * int64_t{size}), left_(size_) {}

  /// A server has answered. Of a whole call, that gives back a tenth of a retry.
  void Answered();
  void Succeeded();
  void RetryFailed();
  bool empty() const;
  bool answered() const;

 private:
  const int64_t size_;  // in tenths, as left_
  mutable Mutex mutex_;
  int64_t left_ ABSL_GUARDED_BY(mutex_);
  bool answered_ ABSL_GUARDED_BY(mutex_) = false;
};

/// The attempts of one call. Used by one thread at a time.
class Attempts {
 public:
  Attempts(const RetryPolicy& policy, std::shared_ptr<RetryBudget> budget,
           std::optional<std::chrono::system_clock::time_point> deadline);

  /// The latest attempt delivered an event: earlier failures no longer count.
  void Renew();
  /// The latest attempt ended with `status`. Returns the wait before the next one, or nullopt when
  /// the caller gets `status`.
  std::optional<std::chrono::nanoseconds> Ended(const absl::Status& status);
  /// `last` for the caller. If it only says that nobody is there, it gets the text of the first
  /// failure in the row, which may say why.
  absl::Status WithCause(absl::Status last) const;

 private:
  const RetryPolicy policy_;
  const std::shared_ptr<RetryBudget> budget_;
  const std::optional<std::chrono::system_clock::time_point> deadline_;
  int count_ = 1;
  std::string first_failure_;  // of those that count
};

}  // namespace denoised::client
