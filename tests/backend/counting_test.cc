// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/counting.h"

#include <gtest/gtest.h>

#include "engine/core/arena.h"

namespace denoised {
namespace {

Tensor Host(const Shape& shape, DType dtype = DType::kF32) { return Tensor::Host(shape, dtype); }

class CountingTest : public testing::Test {
 protected:
  CountingBackend backend_{Device::kCuda, DType::kBF16};
  Arena arena_ = Arena::Measuring(Device::kCuda);
  Tensor New(const Shape& shape, DType dtype = DType::kBF16) { return arena_.New(shape, dtype); }
};

TEST_F(CountingTest, ConvolutionsAndTheirBytes) {
  auto packed = backend_.PackConv2d(Host({64, 48, 3, 3}), Host({64}), true);
  ASSERT_TRUE(packed.ok()) << packed.status();
  EXPECT_EQ(backend_.weight_bytes(), 64u * 48 * 16 * 2 + 64 * 4) << "four kernels of 2×2";
  const Tensor x = New({2, 8, 8, 32}), x2 = New({2, 8, 8, 16}), out = New({2, 16, 16, 64});
  backend_.Conv2d({.x = x,
                   .weight = packed->get(),
                   .pad_top = 1,
                   .pad_left = 1,
                   .pad_bottom = 1,
                   .pad_right = 1,
                   .prologue = {.x2 = x2, .upsample2x = true},
                   .out = out});
  EXPECT_EQ(backend_.work().flops, 2.0 * 2 * 16 * 16 * 64 * 48 * 9);
  EXPECT_EQ(backend_.work().bytes, 2.0 * (2 * 8 * 8 * 48 + 64 * 48 * 9 + 2 * 16 * 16 * 64));
  EXPECT_EQ(backend_.work().ops, 1);
}

TEST_F(CountingTest, AShortcutBelongsToItsConvolution) {
  auto packed = backend_.PackConv2d(Host({64, 64, 3, 3}), {}, false);
  auto shortcut = backend_.PackConv2d(Host({64, 48, 1, 1}), {}, false);
  ASSERT_TRUE(packed.ok() && shortcut.ok());
  Conv2dArgs args{.x = New({2, 8, 8, 64}), .weight = packed->get()};
  args.pad_top = args.pad_left = args.pad_bottom = args.pad_right = 1;
  args.epilogue.shortcut = {
      .x = New({2, 8, 8, 32}), .x2 = New({2, 8, 8, 16}), .weight = shortcut->get()};
  args.out = New({2, 8, 8, 64});
  backend_.Conv2d(args);
  const double inputs = 64 * 9 + 48, pixels = 2 * 8 * 8;
  EXPECT_EQ(backend_.work().flops, 2 * pixels * 64 * inputs);
  EXPECT_EQ(backend_.work().bytes, 2 * (pixels * (64 + 48 + 64) + 64 * inputs));
  EXPECT_EQ(backend_.work().ops, 1);
}

TEST_F(CountingTest, LayersInE4m3) {
  const E4m3Layer e4m3 = {.input_scale = 1};
  const auto packed = backend_.PackConv2d(Host({64, 40, 3, 3}), Host({64}), false, e4m3);
  const auto linear = backend_.PackLinear({Host({32, 16})}, {}, e4m3);
  ASSERT_TRUE(packed.ok() && linear.ok());
  EXPECT_EQ(backend_.weight_bytes(), 64u * 40 * 9 + 64 * 4 + 64 * 4 + 32 * 16 + 32 * 4);
  EXPECT_EQ((*packed)->rounded_bytes, 48);
  EXPECT_EQ((*linear)->rounded_bytes, 16);
  Conv2dArgs args{.x = New({2, 6, 6, 40}), .weight = packed->get(), .out = New({2, 4, 4, 64})};
  EXPECT_DEATH(backend_.Conv2d(args), "rounded is undefined");
  args.prologue.rounded = New({2, 6, 6, 48}, DType::kU8);
  backend_.Conv2d(args);
  EXPECT_EQ(backend_.work().ops, 1);
  LinearArgs tokens{.x = New({2, 5, 16}), .weight = linear->get(), .out = New({2, 5, 32})};
  tokens.prologue.rounded = New({2, 5, 32}, DType::kU8);
  EXPECT_DEATH(backend_.Linear(tokens), "rounded is \\[2, 5, 32\\], must be \\[2, 5, 16\\]");
  CountingBackend on_cpu(Device::kCpu, DType::kF32);
  EXPECT_EQ(on_cpu.PackLinear({Host({32, 16})}, {}, e4m3).value()->rounded_bytes, 0);
  // Over doubled images: four weights for each output.
  const size_t before = backend_.weight_bytes(), before_on_cpu = on_cpu.weight_bytes();
  for (CountingBackend* backend : {&backend_, &on_cpu})
    ASSERT_TRUE(backend->PackConv2d(Host({64, 40, 3, 3}), {}, /*upsample2x=*/true, e4m3).ok());
  EXPECT_EQ(backend_.weight_bytes() - before, 64u * 40 * 16 + 64 * 4);
  EXPECT_EQ(on_cpu.weight_bytes() - before_on_cpu, 4u * 64 * 40 * 9 * sizeof(float));
}

TEST_F(CountingTest, ReadersInE4m3) {
  const E4m3Layer e4m3 = {.input_scale = 1};
  const auto linear = backend_.PackLinear({Host({32, 16})}, {}, e4m3).value(),
             wide = backend_.PackLinear({Host({32, 16})}, {}).value(),
             gated = backend_.PackLinear({Host({32, 16})}, {}, e4m3, /*gated=*/true).value();
  const auto conv = backend_.PackConv2d(Host({16, 16, 1, 1}), {}, false, e4m3).value();

  // Layers whose input is in e4m3 already.
  const LinearArgs reads{
      .x = New({2, 5, 16}, DType::kU8), .weight = linear.get(), .out = New({2, 5, 32})};
  backend_.Linear(reads);
  EXPECT_EQ(backend_.work().flops, 2.0 * 2 * 5 * 16 * 32);
  EXPECT_EQ(backend_.work().bytes, 2 * 5 * 16 + 2.0 * (16 * 32 + 2 * 5 * 32));
  LinearArgs args = reads;
  args.weight = wide.get();
  EXPECT_DEATH(backend_.Linear(args), "or of a layer that does not multiply in it");
  args = reads;
  args.prologue.norm = {.gamma = New({16}, DType::kF32), .groups = 0};
  EXPECT_DEATH(backend_.Linear(args), "an input in e4m3 before a norm");
  args = reads;
  args.x = New({2, 5, 32}, DType::kU8);
  EXPECT_DEATH(backend_.Linear(args), "x is \\[2, 5, 32\\], must be \\[2, 5, 16\\]");
  Conv2dArgs convolves{
      .x = New({2, 4, 4, 16}, DType::kU8), .weight = conv.get(), .out = New({2, 4, 4, 16})};
  backend_.ResetWork();
  backend_.Conv2d(convolves);
  EXPECT_EQ(backend_.work().bytes, 2 * 4 * 4 * 16 + 2.0 * (16 * 16 + 2 * 4 * 4 * 16));
  convolves.prologue.x2 = New({2, 4, 4, 16});
  EXPECT_DEATH(backend_.Conv2d(convolves), "an input in e4m3 before a norm, beside another");
  convolves.prologue.x2 = Tensor();
  convolves.x = New({2, 4, 4, 32}, DType::kU8);
  EXPECT_DEATH(backend_.Conv2d(convolves), "x is \\[2, 4, 4, 32\\], must be \\[2, 4, 4, 16\\]");

  // Ops that write it.
  const E4m3Reader reader = {.rounded = New({2, 5, 16}, DType::kU8), .scale = 1};
  LinearArgs gates{.x = reads.x,
                   .weight = gated.get(),
                   .epilogue = {.ungated = New({2, 5, 32}), .reader = reader},
                   .out = New({2, 5, 16})};
  backend_.ResetWork();
  backend_.Linear(gates);
  EXPECT_EQ(backend_.work().bytes, 2 * 5 * (16 + 16) + 2.0 * 16 * 32);
  const Tensor q = New({2, 5, 16});
  AttentionArgs attends{.q = q, .k = q, .v = q, .out = New({2, 5, 16}), .reader = reader};
  backend_.ResetWork();
  backend_.Attention(attends);
  EXPECT_EQ(backend_.work().bytes, 2 * 5 * 16 * (3 * 2 + 1));
  gates.epilogue.reader.rounded = gates.x;
  EXPECT_DEATH(backend_.Linear(gates), "the reader's memory is that of the layer's own input");
  gates.epilogue.reader = attends.reader = {.rounded = New({2, 5, 32}, DType::kU8), .scale = 1};
  EXPECT_DEATH(backend_.Linear(gates), "reader is \\[2, 5, 32\\], must be \\[2, 5, 16\\]");
  EXPECT_DEATH(backend_.Attention(attends), "reader is \\[2, 5, 32\\], must be \\[2, 5, 16\\]");
  gates.epilogue.reader = attends.reader = {.rounded = reader.rounded, .scale = 0};
  EXPECT_DEATH(backend_.Linear(gates), "a reader with the scale 0");
  EXPECT_DEATH(backend_.Attention(attends), "a reader with the scale 0");
  args = reads;
  args.epilogue.reader = {.rounded = New({2, 5, 32}, DType::kU8), .scale = 1};
  EXPECT_DEATH(backend_.Linear(args), "a reader without a gate");
  convolves.x = New({2, 4, 4, 16}, DType::kU8);
  convolves.epilogue.reader = {.rounded = New({2, 4, 4, 16}, DType::kU8), .scale = 1};
  EXPECT_DEATH(backend_.Conv2d(convolves), "a convolution with a gate or a reader");
}

TEST_F(CountingTest, LinearsAndAttention) {
  auto packed = backend_.PackLinear({Host({32, 16}), Host({8, 16})}, {Host({32}), Host({8})});
  ASSERT_TRUE(packed.ok()) << packed.status();
  EXPECT_EQ((*packed)->out_features, 40);
  backend_.Linear({.x = New({3, 5, 16}), .weight = packed->get(), .out = New({3, 5, 40})});
  EXPECT_EQ(backend_.work().flops, 2.0 * 3 * 5 * 16 * 40);
  backend_.ResetWork();
  backend_.Attention({.q = New({2, 10, 32}),
                      .k = New({2, 6, 32}),
                      .v = New({2, 6, 32}),
                      .heads = 4,
                      .out = New({2, 10, 32})});
  EXPECT_EQ(backend_.work().flops, 2 * 2.0 * 2 * 10 * 6 * 32);
  backend_.ResetWork();  // with a key set: of the rows, not of the sets
  const Tensor sets = New({9, 6, 32});
  backend_.Attention({.q = New({2, 10, 32}),
                      .k = sets,
                      .v = sets,
                      .key_set = New({2}, DType::kI32),
                      .heads = 4,
                      .out = New({2, 10, 32})});
  EXPECT_EQ(backend_.work().flops, 2 * 2.0 * 2 * 10 * 6 * 32);
}

TEST_F(CountingTest, OpsBoundByMemory) {
  const auto bytes = [&](const std::function<void()>& op) {
    backend_.ResetWork();
    op();
    EXPECT_EQ(backend_.work().ops, 1);
    return backend_.work().bytes;
  };
  const Tensor x = New({2, 5, 16}), channels = New({16}, DType::kF32);
  EXPECT_EQ(
      bytes([&] { backend_.LayerNorm({.x = x, .gamma = channels, .beta = channels, .out = x}); }),
      2 * 160 * 2 + 2 * 16 * 4);
  const auto gated = backend_.PackLinear({Host({24, 16})}, {}, {}, /*gated=*/true);
  ASSERT_TRUE(gated.ok()) << gated.status();
  EXPECT_EQ(bytes([&] {
              backend_.Linear({.x = x,
                               .weight = gated->get(),
                               .epilogue = {.ungated = New({2, 5, 24})},
                               .out = New({2, 5, 12})});
            }),
            (160 + 24 * 16 + 120) * 2);
  EXPECT_EQ(backend_.work().flops, 2.0 * 10 * 16 * 24);
  const Tensor pixels = New({2, 5, 16}, DType::kF32);
  EXPECT_EQ(bytes([&] {
              backend_.NearestCode(pixels, New({7, 16}, DType::kF32), x);
            }),
            160 * 4 + 7 * 16 * 4 + 160 * 2);
  EXPECT_EQ(backend_.work().flops, 3.0 * 160 * 7);
  EXPECT_EQ(bytes([&] {
              backend_.Gaussian({.moments = New({2, 5, 32}, DType::kF32),
                                 .noise = pixels,
                                 .scale = channels,
                                 .shift = channels,
                                 .out = pixels});
            }),
            (320 + 160 + 160 + 2 * 16) * 4);
}

TEST_F(CountingTest, ANormOfTheInputIsAnOp) {
  auto packed = backend_.PackConv2d(Host({64, 48, 1, 1}), {}, false);
  ASSERT_TRUE(packed.ok()) << packed.status();
  const Tensor channels = New({48}, DType::kF32);
  Conv2dArgs args{.x = New({2, 8, 8, 32}),
                  .weight = packed->get(),
                  .prologue = {.x2 = New({2, 8, 8, 16}),
                               .norm = {.gamma = channels, .beta = channels, .groups = 8},
                               .normed = New({2, 8, 8, 48})},
                  .out = New({2, 8, 8, 64})};
  backend_.Conv2d(args);
  EXPECT_EQ(backend_.work().ops, 2);
  EXPECT_EQ(backend_.work().flops, 2.0 * 2 * 8 * 8 * 64 * 48);
  EXPECT_EQ(backend_.work().bytes,
            2.0 * (2 * 8 * 8 * (3 * 48 + 64) + 64 * 48) + 2 * 48 * sizeof(float));
}

TEST_F(CountingTest, AGraphCountsAtEachLaunch) {
  const Tensor a = New({4, 100});
  auto graph = backend_.Capture([&] { backend_.Add(a, 1, {}, 0, Activation::kSilu, a); });
  ASSERT_TRUE(graph.ok());
  EXPECT_EQ(backend_.work().ops, 0);
  backend_.Launch(**graph);
  backend_.Launch(**graph);
  EXPECT_EQ(backend_.work().ops, 2);
  EXPECT_EQ(backend_.work().bytes, 2.0 * 2 * 400 * 2);
}

TEST_F(CountingTest, AllocatesNothingAndSaysHowMuch) {
  auto tensor = backend_.Allocate({1 << 20, 1 << 20}, DType::kF32, "a test");
  ASSERT_TRUE(tensor.ok());
  EXPECT_EQ(backend_.allocated_bytes(), size_t{1} << 42);
  EXPECT_EQ(tensor->device(), Device::kCuda);
  EXPECT_EQ(backend_.BeginDownload(*tensor)->Wait().status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(CountingTest, RefusesTheWeightsThatBackendsRefuse) {
  EXPECT_EQ(backend_.PackConv2d(Host({4, 3, 3, 1}), {}, false).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(backend_.PackLinear({Host({4, 3}), Host({4, 2})}, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

using CountingDeathTest = CountingTest;

TEST_F(CountingDeathTest, ChecksWhatBackendsCheck) {
  auto packed = backend_.PackConv2d(Host({64, 48, 3, 3}), {}, false);
  const Tensor x = New({2, 8, 8, 48});
  EXPECT_DEATH(backend_.Conv2d({.x = x, .weight = packed->get(), .out = New({2, 8, 8, 64})}),
               "out is \\[2, 8, 8, 64\\], must be \\[2, 6, 6, 64\\]");
  EXPECT_DEATH(backend_.Conv2d({.x = New({2, 8, 8, 40}), .weight = packed->get(), .out = x}),
               "x has 40 channels, the weight 48");
  EXPECT_DEATH(
      backend_.Conv2d({.x = New({2, 8, 8, 48}, DType::kF32), .weight = packed->get(), .out = x}),
      "x is F32, must be BF16");
  auto shortcut = backend_.PackConv2d(Host({48, 16, 1, 1}), {}, false);
  Conv2dArgs args{.x = x, .weight = packed->get(), .out = New({2, 6, 6, 64})};
  args.epilogue.shortcut = {.x = New({2, 6, 6, 16}), .weight = shortcut->get()};
  EXPECT_DEATH(backend_.Conv2d(args), "a kernel of 1 and 48 outputs, must be 1 and 64");
  auto fitting = backend_.PackConv2d(Host({64, 16, 1, 1}), {}, false);
  args.epilogue.shortcut.weight = fitting->get();
  args.epilogue.shortcut.x = New({2, 8, 8, 16});
  EXPECT_DEATH(backend_.Conv2d(args), "shortcut.x is \\[2, 8, 8, 16\\], must be \\[2, 6, 6, 16\\]");
  args.epilogue.shortcut.x = New({2, 6, 6, 8});
  EXPECT_DEATH(backend_.Conv2d(args), "the shortcut has 8 channels, its weight 16");
  args.epilogue.shortcut.x = New({2, 6, 6, 16});
  auto biased = backend_.PackConv2d(Host({64, 16, 1, 1}), Host({64}), false);
  args.epilogue.shortcut.weight = biased->get();
  EXPECT_DEATH(backend_.Conv2d(args), "a shortcut with a bias");
  args.epilogue.residual = New({2, 6, 6, 64});
  EXPECT_DEATH(backend_.Conv2d(args), "both a residual and a shortcut");
  EXPECT_DEATH(backend_.Add(Host({4}), 1, {}, 0, Activation::kNone, New({4})), "wrong device");
  EXPECT_DEATH(backend_.Resample2x(Resample::kNearestUp, x, New({2, 16, 8, 48})), "out is");
  EXPECT_DEATH(backend_.LayerNorm({.x = New({2, 16}), .gamma = New({8}, DType::kF32)}),
               "gamma is \\[8\\], must be \\[16\\]");
  const auto gated = backend_.PackLinear({Host({32, 8})}, {}, {}, /*gated=*/true);
  ASSERT_TRUE(gated.ok()) << gated.status();
  LinearArgs linear{.x = New({2, 8}), .weight = gated->get(), .out = New({2, 32})};
  linear.epilogue.ungated = New({2, 32});
  EXPECT_DEATH(backend_.Linear(linear), "out is \\[2, 32\\], must be");
  linear.epilogue.activation = Activation::kSilu;
  EXPECT_DEATH(backend_.Linear(linear), "a gate beside another epilogue");
  Conv2dArgs normed{.x = x, .weight = packed->get(), .out = New({2, 6, 6, 64})};
  normed.prologue.norm = {.gamma = New({48}, DType::kF32), .beta = New({48}, DType::kF32)};
  EXPECT_DEATH(backend_.Conv2d(normed), "48 channels in 32 groups");
  normed.prologue.norm.groups = 8;
  EXPECT_DEATH(backend_.Conv2d(normed), "out is undefined");
  normed.prologue.norm = {};
  Norm after{.gamma = New({48}, DType::kF32), .groups = 8};
  normed.epilogue.norm = &after;
  EXPECT_DEATH(backend_.Conv2d(normed), "gamma is \\[48\\], must be \\[64\\]");
  EXPECT_DEATH(backend_.NearestCode(New({2, 3}), New({9, 3}, DType::kF32), New({2, 3})),
               "x is BF16, must be F32");
  EXPECT_DEATH(
      backend_.Gaussian({.moments = New({2, 8}, DType::kF32), .out = New({2, 8}, DType::kF32)}),
      "moments is \\[2, 8\\], must be \\[2, 16\\]");
  const Tensor q = New({2, 8, 32}), sets = New({5, 8, 32});
  EXPECT_DEATH(backend_.Attention({.q = q, .k = sets, .v = sets, .out = q}), "k is");
  EXPECT_DEATH(backend_.Attention(
                   {.q = q, .k = sets, .v = sets, .key_set = New({5}, DType::kI32), .out = q}),
               "key_set is \\[5\\], must be \\[2\\]");
  EXPECT_DEATH(
      backend_.Attention({.q = q, .k = q, .v = q, .key_counts = New({5}, DType::kI32), .out = q}),
      "key_counts is \\[5\\], must be \\[2\\]");
  EXPECT_DEATH(backend_.Attention({.q = x, .k = x, .v = x, .out = x}), "must have 3 dimensions");
}

}  // namespace
}  // namespace denoised
