// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace denoised::client {

/// What a file of `option` holds: a token, or certificates in PEM. INVALID_ARGUMENT if it
/// cannot be read, is empty or has more than a megabyte.
absl::StatusOr<std::string> ReadFile(const char* option, const std::string& path);

/// The token in a token_file, without the newline with which editors end a file. Errors of
/// ReadFile, and the same if the file holds more than one token.
absl::StatusOr<std::string> ReadToken(const std::string& path);

}  // namespace denoised::client
