// SPDX-License-Identifier: Apache-2.0
// Waiting for the first of several markers.

#include "engine/batching/first_reached.h"

#include <gtest/gtest.h>

#include <chrono>
#include <ctime>
#include <memory>
#include <vector>

namespace denoised {
namespace {

using Clock = std::chrono::steady_clock;

/// Reached at a time.
class TimedMarker final : public Marker {
 public:
  explicit TimedMarker(Clock::time_point time) : time_(time) {}
  bool reached() override { return Clock::now() >= time_; }
  absl::Status Wait() override { return absl::OkStatus(); }
  double SecondsSince(const Marker&) override { return 0; }

 private:
  const Clock::time_point time_;
};

double ThreadSeconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

TEST(FirstReached, IsTheOneThatEndsFirst) {
  const Clock::time_point now = Clock::now();
  TimedMarker late(now + std::chrono::hours(1)), soon(now + std::chrono::milliseconds(20)),
      over(now);
  EXPECT_EQ(FirstReached(std::vector<Marker*>{&late, &soon}), 1u);
  EXPECT_GE(Clock::now(), now + std::chrono::milliseconds(20));
  EXPECT_EQ(FirstReached(std::vector<Marker*>{&late, &over, &soon}), 1u);
  EXPECT_EQ(FirstReached(std::vector<Marker*>{&soon, &over}), 0u);
}

TEST(FirstReached, LeavesTheCoreToOthers) {
  const Clock::time_point begin = Clock::now();
  TimedMarker late(begin + std::chrono::hours(1)), soon(begin + std::chrono::milliseconds(500));
  const double used = ThreadSeconds();
  FirstReached(std::vector<Marker*>{&late, &soon});
  // Looking without sleep takes half a second of an idle core. With it: 0.02 s on an idle machine,
  // 0.11 s on a busy virtual one, where each wake-up is dear.
  EXPECT_LT(ThreadSeconds() - used, 0.25);
}

}  // namespace
}  // namespace denoised
