// SPDX-License-Identifier: Apache-2.0
#include "engine/models/unet_levels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace denoised {
namespace {

using ::testing::ElementsAre;

TEST(UNetLevels, EachLayerOnTheWayUpTakesBackTheLatestOutputOfTheWayDown) {
  const UNetLevels levels = LevelsOf({4, 8, 16}, {1, 2, 1});
  ASSERT_EQ(levels.down.size(), 3u);
  EXPECT_THAT(levels.down[0].inputs, ElementsAre(4));
  EXPECT_THAT(levels.down[1].inputs, ElementsAre(4, 8));
  EXPECT_THAT(levels.down[2].inputs, ElementsAre(8));
  // Outputs, from the first: conv_in 4, resnet 4, halved 4, resnets 8 and 8, halved 8, resnet 16.
  ASSERT_EQ(levels.up.size(), 3u);
  EXPECT_THAT(levels.up[0].inputs, ElementsAre(16 + 16, 16 + 8));
  EXPECT_THAT(levels.up[1].inputs, ElementsAre(16 + 8, 8 + 8, 8 + 4));
  EXPECT_THAT(levels.up[2].inputs, ElementsAre(8 + 4, 4 + 4));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(levels.down[i].resolution, i);
    EXPECT_EQ(levels.up[i].resolution, 2 - i);
    EXPECT_EQ(levels.down[i].outputs, 4 << i);
    EXPECT_EQ(levels.up[i].outputs, 16 >> i);
    EXPECT_EQ(levels.down[i].resamples, i < 2);
    EXPECT_EQ(levels.up[i].resamples, i < 2);
  }
}

}  // namespace
}  // namespace denoised
