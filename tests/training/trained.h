// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "engine/training/trainer.h"

/// Short runs of a trainer, and whether two have the same bits.

namespace denoised::training {

struct Trained {
  std::vector<StepReport> reports;
  TrainerState state;
};

/// `steps` steps, from the state `from` unless that is null.
inline Trained Train(Backend& backend, Exchange& exchange, const NetworkConfig& config,
                     const TrainerOptions& options, const Dataset& dataset, int steps,
                     const TrainerState* from = nullptr) {
  Trained run;
  auto trainer = Trainer::Make(backend, exchange, config, options, dataset);
  EXPECT_TRUE(trainer.ok()) << trainer.status();
  if (from != nullptr) {
    EXPECT_TRUE((*trainer)->Restore(*from).ok());
  }
  for (int i = 0; i < steps; ++i) {
    auto report = (*trainer)->Step();
    EXPECT_TRUE(report.ok()) << report.status();
    run.reports.push_back(*report);
  }
  auto state = (*trainer)->State();
  EXPECT_TRUE(state.ok()) << state.status();
  run.state = *state;
  return run;
}

/// Steps after which a loss has fallen. With sanitizers, which are six times slower, a few: they
/// see no more in later ones, and whether a loss falls is shown by the other builds.
#ifdef DENOISED_SANITIZED
inline int StepsToLearn(int) { return 4; }
#else
inline int StepsToLearn(int steps) { return steps; }
#endif

/// Of the first quarter of the steps and of the last, the mean losses.
inline std::pair<double, double> FirstAndLastLoss(const Trained& run) {
  const size_t steps = run.reports.size(), quarter = steps / 4;
  double first = 0, last = 0;
  for (size_t i = 0; i < quarter; ++i) {
    first += run.reports[i].loss / static_cast<double>(quarter);
    last += run.reports[steps - 1 - i].loss / static_cast<double>(quarter);
  }
  return {first, last};
}

/// The loss fell below `share` of what it was.
inline void ExpectLearned(const Trained& run, double share) {
  const auto [first, last] = FirstAndLastLoss(run);
#ifdef DENOISED_SANITIZED
  EXPECT_TRUE(std::isfinite(last)) << first;
#else
  EXPECT_LT(last, share * first);
#endif
}

inline void ExpectSameBits(const Tensor& a, const Tensor& b, const char* what) {
  ASSERT_EQ(a.bytes(), b.bytes());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.bytes()), 0) << what;
}
inline void ExpectSameBits(const Trained& a, const Trained& b) {
  ExpectSameBits(a.state.trained, b.state.trained, "weights");
  ExpectSameBits(a.state.m, b.state.m, "m");
  ExpectSameBits(a.state.v, b.state.v, "v");
  for (size_t i = 0; i < a.state.averages.size(); ++i)
    ExpectSameBits(a.state.averages[i], b.state.averages[i], "average");
  EXPECT_EQ(a.reports.back().loss, b.reports.back().loss);
  EXPECT_EQ(a.reports.back().gradient_norm, b.reports.back().gradient_norm);
}

}  // namespace denoised::training
