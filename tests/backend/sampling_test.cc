// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <limits>

#include "engine/core/philox.h"
#include "tests/backend/backend_fixture.h"

/// BeginSlot, Gather and Advance against step_plan.h's formulas in double, and what they must not
/// touch.

namespace denoised {
namespace {

using reference::Array;

/// State and plans are fp32 on every backend; sums of nine products of size one. Measured 2e-7.
constexpr double kTolerance = 1e-6;

Array PhiloxNoise(const Shape& image, uint64_t seed, uint32_t draw) {
  Array noise(image);
  for (int64_t i = 0; i < image.elements(); ++i) {
    noise.at(i) = PhiloxNormal(seed, draw, i / 4).v[i % 4];
  }
  return noise;
}

class SamplingTest : public OnBackend {
 protected:
  static constexpr int64_t kSlots = 5, kEvaluations = 4, kFeatures = 7;

  /// Images of 5·3·3 = 45 elements: no multiple of Philox's four.
  Shape image_{5, 3, 3};
  bool sparse_ = false;  // plans: many weights are zero, also all of an output
  SlotState state_;
  std::vector<reference::SlotImages> images_;
  std::vector<std::vector<Evaluation<double>>> plans_;
  std::vector<int32_t> evaluation_;
  std::vector<int64_t> seed_;
  Array guidance_, embedding_;

  static Shape Stacked(int64_t n, const Shape& image) { return {n, image[0], image[1], image[2]}; }

  Evaluation<double> RandomEvaluation() {
    const auto number = [&](double scale) { return Random({1}, DType::kF32, scale).at(0); };
    Evaluation<double> e;
    e.input_scale = number(1);
    e.input_shift = number(1);
    e.condition = number(100);
    e.x0_from_x = number(1);
    e.x0_from_model = number(1);
    e.clip = Coin() ? 0.8f : 0;
    e.log_variance_min = static_cast<float>(-3 + 0.1 * number(1));
    e.log_variance_max = static_cast<float>(-1 + 0.1 * number(1));
    for (auto& row : e.weights) {
      const bool absent = sparse_ && Coin();
      for (double& weight : row) weight = absent || (sparse_ && Coin()) ? 0 : number(0.5);
    }
    return e;
  }

  /// Slots in the middle of their plans, everything random.
  void MakeSlots(NoiseScale noise_scale) {
    images_.clear();
    plans_.clear();
    evaluation_.clear();
    seed_.clear();
    Array x(Stacked(kSlots, image_)), x0(Stacked(kSlots, image_));
    Array registers({kSlots, kRegisters, image_[0], image_[1], image_[2]});
    std::vector<DeviceEvaluation> device_plans;
    x.values.clear();
    x0.values.clear();
    registers.values.clear();
    const auto append = [](Array& to, const Array& from) {
      to.values.insert(to.values.end(), from.values.begin(), from.values.end());
    };
    for (int64_t s = 0; s < kSlots; ++s) {
      reference::SlotImages images{Random(image_, DType::kF32), Random(image_, DType::kF32), {}};
      append(x, images.x);
      append(x0, images.x0);
      for (int k = 0; k < kRegisters; ++k) {
        images.registers.push_back(Random(image_, DType::kF32));
        append(registers, images.registers.back());
      }
      images_.push_back(images);
      StepPlan plan;
      for (int64_t e = 0; e < kEvaluations; ++e) {
        plan.evaluations.push_back(RandomEvaluation());
        plan.evaluations.back().noise_scale = noise_scale;
      }
      plans_.push_back(plan.evaluations);
      for (const DeviceEvaluation& e : ToDevice(plan)) device_plans.push_back(e);
      evaluation_.push_back(static_cast<int32_t>(RandomInt(0, kEvaluations - 1)));
      seed_.push_back(static_cast<int64_t>(random_()));  // all 64 bits
    }
    guidance_ = Random({kSlots, kGuidanceNumbers}, DType::kF32, 1, 4);
    embedding_ = Random({kSlots, kFeatures}, DType::kF32);
    state_.x = Upload(x, DType::kF32);
    state_.x0 = Upload(x0, DType::kF32);
    state_.registers = Upload(registers, DType::kF32);
    state_.plans = Allocate({kSlots, kEvaluations * static_cast<int64_t>(sizeof(DeviceEvaluation))},
                            DType::kU8);
    backend().Upload(device_plans.data(), device_plans.size() * sizeof(DeviceEvaluation),
                     state_.plans);
    state_.evaluation = UploadInts(evaluation_, {kSlots});
    state_.nonfinite = UploadInts(std::vector<int32_t>(kSlots), {kSlots});
    state_.seed = Allocate({kSlots}, DType::kI64);
    backend().Upload(seed_.data(), seed_.size() * sizeof(int64_t), state_.seed);
    state_.guidance = Upload(guidance_, DType::kF32);
    state_.embedding = Upload(embedding_, DType::kF32);
  }

  Tensor UploadRows(const std::vector<EvaluationRow>& rows) {
    std::vector<int32_t> values(kRowNumbers * rows.size());
    std::memcpy(values.data(), rows.data(), values.size() * sizeof(int32_t));
    return UploadInts(values, {static_cast<int64_t>(rows.size()), kRowNumbers});
  }

  /// One slot's part of a state tensor, as an image.
  Array ReadSlot(const Tensor& tensor, int64_t slot) {
    Array array = Read(tensor.Slice(slot, 1));
    array.shape = image_;
    return array;
  }
  Array ReadRegister(int64_t slot, int k) {
    const Array all = Read(state_.registers.Slice(slot, 1));
    Array array(image_);
    std::copy_n(all.values.begin() + k * image_.elements(), image_.elements(),
                array.values.begin());
    return array;
  }
  int32_t ReadEvaluation(int64_t slot) { return Download(state_.evaluation).as<int32_t>()[slot]; }
  std::vector<int32_t> ReadNonfinite() {
    const Tensor host = Download(state_.nonfinite);
    return {host.as<int32_t>(), host.as<int32_t>() + kSlots};
  }

  void ExpectSlot(int64_t slot, const reference::SlotImages& expected, int32_t evaluation) {
    EXPECT_LT(Error(ReadSlot(state_.x, slot), expected.x), kTolerance) << "x of slot " << slot;
    EXPECT_LT(Error(ReadSlot(state_.x0, slot), expected.x0), kTolerance) << "x0 of slot " << slot;
    for (int k = 0; k < kRegisters; ++k) {
      EXPECT_LT(Error(ReadRegister(slot, k), expected.registers[k]), kTolerance)
          << "register " << k << " of slot " << slot;
    }
    EXPECT_EQ(ReadEvaluation(slot), evaluation) << "slot " << slot;
  }

  void ExpectFinite(int64_t slot) {
    for (const Tensor& tensor : {state_.x, state_.x0, state_.registers}) {
      for (const double value : Read(tensor.Slice(slot, 1)).values) {
        ASSERT_TRUE(std::isfinite(value)) << "slot " << slot;
      }
    }
  }

  /// What `conditional` of slot `slot` should lead to.
  reference::SlotImages Expected(int64_t slot, const Array& conditional,
                                 const Array& unconditional) {
    const int32_t e = evaluation_[slot];
    return reference::Advance(
        images_[slot], plans_[slot][e], conditional, unconditional,
        guidance_.at(slot * kGuidanceNumbers),
        PhiloxNoise(image_, static_cast<uint64_t>(seed_[slot]), static_cast<uint32_t>(e)));
  }

  /// Random model outputs. About half of the learned variances (the second half of channels) are
  /// negative, as a network's may be.
  Array RandomOutput(int64_t rows, bool learned) {
    return Random({rows, image_[0], image_[1], image_[2] * (learned ? 2 : 1)}, DType::kF32);
  }
  static Array Row(const Array& stacked, int64_t r) {
    Array row({stacked.shape[1], stacked.shape[2], stacked.shape[3]});
    std::copy_n(stacked.values.begin() + r * row.shape.elements(), row.shape.elements(),
                row.values.begin());
    return row;
  }
};

TEST_P(SamplingTest, AdvanceFollowsThePlan) {
  for (NoiseScale kind : {NoiseScale::kFixed, NoiseScale::kLearned, NoiseScale::kLearnedRange}) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      MakeSlots(kind);
      // Slot 3 is guided by row 4; slots 0 and 4 go alone; a padding row; slots 1 and 2 rest.
      const Tensor rows =
          UploadRows({{3, 2, 4, 1}, {0, 1, -1, 1}, {-1, 0, -1, 0}, {4, 9, -1, 1}, {3, 5, -1, 0}});
      const Array output = RandomOutput(5, kind != NoiseScale::kFixed);
      backend().Advance(
          {.state = state_, .rows = rows, .model_output = Upload(output, DType::kF32)});
      ExpectSlot(3, Expected(3, Row(output, 0), Row(output, 4)), evaluation_[3] + 1);
      ExpectSlot(0, Expected(0, Row(output, 1), {}), evaluation_[0] + 1);
      ExpectSlot(4, Expected(4, Row(output, 3), {}), evaluation_[4] + 1);
      for (int64_t resting : {1, 2}) {
        EXPECT_EQ(Error(ReadSlot(state_.x, resting), images_[resting].x), 0);
        EXPECT_EQ(Error(ReadSlot(state_.x0, resting), images_[resting].x0), 0);
        for (int k = 0; k < kRegisters; ++k) {
          EXPECT_EQ(Error(ReadRegister(resting, k), images_[resting].registers[k]), 0);
        }
        EXPECT_EQ(ReadEvaluation(resting), evaluation_[resting]);
      }
    }
  }
}

TEST_P(SamplingTest, AdvanceOfImagesOfOtherSizes) {
  // In vectors of four elements; and more of them than CUDA has threads for one image.
  for (const Shape& image : {Shape{4, 5, 3}, Shape{296, 296, 3}}) {
    image_ = image;
    MakeSlots(NoiseScale::kLearnedRange);
    const Array output = RandomOutput(2, true);
    backend().Advance({.state = state_,
                       .rows = UploadRows({{1, 0, 1, 1}, {1, 0, -1, 0}}),
                       .model_output = Upload(output, DType::kF32)});
    ExpectSlot(1, Expected(1, Row(output, 0), Row(output, 1)), evaluation_[1] + 1);
    MakeSlots(NoiseScale::kFixed);
    const Array fixed = RandomOutput(2, false);
    backend().Advance({.state = state_,
                       .rows = UploadRows({{4, 0, 1, 1}, {4, 0, -1, 0}}),
                       .model_output = Upload(fixed, DType::kF32)});
    ExpectSlot(4, Expected(4, Row(fixed, 0), Row(fixed, 1)), evaluation_[4] + 1);
    EXPECT_EQ(Error(ReadSlot(state_.x, 1), images_[1].x), 0);
  }
}

TEST_P(SamplingTest, WhatAMaskKeepsIsPutBack) {
  for (const Shape& image : {Shape{5, 3, 3}, Shape{4, 5, 3}, Shape{4, 4, 4}}) {
    image_ = image;
    MakeSlots(NoiseScale::kFixed);
    const int64_t pixels = image[0] * image[1], channels = image[2];
    const Array known = Random({kSlots, 2, image[0], image[1], image[2]}, DType::kF32);
    Array mask({kSlots, image[0], image[1]});
    for (double& value : mask.values) value = Coin() ? 1 : 0;
    state_.known = Upload(known, DType::kF32);
    state_.mask = Upload(mask, DType::kF32);
    // Slot 3 has a mask, slot 1 has none.
    StepPlan plan{.evaluations = plans_[3]};
    for (Evaluation<double>& e : plan.evaluations) {
      e.known_image = 0.75;
      e.known_noise = 0.5;
    }
    const std::vector<DeviceEvaluation> masked = ToDevice(plan, /*masked=*/true);
    backend().Upload(masked.data(), masked.size() * sizeof(DeviceEvaluation),
                     state_.plans.Slice(3, 1));
    const Array output = RandomOutput(2, false);
    backend().Advance({.state = state_,
                       .rows = UploadRows({{3, 0, -1, 1}, {1, 0, -1, 1}}),
                       .model_output = Upload(output, DType::kF32)});
    reference::SlotImages expected = Expected(3, Row(output, 0), {});
    const Array drawn = expected.x;
    for (int64_t i = 0; i < image.elements(); ++i) {
      const double m = mask.at(3 * pixels + i / channels);
      const double back = 0.75 * known.at(3 * 2 * image.elements() + i) +
                          0.5 * known.at((3 * 2 + 1) * image.elements() + i);
      expected.x.at(i) = m * drawn.at(i) + (1 - m) * back;
    }
    ExpectSlot(3, expected, evaluation_[3] + 1);
    EXPECT_GT(Error(drawn, expected.x), 0.01) << "the mask does nothing";
    ExpectSlot(1, Expected(1, Row(output, 1), {}), evaluation_[1] + 1);
  }
}

TEST_P(SamplingTest, GuidanceOfThreeRows) {
  for (const bool learned : {false, true}) {
    MakeSlots(learned ? NoiseScale::kLearned : NoiseScale::kFixed);
    const Array output = RandomOutput(4, learned);
    // Beside an image of two rows, whose second is another's third.
    backend().Advance({.state = state_,
                       .rows = UploadRows(
                           {{2, 0, 1, 1, 2, 0}, {2, 0, -1, 0}, {2, 0, -1, 0, -1, 1}, {0, 0, 2, 1}}),
                       .model_output = Upload(output, DType::kF32)});
    // u + g·(c − i) + h·(i − u) is what guiding `guided` by u with scale 1 gives.
    const double g = guidance_.at(2 * kGuidanceNumbers), h = guidance_.at(2 * kGuidanceNumbers + 1);
    Array guided = Row(output, 0);
    const Array i = Row(output, 1), u = Row(output, 2);
    const int64_t out_channels = guided.shape[2];
    for (int64_t at = 0; at < guided.shape.elements(); ++at) {
      if (at % out_channels >= image_[2]) continue;  // the variance is the first row's
      guided.at(at) = u.at(at) + g * (guided.at(at) - i.at(at)) + h * (i.at(at) - u.at(at));
    }
    ExpectSlot(2, Expected(2, guided, {}), evaluation_[2] + 1);
    ExpectSlot(0, Expected(0, Row(output, 3), u), evaluation_[0] + 1);
  }
}

TEST_P(SamplingTest, RescaledGuidance) {
  for (const Shape& image : {Shape{5, 3, 3}, Shape{4, 5, 3}, Shape{64, 64, 4}}) {
    for (const bool learned : {false, true}) {
      image_ = image;
      MakeSlots(learned ? NoiseScale::kLearned : NoiseScale::kFixed);
      const Array output = RandomOutput(5, learned);
      constexpr double kRescale = 0.7;
      guidance_.at(1 * kGuidanceNumbers + 2) = kRescale;
      guidance_.at(3 * kGuidanceNumbers + 2) = kRescale;  // not guided
      guidance_.at(0 * kGuidanceNumbers + 2) = 0;         // guided, not rescaled
      state_.guidance = Upload(guidance_, DType::kF32);
      const Tensor factors = Output({5, kOutputFactors}, DType::kF32);
      const Tensor rows =
          UploadRows({{1, 0, 2, 1}, {3, 0, -1, 1}, {1, 0, -1, 0}, {-1, 0, -1, 0}, {0, 0, 2, 1}});
      const Tensor uploaded = Upload(output, DType::kF32);
      backend().MeasureOutputs(
          {.state = state_, .rows = rows, .model_output = uploaded, .factors = factors});
      backend().Advance(
          {.state = state_, .rows = rows, .model_output = uploaded, .factors = factors});
      const Array c = Row(output, 0), u = Row(output, 2);
      const double g = guidance_.at(kGuidanceNumbers);
      const int64_t out_channels = c.shape[2];
      Array guided = c;
      std::vector<double> of_c, of_guided;
      for (int64_t at = 0; at < c.shape.elements(); ++at) {
        if (at % out_channels >= image_[2]) continue;
        guided.at(at) = u.at(at) + g * (c.at(at) - u.at(at));
        of_c.push_back(c.at(at));
        of_guided.push_back(guided.at(at));
      }
      const auto deviation = [](const std::vector<double>& values) {
        double mean = 0, squares = 0;
        for (const double value : values) mean += value / static_cast<double>(values.size());
        for (const double value : values) squares += (value - mean) * (value - mean);
        return std::sqrt(squares / static_cast<double>(values.size() - 1));
      };
      const double expected = kRescale * deviation(of_c) / deviation(of_guided) + 1 - kRescale;
      const Array measured = Read(factors);
      EXPECT_NEAR(measured.at(0), expected, 1e-6 * expected);
      EXPECT_GT(std::fabs(expected - 1), 0.01) << "the test can fail";
      for (const int64_t at : {1, 2, 3, 4, 5, 6, 7, 8, 9}) EXPECT_EQ(measured.at(at), 1) << at;
      for (int64_t at = 0; at < c.shape.elements(); ++at)
        if (at % out_channels < image_[2]) guided.at(at) *= expected;
      ExpectSlot(1, Expected(1, guided, {}), evaluation_[1] + 1);
      ExpectSlot(3, Expected(3, Row(output, 1), {}), evaluation_[3] + 1);
      ExpectSlot(0, Expected(0, Row(output, 4), u), evaluation_[0] + 1);
    }
  }
}

TEST_P(SamplingTest, NoiseScaledByNorms) {
  // Also of more elements than CUDA has threads for one image.
  for (const Shape& image : {Shape{5, 3, 3}, Shape{4, 5, 3}, Shape{64, 64, 4}}) {
    for (const bool variance : {false, true}) {
      image_ = image;
      MakeSlots(NoiseScale::kNormRatio);
      // Slot 0 is at another kind of evaluation.
      for (Evaluation<double>& e : plans_[0]) e.noise_scale = NoiseScale::kFixed;
      const std::vector<DeviceEvaluation> plan = ToDevice({.evaluations = plans_[0]});
      backend().Upload(plan.data(), plan.size() * sizeof(DeviceEvaluation),
                       state_.plans.Slice(0, 1));
      constexpr double kRescale = 0.7;
      guidance_.at(1 * kGuidanceNumbers + 2) = kRescale;
      guidance_.at(4 * kGuidanceNumbers + 2) = 0;
      state_.guidance = Upload(guidance_, DType::kF32);
      const Array output = RandomOutput(6, variance);
      const Tensor uploaded = Upload(output, DType::kF32);
      const std::vector<EvaluationRow> rows = {{1, 0, 2, 1},   {3, 0, -1, 1}, {1, 0, -1, 0},
                                               {-1, 0, -1, 0}, {0, 0, -1, 1}, {4, 0, 2, 1}};
      const Tensor factors = Output({6, kOutputFactors}, DType::kF32);
      backend().MeasureOutputs({.state = state_,
                                .rows = UploadRows(rows),
                                .model_output = uploaded,
                                .factors = factors});
      // A row alone has the same bits.
      const Tensor alone = Output({1, kOutputFactors}, DType::kF32);
      backend().MeasureOutputs({.state = state_,
                                .rows = UploadRows({rows[1]}),
                                .model_output = uploaded.Slice(1, 1),
                                .factors = alone});
      const Array measured = Read(factors), of_one = Read(alone);
      EXPECT_EQ(of_one.at(1), measured.at(3));
      for (const int64_t r : {2, 3, 4}) EXPECT_EQ(measured.at(2 * r + 1), 1) << r;
      for (const int64_t r : {0, 1, 5})
        EXPECT_GT(std::fabs(measured.at(2 * r + 1) - 1), 1e-4) << "the test can fail";
      backend().Advance({.state = state_,
                         .rows = UploadRows(rows),
                         .model_output = uploaded,
                         .factors = factors});
      Array guided = Row(output, 0);
      const Array u = Row(output, 2);
      const double g = guidance_.at(kGuidanceNumbers);
      for (int64_t at = 0; at < guided.shape.elements(); ++at)
        guided.at(at) = measured.at(0) * (u.at(at) + g * (guided.at(at) - u.at(at)));
      ExpectSlot(1, Expected(1, guided, {}), evaluation_[1] + 1);
      ExpectSlot(3, Expected(3, Row(output, 1), {}), evaluation_[3] + 1);
      ExpectSlot(0, Expected(0, Row(output, 4), {}), evaluation_[0] + 1);
      ExpectSlot(4, Expected(4, Row(output, 5), u), evaluation_[4] + 1);
    }
  }
}

TEST_P(SamplingTest, WhatIsNotKeptIsZeroForTheNextEvaluation) {
  sparse_ = true;
  for (int repeat = 0; repeat < 6; ++repeat) {
    if (repeat == 3) image_ = {4, 5, 3};
    MakeSlots(NoiseScale::kFixed);
    backend().BeginSlot({.state = state_, .slot = 2});  // registers held something
    for (int e = 0; e < kEvaluations; ++e) {
      evaluation_[2] = e;
      images_[2] = {ReadSlot(state_.x, 2), ReadSlot(state_.x0, 2), {}};
      for (int k = 0; k < kRegisters; ++k) images_[2].registers.push_back(ReadRegister(2, k));
      const Array output = RandomOutput(1, false);
      backend().Advance({.state = state_,
                         .rows = UploadRows({{2, 0, -1, 1}}),
                         .model_output = Upload(output, DType::kF32)});
      ExpectSlot(2, Expected(2, Row(output, 0), {}), e + 1);
    }
  }
}

TEST_P(SamplingTest, AModelWithUnusedVarianceChannels) {
  // Fixed variance although the model outputs 2C channels: the second half is not read.
  MakeSlots(NoiseScale::kFixed);
  const Array output = RandomOutput(1, true);
  backend().Advance({.state = state_,
                     .rows = UploadRows({{2, 0, -1, 1}}),
                     .model_output = Upload(output, DType::kF32)});
  ExpectSlot(2, Expected(2, Row(output, 0), {}), evaluation_[2] + 1);
}

TEST_P(SamplingTest, ARowOfPaddingAloneChangesNothing) {
  MakeSlots(NoiseScale::kFixed);
  const Array output = RandomOutput(2, false);
  backend().Advance({.state = state_,
                     .rows = UploadRows({{-1, 0, -1, 1}, {1, 0, -1, 0}}),
                     .model_output = Upload(output, DType::kF32)});
  for (int64_t s = 0; s < kSlots; ++s) {
    EXPECT_EQ(Error(ReadSlot(state_.x, s), images_[s].x), 0);
    EXPECT_EQ(ReadEvaluation(s), evaluation_[s]);
  }
}

TEST_P(SamplingTest, TheTestCanFail) {
  MakeSlots(NoiseScale::kLearnedRange);
  const Array output = RandomOutput(2, true);
  backend().Advance({.state = state_,
                     .rows = UploadRows({{0, 0, 1, 1}, {0, 0, -1, 0}}),
                     .model_output = Upload(output, DType::kF32)});
  const Array x = ReadSlot(state_.x, 0);
  const Array c = Row(output, 0), u = Row(output, 1);
  EXPECT_LT(Error(x, Expected(0, c, u).x), kTolerance);
  EXPECT_GT(Error(x, Expected(0, u, c).x), 10 * kTolerance);
  EXPECT_GT(Error(x, Expected(0, c, {}).x), 10 * kTolerance);
  plans_[0][evaluation_[0]].log_variance_max += 0.01;
  EXPECT_GT(Error(x, Expected(0, c, u).x), 10 * kTolerance);
  plans_[0][evaluation_[0]].log_variance_max -= 0.01;
  seed_[0] ^= int64_t{1} << 40;
  EXPECT_GT(Error(x, Expected(0, c, u).x), 10 * kTolerance);
}

TEST_P(SamplingTest, TheSlotsBitsDoNotDependOnCompany) {
  MakeSlots(NoiseScale::kLearned);
  const Array output = RandomOutput(4, true);
  const SlotState state = state_;
  // Slots 0 … 3 get the state of slot 4, and each is advanced at another place with its output.
  const auto copy = [&](const Tensor& tensor) {
    for (int64_t s = 0; s < 4; ++s) backend().Copy(tensor.Slice(4, 1), tensor.Slice(s, 1));
  };
  for (const Tensor& tensor : {state.x, state.registers, state.x0, state.plans, state.evaluation,
                               state.seed, state.guidance}) {
    copy(tensor);
  }
  Array same = output;
  const int64_t row = output.shape.elements() / 4;
  for (int64_t r : {1, 3}) std::copy_n(output.values.begin(), row, same.values.begin() + r * row);
  backend().Advance({.state = state,
                     .rows = UploadRows({{4, 0, -1, 1}}),
                     .model_output = Upload(same, DType::kF32).Slice(0, 1)});
  backend().Advance(
      {.state = state,
       .rows = UploadRows({{-1, 0, -1, 0}, {0, 0, -1, 1}, {2, 0, -1, 1}, {1, 0, -1, 1}}),
       .model_output = Upload(same, DType::kF32)});
  for (const Tensor& tensor : {state.x, state.registers, state.x0}) {
    const Tensor alone = Download(tensor.Slice(4, 1));
    for (int64_t s : {0, 1}) {
      const Tensor host = Download(tensor.Slice(s, 1));
      EXPECT_EQ(std::memcmp(host.data(), alone.data(), alone.bytes()), 0) << "slot " << s;
    }
    const Tensor other = Download(tensor.Slice(2, 1));
    EXPECT_NE(std::memcmp(other.data(), alone.data(), alone.bytes()), 0);
  }
}

TEST_P(SamplingTest, BeginSlot) {
  const Array source = Random(image_, DType::kF32), noise = Random(image_, DType::kF32);
  for (int which = 0; which < 8; ++which) {
    const bool with_source = which & 1, with_noise = which & 2, with_churn = which & 4;
    MakeSlots(NoiseScale::kFixed);
    BeginSlotArgs args{.state = state_, .slot = 2};
    if (with_source) args.source = Upload(source, DType::kF32);
    if (with_noise) args.noise = Upload(noise, DType::kF32);
    args.source_scale = with_source ? 0.75f : 0.0f;
    args.noise_scale = 12.5f;
    args.churn_scale = with_churn ? 1.5f : 0.0f;
    args.shift = with_churn ? -1.0f : 0.0f;
    backend().BeginSlot(args);
    const auto seed = static_cast<uint64_t>(seed_[2]);
    const Array drawn = with_noise ? noise : PhiloxNoise(image_, seed, kInitialDraw);
    const Array churn = PhiloxNoise(image_, seed, kInitialChurnDraw);
    Array expected(image_);
    for (int64_t i = 0; i < image_.elements(); ++i) {
      expected.at(i) = args.source_scale * source.at(i) + 12.5 * drawn.at(i) +
                       args.churn_scale * churn.at(i) + args.shift;
    }
    EXPECT_LT(Error(ReadSlot(state_.x, 2), expected), kTolerance) << which;
    const Array zeros(image_);
    EXPECT_EQ(Error(ReadSlot(state_.x0, 2), zeros), 0);
    for (int k = 0; k < kRegisters; ++k) EXPECT_EQ(Error(ReadRegister(2, k), zeros), 0);
    EXPECT_EQ(ReadEvaluation(2), 0);
    for (int64_t s : {0, 1, 3, 4}) {
      EXPECT_EQ(Error(ReadSlot(state_.x, s), images_[s].x), 0);
      EXPECT_EQ(Error(ReadRegister(s, 0), images_[s].registers[0]), 0);
      EXPECT_EQ(ReadEvaluation(s), evaluation_[s]);
    }
  }
}

TEST_P(SamplingTest, WhatIsNotFiniteIsNotedInItsSlotAlone) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  // Also of more elements than CUDA has threads for one image; the last element is the bad one.
  for (const Shape& image : {Shape{5, 3, 3}, Shape{4, 5, 3}, Shape{296, 296, 3}}) {
    image_ = image;
    for (const float bad : {kNan, kInfinity, -kInfinity}) {
      if (image[0] > 5 && bad != kInfinity) continue;  // large ones take long
      for (const bool learned : {false, true}) {
        MakeSlots(learned ? NoiseScale::kLearned : NoiseScale::kFixed);
        const std::vector<int32_t> none(kSlots);
        const auto advance = [&](const Array& output) {
          backend().Advance(
              {.state = state_,
               .rows = UploadRows({{3, 0, -1, 1}, {1, 0, -1, 1}, {4, 0, 3, 1}, {4, 0, -1, 0}}),
               .model_output = Upload(output, DType::kF32)});
        };
        const auto begin = [&](int slot) { backend().BeginSlot({.state = state_, .slot = slot}); };
        for (const int slot : {1, 3, 4}) begin(slot);
        Array output = RandomOutput(4, learned);
        advance(output);
        ASSERT_EQ(ReadNonfinite(), none);
        // Of slot 3 the prediction, which clipping would hide; of slot 4 the unconditional row.
        const int64_t row = output.shape.elements() / 4;
        const int64_t last = row - 1 - (learned ? image[2] : 0);
        output.at(last) = output.at(3 * row + last) = bad;
        advance(output);
        ASSERT_EQ(ReadNonfinite(), (std::vector<int32_t>{0, 0, 0, 2, 2}));
        ExpectFinite(1);
        advance(RandomOutput(4, learned));
        ASSERT_EQ(ReadNonfinite(), (std::vector<int32_t>{0, 0, 0, 2, 2})) << "the first is kept";
        begin(4);
        ASSERT_EQ(ReadNonfinite(), (std::vector<int32_t>{0, 0, 0, 2, 0}));
        begin(3);
        ASSERT_EQ(ReadNonfinite(), none);
        if (!learned) continue;
        // A variance that is not finite reaches the next state with the noise.
        begin(1);
        Array variance = RandomOutput(4, learned);
        variance.at(row + row - 1) = std::fabs(bad);
        advance(variance);
        ASSERT_EQ(ReadNonfinite(), (std::vector<int32_t>{0, 1, 0, 0, 0}));
      }
    }
  }
}

TEST_P(SamplingTest, ClippingKeepsNanAndHidesNoInfinity) {
  MakeSlots(NoiseScale::kFixed);
  StepPlan plan;
  plan.evaluations.resize(1);
  plan.evaluations[0].x0_from_model = 1;
  plan.evaluations[0].clip = 1;
  const std::vector<DeviceEvaluation> clipped = ToDevice(plan);
  backend().Upload(clipped.data(), sizeof(DeviceEvaluation), state_.plans.Slice(2, 1));
  Array output = RandomOutput(1, false);
  const auto advance = [&] {
    backend().BeginSlot({.state = state_, .slot = 2});
    backend().Advance({.state = state_,
                       .rows = UploadRows({{2, 0, -1, 1}}),
                       .model_output = Upload(output, DType::kF32)});
  };
  output.at(1) = std::numeric_limits<double>::infinity();
  output.at(2) = -std::numeric_limits<double>::infinity();
  advance();
  EXPECT_EQ(ReadSlot(state_.x0, 2).at(1), 1);
  EXPECT_EQ(ReadSlot(state_.x0, 2).at(2), -1);
  EXPECT_EQ(ReadNonfinite()[2], 1);
  output.at(0) = std::numeric_limits<double>::quiet_NaN();
  advance();
  EXPECT_TRUE(std::isnan(ReadSlot(state_.x0, 2).at(0)));
}

TEST_P(SamplingTest, Gather) {
  MakeSlots(NoiseScale::kFixed);
  const std::vector<EvaluationRow> rows = {
      {3, 2, 3, 1}, {-1, 8, -1, 0}, {0, 7, -1, 1}, {3, 10, -1, 0}, {-1, 0, -1, 0}};
  GatherArgs args{.state = state_, .rows = UploadRows(rows)};
  args.x = Output(Stacked(5, image_));
  args.condition = Output({5}, DType::kF32);
  args.label = UploadInts({-7, -7, -7, -7, -7}, {5});
  args.embedding = Output({5, kFeatures}, DType::kF32);
  backend().Gather(args);
  Array x(args.x.shape()), condition({5}), embedding({5, kFeatures});
  for (int64_t r = 0; r < 5; ++r) {
    const EvaluationRow& row = rows[r];
    if (row.slot < 0) continue;
    const Evaluation<double>& e = plans_[row.slot][evaluation_[row.slot]];
    for (int64_t i = 0; i < image_.elements(); ++i) {
      x.at(r * image_.elements() + i) = e.input_scale * images_[row.slot].x.at(i) + e.input_shift;
    }
    condition.at(r) = e.condition;
    for (int64_t d = 0; d < kFeatures && row.advances; ++d) {
      embedding.at(r * kFeatures + d) = embedding_.at(row.slot * kFeatures + d);
    }
  }
  EXPECT_LT(Error(Read(args.x), x), Tolerance(kTolerance));
  EXPECT_EQ(Error(Read(args.condition), condition), 0);
  EXPECT_EQ(Error(Read(args.embedding), embedding), 0);
  const Tensor label = Download(args.label);
  EXPECT_EQ(std::vector<int32_t>(label.as<int32_t>(), label.as<int32_t>() + 5),
            (std::vector<int32_t>{2, 0, 7, 10, 0}));
}

TEST_P(SamplingTest, GatherWithExtraChannels) {
  for (const int64_t extra : {5, 4}) {
    MakeSlots(NoiseScale::kFixed);
    const int64_t pixels = image_[0] * image_[1], channels = image_[2], all = channels + extra;
    const Array beside = Random({kSlots, image_[0], image_[1], extra}, DType::kF32);
    state_.extra = Upload(beside, DType::kF32);
    const std::vector<EvaluationRow> rows = {{3, 0, 1, 1, 2, 0},
                                             {3, 0, -1, 0, -1, 0},
                                             {3, 0, -1, 0, -1, 1},
                                             {-1, 0, -1, 0},
                                             {0, 0, -1, 1}};
    GatherArgs args{.state = state_, .rows = UploadRows(rows)};
    args.x = Output({5, image_[0], image_[1], all});
    args.condition = Output({5}, DType::kF32);
    backend().Gather(args);
    Array x(args.x.shape());
    for (int64_t r = 0; r < 5; ++r) {
      const int64_t slot = rows[r].slot;
      if (slot < 0) continue;
      const Evaluation<double>& e = plans_[slot][evaluation_[slot]];
      for (int64_t i = 0; i < pixels * all; ++i) {
        const int64_t p = i / all, c = i % all;
        x.at(r * pixels * all + i) =
            c < channels ? e.input_scale * images_[slot].x.at(p * channels + c) + e.input_shift
            : rows[r].no_extra ? 0
                               : beside.at((slot * pixels + p) * extra + c - channels);
      }
    }
    EXPECT_LT(Error(Read(args.x), x), Tolerance(kTolerance));
  }
}

TEST_P(SamplingTest, BeginSlotKeepsWhatAMaskNeeds) {
  MakeSlots(NoiseScale::kFixed);
  state_.known =
      Upload(Random({kSlots, 2, image_[0], image_[1], image_[2]}, DType::kF32), DType::kF32);
  state_.mask = Upload(Array({kSlots, image_[0], image_[1]}), DType::kF32);
  const Array before = Read(state_.known), source = Random(image_, DType::kF32);
  const Array given = Random(image_, DType::kF32);
  for (const bool drawn : {false, true}) {
    backend().BeginSlot({.state = state_,
                         .slot = 2,
                         .source = Upload(source, DType::kF32),
                         .noise = drawn ? Tensor() : Upload(given, DType::kF32),
                         .keeps_known = true});
    const Array noise =
        drawn ? PhiloxNoise(image_, static_cast<uint64_t>(seed_[2]), kInitialDraw) : given;
    Array expected = before;
    const int64_t elements = image_.elements();
    std::copy_n(source.values.begin(), elements, expected.values.begin() + 4 * elements);
    std::copy_n(noise.values.begin(), elements, expected.values.begin() + 5 * elements);
    EXPECT_LT(Error(Read(state_.known), expected), kTolerance);
  }
}

TEST_P(SamplingTest, GatherWithoutLabelsAndEmbeddings) {
  MakeSlots(NoiseScale::kFixed);
  state_.embedding = Tensor();
  GatherArgs args{.state = state_, .rows = UploadRows({{1, 0, -1, 1}})};
  args.x = Output(Stacked(1, image_));
  args.condition = Output({1}, DType::kF32);
  backend().Gather(args);
  EXPECT_EQ(Read(args.condition).at(0), plans_[1][evaluation_[1]].condition);
}

DENOISED_ON_EACH_BACKEND(SamplingTest);

class OrderTest : public OnBackend {};

TEST_P(OrderTest, AGraphRecordsAndLaunches) {
  const Array a = Random({2, 100}, DType::kF32);
  const Tensor x = Upload(a, DType::kF32);
  int recorded = 0;
  auto graph = backend().Capture([&] {
    ++recorded;
    backend().Add(x, 2, {}, 0, Activation::kNone, x);
  });
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(recorded, 1);
  EXPECT_EQ(Error(Read(x), a), 0) << "capturing must not execute";
  for (int i = 0; i < 3; ++i) backend().Launch(**graph);
  Array expected = a;
  for (double& value : expected.values) value *= 8;
  EXPECT_EQ(Error(Read(x), expected), 0);
}

TEST_P(OrderTest, ADownloadIsASnapshot) {
  const Array a = Random({64}, DType::kF32);
  const Tensor x = Upload(a, DType::kF32);
  auto download = backend().BeginDownload(x);
  backend().Add(x, 0, {}, 1, Activation::kNone, x);
  auto host = download->Wait();
  ASSERT_TRUE(host.ok()) << host.status();
  for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(host->as<float>()[i], a.at(i));
  backend().BeginDownload(x);  // dropped at once
}

TEST_P(OrderTest, AnUploadMayBeReusedOnReturn) {
  Tensor x = Allocate({1 << 16}, DType::kF32);
  std::vector<float> values(1 << 16, 3.0f);
  backend().Upload(values.data(), values.size() * sizeof(float), x);
  std::fill(values.begin(), values.end(), 4.0f);
  for (float value : Download(x).ToFloats()) ASSERT_EQ(value, 3.0f);
}

TEST_P(OrderTest, MarkersMeasureTime) {
  const Tensor x = Upload(Random({256, 1024}, DType::kF32), DType::kF32);
  auto before = backend().Mark();
  for (int i = 0; i < 20; ++i) backend().Add(x, 1, {}, 0, Activation::kMish, x);
  auto after = backend().Mark();
  ASSERT_TRUE(after->Wait().ok());
  EXPECT_TRUE(before->reached());
  EXPECT_TRUE(after->reached());
  EXPECT_GT(after->SecondsSince(*before), 0);
  EXPECT_LT(after->SecondsSince(*before), 60);
}

TEST_P(OrderTest, AllocatingTooMuchIsResourceExhausted) {
  const BackendMemory memory = backend().memory();
  EXPECT_GT(memory.free, 0u);
  EXPECT_LE(memory.free, memory.total);
  const auto refused =
      backend().Allocate({static_cast<int64_t>(memory.total) * 2}, DType::kU8, "a test's dream");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(std::string(refused.status().message()).find("a test's dream"), std::string::npos);
  EXPECT_TRUE(backend().status().ok()) << "a refused allocation is no device error";
}

TEST_P(OrderTest, VectorsArePackedFromAnyFloat) {
  const Array a = Random({5, 3}, DType::kBF16);
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    auto packed = backend().PackVector(ToHost(a, dtype));
    ASSERT_TRUE(packed.ok()) << packed.status();
    EXPECT_EQ(packed->dtype(), DType::kF32);
    EXPECT_EQ(packed->shape(), a.shape);
    EXPECT_LT(Error(Read(*packed), a), dtype == DType::kF16 ? 1e-3 : 1e-9);
  }
  EXPECT_EQ(backend().PackVector(Tensor::Host({3}, DType::kI32)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(OrderTest, SaysWhatItIs) {
  EXPECT_FALSE(backend().name().empty());
  EXPECT_GT(backend().description().size(), 10u);
}

DENOISED_ON_EACH_BACKEND(OrderTest);

}  // namespace
}  // namespace denoised
