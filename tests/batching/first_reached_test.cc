// SPDX-License-Identifier: Apache-2.0
// Waiting for the first of several markers.

#include "engine/batching/first_reached.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <vector>

namespace denoised {
namespace {

using Clock = std::chrono::steady_clock;

/// Reached at a time.
class TimedMarker final : public Marker {
 public:
  explicit TimedMarker(Clock::time_point time) : time_(time) {}
  bool reached() override {
    ++looks_;
    return Clock::now() >= time_;
  }
  absl::Status Wait() override { return absl::OkStatus(); }
  double SecondsSince(const Marker&) override { return 0; }
  int looks() const { return looks_; }

 private:
  const Clock::time_point time_;
  int looks_ = 0;
};

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
  FirstReached(std::vector<Marker*>{&late, &soon});
  // It sleeps at least 10 us after each look. Without sleep there are millions.
  EXPECT_LE(late.looks(), 50'000);
}

}  // namespace
}  // namespace denoised
