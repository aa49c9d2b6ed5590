#pragma once

#include <stop_token>

#include "command/generate_flags.h"
#include "command/report.h"
#include "denoised/client.h"

namespace denoised::command {

/// `denoise generate`: draws, shows and saves. A stop request cancels the call; what was drawn
/// before is saved.
ExitCode Generate(const client::Client& client, const GenerateFlags& flags, std::stop_token stop);

}  // namespace denoised::command
