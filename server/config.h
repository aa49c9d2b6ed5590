#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/core/status.h"
#include "engine/engine.h"
#include "server/models/model_source.h"
#include "server/telemetry/log.h"

namespace denoised {

/// Bounds on what one request may bring, so that a server's memory is planned and not hoped for.
/// What a model or a client allows may be less.
struct RequestLimits {
  int64_t max_request_bytes = 64 << 20;
  int64_t max_init_pixels = 4096 * 4096;        // of an uploaded picture, unpacked
  int64_t max_image_pixels = 4096 * 4096;       // of an image that is drawn
  int64_t max_tensor_bytes = int64_t{1} << 30;  // of all images of a request, as float32
  int64_t max_reply_bytes = int64_t{1} << 30;   // a protobuf message holds at most 2 GiB
  int max_steps = 0, max_count = 0;             // 0: as the model
  double max_previews_per_second = 30;          // of one image; 0: no bound
};

/// Who may connect. Empty paths: not asked for.
struct SecurityConfig {
  std::string tls_cert, tls_key;              // PEM; both or none
  std::string tls_client_ca;                  // clients must show a certificate of it
  std::string clients;                        // the file of clients; needs TLS
  std::chrono::milliseconds refresh{10'000};  // how often these files are looked at

  bool tls() const { return !tls_cert.empty(); }
};

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

/// How long results of jobs wait for whoever asks for them again.
struct JobRetention {
  std::chrono::milliseconds time{600'000};
  int64_t max_bytes = 256 << 20;  // of all results and running jobs together; the oldest go first
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
  int worker_threads = 0;                // 0: half of the cores, at least two
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
