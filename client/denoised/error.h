// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

/// What a server says about an error beyond its code and message (google.rpc error details). It
/// travels in the payloads of the absl::Status, under the usual type URLs, and is decoded here.

namespace denoised::client {

struct FieldViolation {
  std::string field;        // path in the request: "params.steps"
  std::string description;  // its value, why it was refused, and the remedy
};

struct ErrorDetails {
  std::vector<FieldViolation> field_violations;         // every refused field
  std::optional<std::chrono::nanoseconds> retry_after;  // when to come back
  std::string reason;                                   // "QUEUE_FULL"; empty when not said
  std::string domain;                                   // "denoised"
};

/// The details that `status` carries; empty ones when it carries none.
ErrorDetails Details(const absl::Status& status);

}  // namespace denoised::client
