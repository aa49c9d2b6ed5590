// SPDX-License-Identifier: Apache-2.0
#include "tests/backend/backend_fixture.h"

/// Every op with every optional fusion on random shapes, against reference.h.
///
/// Tolerances in fp32 are about four times the largest error measured on the CPU backend (figures
/// beside them); GPU sums of the same length in another order have errors of the same size.

namespace denoised {
namespace {

using reference::Array;

constexpr Activation kActivations[] = {Activation::kNone, Activation::kSilu, Activation::kMish,
                                       Activation::kGelu, Activation::kRelu, Activation::kQuickGelu,
                                       Activation::kTanh};

class Conv2dTest : public OnBackend {
 protected:
  struct Case {
    Conv2dArgs args;
    Array x, x2, weight, bias, add, residual;
    std::unique_ptr<PackedConv2d> packed;
    struct {
      Array x, x2, weight;
      std::unique_ptr<PackedConv2d> packed;
    } shortcut;
  };

  /// Fills in tensors for images [rows, height, width, c1 + c2].
  Case Make(const Conv2dArgs& geometry, int64_t rows, int64_t height, int64_t width, int64_t c1,
            int64_t c2, int64_t out, int64_t kernel, bool bias, bool add, bool residual) {
    Case c;
    c.args = geometry;
    c.x = Random({rows, height, width, c1});
    if (c2 > 0) c.x2 = Random({rows, height, width, c2});
    const double fan_in = static_cast<double>((c1 + c2) * kernel * kernel);
    c.weight = Random({out, c1 + c2, kernel, kernel}, activation(), 1 / std::sqrt(fan_in));
    if (bias) c.bias = Random({out}, DType::kF32);
    if (add) c.add = Random({rows, out});
    c.packed = PackConv2d(c.weight, c.bias, geometry.prologue.upsample2x);
    c.args.weight = c.packed.get();
    const int64_t up = geometry.prologue.upsample2x ? 2 : 1;
    const int64_t out_height =
        (height * up + geometry.pad_top + geometry.pad_bottom - kernel) / geometry.stride + 1;
    const int64_t out_width =
        (width * up + geometry.pad_left + geometry.pad_right - kernel) / geometry.stride + 1;
    const Shape out_shape = {rows, out_height, out_width, out};
    if (residual) c.residual = Random(out_shape);
    c.args.x = Upload(c.x);
    c.args.prologue.x2 = UploadOptional(c.x2);
    if (add) c.args.epilogue.add = UploadAsColumns(c.add, 3 * out, out);
    c.args.epilogue.residual = UploadOptional(c.residual);
    c.args.out = Output(out_shape);
    return c;
  }

  /// In place of a residual, of c1 + c2 channels.
  void AddShortcut(Case* c, int64_t c1, int64_t c2) {
    const Shape& out = c->args.out.shape();
    auto& shortcut = c->shortcut;
    shortcut.x = Random({out[0], out[1], out[2], c1});
    if (c2 > 0) shortcut.x2 = Random({out[0], out[1], out[2], c2});
    shortcut.weight =
        Random({out[3], c1 + c2, 1, 1}, activation(), 1 / std::sqrt(static_cast<double>(c1 + c2)));
    shortcut.packed = PackConv2d(shortcut.weight, Array());
    c->args.epilogue.shortcut = {.x = Upload(shortcut.x),
                                 .x2 = UploadOptional(shortcut.x2),
                                 .weight = shortcut.packed.get()};
  }

  double ErrorOf(const Case& c) {
    backend().Conv2d(c.args);
    const Array shortcut =
        c.shortcut.x.defined()
            ? reference::Conv2d({}, c.shortcut.x, c.shortcut.x2, c.shortcut.weight, {}, {}, {})
            : Array();
    return Error(Read(c.args.out), reference::Conv2d(c.args, c.x, c.x2, c.weight, c.bias, c.add,
                                                     shortcut.defined() ? shortcut : c.residual));
  }

  const double kTolerance = 4e-6;  // measured 1.2e-6, at up to 25·110 products a sum
};

TEST_P(Conv2dTest, ModelShapes) {
  struct {
    int64_t height, c1, c2, out, kernel;
    int stride;
    bool upsample;
  } shapes[] = {
      {32, 1, 0, 64, 3, 1, false},     {32, 64, 0, 1, 3, 1, false},    {32, 3, 0, 128, 3, 1, false},
      {16, 64, 0, 128, 3, 1, false},   {16, 64, 0, 128, 1, 1, false},  {16, 64, 0, 64, 3, 2, false},
      {8, 128, 0, 128, 3, 1, true},    {8, 128, 64, 128, 3, 1, false}, {8, 96, 32, 64, 1, 1, false},
      {4, 256, 256, 256, 3, 1, false}, {2, 64, 0, 64, 3, 1, false},
  };
  for (const auto& s : shapes) {
    const int pad = s.kernel / 2;
    Conv2dArgs geometry{.stride = s.stride,
                        .pad_top = pad,
                        .pad_left = pad,
                        .pad_bottom = pad,
                        .pad_right = pad,
                        .prologue = {.upsample2x = s.upsample},
                        .epilogue = {.activation = Activation::kSilu}};
    const Case c =
        Make(geometry, 2, s.height, s.height, s.c1, s.c2, s.out, s.kernel, true, true, true);
    EXPECT_LT(ErrorOf(c), Tolerance(kTolerance))
        << c.x.shape.ToString() << " + " << s.c2 << " -> " << c.args.out.shape().ToString();
  }
}

TEST_P(Conv2dTest, ShortcutsOfModels) {
  struct {
    int64_t rows, height, width, c1, c2, out, shortcut, shortcut2;
  } shapes[] = {
      {2, 16, 16, 128, 0, 128, 128, 64}, {3, 8, 8, 192, 0, 192, 96, 0},
      {1, 32, 16, 64, 0, 128, 40, 72},   {2, 4, 4, 256, 0, 256, 256, 256},
      {2, 16, 16, 64, 64, 64, 8, 136},   {1, 24, 40, 32, 0, 384, 200, 0},
      {2, 8, 8, 128, 0, 160, 128, 0},    {2, 8, 8, 64, 0, 32, 16, 0},
  };
  for (const auto& s : shapes) {
    Case c = Make({.pad_top = 1,
                   .pad_left = 1,
                   .pad_bottom = 1,
                   .pad_right = 1,
                   .epilogue = {.scale = 0.7071f}},
                  s.rows, s.height, s.width, s.c1, s.c2, s.out, 3, true, true, false);
    AddShortcut(&c, s.shortcut, s.shortcut2);
    EXPECT_LT(ErrorOf(c), Tolerance(kTolerance))
        << c.x.shape.ToString() << " -> " << s.out << ", " << s.shortcut << " + " << s.shortcut2;
  }
}

// Whoever applies them: the second norm belongs to the first convolution or to the second.
TEST_P(Conv2dTest, NormsOfInputsAndResults) {
  struct {
    int64_t rows, size, c1, c2, hidden, out;
    bool upsample, scale_shift;
    Activation activation;
  } shapes[] = {{2, 8, 256, 0, 256, 128, false, false, Activation::kSilu},
                {3, 8, 64, 32, 64, 64, false, false, Activation::kSilu},
                {2, 16, 64, 64, 128, 128, true, true, Activation::kSilu},
                {1, 5, 12, 4, 24, 7, false, false, Activation::kMish}};
  for (const auto& s : shapes) {
    const Conv2dArgs same{.pad_top = 1, .pad_left = 1, .pad_bottom = 1, .pad_right = 1};
    Conv2dArgs geometry = same;
    geometry.prologue.upsample2x = s.upsample;
    Case first = Make(geometry, s.rows, s.size, s.size, s.c1, s.c2, s.hidden, 3, true, true, false);
    const int64_t size = s.upsample ? 2 * s.size : s.size;
    Case second = Make(same, s.rows, size, size, s.hidden, 0, s.out, 3, true, false, true);
    const auto norm_of = [&](int64_t channels, Array* gamma, Array* beta) {
      *gamma = Random({channels}, DType::kF32, 0.3, 1);
      *beta = Random({channels}, DType::kF32);
      return Norm{.gamma = Upload(*gamma, DType::kF32),
                  .beta = Upload(*beta, DType::kF32),
                  .groups = 4,
                  .activation = s.activation};
    };
    Array gamma1, beta1, gamma2, beta2;
    const Norm norm1 = norm_of(s.c1 + s.c2, &gamma1, &beta1);
    Norm norm2 = norm_of(s.hidden, &gamma2, &beta2);
    const Array scale_shift = s.scale_shift ? Random({s.rows, 2 * s.hidden}) : Array();
    norm2.scale_shift = UploadOptional(scale_shift);

    first.args.prologue.norm = norm1;
    first.args.prologue.normed = Output({s.rows, s.size, s.size, s.c1 + s.c2});
    first.args.epilogue.norm = &norm2;
    backend().Conv2d(first.args);
    second.args.x = first.args.out;
    second.args.prologue.norm = norm2;
    second.args.prologue.normed = Output(first.args.out.shape());
    backend().Conv2d(second.args);

    Array in = reference::GroupNorm({.norm = norm1}, first.x, first.x2, gamma1, beta1, {});
    Array hidden = reference::Conv2d(first.args, in, {}, first.weight, first.bias, first.add, {});
    const auto expected = [&](const Array& values) {
      return reference::Conv2d(
          second.args,
          reference::GroupNorm({.norm = norm2}, values, {}, gamma2, beta2, scale_shift), {},
          second.weight, second.bias, {}, second.residual);
    };
    const Array actual = Read(second.args.out);
    EXPECT_LT(Error(actual, expected(hidden)), 4 * Tolerance(kTolerance)) << s.size;
    norm2.eps = 10;
    EXPECT_GT(Error(actual, expected(hidden)), 4 * Tolerance(kTolerance)) << "the test cannot fail";
  }
}

TEST_P(Conv2dTest, AResidualInItsOwnPlace) {
  Case c = Make({.pad_top = 1, .pad_left = 1, .pad_bottom = 1, .pad_right = 1}, 3, 9, 8, 64, 0, 128,
                3, true, false, true);
  backend().Copy(c.args.epilogue.residual, c.args.out);
  c.args.epilogue.residual = c.args.out;
  EXPECT_LT(ErrorOf(c), Tolerance(kTolerance));
}

TEST_P(Conv2dTest, AnyShapeAndFusion) {
  for (int i = 0; i < 60; ++i) {
    Conv2dArgs geometry;
    geometry.prologue.upsample2x = RandomInt(0, 3) == 0;
    const int64_t kernel = geometry.prologue.upsample2x ? 3 : RandomInt(0, 2) * 2 + 1;
    const auto pad = [&] {
      return geometry.prologue.upsample2x ? 1 : static_cast<int>(RandomInt(0, kernel / 2));
    };
    geometry.stride = geometry.prologue.upsample2x ? 1 : static_cast<int>(RandomInt(1, 2));
    geometry.pad_top = pad();
    geometry.pad_left = pad();
    geometry.pad_bottom = pad();
    geometry.pad_right = pad();
    geometry.epilogue.scale = Coin() ? 1.0f : 0.7071f;
    geometry.epilogue.activation = kActivations[RandomInt(0, std::size(kActivations) - 1)];
    // Half of them in eights, which is what fast kernels are for.
    const bool eights = Coin();
    const auto channels = [&] { return eights ? 8 * RandomInt(1, 25) : RandomInt(1, 70); };
    const bool residual = Coin();
    Case c =
        Make(geometry, RandomInt(1, 3), RandomInt(kernel, 13), RandomInt(kernel, 13), channels(),
             Coin() ? channels() : 0, channels(), kernel, Coin(), Coin(), residual);
    if (!residual && Coin()) AddShortcut(&c, channels(), Coin() ? channels() : 0);
    EXPECT_LT(ErrorOf(c), Tolerance(kTolerance))
        << i << ": " << c.x.shape.ToString() << " -> " << c.args.out.shape().ToString()
        << " kernel " << kernel << " stride " << geometry.stride;
  }
}

TEST_P(Conv2dTest, DownsamplingPadsBottomAndRightOnly) {
  // diffusers' Downsample2D with padding 0 pads (0, 1, 0, 1) itself.
  const Case c = Make({.stride = 2, .pad_bottom = 1, .pad_right = 1}, 2, 16, 16, 32, 0, 32, 3, true,
                      false, false);
  EXPECT_EQ(c.args.out.dim(1), 8);
  EXPECT_LT(ErrorOf(c), Tolerance(kTolerance));
}

TEST_P(Conv2dTest, WritesF32) {
  Case c = Make({.pad_top = 1, .pad_left = 1, .pad_bottom = 1, .pad_right = 1}, 2, 8, 8, 64, 0, 3,
                3, true, false, false);
  c.args.out = Output(c.args.out.shape(), DType::kF32);
  EXPECT_LT(ErrorOf(c), Tolerance(kTolerance));
}

TEST_P(Conv2dTest, TheSameWeightsServeSeveralSizes) {
  const Case first = Make({.pad_top = 1, .pad_left = 1, .pad_bottom = 1, .pad_right = 1}, 1, 4, 4,
                          16, 0, 16, 3, true, false, false);
  EXPECT_LT(ErrorOf(first), Tolerance(kTolerance));
  for (int64_t size : {1, 7, 32}) {
    Case c = Make({.pad_top = 1, .pad_left = 1, .pad_bottom = 1, .pad_right = 1}, 1, size, size, 16,
                  0, 16, 3, true, false, false);
    c.args.weight = first.packed.get();
    c.weight = first.weight;
    c.bias = first.bias;
    EXPECT_LT(ErrorOf(c), Tolerance(kTolerance)) << size;
  }
}

TEST_P(Conv2dTest, TheTestCanFail) {
  const Conv2dArgs geometry{.stride = 2, .pad_top = 1, .pad_left = 1};
  Case transposed = Make(geometry, 1, 8, 8, 16, 0, 16, 3, true, true, false);
  for (int64_t o = 0; o < 16; ++o) {
    for (int64_t i = 0; i < o; ++i) {
      for (int64_t k = 0; k < 9; ++k) {
        std::swap(transposed.weight.at((o * 16 + i) * 9 + k),
                  transposed.weight.at((i * 16 + o) * 9 + k));
      }
    }
  }
  EXPECT_GT(ErrorOf(transposed), 10 * Tolerance(kTolerance));

  Case one_pixel = Make(geometry, 1, 8, 8, 16, 0, 16, 3, true, true, false);
  one_pixel.x.at(17) += 5;
  EXPECT_GT(ErrorOf(one_pixel), Tolerance(kTolerance));

  Case swapped = Make(geometry, 1, 8, 8, 16, 0, 16, 3, true, true, false);
  AddShortcut(&swapped, 8, 8);
  std::swap(swapped.shortcut.x, swapped.shortcut.x2);
  EXPECT_GT(ErrorOf(swapped), 10 * Tolerance(kTolerance));

  Case shifted = Make(geometry, 1, 8, 8, 16, 0, 16, 3, true, true, false);
  backend().Conv2d(shifted.args);
  shifted.args.pad_top = 0;
  shifted.args.pad_bottom = 1;
  EXPECT_GT(
      Error(Read(shifted.args.out), reference::Conv2d(shifted.args, shifted.x, {}, shifted.weight,
                                                      shifted.bias, shifted.add, {})),
      10 * Tolerance(kTolerance));
}

TEST_P(Conv2dTest, RefusesWeightsOfWrongShape) {
  const auto refusal = [&](const Shape& weight, const Shape& bias) {
    return backend()
        .PackConv2d(Tensor::Host(weight, DType::kF32), Tensor::Host(bias, DType::kF32), false)
        .status();
  };
  EXPECT_EQ(refusal({4, 3, 3, 1}, {4}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal({4, 3, 3}, {4}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal({4, 3, 3, 3}, {3}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(
      backend().PackConv2d(Tensor::Host({4, 3, 3, 3}, DType::kI32), {}, false).status().code(),
      absl::StatusCode::kInvalidArgument);
}

DENOISED_ON_EACH_BACKEND(Conv2dTest);

class LinearTest : public OnBackend {
 protected:
  const double kTolerance = 2e-6;  // measured 5e-7, at up to 300 products a sum
};

TEST_P(LinearTest, AnyShapeAndFusion) {
  for (int i = 0; i < 60; ++i) {
    const int64_t in = RandomInt(1, 300), out = RandomInt(1, 200), rows = RandomInt(1, 5);
    const Shape shapes[] = {{rows, in}, {rows, RandomInt(1, 70), in}, {rows, 3, 5, in}};
    const Shape& shape = shapes[RandomInt(0, 2)];
    const bool x_f32 = Coin(), out_f32 = Coin();
    const Array x = Random(shape, x_f32 ? DType::kF32 : activation());
    const Array weight = Random({out, in}, activation(), 1 / std::sqrt(static_cast<double>(in)));
    const Array bias = Coin() ? Random({out}, DType::kF32) : Array();
    const auto packed = PackLinear(weight, bias);
    LinearArgs args;
    args.x = Upload(x, x_f32 ? DType::kF32 : activation());
    args.weight = packed.get();
    args.epilogue.activation = kActivations[RandomInt(0, std::size(kActivations) - 1)];
    args.epilogue.scale = Coin() ? 1.0f : 0.7071f;
    const Array no_residual = reference::Linear(args, x, weight, bias, {});
    const Array residual = Coin() ? Random(no_residual.shape) : Array();
    args.epilogue.residual = UploadOptional(residual);
    args.out = Output(no_residual.shape, out_f32 ? DType::kF32 : activation());
    backend().Linear(args);
    EXPECT_LT(Error(Read(args.out), reference::Linear(args, x, weight, bias, residual)),
              Tolerance(kTolerance))
        << i << ": " << shape.ToString() << " -> " << out;
  }
}

TEST_P(LinearTest, OneVectorASample) {
  for (const int64_t rows : {1, 5, 17, 70}) {
    for (const int64_t in : {8, 72, 512, 600}) {
      const int64_t out = RandomInt(1, 300);
      const bool out_f32 = Coin();
      const Array x = Random({rows, in}), weight = Random({out, in}, activation(), 1 / 16.0);
      const Array bias = Coin() ? Random({out}, DType::kF32) : Array();
      const auto packed = PackLinear(weight, bias);
      LinearArgs args{.x = Upload(x), .weight = packed.get()};
      args.epilogue.activation = kActivations[RandomInt(0, std::size(kActivations) - 1)];
      args.epilogue.scale = Coin() ? 1.0f : 0.7071f;
      const Array residual = Coin() ? Random({rows, out}) : Array();
      args.epilogue.residual = UploadOptional(residual);
      args.out = Output({rows, out}, out_f32 ? DType::kF32 : activation());
      backend().Linear(args);
      EXPECT_LT(Error(Read(args.out), reference::Linear(args, x, weight, bias, residual)),
                Tolerance(kTolerance))
          << rows << ": " << in << " -> " << out;
    }
  }
}

TEST_P(LinearTest, SeveralWeightsBecomeOne) {
  const int64_t in = 48;
  const Array q = Random({64, in}), k = Random({64, in}), v = Random({32, in});
  const Array bq = Random({64}, DType::kF32), bk = Random({64}, DType::kF32),
              bv = Random({32}, DType::kF32);
  Array weight({160, in}), bias({160});
  weight.values = q.values;
  weight.values.insert(weight.values.end(), k.values.begin(), k.values.end());
  weight.values.insert(weight.values.end(), v.values.begin(), v.values.end());
  bias.values = bq.values;
  bias.values.insert(bias.values.end(), bk.values.begin(), bk.values.end());
  bias.values.insert(bias.values.end(), bv.values.begin(), bv.values.end());
  // As in a file: any float dtype, here one whose rounding the values have.
  auto packed = backend().PackLinear(
      {ToHost(q, activation()), ToHost(k, activation()), ToHost(v, activation())},
      {ToHost(bq, DType::kF32), ToHost(bk, DType::kF32), ToHost(bv, DType::kF32)});
  ASSERT_TRUE(packed.ok()) << packed.status();
  EXPECT_EQ((*packed)->in_features, in);
  EXPECT_EQ((*packed)->out_features, 160);
  const Array x = Random({2, 9, in});
  LinearArgs args{.x = Upload(x), .weight = packed->get()};
  args.out = Output({2, 9, 160});
  backend().Linear(args);
  EXPECT_LT(Error(Read(args.out), reference::Linear(args, x, weight, bias, {})),
            Tolerance(kTolerance));
}

TEST_P(LinearTest, TheSameWeightsServeVectorsAndTokens) {
  const Array weight = Random({24, 40}, activation(), 0.2), bias = Random({24}, DType::kF32);
  const auto packed = PackLinear(weight, bias);
  for (const Shape& shape : {Shape{2, 40}, Shape{2, 7, 40}, Shape{3, 40}, Shape{1, 9, 40}}) {
    const Array x = Random(shape);
    LinearArgs args{.x = Upload(x), .weight = packed.get()};
    const Array expected = reference::Linear(args, x, weight, bias, {});
    args.out = Output(expected.shape);
    backend().Linear(args);
    EXPECT_LT(Error(Read(args.out), expected), Tolerance(kTolerance)) << shape.ToString();
  }
}

TEST_P(LinearTest, TheTestCanFail) {
  const Array weight = Random({32, 32}, activation(), 0.2);
  Array transposed = weight;
  for (int64_t o = 0; o < 32; ++o) {
    for (int64_t i = 0; i < 32; ++i) transposed.at(o * 32 + i) = weight.at(i * 32 + o);
  }
  const auto packed = PackLinear(weight, {});
  const Array x = Random({2, 5, 32});
  LinearArgs args{.x = Upload(x), .weight = packed.get()};
  args.out = Output({2, 5, 32});
  backend().Linear(args);
  EXPECT_GT(Error(Read(args.out), reference::Linear(args, x, transposed, {}, {})),
            10 * Tolerance(kTolerance));
}

TEST_P(LinearTest, RefusesWeightsOfWrongShape) {
  const auto host = [](const Shape& shape) { return Tensor::Host(shape, DType::kF32); };
  const auto code = [&](std::vector<Tensor> weights, std::vector<Tensor> biases) {
    return backend().PackLinear(weights, biases).status().code();
  };
  EXPECT_EQ(code({}, {}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({host({4, 3}), host({4, 2})}, {}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({host({4, 3})}, {host({3})}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({host({4, 3}), host({4, 3})}, {host({4}), Tensor()}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({host({4, 3, 1})}, {}), absl::StatusCode::kInvalidArgument);
}

DENOISED_ON_EACH_BACKEND(LinearTest);

class GroupNormTest : public OnBackend {
 protected:
  const double kTolerance = 1e-6;  // measured 2.5e-7
};

TEST_P(GroupNormTest, AnyShapeAndFusion) {
  for (int i = 0; i < 60; ++i) {
    const int groups = static_cast<int>(RandomInt(1, 32));
    const int64_t channels = groups * RandomInt(1, 6), rows = RandomInt(1, 4);
    const int64_t c2 = channels > 1 && Coin() ? RandomInt(1, channels - 1) : 0;
    const int64_t height = RandomInt(1, 17), width = RandomInt(2, 17);
    const auto shape = [&](int64_t c) {
      return i % 3 == 0 ? Shape{rows, height * width, c} : Shape{rows, height, width, c};
    };
    const Array x = Random(shape(channels - c2), activation(), 2, 0.5);
    const Array x2 = c2 > 0 ? Random(shape(c2), activation(), 0.5, -1) : Array();
    const Array gamma = Random({channels}, DType::kF32, 0.3, 1),
                beta = Random({channels}, DType::kF32);
    const Array scale_shift = Coin() ? Random({rows, 2 * channels}, activation(), 0.5) : Array();
    GroupNormArgs args;
    args.x = Upload(x);
    args.x2 = UploadOptional(x2);
    args.norm.gamma = Upload(gamma, DType::kF32);
    args.norm.beta = Upload(beta, DType::kF32);
    args.norm.groups = groups;
    args.norm.eps = Coin() ? 1e-5f : 1e-6f;
    if (scale_shift.defined()) args.norm.scale_shift = UploadAsColumns(scale_shift, channels, 3);
    args.norm.activation = kActivations[RandomInt(0, std::size(kActivations) - 1)];
    args.out = Output(shape(channels));
    backend().GroupNorm(args);
    EXPECT_LT(Error(Read(args.out), reference::GroupNorm(args, x, x2, gamma, beta, scale_shift)),
              Tolerance(kTolerance))
        << i << ": " << x.shape.ToString() << " + " << c2 << " in " << groups << " groups";
  }
}

TEST_P(GroupNormTest, AMeanFarFromZeroKeepsItsVariance) {
  const Array x = Random({2, 16, 16, 64}, activation(), 1, 100);
  const Array gamma = Random({64}, DType::kF32, 0.3, 1), beta = Random({64}, DType::kF32);
  GroupNormArgs args{
      .x = Upload(x),
      .norm = {
          .gamma = Upload(gamma, DType::kF32), .beta = Upload(beta, DType::kF32), .groups = 32}};
  args.out = Output(x.shape);
  backend().GroupNorm(args);
  // The mean itself is rounded to fp32: 100·2⁻²⁴ of a standard deviation of one. Measured 1.5e-6.
  EXPECT_LT(Error(Read(args.out), reference::GroupNorm(args, x, {}, gamma, beta, {})),
            Tolerance(6e-6));
}

TEST_P(GroupNormTest, AConstantImageBecomesBeta) {
  Array x({1, 8, 8, 32});
  std::fill(x.values.begin(), x.values.end(), 3.0);
  const Array gamma = Random({32}, DType::kF32, 0.3, 1), beta = Random({32}, DType::kF32);
  GroupNormArgs args{
      .x = Upload(x),
      .norm = {
          .gamma = Upload(gamma, DType::kF32), .beta = Upload(beta, DType::kF32), .groups = 8}};
  args.out = Output(x.shape);
  backend().GroupNorm(args);
  EXPECT_LT(Error(Read(args.out), reference::GroupNorm(args, x, {}, gamma, beta, {})),
            Tolerance(kTolerance));
}

TEST_P(GroupNormTest, TheTestCanFail) {
  const Array x = Random({1, 4, 4, 32}, activation(), 0.02);
  const Array gamma = Random({32}, DType::kF32, 0.3, 1), beta = Random({32}, DType::kF32);
  GroupNormArgs args{.x = Upload(x),
                     .norm = {.gamma = Upload(gamma, DType::kF32),
                              .beta = Upload(beta, DType::kF32),
                              .groups = 8,
                              .eps = 1e-5f}};
  args.out = Output(x.shape);
  backend().GroupNorm(args);
  const Array actual = Read(args.out);
  args.norm.eps = 1e-4f;
  EXPECT_GT(Error(actual, reference::GroupNorm(args, x, {}, gamma, beta, {})),
            Tolerance(kTolerance));
  args.norm.eps = 1e-5f;
  args.norm.groups = 32;
  EXPECT_GT(Error(actual, reference::GroupNorm(args, x, {}, gamma, beta, {})),
            10 * Tolerance(kTolerance));
}

DENOISED_ON_EACH_BACKEND(GroupNormTest);

class LayerNormTest : public OnBackend {
 protected:
  struct Case {
    LayerNormArgs args;
    Array x, gamma, beta;
  };
  Case Make(const Shape& shape, double scale = 1, double mean = 0) {
    Case c;
    c.x = Random(shape, activation(), scale, mean);
    c.gamma = Random({shape[-1]}, DType::kF32, 0.3, 1);
    c.beta = Random({shape[-1]}, DType::kF32);
    c.args = {.x = Upload(c.x),
              .gamma = Upload(c.gamma, DType::kF32),
              .beta = Upload(c.beta, DType::kF32),
              .eps = Coin() ? 1e-5f : 1e-6f,
              .out = Output(shape)};
    return c;
  }
  double ErrorOf(const Case& c) {
    backend().LayerNorm(c.args);
    return Error(Read(c.args.out), reference::LayerNorm(c.args, c.x, c.gamma, c.beta));
  }

  const double kTolerance = 1e-6;  // measured 1e-7
};

TEST_P(LayerNormTest, AnyShape) {
  for (int i = 0; i < 40; ++i) {
    const int64_t widths[] = {320, 768, 1280, 8 * RandomInt(1, 300), RandomInt(1, 700)};
    const int64_t width = widths[RandomInt(0, 4)], rows = RandomInt(1, 4);
    const Shape shape = Coin() ? Shape{rows, width} : Shape{rows, RandomInt(1, 90), width};
    EXPECT_LT(ErrorOf(Make(shape, 2, 0.5)), Tolerance(kTolerance)) << i << shape.ToString();
  }
}

/// More than a block for each multiprocessor, and a last block that is not full.
TEST_P(LayerNormTest, ManyTokens) {
  for (const Shape& shape : {Shape{2113, 640}, Shape{3201, 72}, Shape{7393, 64}, Shape{8449, 40}})
    EXPECT_LT(ErrorOf(Make(shape)), Tolerance(kTolerance)) << shape.ToString();
}

TEST_P(LayerNormTest, AMeanFarFromZeroKeepsItsVariance) {
  // The mean is rounded to fp32, as in group norm, and so are partial sums. Measured 4.8e-6.
  EXPECT_LT(ErrorOf(Make({2, 9, 640}, 1, 100)), Tolerance(2e-5));
}

TEST_P(LayerNormTest, MayWriteOverItsInput) {
  Case c = Make({2, 5, 320});
  c.args.out = c.args.x;
  EXPECT_LT(ErrorOf(c), Tolerance(kTolerance));
}

TEST_P(LayerNormTest, TheTestCanFail) {
  Case c = Make({1, 4, 64}, 0.02);
  c.args.eps = 1e-5f;
  EXPECT_LT(ErrorOf(c), Tolerance(kTolerance));
  const Array actual = Read(c.args.out);
  c.args.eps = 1e-4f;
  EXPECT_GT(Error(actual, reference::LayerNorm(c.args, c.x, c.gamma, c.beta)),
            Tolerance(kTolerance));
}

DENOISED_ON_EACH_BACKEND(LayerNormTest);

class AttentionTest : public OnBackend {
 protected:
  const double kTolerance = 4e-6;  // measured 9e-7, with scores of ±8
};

TEST_P(AttentionTest, AnyShapeAndViews) {
  for (int i = 0; i < 40; ++i) {
    const int heads = static_cast<int>(RandomInt(1, 4));
    const int64_t dims[] = {8, 16, 40, 64, RandomInt(1, 70)};
    const int64_t width = heads * dims[RandomInt(0, 4)], rows = RandomInt(1, 3);
    const int64_t queries = RandomInt(1, 150), keys = Coin() ? queries : RandomInt(1, 150);
    const Array q = Random({rows, queries, width}), k = Random({rows, keys, width}),
                v = Random({rows, keys, width});
    AttentionArgs args;
    args.heads = heads;
    args.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(width / heads)));
    const bool views = Coin();
    args.q = views ? UploadAsColumns(q, 0, 2 * width) : Upload(q);
    args.k = views ? UploadAsColumns(k, width, width) : Upload(k);
    args.v = views ? UploadAsColumns(v, 2 * width, 0) : Upload(v);
    args.out = Output(q.shape);
    backend().Attention(args);
    EXPECT_LT(Error(Read(args.out), reference::Attention(args, q, k, v)), Tolerance(kTolerance))
        << i << ": " << q.shape.ToString() << ", " << keys << " keys, " << heads << " heads";
  }
}

// A pool of keys and values that rows choose from, sets with fewer keys than there is room for, and
// queries that see no later keys: each alone and all together.
TEST_P(AttentionTest, KeySetsCountsAndCausality) {
  for (int i = 0; i < 80; ++i) {
    const bool indexed = i & 1, counted = i & 2, causal = i & 4;
    const int heads = static_cast<int>(RandomInt(1, 4));
    const int64_t dims[] = {40, 64, 80, 160, RandomInt(1, 70)};
    const int64_t width = heads * dims[RandomInt(0, 4)], rows = RandomInt(1, 4);
    const int64_t sets = indexed ? RandomInt(1, 5) : rows;
    const int64_t queries = RandomInt(1, 150);
    const int64_t keys = causal && Coin() ? queries : RandomInt(1, 190);
    const Array q = Random({rows, queries, width}), k = Random({sets, keys, width}),
                v = Random({sets, keys, width});
    reference::KeySets integers;
    for (int64_t n = 0; n < rows && indexed; ++n) {
      integers.set.push_back(static_cast<int32_t>(RandomInt(0, sets - 1)));
    }
    for (int64_t set = 0; set < sets && counted; ++set) {
      integers.counts.push_back(static_cast<int32_t>(RandomInt(1, keys)));
    }
    // Keys that do not exist may hold anything.
    Array stored_k = k, stored_v = v;
    for (int64_t set = 0; set < sets && counted; ++set) {
      for (int64_t at = (set * keys + integers.counts[set]) * width; at < (set + 1) * keys * width;
           ++at) {
        stored_k.at(at) = NAN;
        stored_v.at(at) = NAN;
      }
    }
    AttentionArgs args;
    args.q = UploadAsColumns(q, 0, 2 * width);
    args.k = UploadAsColumns(stored_k, width, 8);
    args.v = UploadAsColumns(stored_v, 8, width);
    if (indexed) args.key_set = UploadInts(integers.set, {rows});
    if (counted) args.key_counts = UploadInts(integers.counts, {sets});
    args.causal = causal;
    args.heads = heads;
    args.scale = static_cast<float>(2 / std::sqrt(static_cast<double>(width / heads)));
    args.out = Output(q.shape);
    backend().Attention(args);
    EXPECT_LT(Error(Read(args.out), reference::Attention(args, q, k, v, integers)),
              Tolerance(kTolerance))
        << i << ": " << q.shape.ToString() << ", " << keys << " keys, " << heads << " heads"
        << (indexed ? ", indexed" : "") << (counted ? ", counted" : "")
        << (causal ? ", causal" : "");
  }
}

TEST_P(AttentionTest, KeySetsCountsAndCausalityMatter) {
  const Array q = Random({2, 40, 64}), k = Random({2, 40, 64}), v = Random({2, 40, 64});
  AttentionArgs args{.q = Upload(q),
                     .k = Upload(k),
                     .v = Upload(v),
                     .key_set = UploadInts({1, 0}, {2}),
                     .key_counts = UploadInts({30, 20}, {2}),
                     .causal = true,
                     .heads = 2,
                     .scale = 0.125f,
                     .out = Output(q.shape)};
  backend().Attention(args);
  const Array actual = Read(args.out);
  const double tolerance = 2 * Tolerance(kTolerance);
  EXPECT_LT(Error(actual, reference::Attention(args, q, k, v, {{1, 0}, {30, 20}})), tolerance);
  EXPECT_GT(Error(actual, reference::Attention(args, q, k, v, {{0, 1}, {30, 20}})), tolerance);
  EXPECT_GT(Error(actual, reference::Attention(args, q, k, v, {{1, 0}, {30, 19}})), tolerance);
  args.causal = false;
  EXPECT_GT(Error(actual, reference::Attention(args, q, k, v, {{1, 0}, {30, 20}})), tolerance);
}

TEST_P(AttentionTest, OneWideHead) {
  // attention_head_dim null: all channels are one head.
  for (int64_t width : {128, 512}) {
    const Array q = Random({1, 64, width}), k = Random({1, 64, width}), v = Random({1, 64, width});
    AttentionArgs args{.q = Upload(q), .k = Upload(k), .v = Upload(v), .heads = 1};
    args.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(width)));
    args.out = Output(q.shape);
    backend().Attention(args);
    EXPECT_LT(Error(Read(args.out), reference::Attention(args, q, k, v)), Tolerance(kTolerance));
  }
}

TEST_P(AttentionTest, LargeScoresDoNotOverflow) {
  const Array q = Random({1, 33, 32}, activation(), 30), k = Random({1, 33, 32}, activation(), 30),
              v = Random({1, 33, 32});
  AttentionArgs args{.q = Upload(q), .k = Upload(k), .v = Upload(v), .heads = 1, .scale = 1};
  args.out = Output(q.shape);
  backend().Attention(args);
  // Scores reach thousands, so nearly every softmax picks one key. Measured 1e-8.
  EXPECT_LT(Error(Read(args.out), reference::Attention(args, q, k, v)), Tolerance(1e-6));
}

TEST_P(AttentionTest, TheTestCanFail) {
  const Array q = Random({1, 40, 64}), k = Random({1, 40, 64}), v = Random({1, 40, 64});
  AttentionArgs args{.q = Upload(q), .k = Upload(k), .v = Upload(v), .heads = 2, .scale = 0.125f};
  args.out = Output(q.shape);
  backend().Attention(args);
  const Array actual = Read(args.out);
  EXPECT_GT(Error(actual, reference::Attention(args, k, q, v)), 10 * Tolerance(kTolerance));
  args.heads = 1;
  EXPECT_GT(Error(actual, reference::Attention(args, q, k, v)), 10 * Tolerance(kTolerance));
  args.heads = 2;
  args.scale = 0.15f;
  EXPECT_GT(Error(actual, reference::Attention(args, q, k, v)), Tolerance(kTolerance));
}

DENOISED_ON_EACH_BACKEND(AttentionTest);

class EmbeddingTest : public OnBackend {};

TEST_P(EmbeddingTest, Timestep) {
  Array t({5});
  t.values = {0, 1, 17.5, 500, 999};
  for (int64_t dim : {2, 32, 33, 128}) {
    for (bool flip : {false, true}) {
      for (double shift : {0.0, 1.0}) {
        if (dim / 2 == shift) continue;
        TimestepEmbeddingArgs args{.t = Upload(t, DType::kF32),
                                   .flip_sin_to_cos = flip,
                                   .freq_shift = shift,
                                   .scale = flip ? 1.0 : 0.5};
        args.out = Output({5, dim});
        backend().TimestepEmbedding(args);
        // An angle of 999 in fp32 is off by 3e-5; measured 5e-8 where angles are computed in
        // double.
        EXPECT_LT(Error(Read(args.out), reference::TimestepEmbedding(args, t, dim)),
                  Tolerance(1e-4))
            << dim << " flip " << flip << " shift " << shift;
        args.scale *= 1.01;
        EXPECT_GT(Error(Read(args.out), reference::TimestepEmbedding(args, t, dim)),
                  Tolerance(1e-4))
            << "the test must be able to fail";
      }
    }
  }
}

TEST_P(EmbeddingTest, Fourier) {
  Array t({4});
  t.values = {0.25, 1, 13.5, 80};
  const Array weight = Random({24}, DType::kF32, 16);
  for (bool log : {false, true}) {
    for (bool flip : {false, true}) {
      FourierEmbeddingArgs args{.t = Upload(t, DType::kF32),
                                .weight = Upload(weight, DType::kF32),
                                .log = log,
                                .flip_sin_to_cos = flip};
      args.out = Output({4, 48});
      backend().FourierEmbedding(args);
      // Without the logarithm angles reach 2π·40·80 = 2·10⁴, which fp32 knows to 1e-3 only.
      const double tolerance = Tolerance(log ? 2e-4 : 4e-3);
      EXPECT_LT(Error(Read(args.out), reference::FourierEmbedding(args, t, weight)), tolerance)
          << log << flip;
      args.flip_sin_to_cos = !flip;
      EXPECT_GT(Error(Read(args.out), reference::FourierEmbedding(args, t, weight)), tolerance);
    }
  }
}

TEST_P(EmbeddingTest, Table) {
  for (DType dtype : {DType::kF32, activation()}) {
    const Array table = Random({11, 37}, activation());
    const std::vector<int32_t> index = {0, 10, 3, 3, 7};
    EmbeddingArgs args{.table = Upload(table, dtype),
                       .index = UploadInts(index, {5}),
                       .out = Output({5, 37}, dtype)};
    backend().Embedding(args);
    Array expected({5, 37});
    for (int64_t n = 0; n < 5; ++n) {
      for (int64_t d = 0; d < 37; ++d) expected.at(n * 37 + d) = table.at(index[n] * 37 + d);
    }
    EXPECT_EQ(Error(Read(args.out), expected), 0);
    // The same entries by numbers, two of them beyond the table.
    Array numbers({5});
    numbers.values = {-1, 11.5, 2.75, 3.25, 7};
    args.index = Upload(numbers, DType::kF32);
    args.out = Output({5, 37}, dtype);
    backend().Embedding(args);
    EXPECT_EQ(Error(Read(args.out), expected), 0);
  }
}

DENOISED_ON_EACH_BACKEND(EmbeddingTest);

class ElementwiseTest : public OnBackend {};

TEST_P(ElementwiseTest, Resample2x) {
  for (const Shape& shape :
       {Shape{2, 8, 8, 64}, Shape{3, 6, 4, 5}, Shape{1, 2, 2, 1}, Shape{2, 5, 7, 3}}) {
    const Array x = Random(shape);
    const Tensor device = Upload(x);
    for (Resample kind :
         {Resample::kNearestUp, Resample::kAveragePoolDown, Resample::kFirUp, Resample::kFirDown}) {
      const Array expected = reference::Resample2x(kind, x);
      const Tensor out = Output(expected.shape);
      backend().Resample2x(kind, device, out);
      EXPECT_LT(Error(Read(out), expected), Tolerance(1e-6)) << shape.ToString();
    }
  }
}

TEST_P(ElementwiseTest, DoublingWithoutTheLastLine) {
  for (const Shape& shape : {Shape{2, 4, 3, 64}, Shape{3, 1, 4, 5}}) {
    const Array x = Random(shape), doubled = reference::Resample2x(Resample::kNearestUp, x);
    const Tensor device = Upload(x);
    for (const auto& [less_high, less_wide] : {std::pair{1, 0}, {0, 1}, {1, 1}}) {
      Array expected({shape[0], 2 * shape[1] - less_high, 2 * shape[2] - less_wide, shape[3]});
      int64_t at = 0;
      for (int64_t n = 0; n < shape[0]; ++n)
        for (int64_t h = 0; h < expected.shape[1]; ++h)
          for (int64_t w = 0; w < expected.shape[2]; ++w)
            for (int64_t c = 0; c < shape[3]; ++c, ++at) expected.at(at) = doubled.at(n, h, w, c);
      const Tensor out = Output(expected.shape);
      backend().Resample2x(Resample::kNearestUp, device, out);
      EXPECT_LT(Error(Read(out), expected), Tolerance(1e-6)) << shape.ToString();
    }
  }
}

TEST_P(ElementwiseTest, Add) {
  for (int i = 0; i < 40; ++i) {
    const Shape shape = {RandomInt(1, 3), RandomInt(1, 40), RandomInt(1, 300)};
    const auto dtype = [&] { return Coin() ? DType::kF32 : activation(); };
    const DType a_dtype = dtype(), b_dtype = dtype();
    const Array a = Random(shape, a_dtype), b = Coin() ? Random(shape, b_dtype) : Array();
    const float scale = Coin() ? 1.0f : -1.5f, shift = Coin() ? 0.0f : 0.25f;
    const Activation activation = kActivations[RandomInt(0, std::size(kActivations) - 1)];
    const Tensor out = Output(shape, dtype());
    backend().Add(Upload(a, a_dtype), scale, b.defined() ? Upload(b, b_dtype) : Tensor(), shift,
                  activation, out);
    Array expected(shape);
    for (int64_t e = 0; e < shape.elements(); ++e) {
      const double sum = a.at(e) * scale + (b.defined() ? b.at(e) : 0) + shift;
      expected.at(e) = reference::Activate(activation, sum);
    }
    EXPECT_LT(Error(Read(out), expected), Tolerance(1e-6)) << i << ": " << shape.ToString();
  }
}

TEST_P(ElementwiseTest, DivideRows) {
  for (const Shape& shape : {Shape{3, 8, 8, 16}, Shape{2, 5, 3, 1}}) {
    for (DType out_dtype : {DType::kF32, activation()}) {
      const Array x = Random(shape);
      Array divisor({shape[0]});
      for (int64_t n = 0; n < shape[0]; ++n) divisor.at(n) = static_cast<float>(0.3 * (n + 1));
      const Tensor out = Output(shape, out_dtype);
      backend().DivideRows(Upload(x), Upload(divisor, DType::kF32), out);
      Array expected(shape);
      const int64_t row = shape.elements() / shape[0];
      for (int64_t i = 0; i < shape.elements(); ++i) expected.at(i) = x.at(i) / divisor.at(i / row);
      EXPECT_LT(Error(Read(out), expected), Tolerance(1e-6)) << shape.ToString();
      divisor.at(1) *= 1.1;
      for (int64_t i = row; i < 2 * row; ++i) expected.at(i) = x.at(i) / divisor.at(1);
      EXPECT_GT(Error(Read(out), expected), Tolerance(1e-6)) << "the test must be able to fail";
    }
  }
}

TEST_P(ElementwiseTest, ActivationsOverTheirWholeRange) {
  // From where exponentials underflow to where they overflow.
  Array x({1, 4001});
  for (int64_t i = 0; i <= 4000; ++i) x.at(i) = static_cast<float>((i - 2000) * 0.06);
  for (Activation activation : kActivations) {
    const Tensor out = Output(x.shape, DType::kF32);
    backend().Add(Upload(x, DType::kF32), 1, {}, 0, activation, out);
    const Array actual = Read(out);
    for (int64_t i = 0; i <= 4000; ++i) {
      const double expected = reference::Activate(activation, x.at(i));
      // Measured below 1e-6 relative on the CPU; where GELU's 1 + erf cancels, 1e-6 remains.
      EXPECT_NEAR(actual.at(i), expected, 4e-6 * std::fabs(expected) + 1e-6)
          << static_cast<int>(activation) << " of " << x.at(i);
    }
  }
}

TEST_P(LinearTest, Gated) {
  struct {
    Shape tokens;
    int64_t in, features;
  } shapes[] = {{{2, 9}, 320, 1280}, {{1, 300}, 64, 256}, {{3, 5}, 40, 13},
                {{2, 70}, 24, 40},   {{4}, 48, 64},       {{1, 1}, 1, 1}};
  for (const auto& s : shapes) {
    const auto with = [&](int64_t last) {
      std::vector<int64_t> dims;
      for (int i = 0; i < s.tokens.rank(); ++i) dims.push_back(s.tokens[i]);
      dims.push_back(last);
      return Shape(dims);
    };
    const Array x = Random(with(s.in));
    const Array weight =
        Random({2 * s.features, s.in}, activation(), 1 / std::sqrt(static_cast<double>(s.in)));
    const Array bias = Coin() ? Random({2 * s.features}, DType::kF32) : Array();
    const auto packed = PackGatedLinear(weight, bias);
    const Tensor out = Output(with(s.features));
    backend().Linear({.x = Upload(x),
                      .weight = packed.get(),
                      .epilogue = {.ungated = Output(with(2 * s.features))},
                      .out = out});
    const Array linear = reference::Linear({}, x, weight, bias, {});
    // Values and gates are rounded to bf16, then their product: thrice the error of one rounding.
    EXPECT_LT(Error(Read(out), reference::GegluGate(linear, out.shape())),
              3 * Tolerance(kTolerance))
        << out.shape().ToString() << " of " << s.in;
    Array swapped = linear;
    for (int64_t i = 0; i < out.elements(); ++i) {
      const int64_t value = i / s.features * 2 * s.features + i % s.features;
      std::swap(swapped.at(value), swapped.at(value + s.features));
    }
    EXPECT_GT(Error(Read(out), reference::GegluGate(swapped, out.shape())),
              6 * Tolerance(kTolerance))
        << "the test must be able to fail";
  }
}

TEST_P(ElementwiseTest, NearestCode) {
  for (const auto& [codes, channels] :
       {std::pair<int64_t, int64_t>{1, 3}, {24, 3}, {300, 2}, {8192, 3}, {77, 4}, {40, 37}}) {
    const Array x = Random({2, 7, 5, channels}, DType::kF32);
    const Array codebook = Random({codes, channels}, activation());
    const Tensor out = Output(x.shape);
    backend().NearestCode(Upload(x, DType::kF32), Upload(codebook, DType::kF32), out);
    EXPECT_EQ(Error(Read(out), reference::NearestCode(x, codebook)), 0) << codes << " codes";
  }
}

TEST_P(ElementwiseTest, NearestCodeTakesTheFirstOfEquals) {
  // Codes at equal distances from 0, which differ in sign alone, and codes that are the same.
  constexpr int64_t kCodes = 1001;
  Array codebook({kCodes, 1}), x({1, 1, 1, 1});
  for (int64_t i = 0; i < kCodes; ++i) codebook.at(i) = i < 137 ? 2 : i % 2 == 0 ? -1 : 1;
  const Tensor out = Output(x.shape);
  backend().NearestCode(Upload(x, DType::kF32), Upload(codebook, DType::kF32), out);
  EXPECT_EQ(Read(out).at(0), 1) << "that of the code 137";
}

TEST_P(ElementwiseTest, Gaussian) {
  for (const Shape& shape : {Shape{2, 8, 8, 4}, Shape{3, 5, 3, 16}, Shape{1, 1, 1, 1}}) {
    const int64_t channels = shape[-1];
    // Logarithms of variances beyond both ends of the clamp.
    const Array moments = Random({shape[0], shape[1], shape[2], 2 * channels}, DType::kF32, 15);
    const Array scale = Random({channels}, DType::kF32, 0.2, 1),
                shift = Random({channels}, DType::kF32);
    for (const bool noisy : {false, true}) {
      const Array noise = noisy ? Random(shape, DType::kF32) : Array();
      GaussianArgs args{.moments = Upload(moments, DType::kF32),
                        .scale = Upload(scale, DType::kF32),
                        .shift = Upload(shift, DType::kF32),
                        .out = Output(shape, DType::kF32)};
      if (noisy) args.noise = Upload(noise, DType::kF32);
      backend().Gaussian(args);
      const Array actual = Read(args.out);
      const Array expected = reference::Gaussian(moments, noise, scale, shift, shape);
      for (int64_t i = 0; i < shape.elements(); ++i) {  // they differ by powers of ten
        EXPECT_NEAR(actual.at(i), expected.at(i), 1e-6 * std::fabs(expected.at(i)) + 2e-5) << i;
      }
    }
  }
}

TEST_P(ElementwiseTest, CopyIntoColumns) {
  for (const DType dtype : {DType::kF32, activation()}) {
    for (const int64_t before : {0, 3, 8}) {
      const Array from = Random({3, 5, 16}, dtype), to = Random({3, 5, 30}, dtype);
      const Tensor wide = Upload(to, dtype);
      backend().Copy(Upload(from, dtype), wide.Columns(before, 16));
      Array expected = to;
      for (int64_t i = 0; i < 3 * 5 * 16; ++i) {
        expected.at(i / 16 * 30 + before + i % 16) = from.at(i);
      }
      EXPECT_EQ(Error(Read(wide), expected), 0);
    }
    const Array from = Random({3, 5, 16}, dtype);
    const Tensor to = Output({15, 16}, dtype);
    backend().Copy(Upload(from, dtype), to);
    Array expected({15, 16});
    expected.values = from.values;
    EXPECT_EQ(Error(Read(to), expected), 0);
  }
}

TEST_P(ElementwiseTest, AddMayWriteOverItsOperands) {
  const Array a = Random({2, 100}), b = Random({2, 100});
  const Tensor to_a = Upload(a), to_b = Upload(b);
  backend().Add(to_a, 2, to_b, 0, Activation::kNone, to_a);
  Array expected(a.shape);
  for (int64_t i = 0; i < 200; ++i) expected.at(i) = 2 * a.at(i) + b.at(i);
  EXPECT_LT(Error(Read(to_a), expected), Tolerance(1e-6));
}

DENOISED_ON_EACH_BACKEND(ElementwiseTest);

}  // namespace
}  // namespace denoised
