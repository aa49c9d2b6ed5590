// SPDX-License-Identifier: Apache-2.0
#include "engine/batching/evaluator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "engine/backend/counting.h"
#include "tests/batching/fake_codec.h"
#include "tests/batching/fake_denoiser.h"

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
  ASSERT_TRUE(evaluator->Evaluate(padding).ok());  // checks the ops, then computes
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
  ASSERT_TRUE(evaluator->Evaluate(std::vector<EvaluationRow>(1, row)).ok());
  const auto parked = evaluator->Park(0);
  evaluator->Begin(0, start);
  evaluator->Begin(1, start);
  ASSERT_TRUE(parked->Arrive().ok());
  evaluator->Resume(1, start, /*evaluations_done=*/1, *parked);
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
  ASSERT_TRUE(evaluator->Evaluate(std::vector<EvaluationRow>(1, row)).ok());
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

TEST(EvaluatorDeathTest, TakesNoMoreRowsThanItHasMemoryFor) {
  auto backend = OpenBackend({.device = "cpu"});
  ASSERT_TRUE(backend.ok()) << backend.status();
  const auto evaluator =
      Evaluator::Create(**backend, std::make_shared<FakeDenoiser>(4, 1, 0),
                        {.height = 4, .width = 4, .max_rows = 2, .slots = 4, .max_evaluations = 1});
  ASSERT_TRUE(evaluator.ok()) << evaluator.status();
  const EvaluationRow padding{.slot = -1, .label = 0, .unconditional_row = -1, .advances = 0};
  const auto bucket = (*evaluator)->Evaluate(std::vector<EvaluationRow>(2, padding));
  ASSERT_TRUE(bucket.ok()) << bucket.status();
  EXPECT_EQ(*bucket, 2);
  EXPECT_DEATH((*evaluator)->Evaluate(std::vector<EvaluationRow>(3, padding)).IgnoreError(),
               "3 rows, at most 2");
}

}  // namespace
}  // namespace denoised
