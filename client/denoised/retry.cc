// SPDX-License-Identifier: Apache-2.0
#include "denoised/retry.h"

#include <algorithm>
#include <cmath>

#include "denoised/error.h"

namespace denoised::client {

bool RetryPolicy::Retryable(const absl::Status& status) {
  if (absl::IsUnavailable(status)) return true;
  return (absl::IsResourceExhausted(status) || absl::IsFailedPrecondition(status)) &&
         Details(status).retry_after.has_value();
}

std::optional<std::chrono::nanoseconds> RetryPolicy::NextDelay(
    const absl::Status& status, int attempt, double random,
    std::optional<std::chrono::nanoseconds> remaining) const {
  if (attempt >= max_attempts || !Retryable(status)) return std::nullopt;
  const auto retry_after = Details(status).retry_after;

  using Nanoseconds = std::chrono::duration<double, std::nano>;
  const Nanoseconds backoff = std::min<Nanoseconds>(
      max_backoff, Nanoseconds(initial_backoff) * std::pow(multiplier, attempt - 1));
  auto delay = std::chrono::duration_cast<std::chrono::nanoseconds>(backoff * (1 + random) / 2);
  // On top of RetryInfo, not instead of it: all who were refused were told the same time.
  if (retry_after) delay += std::max(*retry_after, std::chrono::nanoseconds::zero());
  if (remaining && delay >= *remaining) return std::nullopt;
  return delay;
}

}  // namespace denoised::client
