// SPDX-License-Identifier: Apache-2.0
#include "engine/core/e4m3.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "engine/backend/cpu/onednn.h"
#include "tests/backend/backend_fixture.h"

/// Layers in e4m3 against float64, on the CPU and on CUDA.

namespace denoised {
namespace {

using reference::Array;

/// The numbers of e4m3 that an op multiplies, with their scale again.
Array InE4m3(Array array, float scale) {
  for (double& value : array.values)
    value = double{E4m3ToFloat(FloatToE4m3(static_cast<float>(value) / scale))} * scale;
  return array;
}

/// concat(x, x2) as an op that writes e4m3 leaves it: `bytes` a pixel, zeros beyond the channels.
std::vector<uint8_t> BytesOf(const Array& x, const Array& x2, float scale, int64_t bytes) {
  const int64_t c1 = x.shape[-1], c2 = x2.values.empty() ? 0 : x2.shape[-1];
  const int64_t pixels = x.shape.elements() / c1;
  std::vector<uint8_t> e4m3(static_cast<size_t>(pixels * bytes));
  for (int64_t pixel = 0; pixel < pixels; ++pixel) {
    for (int64_t c = 0; c < c1 + c2; ++c) {
      const double value = c < c1 ? x.at(pixel * c1 + c) : x2.at(pixel * c2 + c - c1);
      e4m3[pixel * bytes + c] = FloatToE4m3(static_cast<float>(value) / scale);
    }
  }
  return e4m3;
}

/// The numbers of weights, with a scale for each output.
Array WeightInE4m3(Array weight) {
  const int64_t outputs = weight.shape[0], each = weight.shape.elements() / outputs;
  for (int64_t o = 0; o < outputs; ++o) {
    float largest = 0;
    for (int64_t i = o * each; i < (o + 1) * each; ++i)
      largest = std::max(largest, static_cast<float>(std::fabs(weight.at(i))));
    const float scale = E4m3Scale(largest);
    for (int64_t i = o * each; i < (o + 1) * each; ++i)
      weight.at(i) =
          double{E4m3ToFloat(FloatToE4m3(static_cast<float>(weight.at(i)) / scale))} * scale;
  }
  return weight;
}

/// ‖a − b‖ / ‖b‖
double Distance(const Array& a, const Array& b) {
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < b.shape.elements(); ++i) {
    difference += std::pow(a.at(i) - b.at(i), 2);
    norm += std::pow(b.at(i), 2);
  }
  return std::sqrt(difference / norm);
}

/// What rounding both operands to three bits of fraction costs: about 2⁻⁴ · √(1/3) · √2 / 1.4.
constexpr double kLeastLoss = 1e-2;

class E4m3 : public OnBackend {
 protected:
  void SetUp() override {
    if (GetParam().options.cpu_dtype == DType::kBF16 && !cpu::MultipliesBf16())
      GTEST_SKIP() << "this CPU has neither AVX512-BF16 nor AMX";
    OnBackend::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (backend().MultipliesE4m3()) return;
    ASSERT_NE(GetParam().options.device, "cpu") << "the CPU multiplies in e4m3 with every dtype";
    GTEST_SKIP() << "this device or dtype has no kernels in e4m3";
  }

  std::unique_ptr<PackedConv2d> Pack(const Array& weight, const Array& bias, float scale,
                                     bool upsample2x = false) {
    auto packed = backend().PackConv2d(ToHost(weight, DType::kF32), HostOptional(bias), upsample2x,
                                       {.input_scale = scale});
    EXPECT_TRUE(packed.ok()) << packed.status();
    return std::move(packed).value();
  }
  std::unique_ptr<PackedLinear> PackLinears(const std::vector<Array>& weights,
                                            const std::vector<Array>& biases, float scale,
                                            bool gated = false) {
    std::vector<Tensor> host_weights, host_biases;
    for (const Array& weight : weights) host_weights.push_back(ToHost(weight, DType::kF32));
    for (const Array& bias : biases) host_biases.push_back(ToHost(bias, DType::kF32));
    auto packed = backend().PackLinear(host_weights, host_biases, {.input_scale = scale}, gated);
    EXPECT_TRUE(packed.ok()) << packed.status();
    return std::move(packed).value();
  }
  /// A layer norm of random tokens, then this layer.
  LinearArgs NormThen(const PackedLinear& layer) {
    const int64_t channels = layer.in_features;
    LinearArgs args{.x = Upload(Random({3, 50, channels}, activation(), 2, 1)),
                    .weight = &layer,
                    .out = Output({3, 50, layer.out_features})};
    args.prologue.norm = {.gamma = Upload(Random({channels}, DType::kF32), DType::kF32),
                          .beta = Upload(Random({channels}, DType::kF32), DType::kF32),
                          .groups = 0};
    args.prologue.normed = Output({3, 50, channels});
    args.prologue.rounded = Scratch(args.x, layer);
    return args;
  }
  /// That norm alone.
  Tensor NormBefore(const LinearArgs& args) {
    const Norm& norm = args.prologue.norm;
    const Tensor normed = Output(args.x.shape());
    backend().LayerNorm(
        {.x = args.x, .gamma = norm.gamma, .beta = norm.beta, .eps = norm.eps, .out = normed});
    return normed;
  }
  /// Calls op(result, reader) for a result of this shape without and with a reader, then that
  /// layer: at once, and in a graph. Returns whether the op with a reader wrote its result, too.
  template <typename Op>
  bool ExpectSameForAReader(const PackedLinear& layer, const Shape& shape, const Op& op) {
    const Tensor result = Output(shape), out = Output(WithLast(shape, layer.out_features));
    const E4m3Reader reader = {Scratch(result, layer), layer.e4m3.input_scale};
    const Tensor own = Scratch(result, layer);
    const auto run = [&](bool for_reader) {
      op(result, for_reader ? reader : E4m3Reader());
      LinearArgs args{.x = result, .weight = &layer, .prologue = {.rounded = own}, .out = out};
      if (for_reader && reader.rounded) args = {.x = reader.rounded, .weight = &layer, .out = out};
      backend().Linear(args);
    };
    // Of bf16, fp32 and e4m3.
    const auto fill_with_nan = [&](const Tensor& tensor) {
      if (!tensor) return;
      const std::vector<std::byte> ones(tensor.bytes(), std::byte{0xff});
      backend().Upload(ones.data(), ones.size(), tensor);
    };
    run(false);
    const Array finite = Read(out);
    EXPECT_TRUE(std::all_of(finite.values.begin(), finite.values.end(),
                            [](double value) { return std::isfinite(value); }));
    const Tensor expected = Download(out);
    const auto expect_the_same = [&](const char* how) {
      Read(result), Read(out);  // nothing is written behind them
      EXPECT_EQ(std::memcmp(Download(out).data(), expected.data(), expected.bytes()), 0) << how;
    };
    fill_with_nan(result), fill_with_nan(out);
    run(true);
    expect_the_same("at once");
    fill_with_nan(reader.rounded), fill_with_nan(result), fill_with_nan(out);
    const auto graph = backend().Capture([&] { run(true); });
    EXPECT_TRUE(graph.ok()) << graph.status();
    if (!graph.ok()) return false;
    backend().Launch(**graph);
    expect_the_same("in a graph");
    return std::isfinite(Read(result).at(0));
  }
  /// What a layer may add to the rounded numbers: the rounding of its sums, which on CUDA are less
  /// precise within a run of steps along k, and of `results` tensors in the activation dtype.
  double Tolerance(const Array& expected, int results = 1) const {
    if (activation() == DType::kF32) return 1e-5;
    const double of_result = Distance(Rounded(expected, activation()), expected);
    return std::hypot(1e-3, results * of_result);
  }
};

// Numbers of e4m3 and their products are exact in bf16, so it multiplies them as fp32 does.
INSTANTIATE_TEST_SUITE_P(Cpu, E4m3,
                         testing::Values(BackendUnderTest{"Fp32", {.device = "cpu"}},
                                         BackendUnderTest{
                                             "Bf16", {.device = "cpu", .cpu_dtype = DType::kBF16}}),
                         BackendName);
INSTANTIATE_TEST_SUITE_P(Cuda, E4m3, testing::ValuesIn(CudaBackends()), BackendName);

struct E4m3Conv {
  int64_t height, width, c1, c2, outputs;
  int kernel, stride;
  int64_t shortcut = 0;
  Activation activation = Activation::kSilu;
};

TEST_P(E4m3, Convolutions) {
  const E4m3Conv cases[] = {{18, 18, 32, 0, 40, 3, 1},
                            {18, 18, 32, 24, 40, 3, 1, 16},
                            {18, 18, 32, 24, 40, 1, 1},
                            {18, 18, 32, 0, 40, 3, 2},
                            // Several steps of 128 channels, and of tiles; padded channels.
                            {9, 10, 192, 72, 264, 3, 1, 136},
                            {16, 16, 128, 0, 128, 1, 1},
                            // Halo tiles on Hopper; half a step without channels.
                            {16, 16, 192, 0, 128, 3, 1},
                            // With a shortcut, its last run, of one chunk and of several.
                            {16, 16, 192, 0, 128, 3, 1, 40},
                            {8, 8, 128, 64, 160, 3, 1, 264, Activation::kNone},
                            {7, 5, 136, 0, 320, 3, 2},
                            // Nothing is a multiple of eight.
                            {7, 5, 13, 6, 11, 3, 1, 5, Activation::kGelu},
                            {1, 1, 40, 0, 24, 1, 1}};
  // The input's scale leaves room, fits tightly, or is too small, so that much is saturated.
  for (const float scale : {0x1p-4f, 0x1p-7f, 0x1p-9f}) {
    for (const E4m3Conv& c : cases) {
      SCOPED_TRACE(fmt::format("{}x{}x{}+{} to {}, kernel {}, stride {}, scale {}", c.height,
                               c.width, c.c1, c.c2, c.outputs, c.kernel, c.stride, scale));
      const int64_t out_height = (c.height - 1) / c.stride + 1,
                    out_width = (c.width - 1) / c.stride + 1;
      const Shape out = {2, out_height, out_width, c.outputs};
      const double deviation = 1 / std::sqrt((c.c1 + c.c2) * c.kernel * c.kernel);
      const Array x = Random({2, c.height, c.width, c.c1}),
                  x2 = c.c2 > 0 ? Random({2, c.height, c.width, c.c2}) : Array(),
                  weight =
                      Random({c.outputs, c.c1 + c.c2, c.kernel, c.kernel}, DType::kF32, deviation),
                  bias = Random({c.outputs}, DType::kF32), add = Random({2, c.outputs}),
                  shortcut_x =
                      c.shortcut > 0 ? Random({2, out_height, out_width, c.shortcut}) : Array(),
                  shortcut_weight = c.shortcut > 0 ? Random({c.outputs, c.shortcut, 1, 1},
                                                            DType::kF32, 1 / std::sqrt(c.shortcut))
                                                   : Array();
      const auto packed = Pack(weight, bias, scale);
      // In the activation dtype.
      const auto shortcut = c.shortcut > 0 ? Pack(shortcut_weight, Array(), 0) : nullptr;
      Conv2dArgs args{.x = Upload(x),
                      .weight = packed.get(),
                      .stride = c.stride,
                      .prologue = {.x2 = UploadOptional(x2)},
                      .epilogue = {.add = Upload(add), .scale = 0.7f, .activation = c.activation},
                      .out = Output(out)};
      args.pad_top = args.pad_left = args.pad_bottom = args.pad_right = c.kernel / 2;
      args.prologue.rounded = Scratch(args.x, *packed);
      if (shortcut) args.epilogue.shortcut = {.x = Upload(shortcut_x), .weight = shortcut.get()};
      backend().Conv2d(args);

      const auto expected = [&](const Array& of_x, const Array& of_x2, const Array& of_weight) {
        const Array residual =
            shortcut
                ? reference::Conv2d({}, Rounded(shortcut_x, backend().product_dtype()), Array(),
                                    Rounded(shortcut_weight, backend().product_dtype()), Array(),
                                    Array(), Array())
                : Array();
        return reference::Conv2d(args, of_x, of_x2, of_weight, bias, add, residual);
      };
      const Array actual = Read(args.out);
      const Array in_e4m3 = expected(InE4m3(x, scale), InE4m3(x2, scale), WeightInE4m3(weight));
      // The result of a shortcut of its own is rounded, too.
      EXPECT_LT(Distance(actual, in_e4m3), Tolerance(in_e4m3, shortcut ? 2 : 1));
      EXPECT_GT(Distance(actual, expected(x, x2, weight)), kLeastLoss);

      if (packed->rounded_bytes == 0) continue;
      SCOPED_TRACE("of an input in e4m3");
      const Tensor separate = Download(args.out);
      const auto bytes = BytesOf(x, x2, scale, packed->rounded_bytes);
      args.x = args.prologue.rounded;
      args.prologue = {};
      args.out = Output(out);
      backend().Upload(bytes.data(), bytes.size(), args.x);
      backend().Conv2d(args);
      EXPECT_EQ(std::memcmp(Download(args.out).data(), separate.data(), separate.bytes()), 0);
    }
  }
}

/// The four 2×2 weights that a 3×3 weight [O, C, 3, 3] becomes for the rows and columns of a
/// doubled image: [O, 4, C, 2, 2].
Array PhasesOf(const Array& weight) {
  const int64_t outputs = weight.shape[0], channels = weight.shape[1];
  Array phases({outputs, 4, channels, 2, 2});
  // Row y + k − 1 of the doubled image is row ⌊(y + k − 1) / 2⌋ of the image.
  const auto tap_of = [](int64_t parity, int64_t k) { return (parity + k + 1) / 2 - parity; };
  for (int64_t o = 0; o < outputs; ++o) {
    for (int64_t phase = 0; phase < 4; ++phase) {
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t i = 0; i < 9; ++i) {
          const int64_t at = tap_of(phase / 2, i / 3) * 2 + tap_of(phase % 2, i % 3);
          phases.at(((o * 4 + phase) * channels + c) * 4 + at) +=
              weight.at((o * channels + c) * 9 + i);
        }
      }
    }
  }
  return phases;
}

TEST_P(E4m3, DoubledImages) {
  struct {
    int64_t height, width, channels, outputs;
    bool residual;
    Activation activation = Activation::kNone;
  } cases[] = {{16, 16, 64, 128, false},
               {8, 16, 192, 192, true},  // whole lines, and more than a run of steps
               {5, 8, 40, 160, false, Activation::kSilu},
               {9, 7, 24, 64, true},  // odd lines, padded channels
               {3, 12, 128, 320, false},
               {4, 3, 13, 11, true, Activation::kGelu}};
  for (const auto& c : cases) {
    SCOPED_TRACE(fmt::format("{}x{}x{} to {}", c.height, c.width, c.channels, c.outputs));
    const float scale = 0x1p-6f;
    const Shape shape = {2, 2 * c.height, 2 * c.width, c.outputs};
    const Array x = Random({2, c.height, c.width, c.channels}),
                weight = Random({c.outputs, c.channels, 3, 3}, DType::kF32,
                                1 / std::sqrt(4 * c.channels)),
                bias = Random({c.outputs}, DType::kF32), add = Random({2, c.outputs}),
                residual = c.residual ? Random(shape) : Array();
    const auto packed = Pack(weight, bias, scale, /*upsample2x=*/true);
    Conv2dArgs args{.x = Upload(x),
                    .weight = packed.get(),
                    .prologue = {.upsample2x = true},
                    .epilogue = {.add = Upload(add),
                                 .residual = UploadOptional(residual),
                                 .scale = 0.7f,
                                 .activation = c.activation},
                    .out = Output(shape)};
    args.pad_top = args.pad_left = args.pad_bottom = args.pad_right = 1;
    args.prologue.rounded = Scratch(args.x, *packed);
    backend().Conv2d(args);
    const Array actual = Read(args.out);

    const Array phases = WeightInE4m3(PhasesOf(weight)), rounded = InE4m3(x, scale);
    Array expected(shape);
    for (int phase = 0; phase < 4; ++phase) {
      const int64_t each = c.channels * 4;
      Array of_phase({c.outputs, c.channels, 2, 2});
      for (int64_t o = 0; o < c.outputs; ++o) {
        for (int64_t i = 0; i < each; ++i)
          of_phase.at(o * each + i) = phases.at((o * 4 + phase) * each + i);
      }
      // Of the pixels of a phase: calls use(pixel of the phase, pixel of the doubled image).
      const auto for_pixels = [&](const auto& use) {
        int64_t at = 0;
        for (int64_t n = 0; n < 2; ++n) {
          for (int64_t h = 0; h < c.height; ++h) {
            for (int64_t w = 0; w < c.width; ++w, ++at)
              use(at, ((n * c.height + h) * 2 + phase / 2) * 2 * c.width + 2 * w + phase % 2);
          }
        }
      };
      Array its_residual;
      if (c.residual) {
        its_residual = Array({2, c.height, c.width, c.outputs});
        for_pixels([&](int64_t at, int64_t whole) {
          for (int64_t o = 0; o < c.outputs; ++o)
            its_residual.at(at * c.outputs + o) = residual.at(whole * c.outputs + o);
        });
      }
      Conv2dArgs plain{.epilogue = {.scale = 0.7f, .activation = c.activation}};
      plain.pad_top = 1 - phase / 2, plain.pad_bottom = phase / 2;
      plain.pad_left = 1 - phase % 2, plain.pad_right = phase % 2;
      const Array part =
          reference::Conv2d(plain, rounded, Array(), of_phase, bias, add, its_residual);
      for_pixels([&](int64_t at, int64_t whole) {
        for (int64_t o = 0; o < c.outputs; ++o)
          expected.at(whole * c.outputs + o) = part.at(at * c.outputs + o);
      });
    }
    if (c.residual) {  // in its place
      const Tensor separate = Download(args.out);
      args.out = args.epilogue.residual;
      backend().Conv2d(args);
      EXPECT_EQ(std::memcmp(Download(args.out).data(), separate.data(), separate.bytes()), 0);
    }
    EXPECT_LT(Distance(actual, expected), Tolerance(expected));
    EXPECT_GT(Distance(actual, reference::Conv2d(args, x, Array(), weight, bias, add, residual)),
              kLeastLoss);
  }
}

TEST_P(E4m3, LinearsOverTokens) {
  struct {
    int64_t tokens, in, out, out2;
  } cases[] = {{50, 64, 72, 24}, {257, 320, 320, 320}, {1, 40, 24, 8}, {33, 27, 13, 6}};
  for (const auto& c : cases) {
    for (const DType dtype : {activation(), DType::kF32}) {
      SCOPED_TRACE(fmt::format("{} {} to {}+{} {}", c.tokens, c.in, c.out, c.out2, Name(dtype)));
      const int64_t outputs = c.out + c.out2;
      const Array x = Random({3, c.tokens, c.in}, dtype, 3),
                  weight = Random({c.out, c.in}, DType::kF32, 0.1),
                  second = Random({c.out2, c.in}, DType::kF32, 2),
                  bias = Random({c.out}, DType::kF32), bias2 = Random({c.out2}, DType::kF32),
                  residual = Random({3, c.tokens, outputs});
      const float scale = 0x1p-5f;
      const auto packed = PackLinears({weight, second}, {bias, bias2}, scale);
      LinearArgs args{.x = Upload(x, dtype),
                      .weight = packed.get(),
                      .epilogue = {.residual = Upload(residual), .scale = 0.5f},
                      .out = Output({3, c.tokens, outputs})};
      args.prologue.rounded = Scratch(args.x, *packed);
      backend().Linear(args);
      Array both({outputs, c.in}), biases({outputs});
      both.values = WeightInE4m3(weight).values;
      const Array of_second = WeightInE4m3(second);
      both.values.insert(both.values.end(), of_second.values.begin(), of_second.values.end());
      biases.values = bias.values;
      biases.values.insert(biases.values.end(), bias2.values.begin(), bias2.values.end());
      const Array expected = reference::Linear(args, InE4m3(x, scale), both, biases, residual);
      EXPECT_LT(Distance(Read(args.out), expected), Tolerance(expected));
    }
  }
}

TEST_P(E4m3, GatedLinears) {
  struct {
    int64_t tokens, in, features;
  } cases[] = {{40, 32, 48}, {70, 160, 640}, {9, 40, 13}};
  for (const auto& c : cases) {
    SCOPED_TRACE(fmt::format("{} {} to {}", c.tokens, c.in, c.features));
    const Array x = Random({2, c.tokens, c.in}),
                weight = Random({2 * c.features, c.in}, DType::kF32, 0.2),
                bias = Random({2 * c.features}, DType::kF32);
    const float scale = 0x1p-6f;
    const auto packed = PackLinears({weight}, {bias}, scale, /*gated=*/true);
    LinearArgs args{.x = Upload(x),
                    .weight = packed.get(),
                    .epilogue = {.ungated = Output({2, c.tokens, 2 * c.features})},
                    .out = Output({2, c.tokens, c.features})};
    args.prologue.rounded = Scratch(args.x, *packed);
    backend().Linear(args);
    const Array both = reference::Linear({}, InE4m3(x, scale), WeightInE4m3(weight), bias, Array());
    const Array expected =
        reference::GegluGate(Rounded(both, activation()), {2, c.tokens, c.features});
    // Values and gates that are rounded the other way add to the result's own rounding.
    EXPECT_LT(Distance(Read(args.out), expected), Tolerance(expected, 3));
  }
}

/// [C, C, k, k] with ones in its diagonal: a layer that returns its input in e4m3, times its scale.
Array Identity(const Shape& shape) {
  Array weight(shape);
  for (int64_t c = 0; c < shape[0]; ++c) weight.at(c * shape[0] + c) = 1;
  return weight;
}

/// Of a norm before a layer in e4m3, and of one that was rounded to the activation dtype. A norm
/// that is rounded once differs where bf16 lies on a tie of e4m3.
enum class Rounds { kOnce, kTwice, kAny };
void ExpectNearest(const Array& in_e4m3, const Array& rounded_before, float scale, DType dtype,
                   Rounds rounds) {
  const double of_dtype = dtype == DType::kBF16 ? 0x1p-8 : 0x1p-20;
  const Array apart = InE4m3(rounded_before, scale);
  int64_t differ = 0;
  for (int64_t i = 0; i < apart.shape.elements(); ++i) {
    if (in_e4m3.at(i) == apart.at(i)) continue;
    ++differ;
    const double y = rounded_before.at(i);
    ASSERT_LE(std::fabs(in_e4m3.at(i) - y),
              std::fabs(apart.at(i) - y) + std::fabs(y) * of_dtype + scale * 1e-6)
        << "element " << i << " is " << y;
  }
  EXPECT_EQ(in_e4m3.values, InE4m3(in_e4m3, scale).values);
  EXPECT_LT(differ, apart.shape.elements() / 20);
  if (dtype != DType::kBF16 || rounds == Rounds::kTwice) {
    EXPECT_EQ(differ, 0);
  } else if (rounds == Rounds::kOnce) {
    EXPECT_GT(differ, apart.shape.elements() / 200);
  }
}

TEST_P(E4m3, NormsBeforeLayersAreRoundedOnce) {
  struct {
    int64_t rows, height, width, c1, c2;
    int groups;
    Activation activation;
    bool scaled;
    Rounds rounds = Rounds::kOnce;  // on CUDA
  } cases[] = {{3, 16, 16, 64, 0, 32, Activation::kSilu, false},
               {2, 8, 8, 128, 64, 32, Activation::kSilu, true},
               {2, 9, 7, 24, 0, 8, Activation::kSilu, false, Rounds::kTwice},  // padded channels
               {2, 9, 7, 48, 0, 16, Activation::kNone, false, Rounds::kAny},   // groups of three
               {2, 6, 5, 32, 0, 8, Activation::kMish, false, Rounds::kTwice},
               // More than a cluster holds; two sources of 32 channels are too narrow for the
               // persistent kernel.
               {2, 160, 160, 64, 0, 32, Activation::kSilu, false},
               {2, 160, 160, 32, 32, 32, Activation::kSilu, false}};
  for (const auto& c : cases) {
    SCOPED_TRACE(fmt::format("{}x{}x{}+{}", c.height, c.width, c.c1, c.c2));
    const int64_t channels = c.c1 + c.c2;
    const float scale = 0x1p-6f;
    const auto packed = Pack(Identity({channels, channels, 1, 1}), Array(), scale);
    Conv2dArgs args{.x = Upload(Random({c.rows, c.height, c.width, c.c1})),
                    .weight = packed.get(),
                    .out = Output({c.rows, c.height, c.width, channels})};
    if (c.c2 > 0) args.prologue.x2 = Upload(Random({c.rows, c.height, c.width, c.c2}));
    args.prologue.norm = {
        .gamma = Upload(Random({channels}, DType::kF32), DType::kF32),
        .beta = Upload(Random({channels}, DType::kF32), DType::kF32),
        .groups = c.groups,
        .scale_shift = c.scaled ? Upload(Random({c.rows, 2 * channels})) : Tensor(),
        .activation = c.activation};
    args.prologue.normed = Output({c.rows, c.height, c.width, channels});
    args.prologue.rounded = Scratch(args.x, *packed);
    backend().Conv2d(args);
    const Tensor normed = Output({c.rows, c.height, c.width, channels});
    backend().GroupNorm(
        {.x = args.x, .x2 = args.prologue.x2, .norm = args.prologue.norm, .out = normed});
    ExpectNearest(Read(args.out), Read(normed), scale, activation(), c.rounds);
  }
}

TEST_P(E4m3, LayerNormsBeforeLinearsAreRoundedOnce) {
  // Padded channels; the most that a kernel rounds itself, and more.
  const struct {
    int64_t channels;
    Rounds rounds;
  } cases[] = {{320, Rounds::kOnce},
               {40, Rounds::kAny},
               {37, Rounds::kAny},
               {2048, Rounds::kOnce},
               {2064, Rounds::kTwice}};
  for (const auto& [channels, rounds] : cases) {
    SCOPED_TRACE(fmt::format("{} channels", channels));
    const float scale = 0x1p-6f;
    const auto packed = PackLinears({Identity({channels, channels})}, {}, scale);
    const LinearArgs args = NormThen(*packed);
    backend().Linear(args);
    ExpectNearest(Read(args.out), Read(NormBefore(args)), scale, activation(), rounds);
  }
}

// Of linears in the activation dtype.
TEST_P(E4m3, LayerNormsBeforeLinearsGiveTheBitsOfNormThenLinear) {
  for (const int64_t channels : {320, 40, 37, 2048, 2064}) {
    SCOPED_TRACE(fmt::format("{} channels", channels));
    const auto packed = PackLinears({Random({72, channels}, DType::kF32, 0.1)}, {}, 0);
    const LinearArgs args = NormThen(*packed);
    backend().Linear(args);
    const Tensor together = Download(args.out);

    LinearArgs apart = args;
    apart.x = NormBefore(args);
    apart.prologue = {.rounded = args.prologue.rounded};
    apart.out = Output({3, 50, 72});
    backend().Linear(apart);
    const Tensor expected = Download(apart.out);
    EXPECT_EQ(std::memcmp(together.data(), expected.data(), expected.bytes()), 0);
  }
}

// An op that leaves its reader's input in e4m3, where the backend rounds into memory, and what the
// reader makes of it.
TEST_P(E4m3, AttentionForAReaderGivesTheBitsOfRoundingItsResult) {
  struct Case {
    int64_t tokens;
    int heads, dim;
    bool selects = false;
  };
  // 72 features are no whole vectors, so they are rounded apart. On Hopper, heads of 256 dimensions
  // have tiles of their own for few, some and many queries.
  for (const Case& c :
       {Case{70, 2, 40}, Case{300, 8, 64}, Case{130, 1, 80}, Case{200, 2, 128}, Case{130, 1, 160},
        Case{200, 1, 256}, Case{500, 2, 256}, Case{500, 4, 256}, Case{64, 1, 512},
        Case{70, 2, 64, true}, Case{70, 3, 160, true}, Case{70, 3, 24}}) {
    SCOPED_TRACE(fmt::format("{} tokens, {} heads of {}", c.tokens, c.heads, c.dim));
    const int64_t features = int64_t{c.heads} * c.dim;
    const auto linear = PackLinears({Random({48, features}, DType::kF32, 0.1)}, {}, 0x1p-6f);
    const Shape shape{3, c.tokens, features};
    const Tensor q = Upload(Random(shape)), k = Upload(Random(shape)), v = Upload(Random(shape)),
                 counts = UploadInts({70, 20, 1}, {3});
    const auto attend = [&](const Tensor& attended, const E4m3Reader& reader) {
      AttentionArgs attention{.q = q,
                              .k = k,
                              .v = v,
                              .heads = c.heads,
                              .scale = 0.2f,
                              .out = attended,
                              .reader = reader};
      if (c.selects) attention.key_counts = counts;
      backend().Attention(attention);
    };
    EXPECT_EQ(ExpectSameForAReader(*linear, shape, attend), !on_hopper() || features % 16 != 0);
  }
}

TEST_P(E4m3, AGateForAReaderGivesTheBitsOfRoundingItsResult) {
  // Of tiles of 128, 160 and 192 outputs, and parts of them; 72 features are no whole vectors. A
  // gate in the activation dtype may have a reader in e4m3, too.
  for (const int64_t features : {64, 80, 96, 160, 320, 1280, 72}) {
    for (const int64_t tokens : {50, 700}) {
      for (const float scale : {0x1p-6f, 0.0f}) {
        SCOPED_TRACE(fmt::format("{} tokens, {} features, scale {}", tokens, features, scale));
        const auto gated = PackLinears({Random({2 * features, 144}, DType::kF32, 0.1)},
                                       {Random({2 * features}, DType::kF32)}, scale, true);
        const auto linear = PackLinears({Random({48, features}, DType::kF32, 0.1)}, {}, 0x1p-6f);
        const Tensor x = Upload(Random({3, tokens, 144})), rounded = Scratch(x, *gated),
                     ungated = Output({3, tokens, 2 * features});
        ExpectSameForAReader(*linear, {3, tokens, features},
                             [&](const Tensor& hidden, const E4m3Reader& reader) {
                               backend().Linear({.x = x,
                                                 .weight = gated.get(),
                                                 .prologue = {.rounded = rounded},
                                                 .epilogue = {.ungated = ungated, .reader = reader},
                                                 .out = hidden});
                             });
      }
    }
  }
}

TEST_P(E4m3, ARowHasTheSameBitsInAnyBatch) {
  const Tensor x = Upload(Random({5, 20, 20, 32})), tokens = Upload(Random({5, 70, 64}));
  const auto conv = Pack(Random({48, 32, 3, 3}, DType::kF32), Random({48}, DType::kF32), 0x1p-6f);
  const auto doubled = Pack(Random({48, 32, 3, 3}, DType::kF32), Array(), 0x1p-6f, true);
  const auto linear = PackLinears({Random({80, 64}, DType::kF32)}, {}, 0x1p-6f);
  const auto run = [&](int begin, int count) {
    std::vector<Tensor> results;
    for (const PackedConv2d* layer : {conv.get(), doubled.get()}) {
      const int64_t edge = layer->upsample2x ? 40 : 20;
      Conv2dArgs args{.x = x.Slice(begin, count), .weight = layer};
      args.pad_top = args.pad_left = args.pad_bottom = args.pad_right = 1;
      args.prologue.rounded = Scratch(args.x, *layer);
      args.prologue.upsample2x = layer->upsample2x;
      args.out = Output({count, edge, edge, 48});
      backend().Conv2d(args);
      results.push_back(Download(args.out));
    }
    LinearArgs of_tokens{.x = tokens.Slice(begin, count), .weight = linear.get()};
    of_tokens.prologue.rounded = Scratch(of_tokens.x, *linear);
    of_tokens.out = Output({count, 70, 80});
    backend().Linear(of_tokens);
    results.push_back(Download(of_tokens.out));
    return results;
  };
  const std::vector<Tensor> together = run(0, 5);
  for (int row = 0; row < 5; ++row) {
    const std::vector<Tensor> alone = run(row, 1);
    for (size_t i = 0; i < alone.size(); ++i) {
      EXPECT_EQ(std::memcmp(alone[i].data(), together[i].Slice(row, 1).data(), alone[i].bytes()), 0)
          << "result " << i << " of row " << row;
    }
  }
}

TEST(InputRanges, AnErrorIsNotARange) {
  InputRanges ranges;
  ranges.Add("a", 2);
  ranges.Fail(Internal("the device is lost"));
  EXPECT_EQ(ranges.largest().status().code(), absl::StatusCode::kInternal);
}

/// A backend of its own, which learns ranges.
class InputRangesOf : public OnBackend {
 protected:
  void SetUp() override {
    OnBackend::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    BackendOptions options = GetParam().options;
    options.input_ranges = ranges_;
    own_ = OpenBackend(options).value();
    Use(own_.get());
  }
  void Close() {
    EXPECT_TRUE(own_->Synchronize().ok());
    Use(nullptr);
    own_.reset();
  }
  Tensor Constant(const Shape& shape, double value, DType dtype) {
    Array array(shape);
    std::fill(array.values.begin(), array.values.end(), value);
    return Upload(array, dtype);
  }
  /// -`largest` somewhere among smaller numbers.
  Tensor With(const Shape& shape, double largest) {
    Array array = Rounded(Random(shape, DType::kF32, 0.1), activation());
    array.at(array.shape.elements() * 2 / 3) = -largest;
    return Upload(array);
  }
  std::unique_ptr<PackedConv2d> Pack(const Shape& shape, const char* name) {
    return backend()
        .PackConv2d(ToHost(Random(shape, DType::kF32), DType::kF32), {}, false, {.name = name})
        .value();
  }

  const std::shared_ptr<InputRanges> ranges_ = std::make_shared<InputRanges>();
  std::unique_ptr<Backend> own_;
};
DENOISED_ON_EACH_BACKEND(InputRangesOf);

TEST_P(InputRangesOf, LayersWithANameAreTheirLargestMagnitudes) {
  ranges_->Start();
  const auto conv = Pack({8, 12, 1, 1}, "a"), shortcut = Pack({8, 6, 1, 1}, "b"),
             of_norm = Pack({8, 16, 3, 3}, "c");
  const auto pack_linear = [&](const char* name) {
    return backend()
        .PackLinear({ToHost(Random({8, 24}, DType::kF32), DType::kF32)}, {}, {.name = name})
        .value();
  };
  const auto linear = pack_linear("d"), nameless = pack_linear("");
  const auto of_first = Pack({8, 12, 1, 1}, "e");
  Conv2dArgs args{
      .x = With({1, 3, 3, 8}, 2), .weight = conv.get(), .prologue = {.x2 = With({1, 3, 3, 4}, 5)}};
  args.epilogue.shortcut = {.x = With({1, 3, 3, 6}, 7), .weight = shortcut.get()};
  args.out = Output({1, 3, 3, 8});
  backend().Conv2d(args);
  // Of two inputs, the first may be the larger one, too.
  backend().Conv2d({.x = With({1, 3, 3, 8}, 11),
                    .weight = of_first.get(),
                    .prologue = {.x2 = With({1, 3, 3, 4}, 5)},
                    .out = Output({1, 3, 3, 8})});
  // A norm makes 3 of everything before the layer reads it.
  backend().Conv2d({.x = With({2, 16, 16, 16}, 40),
                    .weight = of_norm.get(),
                    .pad_top = 1,
                    .pad_left = 1,
                    .pad_bottom = 1,
                    .pad_right = 1,
                    .prologue = {.norm = {.gamma = Constant({16}, 0, DType::kF32),
                                          .beta = Constant({16}, -3, DType::kF32),
                                          .groups = 4},
                                 .normed = Output({2, 16, 16, 16})},
                    .out = Output({2, 16, 16, 8})});
  backend().Linear({.x = With({1, 5, 24}, 9), .weight = linear.get(), .out = Output({1, 5, 8})});
  backend().Linear({.x = With({1, 5, 24}, 8), .weight = linear.get(), .out = Output({1, 5, 8})});
  backend().Linear({.x = With({1, 5, 24}, 99), .weight = nameless.get(), .out = Output({1, 5, 8})});
  Close();
  EXPECT_EQ(ranges_->largest().value(),
            (std::map<std::string, float>{{"a", 5}, {"b", 7}, {"c", 3}, {"d", 9}, {"e", 11}}));
}

TEST_P(InputRangesOf, WarmingUpDoesNotCount) {
  const auto conv = Pack({8, 8, 1, 1}, "a");
  const Tensor x = With({1, 4, 4, 8}, 50), out = Output({1, 4, 4, 8});
  const auto graph =
      backend().Capture([&] { backend().Conv2d({.x = x, .weight = conv.get(), .out = out}); });
  ASSERT_TRUE(graph.ok()) << graph.status();
  backend().Launch(**graph);
  ranges_->Start();
  backend().Copy(With({1, 4, 4, 8}, 6), x);
  backend().Launch(**graph);
  backend().Copy(With({1, 4, 4, 8}, 4), x);
  backend().Launch(**graph);
  Close();
  EXPECT_EQ(ranges_->largest().value(), (std::map<std::string, float>{{"a", 6}}));
}

}  // namespace
}  // namespace denoised
