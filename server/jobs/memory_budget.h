// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "engine/core/condition_variable.h"
#include "engine/core/mutex.h"
#include "engine/core/status.h"

namespace denoised {

/// Memory that all requests share. Code reserves bytes here before it takes them, so that many
/// requests at once cannot take more than the host has. Thread-safe; must outlive its leases.
class MemoryBudget {
 public:
  /// Reserved bytes, given back by the destructor or when another lease is assigned.
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

  /// Adds `bytes` to what `lease` holds (an empty one holds nothing). ResourceExhausted when others
  /// hold too much now; InvalidArgument when the whole budget is smaller. Both leave `lease` as it
  /// was.
  absl::Status Reserve(int64_t bytes, Lease* lease);

  /// Waits until there are `bytes`, which are at most bytes(). Only for threads that hold no lease
  /// and for whom nobody with a lease waits.
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
