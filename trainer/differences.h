// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace denoised::trainer {

/// Lists the fields in which two configurations differ, each as `format`: field, one value, the
/// other. Empty if none. `counts`, if there is one, says which of these fields to list.
std::string Differences(
    const nlohmann::json& one, const nlohmann::json& other,
    fmt::format_string<const std::string&, const std::string&, const std::string&> format,
    const std::function<bool(const std::string& field)>& counts = {});

}  // namespace denoised::trainer
