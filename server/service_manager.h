// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace denoised {

/// Sends `state` to the service manager, like sd_notify(3): lines such as "READY=1" or
/// "STATUS=loading models". Does nothing without $NOTIFY_SOCKET. Ignores failures, because the
/// server also runs without a manager. Thread-safe.
void NotifyServiceManager(std::string_view state);

}  // namespace denoised
