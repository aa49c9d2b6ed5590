// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/timeline.h"

#include <gtest/gtest.h>

namespace denoised {
namespace {

std::vector<int> Evaluations(const v1::Timeline& timeline) {
  std::vector<int> evaluations;
  for (const v1::TimelineEntry& entry : timeline.entries()) {
    if (entry.has_evaluations()) evaluations.push_back(entry.evaluations());
  }
  return evaluations;
}

TEST(TimelineTest, EveryTenthEvaluationAndTheLast) {
  Timeline timeline;
  for (int done = 1; done <= 25; ++done) timeline.AddEvaluation(done, done, 25);
  EXPECT_EQ(Evaluations(timeline.ToProto()), (std::vector<int>{10, 20, 25}));
}

TEST(TimelineTest, StagesNameTheirImageAndWhatTheyTook) {
  Timeline timeline;
  timeline.AddStage(0.5, 2, Stage::kCondition, 0.25);
  timeline.AddStage(1, 2, Stage::kDenoise, -1);
  const v1::Timeline proto = timeline.ToProto();
  ASSERT_EQ(proto.entries_size(), 2);
  EXPECT_EQ(proto.entries(0).milestone(), v1::TimelineEntry::MILESTONE_STAGE);
  EXPECT_EQ(proto.entries(0).stage(), v1::STAGE_CONDITION);
  EXPECT_EQ(proto.entries(0).image_index(), 2);
  EXPECT_EQ(proto.entries(0).device_seconds(), 0.25);
  EXPECT_EQ(proto.entries(1).stage(), v1::STAGE_DENOISE);
  EXPECT_FALSE(proto.entries(1).has_device_seconds());
}

TEST(TimelineTest, RowsOfOneEvaluationMayStepOverATenth) {
  Timeline timeline;
  for (int done = 7; done <= 49; done += 7) timeline.AddEvaluation(done, done, 49);
  EXPECT_EQ(Evaluations(timeline.ToProto()), (std::vector<int>{14, 21, 35, 42, 49}));
}

TEST(TimelineTest, LongRequestsAreThinnedOutEvenly) {
  Timeline timeline;
  timeline.Add(v1::TimelineEntry::MILESTONE_QUEUED, 0);
  constexpr int kTotal = 100'000;
  for (int done = 1; done <= kTotal; ++done) timeline.AddEvaluation(done, done, kTotal);
  const std::vector<int> evaluations = Evaluations(timeline.ToProto());
  EXPECT_LE(evaluations.size(), 100u);
  EXPECT_GE(evaluations.size(), 49u);
  EXPECT_EQ(evaluations.back(), kTotal);
  for (size_t i = 2; i + 1 < evaluations.size(); ++i) {
    EXPECT_EQ(evaluations[i] - evaluations[i - 1], evaluations[1] - evaluations[0]);
  }
  EXPECT_EQ(timeline.ToProto().entries(0).milestone(), v1::TimelineEntry::MILESTONE_QUEUED);
}

}  // namespace
}  // namespace denoised
