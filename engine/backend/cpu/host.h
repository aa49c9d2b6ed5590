// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "engine/backend/compute_device.h"

namespace denoised::cpu {

/// Memory this process may have: the machine's, or its control group's limit (v2 or v1) where that
/// is lower. Page cache that the kernel can reclaim counts as free. `root` is "/" except in tests.
BackendMemory ReadMemory(const std::string& root = "/");

/// "Intel(R) Xeon(R) Gold 6430", or "CPU" when the kernel does not say.
std::string ReadModelName(const std::string& root = "/");

}  // namespace denoised::cpu
