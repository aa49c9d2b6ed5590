// SPDX-License-Identifier: Apache-2.0
#include "denoised/attempts.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "denoised/backoff.h"
#include "denoised/error.h"

namespace denoised::client {

void RetryBudget::Answered() {
  MutexLock lock(&mutex_);
  answered_ = true;
}

void RetryBudget::Succeeded() {
  MutexLock lock(&mutex_);
  answered_ = true;
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

bool RetryBudget::answered() const {
  MutexLock lock(&mutex_);
  return answered_;
}

Attempts::Attempts(const RetryPolicy& policy, std::shared_ptr<RetryBudget> budget,
                   std::optional<std::chrono::system_clock::time_point> deadline)
    : policy_(policy), budget_(std::move(budget)), deadline_(deadline) {}

void Attempts::Renew() {
  count_ = 1;
  first_failure_.clear();
  budget_->Answered();
}

std::optional<std::chrono::nanoseconds> Attempts::Ended(const absl::Status& status) {
  if (status.ok()) {
    budget_->Succeeded();
    return std::nullopt;
  }
  if (count_ == 1) first_failure_ = std::string(status.message());
  RetryPolicy policy = policy_;
  if (policy.max_attempts > 1 && !absl::IsResourceExhausted(status) && budget_->answered()) {
    policy.max_attempts = std::max(policy.max_attempts, policy.restart_attempts);
  }
  const auto delay = policy.NextDelay(status, count_, RandomFraction(), Remaining(deadline_));
  // A retry at the time that the server asked for is no burden to it, so it costs nothing.
  if (RetryPolicy::Retryable(status) && !Details(status).retry_after) {
    if (count_ > 1) budget_->RetryFailed();
    if (budget_->empty()) return std::nullopt;
  }
  ++count_;
  return delay;
}

absl::Status Attempts::WithCause(absl::Status last) const {
  const bool nobody = absl::IsUnavailable(last) && Details(last).domain.empty();
  const std::string text(last.message());
  if (!nobody || first_failure_.empty() || first_failure_ == text) return last;
  return absl::UnavailableError(fmt::format("{}; the first failure was: {}", text, first_failure_));
}

}  // namespace denoised::client
