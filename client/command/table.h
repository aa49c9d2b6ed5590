// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace denoised::command {

/// Text of a server with its control characters as "\x1b", since a terminal would obey them.
std::string Printable(std::string_view text);

/// Rows of text, the first with the headings, as lines with aligned columns; Printable. All rows
/// are as long as the first.
std::string Table(std::vector<std::vector<std::string>> rows);

}  // namespace denoised::command
