// SPDX-License-Identifier: Apache-2.0
// Who makes threads obeys the CPU quota: this program is linked with an AvailableCores() of its own
// (ld's --wrap).

#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "engine/backend/cpu/parallel.h"
#include "server/jobs/worker_pool.h"

namespace {

int available_cores = 1;

}  // namespace

// NOLINTNEXTLINE(bugprone-reserved-identifier): the linker's name for it
extern "C" int __wrap__ZN8denoised14AvailableCoresEv() { return available_cores; }

namespace denoised {
namespace {

TEST(QuotaTest, TheCpuBackendHasNoMoreThreads) {
  unsetenv("OMP_NUM_THREADS");
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "needs two cores";
  EXPECT_EQ(cpu::Workers(), 1);
}

TEST(QuotaTest, TheServerHasHalfAsManyWorkers) {
  for (const auto& [cores, workers] : {std::pair(1, 2), {5, 2}, {200, 100}}) {
    available_cores = cores;
    EXPECT_EQ(WorkerThreads(0), workers) << cores << " cores";
    EXPECT_EQ(WorkerThreads(3), 3);
  }
}

}  // namespace
}  // namespace denoised
