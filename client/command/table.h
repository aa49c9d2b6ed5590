// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace denoised::command {

/// Printable text in at most about `bytes` bytes: what is cut off at its end is told by "…".
std::string Shortened(std::string_view text, size_t bytes);

/// Rows of text, the first with the headings, as lines with aligned columns; Printable. All rows
/// are as long as the first.
std::string Table(std::vector<std::vector<std::string>> rows);

}  // namespace denoised::command
