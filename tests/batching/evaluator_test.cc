// An evaluator refuses what would reach beyond its memory.

#include "engine/batching/evaluator.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/batching/fake_denoiser.h"

namespace denoised {
namespace {

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
