// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace denoised {

/// To the engine, each version of a model is a model of its own, "name@version".
inline std::string EngineName(std::string_view name, std::string_view version) {
  return std::string(name) + "@" + std::string(version);
}
/// "digits@2" → "digits".
inline std::string ModelOf(std::string_view engine_name) {
  return std::string(engine_name.substr(0, engine_name.find('@')));
}
/// "digits@2" → "2"; empty if there is no '@'.
inline std::string VersionOf(std::string_view engine_name) {
  const size_t at = engine_name.find('@');
  return at == std::string_view::npos ? "" : std::string(engine_name.substr(at + 1));
}

}  // namespace denoised
