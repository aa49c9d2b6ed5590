// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>

namespace denoised {

/// How long results are kept for clients that fetch them later.
struct JobRetention {
  std::chrono::milliseconds time{600'000};
  int64_t max_bytes = 256 << 20;  // of all results and running jobs together; the oldest go first
};

}  // namespace denoised
