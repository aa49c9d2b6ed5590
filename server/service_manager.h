// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace denoised {

/// Sends `state` to the service manager, as sd_notify(3) does: lines such as "READY=1" or
/// "STATUS=loading models". Does nothing when no manager asked for it, that is without
/// $NOTIFY_SOCKET, and a failure is ignored: the server runs as well without a manager.
/// Thread-safe.
void NotifyServiceManager(std::string_view state);

}  // namespace denoised
