// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "command/load_generator.h"

/// What a load test found, for people and for programs.

namespace denoised::command {

/// Statistics of a set of times, in seconds.
struct Distribution {
  int64_t count = 0;
  double mean = 0, p50 = 0, p90 = 0, p95 = 0, p99 = 0, max = 0;
};

/// nullopt of nothing. A percentile is the smallest time that so many percent do not exceed
/// (nearest rank).
std::optional<Distribution> DistributionOf(std::vector<double> seconds);

/// The results of the requests of one kind, or of all.
struct Summary {
  int64_t requests = 0, succeeded = 0, failed = 0, cancelled = 0;
  int64_t in_time = 0;                          // succeeded within their deadlines, if they had one
  std::optional<Distribution> latency, queued;  // of those that succeeded
  std::optional<Distribution> first_preview;    // of those that had one
  std::optional<Distribution> sent_late;        // by this program's fault
  std::map<std::string, int64_t> errors;        // "RESOURCE_EXHAUSTED QUEUE_FULL", by number
  std::map<std::string, std::string> messages;  // the first of each
};

struct BenchReport {
  LoadResult load;
  Summary all;
  std::map<std::string, Summary> kinds;
  std::optional<int64_t> images_compared;  // with an earlier run
};

BenchReport MakeReport(LoadResult load);

/// A table of percentiles, throughput and errors, in lines.
std::string Describe(const BenchReport& report);
nlohmann::json ToJson(const BenchReport& report);

}  // namespace denoised::command
