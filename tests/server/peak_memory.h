// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <string>

#include "tests/eventually.h"

namespace denoised {

/// A figure in bytes of /proc/self/status, such as "VmHWM:", the largest resident memory so far. A
/// test fails where there is none.
inline int64_t MemoryFigure(const std::string& name) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    int64_t kilobytes = 0;
    if (word == name && status >> kilobytes) return kilobytes * 1024;
  }
  ADD_FAILURE() << "/proc/self/status has no " << name;
  return 0;
}

/// By how much `work` raises the process's resident memory at its peak, in bytes. A test fails
/// where that cannot be measured.
template <typename Work>
int64_t PeakGrowth(const Work& work) {
  bool can_reset = true;
  int64_t before = 0;
  // Else an earlier peak would hide this one: also what another thread gives back just now. The
  // kernel counts pages of each core apart.
  EXPECT_TRUE(Eventually([&] {
    std::ofstream reset("/proc/self/clear_refs");
    reset << 5 << std::flush;  // the peak becomes what is resident now
    can_reset = reset.good();
    before = MemoryFigure("VmHWM:");
    return !can_reset || before - MemoryFigure("VmRSS:") < 4 << 20;
  })) << "the peak was not reset";
  EXPECT_TRUE(can_reset) << "/proc/self/clear_refs cannot be written";
  work();
  return MemoryFigure("VmHWM:") - before;
}

}  // namespace denoised
