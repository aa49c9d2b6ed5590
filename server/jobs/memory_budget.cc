// SPDX-License-Identifier: Apache-2.0
#include "server/jobs/memory_budget.h"

#include <fmt/format.h>

#include <string>
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
  budget_->released_.NotifyAll();
}

absl::Status MemoryBudget::Reserve(int64_t bytes, Lease* lease) {
  const int64_t held = lease->bytes_;
  if (bytes > bytes_ - held) {
    const std::string besides = held > 0 ? fmt::format(" beside the {} that it has", held) : "";
    return InvalidArgument("needs {} bytes{}, and there are {} for all requests", bytes, besides,
                           bytes_);
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

MemoryBudget::Lease MemoryBudget::Wait(int64_t bytes) {
  DENOISED_CHECK(bytes <= bytes_, "{} of {} bytes", bytes, bytes_);
  MutexLock lock(&mutex_);
  while (bytes > bytes_ - reserved_) released_.Wait(&mutex_);
  reserved_ += bytes;
  return Lease(this, bytes);
}

int64_t MemoryBudget::reserved() const {
  MutexLock lock(&mutex_);
  return reserved_;
}

}  // namespace denoised
