// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

namespace denoised {

/// The stages of a shutdown. Lame duck: clients are told to go elsewhere, but requests are still
/// taken. Draining: new requests are refused.
enum class DrainState { kNone, kLameDuck, kDraining };

/// The server sets it; everyone may read it. Thread-safe.
struct DrainProgress {
  std::atomic<DrainState> state{DrainState::kNone};
  /// When the drain should be over, in seconds since 1970; 0 before the drain.
  std::atomic<double> deadline{0};

  /// From now on new requests are refused.
  bool draining() const { return state == DrainState::kDraining; }
};

}  // namespace denoised
