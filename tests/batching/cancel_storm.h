// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/batching/simulation.h"

namespace denoised {

constexpr int kShapes = 12;

/// One of kShapes requests that differ in all that decides how they are batched.
inline Simulation::Request RequestOfShape(int shape) {
  return {.steps = 1 + 2 * shape,
          .seed = static_cast<uint64_t>(shape),
          .count = 1 + shape % 3,
          .guidance = shape % 2 ? 2.0 : 1.0,
          .priority = static_cast<Priority>(shape % 3),
          .client = std::to_string(shape % 5)};
}
/// Their images, each drawn alone.
inline std::array<std::map<int, std::vector<float>>, kShapes> ImagesOfShapes() {
  std::array<std::map<int, std::vector<float>>, kShapes> images;
  for (int shape = 0; shape < kShapes; ++shape) {
    Simulation simulation({});
    const auto heard = simulation.Submit(RequestOfShape(shape));
    simulation.RunAll();
    images[shape] = heard->images;
  }
  return images;
}

inline void ExpectNothingLeft(const Admission::Totals& totals) {
  EXPECT_EQ(totals.active_images, 0);
  EXPECT_EQ(std::accumulate(totals.queued_images.begin(), totals.queued_images.end(), 0), 0);
  EXPECT_EQ(std::accumulate(totals.queued_requests.begin(), totals.queued_requests.end(), 0), 0);
}

/// Jobs of all shapes that come at random; some stay, most are cancelled.
class CancelStorm {
 public:
  CancelStorm(Simulation& simulation, uint32_t seed) : simulation_(simulation), random_(seed) {}

  /// A job comes, one is cancelled, or a device evaluates.
  void Next() {
    const int shape = static_cast<int>(random_() % kShapes);
    switch (random_() % 11) {
      case 0:
        if (survivors_.size() < 500)
          survivors_.emplace_back(shape, simulation_.Submit(RequestOfShape(shape)));
        break;
      case 1:
      case 2:
      case 3:
        simulation_.Submit(RequestOfShape(shape));
        doomed_.push_back(simulation_.last_id);
        break;
      case 4:
      case 5:
      case 6:
        if (doomed_.empty()) break;
        std::swap(doomed_[random_() % doomed_.size()], doomed_.back());
        simulation_.queue.End(doomed_.back(), Cancelled("gone"), EndReason::kCancelled);
        doomed_.pop_back();
        ++cancelled_;
        break;
      default:
        simulation_.Step();
    }
  }
  int cancelled() const { return cancelled_; }

  /// Lets the rest be drawn. Those that stayed have the bits that they have alone, and nothing is
  /// left of the others.
  void Finish() {
    simulation_.RunAll();
    ASSERT_GT(survivors_.size(), 100u);
    const auto alone = ImagesOfShapes();
    for (const auto& [shape, heard] : survivors_) {
      ASSERT_TRUE(heard->done->ok()) << *heard->done;
      EXPECT_EQ(heard->images, alone[shape]);
    }
    ExpectNothingLeft(simulation_.Totals());
  }

 private:
  Simulation& simulation_;
  std::mt19937 random_;
  std::vector<JobId> doomed_;
  std::vector<std::pair<int, std::shared_ptr<Heard>>> survivors_;
  int cancelled_ = 0;
};

}  // namespace denoised
