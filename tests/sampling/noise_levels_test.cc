// SPDX-License-Identifier: Apache-2.0
#include "engine/sampling/noise_levels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace denoised {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;

TEST(NoiseLevelsTest, LinspaceOfOneIsItsStart) {
  EXPECT_THAT(Linspace(3, 9, 1), ElementsAre(3));
  EXPECT_THAT(Linspace(0, 1, 3), ElementsAre(0, 0.5, 1));
}

TEST(NoiseLevelsTest, TimestepSpacings) {
  EXPECT_THAT(SpacedTimesteps(TimestepSpacing::kLeading, 1000, 4, 1),
              ElementsAre(751, 501, 251, 1));
  EXPECT_THAT(SpacedTimesteps(TimestepSpacing::kTrailing, 1000, 4, 0),
              ElementsAre(999, 749, 499, 249));
  EXPECT_THAT(SpacedTimesteps(TimestepSpacing::kLinspace, 1000, 3, 0), ElementsAre(999, 499.5, 0));
}

TEST(NoiseLevelsTest, RoundsHalvesToEven) {
  EXPECT_THAT(Rounded({0.5, 1.5, 2.5, 499.5, 166.4}), ElementsAre(0, 2, 2, 500, 166));
  // 1000 − 62.5 = 937.5 rounds to 938.
  EXPECT_EQ(SpacedTimesteps(TimestepSpacing::kTrailing, 1000, 16, 0)[1], 937);
}

// numpy.arange(1000, 0, -1000 / 61) has 62 values; the last would be timestep −1.
TEST(NoiseLevelsTest, TrailingNeverPassesZero) {
  for (int count = 1; count <= 1000; ++count) {
    const auto timesteps = SpacedTimesteps(TimestepSpacing::kTrailing, 1000, count, 0);
    ASSERT_EQ(timesteps.size(), static_cast<size_t>(count));
    EXPECT_EQ(timesteps.front(), 999);
    EXPECT_GE(timesteps.back(), 0) << count;
  }
}

TEST(NoiseLevelsTest, ZeroTerminalSnrKeepsTheFirstAndEmptiesTheLast) {
  const auto betas = Betas(BetaSchedule::kScaledLinear, 0.00085, 0.012, 1000);
  const auto alphas = AlphasCumprod(RescaleToZeroTerminalSnr(betas));
  EXPECT_NEAR(alphas.front(), 1 - betas.front(), 1e-15);
  EXPECT_EQ(alphas.back(), 0);
}

TEST(NoiseLevelsTest, EverySpacingRunsFromMaxToMin) {
  for (const auto& sigmas : {KarrasSigmas(0.002, 80, 7, 18), ExponentialSigmas(0.002, 80, 18),
                             BetaSigmas(0.002, 80, 18)}) {
    ASSERT_EQ(sigmas.size(), 18u);
    EXPECT_NEAR(sigmas.front(), 80, 1e-12);
    EXPECT_NEAR(sigmas.back(), 0.002, 1e-15);
    for (size_t i = 1; i < sigmas.size(); ++i) EXPECT_LT(sigmas[i], sigmas[i - 1]);
  }
}

TEST(NoiseLevelsTest, TimestepOfSigmaInvertsInterpolation) {
  std::vector<double> logs;
  const auto alphas = AlphasCumprod(Betas(BetaSchedule::kLinear, 0.0001, 0.02, 1000));
  for (const double sigma : SigmasFromAlphas(alphas)) logs.push_back(std::log(sigma));
  for (const double t : {0.0, 0.25, 17.0, 500.5, 998.75, 999.0})
    EXPECT_NEAR(TimestepOfSigma(std::exp(InterpolateAt(logs, t)), logs), t, 1e-9);
  EXPECT_EQ(TimestepOfSigma(1e-12, logs), 0);
  EXPECT_EQ(TimestepOfSigma(1e6, logs), 999);
  // Rounding error around a whole timestep is taken away: some samplers truncate it.
  EXPECT_EQ(TimestepOfSigma(std::exp(logs[500]) * (1 - 1e-12), logs), 500);
}

TEST(NoiseLevelsTest, BetaQuantileIsScipys) {
  // scipy.stats.beta.ppf(q, 0.6, 0.6)
  const std::pair<double, double> quantiles[] = {{1e-06, 1.8558824624053043e-10},
                                                 {0.001, 1.855873851745199e-05},
                                                 {0.02, 0.0027329820245770272},
                                                 {0.1, 0.039584405588780847},
                                                 {0.25, 0.17568037865269498},
                                                 {0.4999, 0.49986127490549975},
                                                 {0.5, 0.5},
                                                 {0.7, 0.76598299612476428},
                                                 {0.95, 0.98744554312638855},
                                                 {0.999, 0.99998144126148258}};
  for (const auto& [q, x] : quantiles)
    EXPECT_THAT(SymmetricBetaQuantile(q, 0.6), DoubleNear(x, 1e-11 * x)) << q;
  EXPECT_EQ(SymmetricBetaQuantile(0, 0.6), 0);
  EXPECT_EQ(SymmetricBetaQuantile(1, 0.6), 1);
}

}  // namespace
}  // namespace denoised
