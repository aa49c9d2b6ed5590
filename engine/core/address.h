// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "engine/core/status.h"

namespace denoised {

/// InvalidArgument, which names the flag, unless `address` is host:port. No name is looked up.
/// `example`: a port for the message.
absl::Status CheckAddress(const std::string& flag, const std::string& address, int example);

}  // namespace denoised
