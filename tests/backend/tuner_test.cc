// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cuda/tuner.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/core/e4m3.h"
#include "engine/core/tensor.h"
#include "tests/needs_gpu.h"

/// The tuner on ways that copy memory, whose speed and effect are known.

namespace denoised::cuda {
namespace {

class CudaTunerTest : public testing::Test {
 protected:
  void SetUp() override {
    DENOISED_NEEDS_GPU();
    stream_ = NewStream().value();
    tuner_.emplace(Queue{stream_.get(), 1}, std::nullopt, Notify());
  }

  DeviceMemory Allocate(size_t bytes) {
    DeviceMemory memory = AllocateDevice(bytes, "a test").value();
    EXPECT_EQ(cudaMemset(memory.get(), 0, bytes), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return memory;
  }
  Candidate Copying(const char* name, double microseconds, const void* from, void* to,
                    size_t bytes) {
    return {name, microseconds, [=, this] {
              return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_.get());
            }};
  }

  Stream stream_;
  std::optional<Tuner> tuner_;
};

TEST_F(CudaTunerTest, ChoosesWhatIsClearlyFaster) {
  const size_t bytes = 128 << 20;
  const DeviceMemory from = Allocate(bytes), to = Allocate(bytes);
  const Candidates candidates = {Copying("all", 20, from.get(), to.get(), bytes),
                                 Copying("a half", 25, from.get(), to.get(), bytes / 2),
                                 Copying("a part", 28, from.get(), to.get(), bytes / 128)};
  EXPECT_EQ(tuner_->Choose("copies", candidates, {}).name, "all");
  EXPECT_TRUE(tuner_->has_unknown());
  ASSERT_TRUE(tuner_->Measure().ok());
  EXPECT_FALSE(tuner_->has_unknown());
  EXPECT_EQ(tuner_->Choose("copies", candidates, {}).name, "a part");
  EXPECT_FALSE(tuner_->has_unknown()) << "it was measured";
}

// It measures by index, so a list of other candidates would measure what it does not name.
TEST(TunerDeathTest, CandidatesOfALaunchAreAlwaysTheSame) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  Tuner tuner(Queue(), std::nullopt, Notify());
  const Candidates candidates = {{"a", 1, {}}, {"b", 1, {}}}, others = {{"a", 1, {}}, {"c", 1, {}}};
  tuner.Choose("a launch", candidates, {});
  tuner.Choose("a launch", candidates, {});
  EXPECT_DEATH(tuner.Choose("a launch", others, {}), "other candidates of a launch");
}

// Candidates copy the operand, and what is behind it, away as they find it: of each element, in
// vectors and one by one, whole and as columns of a wider matrix.
TEST_F(CudaTunerTest, MeasuresOnNormalNoise) {
  constexpr size_t kGuard = 256;
  for (const Element element : {Element::kBf16, Element::kF32, Element::kE4m3x2}) {
    for (const int columns : {64, 67}) {
      const bool e4m3 = element == Element::kE4m3x2, vector = columns % 8 == 0;
      if (e4m3 && !vector) continue;
      const int64_t rows = 1000, stride = 80;
      const size_t element_bytes = element == Element::kF32 ? 4 : 2;
      const size_t bytes = rows * stride * element_bytes + kGuard;
      const DeviceMemory operand = Allocate(bytes), seen = Allocate(bytes);
      const Candidates candidates = {Copying("one", 1, operand.get(), seen.get(), bytes),
                                     Copying("other", 1, operand.get(), seen.get(), bytes)};
      const float scale = e4m3 ? 0x1p-6f : 1;
      const Rows values = {operand.get(), stride, element, vector, scale};
      const std::string what = fmt::format("{} of {}", static_cast<int>(element), columns);
      SCOPED_TRACE(what);
      tuner_->Choose(what, candidates, {{values, rows, columns}});
      ASSERT_TRUE(tuner_->has_unknown());
      ASSERT_TRUE(tuner_->Measure().ok());
      std::vector<uint8_t> found(bytes);
      ASSERT_EQ(cudaMemcpy(found.data(), seen.get(), bytes, cudaMemcpyDeviceToHost), cudaSuccess);
      EXPECT_TRUE(std::all_of(found.end() - kGuard, found.end(), [](uint8_t byte) {
        return byte == 0;
      })) << "behind the operand";
      const int per = e4m3 ? 2 : 1;  // numbers of an element
      const auto number = [&](int64_t i) {
        if (e4m3) return E4m3ToFloat(found[i]) * scale;
        if (element == Element::kF32) return reinterpret_cast<const float*>(found.data())[i];
        return BFloat16ToFloat(reinterpret_cast<const uint16_t*>(found.data())[i]);
      };
      double sum = 0, squares = 0, neighbours = 0;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < per * stride; ++column) {
          const int64_t i = row * per * stride + column;
          const float value = number(i);
          if (column >= per * columns) {
            ASSERT_EQ(value, 0) << "beside the operand";
            continue;
          }
          sum += value;
          squares += double{value} * value;
          if (column > 0) neighbours += double{value} * number(i - 1);
        }
      }
      const double count = static_cast<double>(per * rows * columns);  // errors of 4/√count
      EXPECT_NEAR(sum / count, 0, 4 / std::sqrt(count));
      EXPECT_NEAR(squares / count, 1, 6 / std::sqrt(count));
      EXPECT_NEAR(neighbours / count, 0, 4 / std::sqrt(count)) << "neighbours are alike";
    }
  }
}

TEST_F(CudaTunerTest, MeasuresOnNoOtherElements) {
  const DeviceMemory operand = Allocate(1024);
  const Candidates candidates = {Copying("one", 1, operand.get(), operand.get(), 0),
                                 Copying("other", 1, operand.get(), operand.get(), 0)};
  tuner_->Choose("fp16", candidates, {{{operand.get(), 8, Element::kF16, true}, 8, 8}});
  EXPECT_FALSE(tuner_->Measure().ok());
}

}  // namespace
}  // namespace denoised::cuda
