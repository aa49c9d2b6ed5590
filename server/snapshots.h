// SPDX-License-Identifier: Apache-2.0
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

/// Metrics whose values are read from their owners at each scrape. Thread-safe.

namespace denoised {

/// The owners. They must outlive each call.
struct SnapshotSources {
  const Engine* engine;
  const Catalog* catalog;
  const Jobs* jobs;
  const MemoryBudget* decoding;
  const DrainProgress* drain;
  const ServerInfo* info;
  SecurityConfig security;
};

/// Metrics of the engine, the catalog and the jobs.
std::vector<prometheus::MetricFamily> CollectServing(const SnapshotSources& sources);

/// The process_* metrics that every Prometheus client library has: CPU, memory, files.
std::vector<prometheus::MetricFamily> CollectProcess();

}  // namespace denoised
