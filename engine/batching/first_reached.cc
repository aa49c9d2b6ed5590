// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/first_reached.h"

#include <chrono>
#include <thread>

namespace denoised {
namespace {

// With the kernel's timer slack, a thread that sleeps this long wakes after 0.05 to 0.1 ms, a
// fraction of an evaluation. Two polls take some microseconds.
constexpr std::chrono::microseconds kSleep(10);

}  // namespace

size_t FirstReached(std::span<Marker* const> markers) {
  if (markers.size() == 1) return 0;  // the caller waits for it without polling
  while (true) {
    for (size_t i = 0; i < markers.size(); ++i)
      if (markers[i]->reached()) return i;
    std::this_thread::sleep_for(kSleep);
  }
}

}  // namespace denoised
