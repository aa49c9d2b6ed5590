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

/// The retries of `denoise health`: none without --wait, else until the call's timeout.
client::RetryPolicy HealthRetries(const HealthFlags& flags);

/// `denoise health`: kOk if SERVING, kError if not, kUnavailable if there is no reply. While it
/// waits, it prints the reason on stderr.
ExitCode Health(const client::Client& client, const HealthFlags& flags,
                const client::CallOptions& call);

}  // namespace denoised::command
