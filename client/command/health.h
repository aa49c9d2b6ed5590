// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "command/report.h"
#include "denoised/client.h"

namespace denoised::command {

struct HealthFlags {
  std::string service;      // empty: the server
  double wait_seconds = 0;  // 0: ask once
  bool json = false;
};

/// How the connection of `denoise health` retries: for as long as a question lasts, if it waits.
client::RetryPolicy HealthRetries(const HealthFlags& flags);

/// `denoise health`: kOk when SERVING, kError when not, kUnavailable when nobody answers. While it
/// waits, it says on stderr what for.
ExitCode Health(const client::Client& client, const HealthFlags& flags,
                const client::CallOptions& call);

}  // namespace denoised::command
