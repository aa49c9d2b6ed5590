// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdint>
#include <optional>
#include <random>

/// Random numbers and times, for retries and for gRPC.

namespace denoised::client {

/// 64 random bits of the operating system.
inline uint64_t RandomBits() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

/// Uniform in [0, 1).
inline double RandomFraction() { return static_cast<double>(RandomBits() >> 11) * 0x1p-53; }

/// A time as gRPC takes it: INT_MAX, and all that is longer, means never.
inline int GrpcMilliseconds(std::chrono::milliseconds time) {
  return static_cast<int>(std::min<std::chrono::milliseconds::rep>(time.count(), INT_MAX));
}

/// So long after `now`, or the clock's last moment, which gRPC takes for no deadline. A timeout
/// that is not positive is over: gRPC rounds deadlines up, so that one at `now` would leave a
/// moment.
inline std::chrono::system_clock::time_point DeadlineAfter(
    std::chrono::nanoseconds timeout,
    std::chrono::system_clock::time_point now = std::chrono::system_clock::now()) {
  if (timeout <= std::chrono::nanoseconds::zero()) return now - std::chrono::seconds(1);
  return now + std::min<std::chrono::nanoseconds>(
                   timeout, std::chrono::system_clock::time_point::max() - now);
}

/// Time until the deadline, never negative; nullopt when there is none.
inline std::optional<std::chrono::nanoseconds> Remaining(
    const std::optional<std::chrono::system_clock::time_point>& deadline) {
  if (!deadline) return std::nullopt;
  return std::max<std::chrono::nanoseconds>(*deadline - std::chrono::system_clock::now(),
                                            std::chrono::nanoseconds::zero());
}

}  // namespace denoised::client
