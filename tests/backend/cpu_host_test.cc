// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "engine/backend/backend.h"
#include "engine/backend/cpu/host.h"
#include "engine/backend/cpu/parallel.h"
#include "engine/backend/cuda/cuda_backend.h"
#include "tests/io/temporary_directory.h"

namespace denoised {
namespace {

using testing::HasSubstr;

class HostTest : public testing::Test {
 protected:
  HostTest() {
    Write("proc/meminfo", "MemTotal:       1024 kB\nMemFree: 1 kB\nMemAvailable:    800 kB\n");
  }
  void Write(const std::string& path, const std::string& text) { directory_.Write(path, text); }

  const TemporaryDirectory directory_;
  const std::string root_ = directory_.path() + "/";
};

TEST(Workers, AreNotMoreThanAStackHolds) {
  // In a process of its own, in which nobody has asked before.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto most = [] {
    setenv("OMP_NUM_THREADS", "100000", 1);
    omp_set_num_threads(100000);
    return cpu::Workers();
  };
  EXPECT_EXIT(std::exit(most() == 4096 ? 0 : 1), testing::ExitedWithCode(0), "");
}

TEST_F(HostTest, TheMachinesMemory) {
  const BackendMemory memory = cpu::ReadMemory(root_);
  EXPECT_EQ(memory.total, 1024u * 1024);
  EXPECT_EQ(memory.free, 800u * 1024);
}

TEST_F(HostTest, AControlGroupsMemory) {
  Write("proc/self/cgroup", "0::/pod/container\n");
  Write("sys/fs/cgroup/pod/container/memory.max", "max\n");
  Write("sys/fs/cgroup/pod/memory.max", "500000\n");
  Write("sys/fs/cgroup/pod/memory.current", "300000\n");
  Write("sys/fs/cgroup/pod/memory.stat", "anon 100\ninactive_file 50000\n");
  const BackendMemory memory = cpu::ReadMemory(root_);
  EXPECT_EQ(memory.total, 500000u);
  EXPECT_EQ(memory.free, 250000u);
}

TEST_F(HostTest, AGroupAboveMayHaveLessFreeThoughItsLimitIsHigher) {
  Write("proc/self/cgroup", "0::/pod/container\n");
  Write("sys/fs/cgroup/pod/container/memory.max", "400000\n");
  Write("sys/fs/cgroup/pod/container/memory.current", "100000\n");
  Write("sys/fs/cgroup/pod/memory.max", "500000\n");
  Write("sys/fs/cgroup/pod/memory.current", "450000\n");
  const BackendMemory memory = cpu::ReadMemory(root_);
  EXPECT_EQ(memory.total, 400000u);
  EXPECT_EQ(memory.free, 50000u);
}

TEST_F(HostTest, InsideAContainerTheMemoryLimitIsAtTheRoot) {
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/memory.max", "400000\n");
  Write("sys/fs/cgroup/memory.current", "500000\n");
  const BackendMemory memory = cpu::ReadMemory(root_);
  EXPECT_EQ(memory.total, 400000u);
  EXPECT_EQ(memory.free, 0u);
}

TEST_F(HostTest, MemoryInTheFirstVersionOfControlGroups) {
  Write("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n");
  Write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "600000\n");
  Write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "200000\n");
  Write("sys/fs/cgroup/memory/a/memory.stat", "total_inactive_file 100000\n");
  const BackendMemory memory = cpu::ReadMemory(root_);
  EXPECT_EQ(memory.total, 600000u);
  EXPECT_EQ(memory.free, 500000u);
}

TEST(OpenBackend, TheCpuByName) {
  auto backend = OpenBackend({.device = "cpu"});
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_EQ((*backend)->name(), "cpu");
  EXPECT_EQ((*backend)->activation_dtype(), DType::kF32);
}

#ifndef DENOISED_SANITIZED  // their allocators end it
TEST(CpuBackend, WeightsThatDoNotFitAreRefused) {
  auto backend = OpenBackend({.device = "cpu"});
  ASSERT_TRUE(backend.ok()) << backend.status();
  const auto weights = [](const Shape& shape) {
    static float nothing;  // which nobody reads
    return Tensor(&nothing, shape, DType::kF32, Device::kCpu, nullptr);
  };
  constexpr int64_t kMany = int64_t{1} << 24;  // its square is beyond every address space
  for (const absl::Status& status :
       {(*backend)->PackConv2d(weights({kMany, kMany, 3, 3}), {}, false).status(),
        (*backend)->PackLinear({weights({kMany, kMany})}, {}).status(),
        (*backend)->PackVector(weights({kMany * kMany})).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("are free; choose a smaller model"));
  }
  EXPECT_TRUE((*backend)->status().ok());
}
#endif

TEST(OpenBackend, AutoTakesCudaWhenThereIsOne) {
  auto backend = OpenBackend({});
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_EQ((*backend)->device(), CudaDeviceCount() > 0 ? Device::kCuda : Device::kCpu);
}

TEST(OpenBackend, UnknownNamesAreRefused) {
  for (const char* name : {"", "gpu", "CPU", "cuda:", "cuda:0", "cpu:1", "cuda 0"}) {
    const absl::Status status = OpenBackend({.device = name}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"auto\", \"cpu\""));
  }
}

TEST(OpenBackend, ADeviceThatIsNotThere) {
  EXPECT_EQ(OpenBackend({.device = "cuda", .number = 4096}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace denoised
