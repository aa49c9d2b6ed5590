#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "denoised/connection.h"

namespace denoised::command {

/// Which server, and how to show it who calls.
struct ConnectionFlags {
  std::string server = "127.0.0.1:50051";
  bool tls = false;
  client::TlsOptions files;
  std::string token_file;
};

/// Adds the flags, with their help and variables of the environment; `flags` outlives `app`.
void AddConnectionFlags(CLI::App& app, ConnectionFlags& flags);

/// Any flag of TLS turns it on.
client::ConnectionOptions ToOptions(const ConnectionFlags& flags);

}  // namespace denoised::command
