// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cpu/parallel.h"

#include <algorithm>
#include <cstdlib>

#include "engine/core/available_cores.h"

namespace denoised::cpu {

int Workers() {
#ifdef DENOISED_THREAD_SANITIZER
  return 2;  // enough for a race; OpenMP, which oneDNN uses, has one (CMakePresets.json)
#else
  static const int workers = std::getenv("OMP_NUM_THREADS") != nullptr
                                 ? omp_get_max_threads()
                                 : std::min(omp_get_max_threads(), AvailableCores());
  return workers;
#endif
}

}  // namespace denoised::cpu
