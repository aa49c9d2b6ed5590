// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace denoised {

/// How many threads of this process can run at one time, at least 1: the cores of its CPU affinity,
/// or its CPU quota (cgroup v1 or v2) where that is smaller. A fraction of a core counts as a whole
/// one. A thread more would use up the quota early, and then all threads stand still until the next
/// period. Read at the first call; later changes are not followed. Thread-safe.
int AvailableCores();

/// The same for `cores` cores of affinity and the control groups of the files below `root`, which
/// ends with a slash. Reads them at each call.
int AvailableCores(int cores, const std::string& root);

}  // namespace denoised
