// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "command/generate_flags.h"
#include "command/report.h"
#include "denoised/client.h"

namespace denoised::command {

/// `denoise generate`: draws, shows and saves. A stop request cancels the call; what was drawn
/// before is saved.
ExitCode Generate(const client::Client& client, GenerateFlags flags,
                  const client::CallOptions& call);

/// Follows a job from after an event that is known and saves its pictures: `denoise jobs watch`. Of
/// the flags it takes `out`, which must fit the job, and `json`.
ExitCode Watch(const client::Client& client, const std::string& request_id, uint64_t after_sequence,
               GenerateFlags flags, const client::CallOptions& call);

}  // namespace denoised::command
