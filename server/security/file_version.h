// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace denoised {

/// Changes whenever the file, its owner or its mode changes, even if a file of the same size
/// replaces it.
std::string FileVersion(const std::string& path);

}  // namespace denoised
