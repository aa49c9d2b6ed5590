// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"
#include "command/report.h"

namespace denoised::command {

/// INVALID_ARGUMENT unless it is an address that may be given to a browser: http or https, and
/// without a password or a token in it, since addresses are kept in histories and logs.
absl::Status CheckPage(const std::string& address);

/// `denoise open`: prints the address of the page and shows it in a browser, where there is one.
/// `page` is what --page or the context says; empty: that of --http-listen's default on the host of
/// `server`.
ExitCode OpenPage(const std::string& page, const std::string& server, bool tls);

}  // namespace denoised::command
