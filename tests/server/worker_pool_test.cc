#include "server/jobs/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

namespace denoised {
namespace {

TEST(WorkerPoolTest, RunsEverythingThatWasPostedAlsoByTasks) {
  std::atomic<int> ran{0};
  {
    WorkerPool pool(2);
    for (int i = 0; i < 100; ++i) {
      pool.Post([&] {
        ++ran;
        pool.Post([&] { ++ran; });
      });
    }
  }
  EXPECT_EQ(ran, 200);
}

TEST(WorkerPoolTest, RunsSideBySide) {
  std::promise<void> first, second;  // outlive the tasks
  WorkerPool pool(2);
  pool.Post([&] {
    first.set_value();
    EXPECT_EQ(second.get_future().wait_for(std::chrono::seconds(10)), std::future_status::ready);
  });
  pool.Post([&] {
    EXPECT_EQ(first.get_future().wait_for(std::chrono::seconds(10)), std::future_status::ready);
    second.set_value();
  });
}

}  // namespace
}  // namespace denoised
