// SPDX-License-Identifier: Apache-2.0
#include "engine/core/available_cores.h"

#include <gtest/gtest.h>
#include <sched.h>

#include "tests/io/temporary_directory.h"

namespace denoised {
namespace {

class AvailableCoresTest : public testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) { directory_.Write(path, text); }
  int Available(int cores) const { return AvailableCores(cores, directory_.path() + "/"); }

  const TemporaryDirectory directory_;
};

TEST_F(AvailableCoresTest, WithoutAQuotaTheCores) {
  EXPECT_EQ(Available(64), 64);
  Write("proc/self/cgroup", "5:cpu,cpuacct:/a\n0::/pod\n");
  Write("sys/fs/cgroup/pod/cpu.max", "max 100000\n");
  Write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n");
  Write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(Available(64), 64);
}

TEST_F(AvailableCoresTest, TheQuotaRoundedUpWithinTheCores) {
  Write("proc/self/cgroup", "0::/\n");
  const auto with = [&](const char* quota, int cores) {
    Write("sys/fs/cgroup/cpu.max", quota);
    return Available(cores);
  };
  EXPECT_EQ(with("200000 100000\n", 64), 2);
  EXPECT_EQ(with("201000 100000\n", 64), 3);
  EXPECT_EQ(with("10000 100000\n", 64), 1);
  EXPECT_EQ(with("6350000 100000\n", 64), 64);
  EXPECT_EQ(with("100000000000000000 100000\n", 2), 2);
}

TEST_F(AvailableCoresTest, TheSmallestQuotaAboveTheProcessCounts) {
  Write("proc/self/cgroup", "0::/pod/container\n");
  Write("sys/fs/cgroup/pod/container/cpu.max", "400000 100000\n");
  Write("sys/fs/cgroup/pod/cpu.max", "75000 50000\n");
  Write("sys/fs/cgroup/cpu.max", "max 100000\n");
  EXPECT_EQ(Available(64), 2);
}

TEST_F(AvailableCoresTest, VersionOne) {
  Write("proc/self/cgroup", "6:cpuset:/a\n5:cpu,cpuacct:/a\n4:memory:/b\n0::/\n");
  Write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "300000\n");
  Write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
  Write("sys/fs/cgroup/cpu/b/cpu.cfs_quota_us", "100000\n");  // not this process's group
  Write("sys/fs/cgroup/cpu/b/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(Available(64), 3);
}

TEST_F(AvailableCoresTest, UnreadableQuotasAreNone) {
  Write("proc/self/cgroup", "0::/pod\n");
  for (const char* text : {"", "100000\n", "100000 0\n", "-5 100000\n", "many of them\n"}) {
    Write("sys/fs/cgroup/pod/cpu.max", text);
    EXPECT_EQ(Available(8), 8) << text;
  }
}

TEST_F(AvailableCoresTest, AtLeastOne) { EXPECT_EQ(Available(0), 1); }

TEST(AvailableCores, WithinTheAffinityOfThisProcess) {
  cpu_set_t affinity;
  if (sched_getaffinity(0, sizeof(affinity), &affinity) != 0) GTEST_SKIP() << "beyond 1024 cores";
  EXPECT_GE(AvailableCores(), 1);
  EXPECT_LE(AvailableCores(), CPU_COUNT(&affinity));
}

}  // namespace
}  // namespace denoised
