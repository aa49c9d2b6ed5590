// SPDX-License-Identifier: Apache-2.0
#include "server/jobs/memory_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tests/eventually.h"

namespace denoised {
namespace {

using ::testing::HasSubstr;

/// Whether a thread of this process waits for something, or is gone.
bool Sleeps(pid_t thread) {
  std::string line;  // 123 (its name) S …
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  if (!std::getline(file, line)) return true;
  const size_t name_end = line.rfind(')');
  return name_end != std::string::npos && line.substr(name_end).starts_with(") S");
}

TEST(MemoryBudgetTest, WhatIsReservedIsGivenBackOnce) {
  MemoryBudget budget(100);
  {
    MemoryBudget::Lease first, second;
    ASSERT_TRUE(budget.Reserve(60, &first).ok());
    ASSERT_TRUE(budget.Reserve(10, &first).ok());
    ASSERT_TRUE(budget.Reserve(30, &second).ok());
    EXPECT_EQ(budget.reserved(), 100);
    const MemoryBudget::Lease moved = std::move(first);
    EXPECT_EQ(budget.reserved(), 100);
    second = {};
    EXPECT_EQ(budget.reserved(), 70);
  }
  EXPECT_EQ(budget.reserved(), 0);
}

TEST(MemoryBudgetTest, SaysWhetherWaitingHelps) {
  MemoryBudget budget(100);
  MemoryBudget::Lease first, second;
  ASSERT_TRUE(budget.Reserve(60, &first).ok());
  const absl::Status full = budget.Reserve(41, &second);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("needs 41 bytes, and 60 of 100"));
  const absl::Status never = budget.Reserve(101, &second), beside = budget.Reserve(41, &first);
  EXPECT_EQ(never.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(never.message()), HasSubstr("needs 101 bytes, and there are 100"));
  EXPECT_EQ(beside.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(beside.message()), HasSubstr("41 bytes beside the 60 that it has"));
  EXPECT_EQ(budget.Reserve(INT64_MAX, &first).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(budget.reserved(), 60);
  EXPECT_TRUE(budget.Reserve(40, &second).ok());
}

TEST(MemoryBudgetTest, WaitsUntilThereIsRoom) {
  MemoryBudget budget(100);
  MemoryBudget::Lease others;
  ASSERT_TRUE(budget.Reserve(60, &others).ok());
  std::promise<pid_t> began;
  std::atomic<bool> given_back{false};  // not before the waiter sleeps
  std::jthread waiter([&] {
    began.set_value(gettid());
    const MemoryBudget::Lease lease = budget.Wait(50);
    EXPECT_TRUE(given_back) << "it did not wait";
    EXPECT_EQ(budget.reserved(), 50);
  });
  const pid_t thread = began.get_future().get();
  EXPECT_TRUE(Eventually([&] { return Sleeps(thread); }));
  given_back = true;
  others = {};
  waiter.join();
  EXPECT_EQ(budget.reserved(), 0);
}

TEST(MemoryBudgetTest, ThreadsNeverHoldMoreThanThereIs) {
  MemoryBudget budget(1000);
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 1000; ++round) {
        MemoryBudget::Lease lease;
        if (budget.Reserve(400, &lease).ok()) {
          EXPECT_LE(budget.reserved(), 1000);
        }
      }
    });
  }
  threads.clear();
  EXPECT_EQ(budget.reserved(), 0);
}

}  // namespace
}  // namespace denoised
