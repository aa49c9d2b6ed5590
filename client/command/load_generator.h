// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "command/image_hashes.h"
#include "command/workload.h"
#include "denoised/client.h"

/// Sends a workload and records how each request ended.

namespace denoised::command {

struct LoadOptions {
  int concurrency = 0;  // requests under way in a closed loop; 0: each is sent when it arrives
  double warm_up_seconds = 0;              // what arrives before is sent, but does not count
  std::optional<double> duration_seconds;  // of the arrivals that count
  std::optional<int64_t> requests;         // that count; with neither, until the workload ends
  bool unary = false;                      // Generate in place of StreamGenerate, a thread for each
  // As in client::CallOptions, of every request.
  std::vector<std::pair<std::string, std::string>> metadata;
  std::string traceparent;
};

/// How a request ended. Times are in seconds. Latency is measured from the arrival, which is the
/// intended send time, so a stalled server (or a slow load generator) cannot hide its queue.
struct Outcome {
  std::string kind;
  double arrival_seconds = 0;  // after the start
  double sent_late_seconds = 0;
  double latency_seconds = 0;                   // until its end
  std::optional<double> queued_seconds;         // as the server tells it
  std::optional<double> first_preview_seconds;  // after the arrival
  std::optional<double> deadline_seconds;       // after the arrival
  int images = 0;                               // received
  bool cancelled = false;                       // by the workload, or with the whole run
  absl::Status status;
};

/// Whether a request that succeeded did so before its deadline; without one it did.
inline bool IsInTime(const Outcome& outcome) {
  return outcome.latency_seconds <= outcome.deadline_seconds.value_or(INFINITY);
}

struct LoadResult {
  std::vector<Outcome> outcomes;  // those that count, in the order of their ends
  double window_seconds = 0;    // from the warm-up's end to the last arrival's, or until all ended
  int64_t window_images = 0;    // that came in the window, of whatever request
  int64_t window_requests = 0;  // that succeeded in the window
  int64_t window_in_time = 0;   // … and before their deadlines
  int64_t images = 0;           // of the whole run
  double cpu_seconds = 0;       // that this process spent, start to end
  ImageHashes hashes;           // of the whole run
};

/// For a line of progress.
struct LoadProgress {
  double elapsed_seconds = 0;
  int64_t sent = 0, under_way = 0, succeeded = 0, failed = 0, images = 0;
};

/// Runs until every request that was sent has ended; requests take turns on the clients'
/// connections. Tells `on_progress` four times a second, on the calling thread. A stop request ends
/// the arrivals and cancels what is under way.
LoadResult RunLoad(const std::vector<client::Client>& clients, Workload workload,
                   const LoadOptions& options, const std::function<void(const Arrival&)>& on_sent,
                   const std::function<void(const LoadProgress&)>& on_progress,
                   const std::stop_token& stop);

}  // namespace denoised::command
