// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace denoised::command {

/// Rows of text, the first with the headings, as lines with aligned columns. All rows are as long
/// as the first.
std::string Table(const std::vector<std::vector<std::string>>& rows);

}  // namespace denoised::command
