// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "absl/status/status.h"

namespace denoised::command {

/// The man page of a command in roff, from the definition that makes its --help.
std::string ManPage(const CLI::App& command, const std::string& version);

/// Writes denoise.1, denoise-generate.1 and so on into a folder, a page for each command.
absl::Status WriteManPages(const CLI::App& program, const std::string& version,
                           const std::string& folder);

}  // namespace denoised::command
