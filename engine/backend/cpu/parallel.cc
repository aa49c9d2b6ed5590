#include "engine/backend/cpu/parallel.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "engine/backend/cpu/host.h"

namespace denoised::cpu {

int Threads() {
  // A quota that changes later is not followed: scratch and the division of work are sized by this.
  static const int useful = std::getenv("OMP_NUM_THREADS") != nullptr
                                ? std::numeric_limits<int>::max()
                                : UsefulThreads(omp_get_num_procs(), ReadCpuQuota());
  return std::min(omp_get_max_threads(), useful);
}

}  // namespace denoised::cpu
