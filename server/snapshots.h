#pragma once

#include <prometheus/metric_family.h>

#include <vector>

#include "engine/engine.h"
#include "server/api/server_info.h"
#include "server/jobs/drain.h"
#include "server/jobs/jobs.h"
#include "server/jobs/memory_budget.h"
#include "server/models/catalog.h"
#include "server/security/security_config.h"

/// Metrics that are read when Prometheus asks, since somebody knows them anyway. Thread-safe.

namespace denoised {

/// What there is to read. What is pointed to outlives the reading.
struct SnapshotSources {
  const Engine* engine;
  const Catalog* catalog;
  const Jobs* jobs;
  const MemoryBudget* decoding;
  const DrainProgress* drain;
  const ServerInfo* info;
  SecurityConfig security;
};

/// What the engine, the catalog and the jobs know.
std::vector<prometheus::MetricFamily> CollectServing(const SnapshotSources& sources);

/// The process_* metrics that every Prometheus client library has: CPU, memory, files.
std::vector<prometheus::MetricFamily> CollectProcess();

}  // namespace denoised
