// SPDX-License-Identifier: Apache-2.0
#include "engine/core/available_cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <thread>
#include <vector>

#include "engine/core/control_groups.h"

namespace denoised {
namespace {

int CoresOfAffinity() {
  // The kernel refuses a set that is smaller than its own, which may be beyond CPU_SETSIZE.
  for (size_t sets = 1; sets <= 64; sets *= 2) {
    std::vector<cpu_set_t> affinity(sets);
    const size_t bytes = sets * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, affinity.data()) == 0)
      return CPU_COUNT_S(bytes, affinity.data());
  }
  return static_cast<int>(std::thread::hardware_concurrency());
}

/// A group's quota in cores: 1.5 for 150 ms in every 100 ms. Infinite where there is none: v2 says
/// "max 100000", v1 has a quota of -1.
double QuotaOf(const ControlGroup& group) {
  double quota = 0, period = 0;
  if (group.v1) {
    std::ifstream(group.directory + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(group.directory + "/cpu.cfs_period_us") >> period;
  } else {
    std::ifstream(group.directory + "/cpu.max") >> quota >> period;
  }
  return quota > 0 && period > 0 ? quota / period : INFINITY;
}

}  // namespace

int AvailableCores(int cores, const std::string& root) {
  double available = cores;
  for (const ControlGroup& group : ControlGroups("cpu", root))
    available = std::min(available, std::ceil(QuotaOf(group)));
  return std::max(1, static_cast<int>(available));
}

int AvailableCores() {
  static const int available = AvailableCores(CoresOfAffinity(), "/");
  return available;
}

}  // namespace denoised
