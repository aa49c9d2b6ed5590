// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"
#include "denoised/error.h"

/// How the command ends and how it tells of errors.

namespace denoised::command {

enum ExitCode : int {
  kOk = 0,
  kError = 1,         // anything that has no code of its own; health: not serving
  kUsage = 2,         // the command line, or a field that the server refused
  kUnavailable = 3,   // the server cannot be reached, is loading or draining, or its queue is full
  kTimeout = 4,       // --timeout passed
  kInterrupted = 130  // Ctrl-C, as shells have it
};

ExitCode ExitCodeOf(const absl::Status& status);

/// One line for each thing that was wrong, each with its remedy: fields under the names of their
/// flags, "error: --steps is 0; use 1 to 1000". A flag that sets several fields has equal lines
/// once.
std::string Describe(const absl::Status& status);

/// {"type": "error", "code": "INVALID_ARGUMENT", "message": ..., "fields": [...], ...} in a line.
std::string DescribeAsJson(const absl::Status& status);

/// Describes it on stderr, and on stdout too when `json`. Returns the exit code.
ExitCode Report(const absl::Status& status, bool json);

}  // namespace denoised::command
