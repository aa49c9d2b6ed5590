// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

#include "denoised/connection.h"

namespace denoised::command {

/// `call` with a timeout.
/// The timeout of a call that draws nothing.
constexpr auto kQuestionTimeout = std::chrono::seconds(10);

inline client::CallOptions WithTimeout(client::CallOptions call, std::chrono::nanoseconds timeout) {
  call.timeout = timeout;
  return call;
}

}  // namespace denoised::command
