// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "command/generate_flags.h"
#include "command/report.h"
#include "denoised/client.h"

namespace denoised::command {

struct JobsFlags {
  std::string request_id;
  uint64_t after_sequence = 0;
  std::string out;  // as GenerateFlags::out
  client::JobQuery query;
  bool json = false;
};

/// `denoise jobs list`: those that run and those that are kept.
ExitCode ListJobs(const client::Client& client, const JobsFlags& flags,
                  const client::CallOptions& call);
/// `denoise jobs get`: how far a job is.
ExitCode GetJob(const client::Client& client, const JobsFlags& flags,
                const client::CallOptions& call);
/// `denoise jobs watch`: follows a job and saves its pictures.
ExitCode WatchJob(const client::Client& client, const JobsFlags& flags,
                  const client::CallOptions& call);
/// `denoise jobs cancel`: ends it.
ExitCode CancelJob(const client::Client& client, const JobsFlags& flags,
                   const client::CallOptions& call);

}  // namespace denoised::command
