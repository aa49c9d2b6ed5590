// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/evaluator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "engine/backend/counting.h"
#include "engine/batching/latent_preview.h"
#include "tests/batching/fake_codec.h"
#include "tests/batching/fake_denoiser.h"
#include "tests/batching/simulated_backend.h"

namespace denoised {
namespace {

/// Counts the rows that are computed for real, not in the dry run that measures memory.
class CountingDenoiser final : public FakeDenoiser {
 public:
  using FakeDenoiser::FakeDenoiser;
  Tensor Forward(nn::Context& context, const DenoiserInput& input) const override {
    if (dynamic_cast<CountingBackend*>(&context.ops) == nullptr) {
      const int count = static_cast<int>(input.x.dim(0));
      rows += count;
      for (int most = most_rows; most < count && !most_rows.compare_exchange_weak(most, count);) {
      }
    }
    return FakeDenoiser::Forward(context, input);
  }
  mutable std::atomic<int> rows = 0, most_rows = 0;
};

// On a CPU each thread takes a few rows through the whole network, in memory of its own.
TEST(Evaluator, RowsGoThroughTheNetworkInParts) {
  const auto backend = OpenBackend({.device = "cpu"}).value();
  constexpr int kRows = 16, kSize = 8;
  const RowSplit split = backend->SplitRows(kRows);
  const auto denoiser = std::make_shared<CountingDenoiser>(kSize, 1, 3);
  const auto evaluator = Evaluator::Create(*backend, denoiser,
                                           {.height = kSize,
                                            .width = kSize,
                                            .max_rows = kRows,
                                            .slots = kRows,
                                            .max_evaluations = 4})
                             .value();
  const std::vector<EvaluationRow> padding(
      kRows, {.slot = -1, .label = 0, .unconditional_row = -1, .advances = 0});
  CapturedRun::Ran ran;
  ASSERT_TRUE(evaluator->Evaluate(padding, &ran).ok());  // checks the ops, then computes
  EXPECT_EQ(denoiser->rows, 2 * kRows);
  EXPECT_EQ(denoiser->most_rows, std::max(split.part, kRows - split.apart));
  if (split.apart == kRows) {
    EXPECT_LE(denoiser->most_rows, 4);
  }
}

// An image that was not finite and is again, as clipping makes it, is still reported.
TEST(Evaluator, ParkedImagesKeepWhenTheyWereNotFinite) {
  const auto backend = OpenBackend({.device = "cpu"}).value();
  const auto denoiser = std::make_shared<FakeDenoiser>(4, 1, 3);
  denoiser->BreakClass(2);
  const auto evaluator =
      Evaluator::Create(*backend, denoiser,
                        {.height = 4, .width = 4, .max_rows = 1, .slots = 2, .max_evaluations = 2})
          .value();
  const std::vector<DeviceEvaluation> plan(2);
  const Evaluator::Start start{.plan = &plan};
  evaluator->Begin(0, start);
  const EvaluationRow row{.slot = 0, .label = 2, .unconditional_row = -1, .advances = 1};
  CapturedRun::Ran ran;
  ASSERT_TRUE(evaluator->Evaluate(std::vector<EvaluationRow>(1, row), &ran).ok());
  const auto parked = evaluator->Park(0);
  evaluator->Begin(0, start);
  evaluator->Begin(1, start);
  ASSERT_TRUE(parked->Arrive().ok());
  Evaluator::Start resumed = start;
  resumed.parked = parked.get();
  resumed.evaluations_done = 1;
  evaluator->Begin(1, resumed);
  const auto nonfinite = evaluator->DownloadNonfinite()->Wait().value();
  EXPECT_EQ(nonfinite.as<int32_t>()[0], 0);
  EXPECT_EQ(nonfinite.as<int32_t>()[1], 1);
}

// An evaluator refuses what would reach beyond its memory.
/// A preview is the prediction, or the state times a factor, through the small autoencoder.
TEST(Evaluator, DecodesPreviews) {
  const auto backend = OpenBackend({.device = "cpu"}).value();
  constexpr int kSize = 4;
  const auto evaluator = Evaluator::Create(*backend, std::make_shared<FakeDenoiser>(kSize, 1, 3),
                                           {.height = kSize,
                                            .width = kSize,
                                            .max_rows = 2,
                                            .slots = 2,
                                            .max_evaluations = 2,
                                            .downloads = 8,
                                            .flag_downloads = 2,
                                            .decodes = 1,
                                            .previews = 4,
                                            .codec = std::make_shared<FakeCodec>(1),
                                            .preview_codec = std::make_shared<FakeCodec>(1)})
                             .value();
  DeviceEvaluation evaluation{};
  evaluation.input_scale = 1;
  evaluation.x0_from_x = 0.5f;
  evaluation.x0_from_model = 1;
  evaluation.weights[kOutputX][kInputX] = 1;
  evaluation.weights[kOutputX][kInputModel] = 0.25f;
  const std::vector<DeviceEvaluation> plan(2, evaluation);
  Evaluator::Start start{.plan = &plan, .seed = 7};
  evaluator->Begin(1, start);
  const EvaluationRow row{.slot = 1, .label = 1, .unconditional_row = -1, .advances = 1};
  CapturedRun::Ran ran;
  ASSERT_TRUE(evaluator->Evaluate(std::vector<EvaluationRow>(1, row), &ran).ok());
  for (const bool predicted : {true, false}) {
    const float scale = predicted ? 1.0f : 0.25f;
    const Tensor from =
        (predicted ? evaluator->DownloadX0(1) : evaluator->DownloadState(1))->Wait().value();
    auto download = evaluator->DownloadPreview(1, predicted, scale);
    ASSERT_TRUE(download.ok()) << download.status();
    const Tensor preview = (*download)->Wait().value();
    ASSERT_EQ(preview.shape(), (Shape{2 * kSize, 2 * kSize, 1}));
    for (int y = 0; y < 2 * kSize; ++y)
      for (int x = 0; x < 2 * kSize; ++x)
        EXPECT_EQ(preview.as<float>()[y * 2 * kSize + x],
                  scale * from.as<float>()[y / 2 * kSize + x / 2]);
  }
}

/// Of as many channels as the codec's images have.
TEST(LatentPreview, HasTheChannelsOfImages) {
  const auto backend = OpenBackend({.device = "cpu"}).value();
  for (const int channels : {1, 2, 3, 5}) {
    const auto preview = LatentPreview::Fit(*backend, FakeCodec(channels));
    ASSERT_TRUE(preview.ok()) << preview.status();
    Tensor latents = Tensor::Host({2, 3, channels}, DType::kF32);
    for (int64_t i = 0; i < latents.elements(); ++i)
      latents.as<float>()[i] = static_cast<float>(i) / 8 - 1;
    const Tensor picture = preview->Draw(latents);
    ASSERT_EQ(picture.shape(), latents.shape());
    EXPECT_EQ(picture.ToFloats(), latents.ToFloats()) << "this codec only makes them larger";
  }
}

/// A GPU that computes nothing: so many seconds for each row of an evaluation, or image decoded.
class TimedBackend final : public CountingBackend {
 public:
  TimedBackend(double row_seconds, double image_seconds)
      : CountingBackend(Device::kCuda, DType::kF32),
        row_seconds_(row_seconds),
        image_seconds_(image_seconds) {}

  Capabilities capabilities() const override { return {.pads_rows = true}; }

  std::vector<int> captured, launched;  // rows of evaluations
  std::vector<int> decoded;             // images of runs of the codec

  absl::StatusOr<std::unique_ptr<Graph>> Capture(const std::function<void()>& body) override {
    rows_ = images_ = 0;
    auto graph = CountingBackend::Capture(body);
    if (rows_ > 0) captured.push_back(rows_);
    counts_[graph->get()] = {rows_, images_};
    return graph;
  }
  void Advance(const AdvanceArgs& args) override {
    rows_ = static_cast<int>(args.rows.dim(0));
    CountingBackend::Advance(args);
  }
  void Resample2x(Resample kind, const Tensor& x, const Tensor& out) override {
    images_ = static_cast<int>(x.dim(0));
    CountingBackend::Resample2x(kind, x, out);
  }
  void Launch(Graph& graph) override {
    const auto [rows, images] = counts_.at(&graph);
    (rows > 0 ? launched : decoded).push_back(rows + images);
    now_ += row_seconds_ * rows + image_seconds_ * images;
  }
  std::unique_ptr<Marker> Mark() override { return std::make_unique<Moment>(now_); }

 private:
  struct Moment final : Marker {
    explicit Moment(double seconds) : seconds(seconds) {}
    bool reached() override { return true; }
    absl::Status Wait() override { return absl::OkStatus(); }
    double SecondsSince(const Marker& earlier) override {
      return seconds - static_cast<const Moment&>(earlier).seconds;
    }
    const double seconds;
  };

  const double row_seconds_, image_seconds_;
  double now_ = 0;
  int rows_ = 0, images_ = 0;
  std::map<const Graph*, std::pair<int, int>> counts_;
};

// Warm-up of a large model would run for seconds if each bucket were run.
TEST(Evaluator, WarmUpRunsNoBucketBeyondOneThatFillsTheDevice) {
  using ::testing::ElementsAre;
  const auto warm = [](TimedBackend& backend) {
    const auto evaluator = Evaluator::Create(backend, std::make_shared<FakeDenoiser>(4, 1, 0),
                                             {.height = 4,
                                              .width = 4,
                                              .max_rows = 48,
                                              .slots = 8,
                                              .max_evaluations = 1,
                                              .decodes = 1,
                                              .codec = std::make_shared<FakeCodec>(1),
                                              .max_images = 8})
                               .value();
    std::vector<std::pair<int, bool>> measured;  // rows
    for (bool more = true; more;) {
      const Evaluator::Warmed warmed = evaluator->WarmUp().value();
      if (warmed.stage == Stage::kDenoise) measured.emplace_back(warmed.count, warmed.seconds >= 0);
      more = warmed.more;
    }
    return measured;
  };
  TimedBackend large(0.01, 0.1);
  // One run that captures, then three that are measured.
  const std::pair one{1, false}, two{2, false}, four{4, false};
  EXPECT_THAT(warm(large),
              ElementsAre(one, one, one, std::pair{1, true}, two, two, two, std::pair{2, true},
                          four, four, four, std::pair{4, true}, std::pair{8, false},
                          std::pair{16, false}, std::pair{32, false}, std::pair{48, false}));
  EXPECT_THAT(large.captured, ElementsAre(1, 2, 4, 8, 16, 32, 48));
  EXPECT_THAT(large.launched, ElementsAre(1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4))
      << "four rows take 0.04 s";
  EXPECT_THAT(large.decoded, ElementsAre(1, 1, 1, 1));
  TimedBackend small(0.0001, 0.001);
  warm(small);
  EXPECT_THAT(small.launched, ElementsAre(1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8, 16, 16,
                                          16, 16, 32, 32, 32, 32, 48, 48, 48, 48));
  EXPECT_THAT(small.decoded, ElementsAre(1, 1, 1, 1, 2, 2, 2, 2)) << "two images gain nothing";
}

// A device that is short of memory would pay for a capture that fails at every evaluation.
TEST(CapturedRun, IsCapturedAgainWhenMoreMemoryIsFree) {
  FakeClock clock;
  SimulatedBackend backend(OpenBackend({.device = "cpu"}).value(), &clock, [](int) { return 0; });
  backend.memory_limit = 1000;
  int runs = 0;
  CapturedRun run(backend, [&] { ++runs; });
  backend.graphs = false;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(run.Capture().ok());
    ASSERT_TRUE(run.Run().ok());
  }
  EXPECT_EQ(runs, 3) << "without a graph";
  EXPECT_EQ(backend.captures, 1);
  backend.memory_limit = 1001;
  ASSERT_TRUE(run.Capture().ok());
  EXPECT_EQ(backend.captures, 2);
  backend.graphs = true;
  ASSERT_TRUE(run.Capture().ok());
  EXPECT_EQ(backend.captures, 2);
  backend.memory_limit = 1002;
  ASSERT_TRUE(run.Capture().ok());
  ASSERT_TRUE(run.Capture().ok());
  EXPECT_EQ(backend.captures, 3);
  const int before = runs;
  ASSERT_TRUE(run.Run().ok());
  EXPECT_EQ(runs, before + 1) << "the graph";
}

TEST(EvaluatorDeathTest, TakesNoMoreRowsThanItHasMemoryFor) {
  auto backend = OpenBackend({.device = "cpu"});
  ASSERT_TRUE(backend.ok()) << backend.status();
  const auto evaluator =
      Evaluator::Create(**backend, std::make_shared<FakeDenoiser>(4, 1, 0),
                        {.height = 4, .width = 4, .max_rows = 2, .slots = 4, .max_evaluations = 1});
  ASSERT_TRUE(evaluator.ok()) << evaluator.status();
  const EvaluationRow padding{.slot = -1, .label = 0, .unconditional_row = -1, .advances = 0};
  CapturedRun::Ran ran;
  const auto bucket = (*evaluator)->Evaluate(std::vector<EvaluationRow>(2, padding), &ran);
  ASSERT_TRUE(bucket.ok()) << bucket.status();
  EXPECT_EQ(*bucket, 2);
  EXPECT_DEATH((*evaluator)->Evaluate(std::vector<EvaluationRow>(3, padding), &ran).IgnoreError(),
               "3 rows, at most 2");
}

}  // namespace
}  // namespace denoised
