// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "command/report.h"
#include "denoised/client.h"

namespace denoised::command {

/// `denoise server info`: prints its version, devices, features and limits.
ExitCode ServerInfo(const client::Client& client, bool json, const client::CallOptions& call);

}  // namespace denoised::command
