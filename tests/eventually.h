// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <thread>

namespace denoised {

/// Waits for something that another thread or process is about to do. The limit is for machines
/// that are busy with other tests.
template <typename Condition>
bool Eventually(Condition condition, std::chrono::milliseconds limit = std::chrono::minutes(1)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace denoised
