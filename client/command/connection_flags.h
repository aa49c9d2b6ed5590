// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <stop_token>
#include <string>
#include <vector>

#include "denoised/connection.h"

namespace denoised::command {

/// Which server to call, how to show it who calls, and what to send with every call.
struct ConnectionFlags {
  std::string server = "127.0.0.1:50051";
  std::string context;  // empty: the current one, or none
  bool tls = false;
  client::TlsOptions files;
  std::string token_file;
  bool allow_plaintext_token = false;
  std::vector<std::string> headers;  // "key: value"
  std::string traceparent;
};

/// Adds the flags, with their help and variables of the environment; `flags` outlives `app`.
void AddConnectionFlags(CLI::App& app, ConnectionFlags& flags);

/// Any flag of TLS turns it on.
client::ConnectionOptions ToOptions(const ConnectionFlags& flags);

/// What every call of the command sends.
client::CallOptions ToCallOptions(const ConnectionFlags& flags, std::stop_token stop);

}  // namespace denoised::command
