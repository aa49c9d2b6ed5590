// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace denoised {

/// The process's largest resident memory in bytes so far; 0 when the system does not tell.
inline int64_t PeakMemory() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    int64_t kilobytes = 0;
    if (word == "VmHWM:" && status >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

/// By how much `work` raises the process's resident memory at its peak, in bytes.
template <typename Work>
int64_t PeakGrowth(const Work& work) {
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak becomes what is resident now
  const int64_t before = PeakMemory();
  work();
  return PeakMemory() - before;
}

}  // namespace denoised
