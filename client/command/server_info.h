// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "command/report.h"
#include "denoised/client.h"

namespace denoised::command {

/// `denoise server info`: what the server is and allows.
ExitCode ServerInfo(const client::Client& client, bool json, const client::CallOptions& call);

}  // namespace denoised::command
