#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/core/status.h"
#include "engine/engine.h"
#include "server/log.h"

namespace denoised {

/// A model to hold, under the name that requests use.
struct ModelSource {
  std::string name;
  std::string directory;
};

/// Bounds on what one request may bring, so that a server's memory is planned and not hoped for.
struct RequestLimits {
  int64_t max_request_bytes = 64 << 20;
  int64_t max_init_pixels = 4096 * 4096;       // of an uploaded picture, unpacked
  int64_t max_reply_bytes = int64_t{1} << 30;  // a protobuf message holds at most 2 GiB
};

/// How long results of jobs wait for whoever asks for them again.
struct JobRetention {
  std::chrono::milliseconds time{600'000};
  int64_t max_bytes = 256 << 20;  // of all results together; the oldest go first
};

/// Everything that the command line says.
struct Config {
  std::string listen = "127.0.0.1:50051";
  std::string metrics_listen = "127.0.0.1:9090";  // empty: no metrics port
  std::vector<ModelSource> models;
  EngineOptions engine;
  RequestLimits limits;
  JobRetention jobs;
  int worker_threads = 0;  // 0: half of the cores, at least two
  std::chrono::milliseconds write_timeout{30'000};
  std::chrono::milliseconds keepalive{60'000};
  std::chrono::milliseconds max_connection_age{0};  // 0: connections live as long as they like
  std::chrono::milliseconds grace{30'000};
  log::Format log_format = log::Format::kText;
  log::Level log_level = log::Level::kInfo;
  bool check = false;
};

/// What a command line asks for: to run with `config`, or, for --help and --version, to print a
/// text and stop.
struct CommandLine {
  Config config;
  std::optional<std::string> print;
};

/// Reads flags and the JSON file of --config; flags win. InvalidArgument or NotFound names the
/// flag, its value and the remedy.
absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv);

}  // namespace denoised
