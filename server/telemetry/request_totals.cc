// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/request_totals.h"

namespace denoised {

void RequestTotals::Begin(const std::string& model) {
  MutexLock lock(&mutex_);
  totals_[model] = {};
}

void RequestTotals::Add(const std::string& model, const Request& request) {
  MutexLock lock(&mutex_);
  const auto version = totals_.find(model);
  if (version == totals_.end()) return;
  Totals& totals = version->second;
  totals.last = std::chrono::system_clock::now();
  if (!request.ok) {
    ++totals.failed;
    totals.failed_time += request.total;
    return;
  }
  ++totals.succeeded;
  totals.succeeded_time += request.total;
  totals.queued_time += request.queued;
  totals.images += static_cast<uint64_t>(request.images);
}

RequestTotals::Totals RequestTotals::Of(const std::string& model) const {
  MutexLock lock(&mutex_);
  const auto totals = totals_.find(model);
  return totals == totals_.end() ? Totals() : totals->second;
}

void RequestTotals::Forget(const std::string& model) {
  MutexLock lock(&mutex_);
  totals_.erase(model);
}

}  // namespace denoised
