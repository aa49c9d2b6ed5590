// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "engine/core/status.h"

namespace denoised {

/// A new job id: 128 random bits of the operating system, as 32 hexadecimal digits. It cannot be
/// guessed, so it protects the jobs of anonymous callers, who share one name (Caller). Internal if
/// the system has no random bytes. Thread-safe.
absl::StatusOr<std::string> MakeJobId();

}  // namespace denoised
