#pragma once

#include <optional>
#include <string>

#include "engine/backend/backend.h"

namespace denoised::cpu {

/// Memory this process may have: the machine's, or its control group's limit (v2 or v1) where that
/// is lower. Page cache that the kernel would give up counts as free. `root` is "/" but for tests.
BackendMemory ReadMemory(const std::string& root = "/");

/// Cores' worth of time that this process's control groups (v2 or v1) grant it: 1.5 for 150 ms in
/// every 100 ms. Nothing when no group bounds it.
std::optional<double> ReadCpuQuota(const std::string& root = "/");

/// Threads that can run at one time on `cores` cores under `quota`: one more than fit would spend
/// the quota early, and then all of them stand still until the next period.
int UsefulThreads(int cores, std::optional<double> quota);

/// "Intel(R) Xeon(R) Gold 6430", or "CPU" when the kernel does not say.
std::string ReadModelName(const std::string& root = "/");

}  // namespace denoised::cpu
