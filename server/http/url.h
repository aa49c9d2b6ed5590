// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace denoised {

/// `text` with each %XX replaced by its byte, in a query with '+' replaced by a space too. Nothing
/// when a '%' is followed by something else.
std::optional<std::string> PercentDecode(std::string_view text, bool query = false);

/// The names and values of "a=1&b=two". Nothing when a name comes twice, or as PercentDecode.
std::optional<std::map<std::string, std::string>> ParseQuery(std::string_view query);

}  // namespace denoised
