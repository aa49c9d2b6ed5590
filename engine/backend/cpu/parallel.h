#pragma once

#include <omp.h>

#include <cstdint>
#include <exception>

namespace denoised::cpu {

/// Threads that ParallelFor uses: OMP_NUM_THREADS where it is set, else OpenMP's limit for the
/// calling thread and at most AvailableCores().
int Threads();

/// The calling thread's number, below Threads().
inline int Thread() { return omp_get_thread_num(); }

/// While it lives, oneDNN plans and runs what the calling thread asks of it for one thread. (It
/// divides work by OpenMP's limit, and bits could follow.)
class OneThread {
 public:
  OneThread() : threads_(omp_get_max_threads()) { omp_set_num_threads(1); }
  OneThread(const OneThread&) = delete;
  ~OneThread() { omp_set_num_threads(threads_); }

 private:
  const int threads_;
};

/// body(unit) for every unit in [0, count), shared out among the cores one at a time, so that a
/// core which other programs slow down delays only its own unit. Which thread runs a unit must not
/// matter to its result. Rethrows the first exception.
template <typename Body>
void ParallelFor(int64_t count, const Body& body) {
  std::exception_ptr failure;
#pragma omp parallel for schedule(dynamic) num_threads(Threads()) if (count > 1)
  for (int64_t unit = 0; unit < count; ++unit) {
    try {
      body(unit);
    } catch (...) {
#pragma omp critical
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace denoised::cpu
