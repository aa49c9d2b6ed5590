// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>

#include "absl/status/status.h"

namespace denoised::client {

/// When a failed call is retried; with replicas, on another one. Retried are UNAVAILABLE (the
/// server cannot be reached, is shutting down or was lost), and, with a RetryInfo,
/// RESOURCE_EXHAUSTED (a full queue) and FAILED_PRECONDITION (a model that is loading or being
/// replaced). Drawing twice is harmless: the seed is fixed before the first attempt, so every
/// attempt yields the same bytes.
struct RetryPolicy {
  int max_attempts = 5;  // in a row without a new event; 1: never retry
  /// Instead of max_attempts, where that is less and not 1, on a connection that has had a reply or
  /// an event, for all but a full queue and CheckHealth: the server may be restarting. With the
  /// other defaults, five attempts take about a second and ten 16 to 33, beside what a RetryInfo
  /// says.
  int restart_attempts = 10;
  std::chrono::milliseconds initial_backoff{100};
  std::chrono::milliseconds max_backoff{10'000};
  double multiplier = 2;
  /// Retries over all calls of a connection that may fail with UNAVAILABLE before it stops
  /// retrying. Ten calls that succeed add one retry, up to this number.
  int budget = 100;

  /// Whether `status` is one of these failures.
  static bool Retryable(const absl::Status& status);

  /// The wait before the attempt after `attempt` (counted from 1), or nullopt when `status` is to
  /// be returned. `random` in [0, 1) places the wait in the upper half of the backoff, so that
  /// clients which failed together do not return together; a RetryInfo is the least wait. A wait
  /// that would outlast `remaining` is not begun.
  std::optional<std::chrono::nanoseconds> NextDelay(
      const absl::Status& status, int attempt, double random,
      std::optional<std::chrono::nanoseconds> remaining) const;
};

}  // namespace denoised::client
