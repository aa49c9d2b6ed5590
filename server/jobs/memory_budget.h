// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"
#include "engine/core/status.h"

namespace denoised {

/// Memory that all requests share. Code reserves bytes before it allocates them, so that many
/// requests at once cannot exhaust the host. Thread-safe; must outlive its leases.
class MemoryBudget {
 public:
  /// Reserved bytes. The destructor, or assigning another lease, releases them.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept { *this = std::move(other); }
    Lease& operator=(Lease&& other) noexcept;
    ~Lease();

   private:
    friend class MemoryBudget;
    Lease(MemoryBudget* budget, int64_t bytes) : budget_(budget), bytes_(bytes) {}

    MemoryBudget* budget_ = nullptr;
    int64_t bytes_ = 0;
  };

  explicit MemoryBudget(int64_t bytes) : bytes_(bytes) {}

  /// Adds `bytes` to `lease`, which may be empty. ResourceExhausted if other leases hold too much
  /// now; InvalidArgument if `bytes` exceed the whole budget. On an error `lease` is unchanged.
  absl::Status Reserve(int64_t bytes, Lease* lease);

  /// Waits until `bytes`, at most bytes(), are free. Call it only on a thread that holds no lease
  /// and that no lease holder waits for; otherwise it can deadlock.
  Lease Wait(int64_t bytes);

  int64_t bytes() const { return bytes_; }
  int64_t reserved() const;

 private:
  const int64_t bytes_;
  mutable Mutex mutex_;
  ConditionVariable released_;
  int64_t reserved_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace denoised
