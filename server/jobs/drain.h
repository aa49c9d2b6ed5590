// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

namespace denoised {

/// How far the end of the server is: clients are asked to go elsewhere, but may still come; then
/// new work is refused.
enum class DrainState { kNone, kLameDuck, kDraining };

/// Set by the server, read by everybody. Thread-safe.
struct DrainProgress {
  std::atomic<DrainState> state{DrainState::kNone};
  /// By when the drain should be over, in seconds since 1970; 0 before it.
  std::atomic<double> deadline{0};

  /// New work is refused.
  bool draining() const { return state == DrainState::kDraining; }
};

}  // namespace denoised
