#pragma once

#include <prometheus/collectable.h>

#include <mutex>
#include <vector>

#include "server/serving.h"

namespace denoised {

/// What the engine, the catalog and the jobs know themselves, read when Prometheus asks.
class ServingSnapshot : public prometheus::Collectable {
 public:
  explicit ServingSnapshot(const Serving* serving) : serving_(serving) {}

  /// Nothing is read from now on: what is pointed to may be destroyed.
  void Detach();

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  mutable std::mutex mutex_;
  const Serving* serving_;  // guarded by mutex_
};

/// The process_* metrics that every Prometheus client library has: CPU, memory, files.
class ProcessSnapshot : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override;
};

}  // namespace denoised
