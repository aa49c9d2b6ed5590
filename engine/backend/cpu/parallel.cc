#include "engine/backend/cpu/parallel.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "engine/core/available_cores.h"

namespace denoised::cpu {

int Threads() {
  static const int useful = std::getenv("OMP_NUM_THREADS") != nullptr
                                ? std::numeric_limits<int>::max()
                                : AvailableCores();
  return std::min(omp_get_max_threads(), useful);
}

}  // namespace denoised::cpu
