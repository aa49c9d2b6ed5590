// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace denoised {

/// A model to hold, under the name that requests use.
struct ModelSource {
  std::string name;
  std::string directory;
};

}  // namespace denoised
