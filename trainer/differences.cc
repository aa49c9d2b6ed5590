// SPDX-License-Identifier: Apache-2.0
#include "trainer/differences.h"

namespace denoised::trainer {

std::string Differences(
    const nlohmann::json& one, const nlohmann::json& other,
    fmt::format_string<const std::string&, const std::string&, const std::string&> format,
    const std::function<bool(const std::string& field)>& counts) {
  nlohmann::json fields = one;
  fields.update(other);
  const auto text = [](const nlohmann::json& value) {
    return value.is_null() ? "not set" : value.dump();
  };
  std::string differences;
  for (const auto& item : fields.items()) {
    const std::string& field = item.key();
    const nlohmann::json a = one.value(field, nlohmann::json()),
                         b = other.value(field, nlohmann::json());
    if (a == b || (counts && !counts(field))) continue;
    const std::string first = text(a), second = text(b);
    if (!differences.empty()) differences += "; ";
    differences += fmt::format(format, field, first, second);
  }
  return differences;
}

}  // namespace denoised::trainer
