// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

#include "engine/core/precision.h"

namespace denoised {

/// A model to load, and the name that requests use for it.
struct ModelSource {
  std::string name;
  std::string directory;
  std::optional<Precision> precision = std::nullopt;  // unset: that of EngineOptions
};

}  // namespace denoised
