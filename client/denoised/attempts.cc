// SPDX-License-Identifier: Apache-2.0
#include "denoised/attempts.h"

#include <algorithm>
#include <utility>

#include "denoised/backoff.h"
#include "denoised/error.h"

namespace denoised::client {

void RetryBudget::Succeeded() {
  MutexLock lock(&mutex_);
  left_ = std::min(left_ + 1, size_);
}

void RetryBudget::RetryFailed() {
  MutexLock lock(&mutex_);
  left_ = std::max<int64_t>(left_ - 10, 0);
}

bool RetryBudget::empty() const {
  MutexLock lock(&mutex_);
  return left_ < 10;
}

Attempts::Attempts(const RetryPolicy& policy, std::shared_ptr<RetryBudget> budget,
                   std::optional<std::chrono::system_clock::time_point> deadline)
    : policy_(policy), budget_(std::move(budget)), deadline_(deadline) {}

std::optional<std::chrono::nanoseconds> Attempts::Ended(const absl::Status& status) {
  if (status.ok()) {
    budget_->Succeeded();
    return std::nullopt;
  }
  const auto delay = policy_.NextDelay(status, count_, RandomFraction(), Remaining(deadline_));
  // A retry at the time that the server asked for is no burden to it, so it costs nothing.
  if (RetryPolicy::Retryable(status) && !Details(status).retry_after) {
    if (count_ > 1) budget_->RetryFailed();
    if (budget_->empty()) return std::nullopt;
  }
  ++count_;
  return delay;
}

}  // namespace denoised::client
