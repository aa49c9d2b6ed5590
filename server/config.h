// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/core/status.h"
#include "engine/engine.h"
#include "server/jobs/retention.h"
#include "server/models/model_source.h"
#include "server/security/limits.h"
#include "server/security/security_config.h"
#include "server/telemetry/log.h"

namespace denoised {

/// Bounds on connections, so that clients that only hold what they take cost little.
struct ConnectionLimits {
  std::chrono::milliseconds keepalive{60'000};
  /// Clients may ping this often, also while nothing moves. No flag sets it, since clients must
  /// know it.
  std::chrono::milliseconds min_ping{10'000};
  std::chrono::milliseconds max_idle{600'000};  // without calls; 0: for ever
  std::chrono::milliseconds max_age{0};         // 0: connections live as long as they like
  std::chrono::milliseconds handshake{20'000};  // from TCP to HTTP/2, TLS included
  int max_connections = 10'000;
  int max_streams = 1000;                         // calls under way of one connection
  int max_streams_per_client = 4096;              // those that wait for images, of one client
  int64_t max_buffered_bytes = int64_t{1} << 30;  // messages that gRPC holds, of all connections
};

/// Everything that the command line says.
struct Config {
  std::string listen = "127.0.0.1:50051";
  std::string metrics_listen = "127.0.0.1:9090";  // empty: no metrics port
  std::vector<ModelSource> models;
  std::vector<std::string> model_roots;  // where admins may load from; empty: see ModelRoots::Make
  std::string state_dir;                 // keeps what admins change; empty: nothing is kept
  EngineOptions engine;
  RequestLimits limits;
  JobRetention jobs;
  ConnectionLimits connections;
  SecurityConfig security;
  bool reflection = true, admin = true;  // whether grpc.reflection and ModelAdmin are there
  int worker_threads = 0;                // 0: half of AvailableCores(), at least two
  /// What uploads may take while they are unpacked, of all requests at a time.
  int64_t max_decoding_bytes = int64_t{1} << 30;
  std::chrono::milliseconds write_timeout{30'000};
  std::chrono::milliseconds lame_duck{0};  // from NOT_SERVING to the refusal of new work
  std::chrono::milliseconds grace{30'000};
  std::chrono::milliseconds reload_models{0};  // how often to look for changes; 0: never
  log::Format log_format = log::Format::kText;
  log::Level log_level = log::Level::kInfo;
  bool check = false;
};

/// What a command line asks for: to run with `config`, or, for --help, --version, --make-token and
/// --print-config, to print a text and stop.
struct CommandLine {
  Config config;
  std::optional<std::string> print;
};

/// Whether only this machine can connect to `address`, a host:port.
bool IsLoopback(const std::string& address);
/// Whether every caller is an admin: the server listens on loopback alone and tells no callers
/// apart, by a file of clients or by certificates. See Clients for why.
bool EverybodyIsAdmin(const Config& config);

/// Reads flags, the environment (DENOISED_MAX_ROWS for --max-rows) and the JSON file of --config,
/// the first of them wins. InvalidArgument or NotFound names the flag, its value and the remedy, of
/// each setting whose value has the right form but cannot be, on a line of its own.
absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv);

}  // namespace denoised
