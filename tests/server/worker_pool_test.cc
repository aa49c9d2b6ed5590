// SPDX-License-Identifier: Apache-2.0
#include "server/jobs/worker_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>

namespace denoised {
namespace {

TEST(WorkerPoolTest, RunsEverythingThatWasPostedAlsoByTasks) {
  std::atomic<int> ran{0};
  {
    WorkerPool pool(2);
    for (int i = 0; i < 100; ++i) {
      pool.Post(Priority::kNormal, "", [&] {
        ++ran;
        pool.Post(Priority::kNormal, "", [&] { ++ran; });
      });
    }
  }
  EXPECT_EQ(ran, 200);
}

TEST(WorkerPoolTest, RunsSideBySide) {
  std::promise<void> first, second;  // outlive the tasks
  WorkerPool pool(2);
  pool.Post(Priority::kNormal, "", [&] {
    first.set_value();
    EXPECT_EQ(second.get_future().wait_for(std::chrono::minutes(1)), std::future_status::ready);
  });
  pool.Post(Priority::kNormal, "", [&] {
    EXPECT_EQ(first.get_future().wait_for(std::chrono::minutes(1)), std::future_status::ready);
    second.set_value();
  });
}

TEST(WorkerPoolTest, ForEachCallsEachOnceAlsoFromTasks) {
  std::array<std::atomic<int>, 200> calls = {};
  {
    WorkerPool pool(3);
    for (int i = 0; i < 10; ++i) {
      pool.Post(Priority::kNormal, "", [&] {
        pool.ForEach(Priority::kNormal, "", 200, [&](int index) { ++calls[index]; });
      });
    }
    pool.ForEach(Priority::kNormal, "", 200, [&](int index) { ++calls[index]; });
    pool.ForEach(Priority::kNormal, "", 0, [&](int) { ADD_FAILURE(); });
  }
  for (const std::atomic<int>& count : calls) EXPECT_EQ(count, 11);
}

TEST(WorkerPoolTest, ForEachUsesIdleThreads) {
  WorkerPool pool(1);
  bool met = false;
  for (int attempt = 0; attempt < 100 && !met; ++attempt) {  // until the thread has become idle
    std::promise<void> helped;
    pool.ForEach(Priority::kNormal, "", 2, [&](int index) {
      if (index == 1) return helped.set_value();
      met =
          helped.get_future().wait_for(std::chrono::milliseconds(100)) == std::future_status::ready;
    });
  }
  EXPECT_TRUE(met);
}

/// A helping thread returns to the queue after each part.
TEST(WorkerPoolTest, OthersTakeTurnsWithThePartsOfForEach) {
  constexpr int kParts = 100;
  std::atomic<int> helped{0}, before{kParts};
  {
    WorkerPool pool(1);
    for (int attempt = 0; attempt < 100 && helped == 0; ++attempt) {  // until the thread is idle
      const auto urgent = std::make_shared<std::promise<void>>();
      const auto caller = std::this_thread::get_id();
      pool.ForEach(Priority::kBatch, "", kParts, [&](int part) {
        if (std::this_thread::get_id() == caller) {
          if (part == 0) urgent->get_future().wait_for(std::chrono::milliseconds(100));
        } else if (helped++ == 0) {
          pool.Post(Priority::kInteractive, "", [&, urgent] {
            before = helped.load();
            urgent->set_value();
          });
        }
      });
    }
  }
  EXPECT_LT(before, 5);
}

TEST(WorkerPoolTest, ForEachNeedsNoIdleThread) {
  std::promise<void> reached, done;
  WorkerPool pool(1);
  pool.Post(Priority::kNormal, "", [&] {
    reached.set_value();
    done.get_future().wait();
  });
  reached.get_future().wait();
  int calls = 0;  // by this thread alone
  pool.ForEach(Priority::kNormal, "", 5, [&](int) { ++calls; });
  EXPECT_EQ(calls, 5);
  done.set_value();
}

/// A client with many tasks does not hold up others.
TEST(WorkerPoolTest, ClientsTakeTurns) {
  std::string ran;  // touched by the one thread
  std::promise<void> reached, posting;
  {
    WorkerPool pool(1);
    pool.Post(Priority::kNormal, "a", [&] {
      reached.set_value();
      posting.get_future().wait();
    });
    reached.get_future().wait();
    for (const char* task : {"a1", "a2", "a3", "a4", "b1", "b2", "c1"}) {
      pool.Post(Priority::kNormal, std::string(1, task[0]), [&ran, task] { ran += task; });
    }
    posting.set_value();
  }
  EXPECT_EQ(ran, "a1b1c1a2b2a3a4");
}

/// Runs tasks on one thread that are all there before the first begins: "bbi" posts two batch tasks
/// and an interactive one. The order in which they ran.
std::string Order(const std::string& posted) {
  std::string ran;  // touched by the one thread
  std::promise<void> reached, posting;
  {
    WorkerPool pool(1);
    pool.Post(Priority::kBatch, "", [&] {
      reached.set_value();
      posting.get_future().wait();
    });
    reached.get_future().wait();  // else the thread would take a task before all are there
    for (const char kind : posted) {
      const Priority priority = kind == 'i'   ? Priority::kInteractive
                                : kind == 'n' ? Priority::kNormal
                                              : Priority::kBatch;
      pool.Post(priority, "", [&ran, kind] { ran += kind; });
    }
    posting.set_value();
  }
  return ran;
}

TEST(WorkerPoolTest, AnInteractiveTaskOvertakes) {
  EXPECT_EQ(Order(std::string(50, 'b') + "i").substr(0, 2), "ib");
  EXPECT_EQ(Order(std::string(50, 'b') + "n").find('n'), 0u);
  EXPECT_EQ(Order(std::string(50, 'n') + "i").find('i'), 0u);
}

TEST(WorkerPoolTest, BatchTasksDoNotStarve) {
  const std::string ran =
      Order(std::string(320, 'i') + std::string(80, 'n') + std::string(20, 'b'));
  ASSERT_EQ(ran.size(), 420u);
  for (size_t i = 0; i + 42 <= ran.size(); i += 21) {
    const std::string part = ran.substr(i, 42);
    EXPECT_GE(std::count(part.begin(), part.end(), 'b'), 1) << "at " << i;
    EXPECT_GE(std::count(part.begin(), part.end(), 'n'), 4) << "at " << i;
    EXPECT_GE(std::count(part.begin(), part.end(), 'i'), 24) << "at " << i;
  }
}

TEST(WorkerPoolTest, AQueueSavesUpNoTurns) {
  // Interactive tasks had the pool for themselves: that must not push them back now.
  std::string ran;
  std::promise<void> reached, posting;
  {
    WorkerPool pool(1);
    for (int i = 0; i < 1000; ++i) pool.Post(Priority::kInteractive, "", [] {});
    pool.Post(Priority::kInteractive, "", [&] {
      reached.set_value();
      posting.get_future().wait();
    });
    reached.get_future().wait();
    for (int i = 0; i < 10; ++i) pool.Post(Priority::kBatch, "", [&] { ran += 'b'; });
    for (int i = 0; i < 10; ++i) pool.Post(Priority::kInteractive, "", [&] { ran += 'i'; });
    posting.set_value();
  }
  EXPECT_LE(std::count(ran.begin(), ran.begin() + 11, 'b'), 1) << ran;
}

}  // namespace
}  // namespace denoised
