// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#include "engine/core/mutex.h"

namespace denoised::cpu {

/// Threads of a ParallelFor that is not inside another one: OMP_NUM_THREADS where it is set, else
/// OpenMP's limit and at most AvailableCores(); never more than 4096. The first call decides for
/// the whole process.
int Workers();

#ifdef DENOISED_THREAD_SANITIZER
// ThreadSanitizer does not see how OpenMP's threads synchronise, since the compiler's OpenMP is not
// instrumented. So std::threads do the same work under it.
struct Team {
  static inline thread_local bool member = false;
  static inline thread_local int number = 0;
};
inline int Worker() { return Team::number; }
inline int Threads() { return Team::member ? 1 : Workers(); }
#else
/// The calling thread's number among those of the outermost ParallelFor, below Workers().
inline int Worker() { return omp_get_thread_num(); }

/// Threads that a ParallelFor called here uses: 1 inside another one.
inline int Threads() { return omp_in_parallel() ? 1 : Workers(); }
#endif

/// While it lives, oneDNN plans and runs the calling thread's work for one thread. (It divides work
/// by OpenMP's limit, and the bits could depend on that.)
class OneThread {
 public:
  OneThread() : threads_(omp_get_max_threads()) { omp_set_num_threads(1); }
  OneThread(const OneThread&) = delete;
  ~OneThread() { omp_set_num_threads(threads_); }

 private:
  const int threads_;
};

/// body(unit, thread) for every unit in [0, count), with thread < Threads(). Threads take one unit
/// at a time, so a thread that is slowed down by other programs delays only its own unit. A unit's
/// result must not depend on the thread. Inside another ParallelFor the calling thread runs all
/// units. Rethrows the first exception.
template <typename Body>
void ParallelFor(int64_t count, const Body& body) {
  const int threads = Threads();
  if (threads == 1 || count <= 1) {
    for (int64_t unit = 0; unit < count; ++unit) body(unit, 0);
    return;
  }
  std::exception_ptr failure;
#ifdef DENOISED_THREAD_SANITIZER
  Mutex mutex;
  std::atomic<int64_t> next = 0;  // relaxed: it orders nothing that OpenMP's schedule does not
  const auto take_units = [&](int number) {
    Team::member = true, Team::number = number;
    for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      try {
        body(unit, number);
      } catch (...) {
        MutexLock lock(&mutex);
        if (!failure) failure = std::current_exception();
      }
    }
    Team::member = false, Team::number = 0;
  };
  std::vector<std::thread> others;
  for (int number = 1; number < threads; ++number) others.emplace_back(take_units, number);
  take_units(0);
  for (std::thread& other : others) other.join();
#else
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t unit = 0; unit < count; ++unit) {
    try {
      body(unit, omp_get_thread_num());
    } catch (...) {
#pragma omp critical
      if (!failure) failure = std::current_exception();
    }
  }
#endif
  if (failure) std::rethrow_exception(failure);
}

}  // namespace denoised::cpu
