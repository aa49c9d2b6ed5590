// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "engine/core/status.h"

namespace denoised {

/// A new id for a job: 128 random bits from OpenSSL's generator as 32 hexadecimal digits. Nobody
/// can guess it, so it protects the jobs of anonymous callers, who share one name (Caller).
/// Internal when the system has no random bytes. Thread-safe.
absl::StatusOr<std::string> MakeJobId();

}  // namespace denoised
