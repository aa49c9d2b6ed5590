// SPDX-License-Identifier: Apache-2.0
#include "trainer/ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

namespace denoised::trainer {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = 4;

/// Runs all ranks on threads; before it is ready, each waits so long, or until all are to end.
std::vector<absl::Status> Together(const std::vector<milliseconds>& late,
                                   const std::vector<std::atomic<bool>>& stops,
                                   std::vector<bool>* ended = nullptr) {
  const auto hosts = training::NewLoopbackExchanges(kRanks);
  std::vector<absl::Status> statuses(kRanks);
  std::vector<int> seen(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      Pulse pulse(*hosts[rank], stops[rank]);
      const auto until = std::chrono::steady_clock::now() + late[rank];
      while (std::chrono::steady_clock::now() < until && !pulse.ended())
        std::this_thread::sleep_for(milliseconds(1));
      seen[rank] = pulse.ended() ? 1 : 0;
      statuses[rank] = pulse.WaitForAll();
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (ended) ended->assign(seen.begin(), seen.end());
  return statuses;
}

TEST(Pulse, RanksWaitForTheLastOne) {
  const std::vector<std::atomic<bool>> stops(kRanks);
  const auto begin = std::chrono::steady_clock::now();
  for (const absl::Status& status :
       Together({milliseconds(0), milliseconds(400), milliseconds(10), milliseconds(50)}, stops))
    EXPECT_TRUE(status.ok()) << status;
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(400));
}

TEST(Pulse, OneThatIsToldToStopEndsAll) {
  std::vector<std::atomic<bool>> stops(kRanks);
  stops[1] = true;
  std::vector<bool> ended;
  // The others would take a minute.
  for (const absl::Status& status :
       Together(std::vector<milliseconds>(kRanks, milliseconds(60'000)), stops, &ended))
    EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_THAT(ended, testing::Each(true));
}

TEST(ConnectRanks, EndsWhenItIsToldTo) {
  const std::atomic<bool> stop = true;
  const auto begin = std::chrono::steady_clock::now();
  const auto connected = ConnectRanks(1, 2, "no-such-host.invalid:1", /*timeout_seconds=*/2, stop);
  EXPECT_TRUE(absl::IsCancelled(connected.status())) << connected.status();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
}

TEST(ConnectRanks, OneAloneNeedsNobody) {
  const std::atomic<bool> stop = false;
  const auto connected = ConnectRanks(0, 1, "", /*timeout_seconds=*/1, stop);
  ASSERT_TRUE(connected.ok()) << connected.status();
  EXPECT_EQ((*connected)->ranks(), 1);
}

}  // namespace
}  // namespace denoised::trainer
