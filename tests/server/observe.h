#pragma once

#include <chrono>
#include <string>
#include <thread>

namespace denoised {

/// What GET /metrics on 127.0.0.1:`port` answers, headers included; empty when nobody does.
std::string Scrape(int port);

/// Waits for something that another thread is about to do.
template <typename Condition>
bool Eventually(Condition condition,
                std::chrono::milliseconds limit = std::chrono::milliseconds(5000)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace denoised
