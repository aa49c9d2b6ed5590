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

/// Limits of connections, so that idle or malicious clients cost little.
struct ConnectionLimits {
  std::chrono::milliseconds keepalive{60'000};
  /// Clients may ping this often, even without calls. It has no flag, because clients must know it.
  std::chrono::milliseconds min_ping{10'000};
  std::chrono::milliseconds max_idle{600'000};  // without calls; 0: for ever
  std::chrono::milliseconds max_age{0};         // 0: no limit
  std::chrono::milliseconds handshake{20'000};  // from TCP to HTTP/2, TLS included
  int max_connections = 10'000;
  int max_streams = 1000;                  // concurrent calls of one connection
  int max_streams_per_client = 4096;       // concurrent calls for images of one client
  int max_queued_requests_per_client = 0;  // 0: no limit of their own
  /// Over all connections: messages in gRPC, and as much again for messages that are read until
  /// their jobs begin, and for bodies on the HTTP port.
  int64_t max_buffered_bytes = int64_t{1} << 30;
};

/// A folder of --models that is no model, and why.
struct SkippedFolder {
  std::string directory, reason;
};

/// All settings of the server.
struct Config {
  std::string listen = "127.0.0.1:50051";
  std::string http_listen = "127.0.0.1:8080";     // empty: no HTTP port
  std::string metrics_listen = "127.0.0.1:9090";  // empty: no metrics port
  std::vector<ModelSource> models;
  std::string models_directory;               // of --models; empty: none
  std::vector<SkippedFolder> skipped_models;  // in it
  std::vector<std::string> model_roots;  // where admins may load from; empty: see ModelRoots::Make
  std::string state_dir;                 // keeps admins' changes; empty: they are lost at a restart
  EngineOptions engine;
  RequestLimits limits;
  JobRetention jobs;
  ConnectionLimits connections;
  SecurityConfig security;
  std::vector<std::string> http_origins;  // whose pages may call, "https://studio.example.org"
  std::chrono::milliseconds http_link_time{600'000};
  bool reflection = true, admin = true;  // whether to offer grpc.reflection and ModelAdmin
  int worker_threads = 0;                // 0: half of AvailableCores(), at least two
  /// Memory for unpacking uploads, over all requests.
  int64_t max_decoding_bytes = int64_t{1} << 30;
  std::chrono::milliseconds write_timeout{30'000};
  std::chrono::milliseconds lame_duck{0};  // from NOT_SERVING to the refusal of new work
  std::chrono::milliseconds grace{30'000};
  std::chrono::milliseconds reload_models{0};  // how often to look for changes; 0: never
  log::Format log_format = log::Format::kText;
  log::Level log_level = log::Level::kInfo;
  bool check = false;
  std::string calibrate;  // directory of a model to calibrate instead of serving; empty: none
};

/// What to do: run with `config`, or print a text and exit (--help, --version, --make-token and
/// --print-config).
struct CommandLine {
  Config config;
  std::optional<std::string> print;
};

/// Whether only this machine can connect to `address`, a host:port.
bool IsLoopback(const std::string& address);
/// Whether only this machine can connect to any port that takes calls.
bool IsLoopbackAlone(const Config& config);
/// Whether every caller is an admin: the server listens on loopback alone, without a clients file
/// and without client certificates. See Clients for the reason.
bool EverybodyIsAdmin(const Config& config);

/// Reads flags, the environment (DENOISED_MAX_ROWS for --max-rows) and the JSON file of --config;
/// the first of them wins. InvalidArgument or NotFound has a line for each invalid setting, with
/// the flag, the value and the remedy.
absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv);

}  // namespace denoised
