// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "engine/training/trainer.h"
#include "tests/training/backends.h"

/// Short runs of a trainer, and whether two have the same bits.

namespace denoised::training {

struct Trained {
  std::vector<StepReport> reports;
  TrainerState state;
};

/// `steps` steps, from the state `from` unless that is null.
inline Trained Train(Trainer& trainer, int steps, const TrainerState* from = nullptr) {
  Trained run;
  if (from != nullptr) {
    EXPECT_TRUE(trainer.Restore(*from).ok());
  }
  for (int i = 0; i < steps; ++i) {
    auto report = trainer.Step();
    EXPECT_TRUE(report.ok()) << report.status();
    run.reports.push_back(*report);
  }
  auto state = trainer.State();
  EXPECT_TRUE(state.ok()) << state.status();
  run.state = *state;
  return run;
}
inline Trained Train(Backend& backend, Exchange& exchange, const NetworkConfig& config,
                     const TrainerOptions& options, const Dataset& dataset, int steps,
                     const TrainerState* from = nullptr) {
  auto trainer = Trainer::Make(backend, exchange, config, options, dataset);
  EXPECT_TRUE(trainer.ok()) << trainer.status();
  return Train(**trainer, steps, from);
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
  ASSERT_EQ(a.state.averages.size(), b.state.averages.size());
  for (size_t i = 0; i < a.state.averages.size(); ++i)
    ExpectSameBits(a.state.averages[i], b.state.averages[i], "average");
  EXPECT_EQ(a.reports.back().loss, b.reports.back().loss);
  EXPECT_EQ(a.reports.back().gradient_norm, b.reports.back().gradient_norm);
}

/// Each rank is a thread with a backend of its own.
inline std::vector<Trained> TrainOnRanks(int ranks, const std::string& backend,
                                         const NetworkConfig& config, const TrainerOptions& options,
                                         const Dataset& dataset, int steps,
                                         const TrainerState* from = nullptr) {
  auto exchanges = NewLoopbackExchanges(ranks);
  std::vector<Trained> runs(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      runs[rank] =
          Train(*OpenForTest(backend), *exchanges[rank], config, options, dataset, steps, from);
    });
  for (std::thread& thread : threads) thread.join();
  return runs;
}

/// Three steps have the same bits over micro-batches, over ranks, over both, and when a state of
/// two ranks goes on on four. Ranks alone would hide what only a rank's second micro-batch gets
/// wrong: there, neither a sample's place in its pass nor in its rank is its place in the batch.
inline void ExpectBitsOfTheRunAlone(const std::string& backend, const NetworkConfig& config,
                                    TrainerOptions options, const Dataset& dataset) {
  const auto train = [&](int ranks, int accumulation, int steps,
                         const TrainerState* from = nullptr) {
    options.accumulation = accumulation;
    return TrainOnRanks(ranks, backend, config, options, dataset, steps, from);
  };
  const Trained whole = train(1, 1, 3)[0];
  for (const auto& [ranks, accumulation] : {std::pair{1, 2}, {2, 2}}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks, accumulation " << accumulation);
    for (const Trained& run : train(ranks, accumulation, 3)) ExpectSameBits(whole, run);
  }
  SCOPED_TRACE("from 2 ranks to 4");
  const std::vector<Trained> begun = train(2, 1, 2);
  for (const Trained& run : train(4, 2, 1, &begun[1].state)) ExpectSameBits(whole, run);
  // What is compared has been changed by the steps.
  EXPECT_NE(begun[0].state.trained.ToFloats(), whole.state.trained.ToFloats());
  EXPECT_NE(begun[0].state.m.ToFloats(), whole.state.m.ToFloats());
}

}  // namespace denoised::training
