// SPDX-License-Identifier: Apache-2.0
// Init images, on a simulated device: how often they are encoded, how many side by side, and whom
// that delays.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tests/batching/simulation.h"

namespace denoised {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

Simulation::Options Encoding(std::function<double(int)> cost) {
  return {.max_rows = 16,
          .warm_up = true,
          .decode_cost = [](int images) { return 0.001 * images; },
          .encode_cost = std::move(cost)};
}

TEST(Encoding, ImagesOfARequestShareAPicture) {
  Simulation simulation(Encoding([](int images) { return 0.01 * images; }));
  const auto heard = simulation.Submit({.count = 6, .init_image = true});
  simulation.RunAll();
  ASSERT_EQ(heard->images.size(), 6u);
  EXPECT_NE(heard->images[0], heard->images[1]) << "each draws noise of its own";
  EXPECT_THAT(simulation.encoded_together, ElementsAre(1));
  int told = 0;
  double seconds = 0;
  for (const auto& [image, stage, took] : heard->stages) {
    if (stage != Stage::kEncode) continue;
    ++told;
    seconds = std::max(seconds, took);
  }
  EXPECT_EQ(told, 6);
  EXPECT_NEAR(seconds, 0.01, 1e-6);
  simulation.Submit({.init_image = true});
  simulation.RunAll();
  EXPECT_THAT(simulation.encoded_together, ElementsAre(1, 1)) << "requests share nothing";
}

/// Requests that begin together, each with a picture of its own.
std::vector<std::map<int, std::vector<float>>> Drawn(Simulation& simulation, int requests) {
  std::vector<std::shared_ptr<Heard>> heard;
  for (int i = 0; i < requests; ++i)
    heard.push_back(simulation.Submit({.seed = static_cast<uint64_t>(i), .init_image = true}));
  simulation.RunAll();
  std::vector<std::map<int, std::vector<float>>> images;
  for (const auto& each : heard) images.push_back(each->images);
  return images;
}

TEST(Encoding, IsSideBySideWhereThatIsFasterWithTheSameBits) {
  Simulation apart(Encoding([](int images) { return 0.01 * images; })),
      together(Encoding([](int) { return 0.01; }));
  const auto begun_apart = apart.clock.now, begun_together = together.clock.now;
  const auto images = Drawn(apart, 8);
  EXPECT_EQ(Drawn(together, 8), images);
  EXPECT_NE(images[0], images[1]);
  EXPECT_EQ(apart.encoded_together, std::vector<int>(8, 1));
  EXPECT_THAT(together.encoded_together, ElementsAre(8));
  EXPECT_NEAR(Seconds(begun_apart, apart.clock.now) - Seconds(begun_together, together.clock.now),
              8 * 0.01 - 0.01, 1e-6);
  Simulation alone(Encoding([](int) { return 0.01; }));
  for (uint64_t seed = 0; seed < 8; ++seed) {
    const auto heard = alone.Submit({.seed = seed, .init_image = true});
    alone.RunAll();
    EXPECT_EQ(heard->images, images[seed]);
  }
}

/// While an evaluation could run, pictures are encoded for no longer than it takes, or one is.
TEST(Encoding, HoldsUpAnEvaluationForOnePictureAtMost) {
  constexpr double kEncode = 0.02;
  Simulation simulation(Encoding([](int images) { return kEncode * images; }));
  const auto running = simulation.Submit({.steps = 60});
  simulation.Step();
  for (uint64_t seed = 0; seed < 8; ++seed) simulation.Submit({.seed = seed, .init_image = true});
  while (!running->done) {
    const auto began = simulation.clock.now;
    const size_t progress = running->progress.size();
    simulation.Step();
    EXPECT_LE(Seconds(began, simulation.clock.now), kEncode + 0.001 + 0.0001 * 16 + 0.001 * 2);
    if (!running->done) {
      EXPECT_EQ(running->progress.size(), progress + 1);
    }
  }
  simulation.RunAll();
  EXPECT_THAT(simulation.encoded_together, ElementsAre(1, 1, 1, 1, 1, 1, 1, 1));
}

/// Those that are encoded within the time of an evaluation delay it as little.
TEST(Encoding, TakesAsLongAsAnEvaluation) {
  Simulation::Options options = Encoding([](int images) { return 0.01 * images; });
  options.cost = [](int) { return 0.025; };
  Simulation simulation(options);
  const auto running = simulation.Submit({.steps = 60});
  simulation.Step();
  for (uint64_t seed = 0; seed < 6; ++seed) simulation.Submit({.seed = seed, .init_image = true});
  std::vector<size_t> encoded;  // at a step
  while (simulation.busy()) {
    const size_t before = simulation.encoded_together.size();
    simulation.Step();
    if (const size_t now = simulation.encoded_together.size(); now > before)
      encoded.push_back(now - before);
  }
  EXPECT_THAT(encoded, ElementsAre(2, 2, 2));
}

TEST(Encoding, IsMeasuredBeforeARequestComes) {
  Simulation simulation(Encoding([](int images) { return 0.03 * images; }));
  EXPECT_NEAR(simulation.admission.StageSeconds("fake")[static_cast<size_t>(Stage::kEncode)], 0.03,
              1e-6);
  // However many images share a picture, and whatever the requests before had.
  for (const int count : {1, 16, 1}) {
    Estimate estimate;
    const auto heard =
        simulation.TrySubmit({.steps = 8, .count = count, .init_image = true}, &estimate);
    ASSERT_TRUE(heard.ok());
    simulation.RunAll();
    // A CPU's warm-up measures evaluations of one row; those of sixteen take 1.5 ms longer.
    EXPECT_NEAR((*heard)->seconds(), *estimate.total_seconds, 0.002 + 4 * 0.0015) << count;
    EXPECT_NEAR(simulation.admission.StageSeconds("fake")[static_cast<size_t>(Stage::kEncode)],
                0.03, 1e-6);
  }
}

/// A request that could be drawn at once is delayed as one in flight is.
TEST(Encoding, HoldsUpARequestWithoutAPicture) {
  constexpr double kEncode = 0.02;
  Simulation simulation(Encoding([](int images) { return kEncode * images; }));
  const auto first = simulation.Submit({.steps = 2});
  for (uint64_t seed = 0; seed < 8; ++seed)
    simulation.Submit({.steps = 4, .seed = seed, .init_image = true});
  simulation.Step();
  EXPECT_THAT(simulation.encoded_together, ElementsAre(1));
  simulation.RunAll();
  EXPECT_LE(first->seconds(), 2 * (kEncode + 0.001 + 0.0001 * 16 + 0.001));
}

/// Sizes other than the model's own encode one picture at a time, in the model's activations.
TEST(Encoding, OfAnotherSize) {
  Simulation simulation(Encoding([](int images) { return 0.01 * images; }));
  simulation.Add("plain", 0);
  std::vector<std::shared_ptr<Heard>> heard;
  for (uint64_t seed = 0; seed < 3; ++seed)
    heard.push_back(
        simulation.Submit({.seed = seed, .model = "plain", .size = 6, .init_image = true}));
  simulation.RunAll();
  for (const auto& each : heard) {
    ASSERT_TRUE(each->done->ok()) << *each->done;
    EXPECT_EQ(each->images.size(), 1u);
  }
  EXPECT_EQ(simulation.encoded_together, std::vector<int>(3, 1));
}

/// Without memory for graphs the codec is slower, with the same bits.
TEST(Encoding, WithoutGraphs) {
  const auto drawn = [](bool graphs) {
    Simulation::Options options = Encoding([](int) { return 0.01; });
    options.graphs = graphs;
    Simulation simulation(options);
    return Drawn(simulation, 3);
  };
  EXPECT_EQ(drawn(false), drawn(true));
}

/// The pictures used last are kept, whole and masked apart.
TEST(InitImages, KeepThoseUsedLast) {
  constexpr int kEdge = 4, kKept = InitImages::kKept;
  const auto backend = OpenBackend({.device = "cpu"}).value();
  const auto codec = std::make_shared<FakeCodec>(1, true);
  InitImages images(*backend, codec, kEdge / 2, kEdge / 2);
  images.stage().Use(
      backend->Allocate({static_cast<int64_t>(images.stage().Bytes(1))}, DType::kU8, "test")
          .value(),
      1);
  size_t bytes = 0;
  ASSERT_TRUE(images.Allocate(&bytes).ok());
  EXPECT_EQ(bytes, kKept * kEdge / 2 * kEdge / 2 * sizeof(float));
  std::vector<std::vector<float>> pixels;
  std::vector<InitImages::Picture> pictures;
  for (int i = 0; i <= kKept; ++i) pixels.emplace_back(kEdge * kEdge, static_cast<float>(i + 1));
  for (int i = 0; i <= kKept; ++i)
    pictures.push_back({.id = static_cast<uint64_t>(i), .pixels = pixels[i].data()});
  const std::vector<float> mask(kEdge * kEdge, 1.0f);
  const auto encode = [&](std::vector<InitImages::Picture> some) {
    int made = 0;
    CapturedRun::Ran ran;
    for (int next = 1; next > 0; made += next) {
      const absl::StatusOr<int> encoded = images.EncodeNext(some, &ran);
      EXPECT_TRUE(encoded.ok()) << encoded.status();
      next = encoded.value_or(0);
    }
    return made;
  };
  const auto first = [&](const InitImages::Picture& picture) {
    return backend->BeginDownload(images.Encoded(picture))->Wait()->as<float>()[0];
  };
  EXPECT_EQ(encode({pictures.begin(), pictures.end() - 1}), kKept);
  for (int i = 0; i < kKept; ++i) EXPECT_EQ(first(pictures[i]), static_cast<float>(i + 1));
  EXPECT_EQ(encode({pictures[0], pictures[0]}), 0) << "kept";
  EXPECT_EQ(encode({pictures[kKept], pictures[kKept]}), 1) << "once";
  EXPECT_FALSE(images.Keeps(pictures[1])) << "the one that was not used for the longest time";
  EXPECT_TRUE(images.Keeps(pictures[0]));
  InitImages::Picture masked = pictures[0];
  masked.mask = mask.data();
  EXPECT_FALSE(images.Keeps(masked));
  EXPECT_EQ(encode({pictures[0], masked}), 1);
  EXPECT_EQ(first(pictures[0]), 1.0f);
  EXPECT_EQ(first(masked), 0.0f);
  EXPECT_EQ(encode({pictures[1]}), 1);
  EXPECT_EQ(first(pictures[1]), 2.0f);
}

/// More pictures than are kept, more than once.
TEST(Encoding, OfManyPictures) {
  Simulation::Options options = Encoding([](int) { return 0.001; });
  options.max_rows = 2;
  Simulation simulation(options);
  const auto images = Drawn(simulation, 20);
  EXPECT_EQ(Drawn(simulation, 20), images);
  EXPECT_EQ(
      std::accumulate(simulation.encoded_together.begin(), simulation.encoded_together.end(), 0),
      40);
}

}  // namespace
}  // namespace denoised
