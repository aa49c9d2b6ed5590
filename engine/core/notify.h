#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace denoised {

/// News for whoever runs the program, while work goes on: kWarning asks for a remedy, which the
/// message names; kInfo does not.
enum class Severity : uint8_t { kInfo, kWarning };
using Notify = std::function<void(Severity, const std::string& message)>;

}  // namespace denoised
