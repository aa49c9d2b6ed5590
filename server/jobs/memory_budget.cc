// SPDX-License-Identifier: Apache-2.0
#include "server/jobs/memory_budget.h"

#include <utility>

namespace denoised {

MemoryBudget::Lease& MemoryBudget::Lease::operator=(Lease&& other) noexcept {
  std::swap(budget_, other.budget_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

MemoryBudget::Lease::~Lease() {
  if (budget_ == nullptr) return;
  MutexLock lock(&budget_->mutex_);
  budget_->reserved_ -= bytes_;
}

absl::Status MemoryBudget::Reserve(int64_t bytes, Lease* lease) {
  const int64_t held = lease->bytes_;
  if (bytes > bytes_ - held) {
    return InvalidArgument("needs {} bytes beside {}, and there are {} for all requests", bytes,
                           held, bytes_);
  }
  {
    MutexLock lock(&mutex_);
    if (bytes > bytes_ - reserved_) {
      return ResourceExhausted("needs {} bytes, and {} of {} are taken by other requests", bytes,
                               reserved_ - held, bytes_);
    }
    reserved_ += bytes;
  }
  lease->budget_ = this;
  lease->bytes_ += bytes;
  return absl::OkStatus();
}

int64_t MemoryBudget::reserved() const {
  MutexLock lock(&mutex_);
  return reserved_;
}

}  // namespace denoised
