// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <set>

#include "engine/backend/backend.h"
#include "engine/backend/cpu/onednn.h"
#include "engine/core/e4m3.h"
#include "engine/core/mutex.h"
#include "tests/backend/reference.h"

namespace denoised {
namespace {

using reference::Array;

Tensor Random(const Shape& shape, int seed, float deviation = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, deviation);
  Tensor tensor = Tensor::Host(shape, DType::kF32);
  for (float& value : tensor.span<float>()) value = normal(random);
  return tensor;
}

Array ToArray(const Tensor& tensor) {
  if (!tensor) return Array();
  Array array(tensor.shape());
  for (int64_t i = 0; i < tensor.elements(); ++i) array.at(i) = tensor.as<float>()[i];
  return array;
}

/// The numbers of e4m3 that an op multiplies, with their scale again.
Array Rounded(const Tensor& tensor, float scale) {
  Array array = ToArray(tensor);
  for (double& value : array.values)
    value = double{E4m3ToFloat(FloatToE4m3(static_cast<float>(value) / scale))} * scale;
  return array;
}

/// The same of weights: a scale for each output.
Array RoundedWeight(const Tensor& weight) {
  Array array = ToArray(weight);
  const int64_t outputs = weight.dim(0), each = weight.elements() / outputs;
  for (int64_t o = 0; o < outputs; ++o) {
    float largest = 0;
    for (int64_t i = o * each; i < (o + 1) * each; ++i)
      largest = std::max(largest, std::fabs(weight.as<float>()[i]));
    const float scale = E4m3Scale(largest);
    for (int64_t i = o * each; i < (o + 1) * each; ++i)
      array.at(i) = double{E4m3ToFloat(FloatToE4m3(weight.as<float>()[i] / scale))} * scale;
  }
  return array;
}

/// ‖a − b‖ / ‖b‖
double Error(const Tensor& a, const Array& b) {
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < a.elements(); ++i) {
    difference += std::pow(a.as<float>()[i] - b.at(i), 2);
    norm += std::pow(b.at(i), 2);
  }
  return std::sqrt(difference / norm);
}

/// Sums are F32: their rounding is all that a backend may add to the rounded numbers.
constexpr double kTolerance = 1e-5;
/// What rounding both operands to three bits of fraction costs: about 2⁻⁴ · √(1/3) · √2 / 1.4.
constexpr double kLeastLoss = 1e-2;

class CpuE4m3 : public ::testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (GetParam() == DType::kBF16 && !cpu::MultipliesBf16())
      GTEST_SKIP() << "this CPU has neither AVX512-BF16 nor AMX";
    backend_ = OpenBackend({.device = "cpu", .cpu_dtype = GetParam()}).value();
  }
  std::unique_ptr<Backend> backend_;
};

// Numbers of e4m3 and their products are exact in bf16, so it multiplies them as fp32 does.
INSTANTIATE_TEST_SUITE_P(Products, CpuE4m3, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return Name(info.param); });

struct ConvCase {
  int kernel, stride;
  bool two_sources, shortcut;
};

TEST_P(CpuE4m3, Convolutions) {
  // The input's scale leaves room, fits tightly, or is too small, so that much is saturated.
  for (const float scale : {0x1p-4f, 0x1p-7f, 0x1p-9f}) {
    for (const ConvCase& c : {ConvCase{3, 1, false, false}, ConvCase{3, 1, true, true},
                              ConvCase{1, 1, true, false}, ConvCase{3, 2, false, false}}) {
      SCOPED_TRACE(::testing::Message()
                   << "kernel " << c.kernel << " stride " << c.stride << " scale " << scale);
      const int64_t c2 = c.two_sources ? 24 : 0, out_edge = 18 / c.stride;
      const Tensor x = Random({2, 18, 18, 32}, 1), x2 = c2 ? Random({2, 18, 18, c2}, 2) : Tensor(),
                   weight = Random({40, 32 + c2, c.kernel, c.kernel}, 3, 0.05f),
                   bias = Random({40}, 4), add = Random({2, 40}, 5),
                   shortcut_x = Random({2, out_edge, out_edge, 16}, 6),
                   shortcut_weight = Random({40, 16, 1, 1}, 7, 0.3f);
      const auto packed = backend_->PackConv2d(weight, bias, false, {.input_scale = scale}).value();
      const auto shortcut =
          backend_->PackConv2d(shortcut_weight, {}, false, {.input_scale = 0x1p-6f}).value();
      Conv2dArgs args{.x = x,
                      .weight = packed.get(),
                      .stride = c.stride,
                      .prologue = {.x2 = x2},
                      .epilogue = {.add = add, .scale = 0.7f, .activation = Activation::kSilu}};
      args.pad_top = args.pad_left = args.pad_bottom = args.pad_right = c.kernel / 2;
      if (c.shortcut) args.epilogue.shortcut = {.x = shortcut_x, .weight = shortcut.get()};
      args.out = Tensor::Host({2, out_edge, out_edge, 40}, DType::kF32);
      backend_->Conv2d(args);
      ASSERT_TRUE(backend_->status().ok()) << backend_->status();

      const auto expected = [&](const Array& x, const Array& x2, const Array& weight,
                                const Array& shortcut_x, const Array& shortcut_weight) {
        Array residual;
        if (c.shortcut)
          residual = reference::Conv2d({}, shortcut_x, Array(), shortcut_weight, Array(), Array(),
                                       Array());
        return reference::Conv2d(args, x, x2, weight, ToArray(bias), ToArray(add), residual);
      };
      EXPECT_LT(Error(args.out, expected(Rounded(x, scale), c2 ? Rounded(x2, scale) : Array(),
                                         RoundedWeight(weight), Rounded(shortcut_x, 0x1p-6f),
                                         RoundedWeight(shortcut_weight))),
                kTolerance);
      EXPECT_GT(Error(args.out, expected(ToArray(x), ToArray(x2), ToArray(weight),
                                         ToArray(shortcut_x), ToArray(shortcut_weight))),
                kLeastLoss);
    }
  }
}

TEST_P(CpuE4m3, LinearsOverTokens) {
  const Tensor x = Random({3, 50, 64}, 1, 3), weight = Random({72, 64}, 2, 0.1f),
               second = Random({24, 64}, 3, 2), bias = Random({72}, 4), bias2 = Random({24}, 5),
               residual = Random({3, 50, 96}, 6);
  const float scale = 0x1p-5f;
  const auto packed =
      backend_->PackLinear({weight, second}, {bias, bias2}, {.input_scale = scale}).value();
  LinearArgs args{.x = x,
                  .weight = packed.get(),
                  .epilogue = {.residual = residual, .scale = 0.5f},
                  .out = Tensor::Host({3, 50, 96}, DType::kF32)};
  backend_->Linear(args);
  Array both({96, 64}), biases({96});
  const Array first_rounded = RoundedWeight(weight), second_rounded = RoundedWeight(second);
  for (int64_t i = 0; i < both.shape.elements(); ++i)
    both.at(i) = i < 72 * 64 ? first_rounded.at(i) : second_rounded.at(i - 72 * 64);
  for (int64_t i = 0; i < 96; ++i)
    biases.at(i) = i < 72 ? bias.as<float>()[i] : bias2.as<float>()[i - 72];
  EXPECT_LT(
      Error(args.out, reference::Linear(args, Rounded(x, scale), both, biases, ToArray(residual))),
      kTolerance);
}

TEST_P(CpuE4m3, GatedLinears) {
  const Tensor x = Random({2, 40, 32}, 1), weight = Random({96, 32}, 2, 0.2f),
               bias = Random({96}, 3);
  const float scale = 0x1p-6f;
  const auto packed =
      backend_->PackLinear({weight}, {bias}, {.input_scale = scale}, /*gated=*/true).value();
  const Tensor scratch = Tensor::Host({2, 40, 96}, DType::kF32),
               out = Tensor::Host({2, 40, 48}, DType::kF32);
  backend_->Linear({.x = x, .weight = packed.get(), .epilogue = {.ungated = scratch}, .out = out});
  const Array both =
      reference::Linear({}, Rounded(x, scale), RoundedWeight(weight), ToArray(bias), Array());
  Array expected({2, 40, 48});
  for (int64_t i = 0; i < expected.shape.elements(); ++i) {
    const int64_t token = i / 48, c = i % 48;
    expected.at(i) = both.at(token * 96 + c) *
                     reference::Activate(Activation::kGelu, both.at(token * 96 + 48 + c));
  }
  EXPECT_LT(Error(out, expected), kTolerance);
}

TEST_P(CpuE4m3, ARowHasTheSameBitsInAnyBatch) {
  const Tensor x = Random({5, 20, 20, 32}, 1), tokens = Random({5, 70, 64}, 2);
  const auto conv =
      backend_
          ->PackConv2d(Random({48, 32, 3, 3}, 3), Random({48}, 4), false, {.input_scale = 0x1p-6f})
          .value();
  const auto linear =
      backend_->PackLinear({Random({80, 64}, 5)}, {}, {.input_scale = 0x1p-6f}).value();
  const auto run = [&](int begin, int count) {
    Conv2dArgs args{.x = x.Slice(begin, count), .weight = conv.get()};
    args.pad_top = args.pad_left = args.pad_bottom = args.pad_right = 1;
    args.out = Tensor::Host({count, 20, 20, 48}, DType::kF32);
    backend_->Conv2d(args);
    const Tensor y = Tensor::Host({count, 70, 80}, DType::kF32);
    backend_->Linear({.x = tokens.Slice(begin, count), .weight = linear.get(), .out = y});
    return std::pair(args.out, y);
  };
  const auto [images, sequences] = run(0, 5);
  for (int row = 0; row < 5; ++row) {
    const auto [image, sequence] = run(row, 1);
    EXPECT_EQ(std::memcmp(image.data(), images.Slice(row, 1).data(), image.bytes()), 0) << row;
    EXPECT_EQ(std::memcmp(sequence.data(), sequences.Slice(row, 1).data(), sequence.bytes()), 0)
        << row;
  }
}

TEST(CpuObserver, SeesTheInputsOfLayersWithAName) {
  Mutex mutex;
  std::multiset<std::string> seen;
  const auto backend = OpenBackend({.device = "cpu",
                                    .observe_input =
                                        [&](const std::string& layer, const Tensor& x) {
                                          MutexLock lock(&mutex);
                                          seen.insert(layer + " " + x.shape().ToString());
                                        }})
                           .value();
  const auto conv = backend->PackConv2d(Random({8, 12, 1, 1}, 1), {}, false, {.name = "a"}).value(),
             shortcut =
                 backend->PackConv2d(Random({8, 6, 1, 1}, 2), {}, false, {.name = "b"}).value();
  const auto linear = backend->PackLinear({Random({8, 4}, 3)}, {}, {.name = "c"}).value(),
             nameless = backend->PackLinear({Random({8, 4}, 3)}, {}).value();
  Conv2dArgs args{.x = Random({1, 3, 3, 8}, 4),
                  .weight = conv.get(),
                  .prologue = {.x2 = Random({1, 3, 3, 4}, 5)}};
  args.epilogue.shortcut = {.x = Random({1, 3, 3, 6}, 6), .weight = shortcut.get()};
  args.out = Tensor::Host({1, 3, 3, 8}, DType::kF32);
  backend->Conv2d(args);
  const Tensor x = Random({1, 5, 4}, 7), out = Tensor::Host({1, 5, 8}, DType::kF32);
  backend->Linear({.x = x, .weight = linear.get(), .out = out});
  backend->Linear({.x = x, .weight = nameless.get(), .out = out});
  EXPECT_EQ(seen, (std::multiset<std::string>{"a [1, 3, 3, 8]", "a [1, 3, 3, 4]", "b [1, 3, 3, 6]",
                                              "c [1, 5, 4]"}));
}

}  // namespace
}  // namespace denoised
