// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "command/report.h"
#include "denoised/client.h"

namespace denoised::command {

/// The flags of `denoise bench`, as given.
struct BenchFlags {
  std::optional<double> rate;
  std::string trace;
  double speed = 1;
  std::optional<int> concurrency;
  std::vector<std::string> mix;
  std::optional<double> duration_seconds;
  std::optional<int64_t> requests;
  std::optional<double> warm_up_seconds;
  uint64_t seed = 1;
  std::string save_trace;
  std::string format = "png";
  int connections = 1;
  bool unary = false;
  std::string json;
  std::string compare;
};

/// Adds the flags, with their help, to the subcommand; `flags` outlives it.
void AddBenchFlags(CLI::App& command, BenchFlags& flags);

/// `denoise bench`: puts a load on the server and tells how it bore it. `clients`, one for each
/// connection, must not retry: an error is a result. kOk when requests succeeded and equal requests
/// got equal images; a stop request ends the load early and is kInterrupted.
ExitCode Bench(const std::vector<client::Client>& clients, const BenchFlags& flags,
               const client::CallOptions& call);

}  // namespace denoised::command
