// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace denoised {

/// Messages for the operator while the program runs. A kWarning needs action, which the message
/// names; a kInfo does not.
enum class Severity : uint8_t { kInfo, kWarning };
using Notify = std::function<void(Severity, const std::string& message)>;

}  // namespace denoised
