// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cpu/parallel.h"

#include <algorithm>
#include <cstdlib>

#include "engine/core/available_cores.h"

namespace denoised::cpu {

int Workers() {
  static const int workers = std::getenv("OMP_NUM_THREADS") != nullptr
                                 ? omp_get_max_threads()
                                 : std::min(omp_get_max_threads(), AvailableCores());
  return workers;
}

}  // namespace denoised::cpu
