// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cpu/parallel.h"

#include <algorithm>
#include <cstdlib>

#include "engine/core/available_cores.h"

namespace denoised::cpu {

int Workers() {
  // For each thread, libgomp takes a part of the stack of the one that starts them.
  constexpr int kMost = 4096;
  static const int workers =
      std::min({omp_get_max_threads(), kMost,
                std::getenv("OMP_NUM_THREADS") != nullptr ? kMost : AvailableCores()});
  return workers;
}

}  // namespace denoised::cpu
