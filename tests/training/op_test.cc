// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <map>

#include "engine/io/safetensors.h"
#include "engine/nn/layers.h"
#include "engine/training/backend.h"
#include "engine/training/random.h"
#include "tests/models/golden.h"
#include "tests/training/backends.h"
#include "tests/training/op_fixture.h"

namespace denoised::training {
namespace {

class OpTest : public OpFixture {
 protected:
  /// After an op whose losses are "out": `sum` is theirs, times `scale`.
  void ExpectSumOfLosses(const Tensor& sum, float scale) {
    double expected = 0;
    for (const float loss : Values(outputs_["out"])) expected += scale * loss;
    EXPECT_NEAR(Values(sum)[0], expected, std::abs(expected) * 1e-6);
  }
  OpTest() : OpFixture("ops") {}
};
INSTANTIATE_TEST_SUITE_P(Backends, OpTest, testing::ValuesIn(kBackends),
                         [](const auto& instance) { return instance.param; });

TEST_P(OpTest, Conv2d) {
  Run(
      "conv2d",
      [&](const nlohmann::json& golden) {
        const Tensor weight = Parameter("weight"), bias = Parameter("bias");
        const auto pads = golden["pads"].get<std::vector<int>>();
        const Conv2dGeometry geometry{golden["stride"], pads[0], pads[1], pads[2], pads[3]};
        const auto packed = backend_->NewConv2d(weight.dim(1), weight.dim(0), weight.dim(2),
                                                golden["upsample"].get<bool>(), geometry);
        backend_->PackConv2d(weight, bias, packed.get());
        const float scale = golden["scale"];
        backend_->Conv2d({.x = In("x"),
                          .weight = packed.get(),
                          .geometry = geometry,
                          .add = In("add"),
                          .residual = In("residual"),
                          .scale = scale,
                          .out = Out("out")});
        const Tensor dout = Scaled(In("dout"), scale);
        backend_->Conv2dBackward({.x = In("x"),
                                  .weight = packed.get(),
                                  .geometry = geometry,
                                  .dout = dout,
                                  .dx = Out("dx"),
                                  .dweight = OutF32("dweight"),
                                  .dbias = OutF32("dbias")});
        if (Golden("dadd")) backend_->SumPixels(dout, Out("dadd"));
        if (Golden("dresidual")) outputs_["dresidual"] = dout;
      },
      [](nlohmann::json& golden) { golden["scale"] = golden["scale"].get<float>() * 1.0001f; }, 8);
}

TEST_P(OpTest, Conv2dFollowsNewWeights) {
  const Tensor x = Activations({1, 2, 2, 1}, {1, 2, 3, 4});
  const auto packed = backend_->NewConv2d(1, 1, 1, false, {});
  const Tensor weight = NewF32({1, 1, 1, 1});
  Tensor out = New({1, 2, 2, 1}), dx = New({1, 2, 2, 1});
  for (const float value : {2.0f, -3.0f}) {
    backend_->Upload(&value, sizeof value, weight);
    backend_->PackConv2d(weight, Tensor(), packed.get());
    backend_->Conv2d({.x = x, .weight = packed.get(), .out = out});
    backend_->Conv2dBackward({.weight = packed.get(), .dout = x, .dx = dx});
    EXPECT_THAT(Values(out), testing::ElementsAre(value, 2 * value, 3 * value, 4 * value));
    EXPECT_THAT(Values(dx), testing::ElementsAre(value, 2 * value, 3 * value, 4 * value));
  }
}

TEST_P(OpTest, Linear) {
  Run(
      "linear",
      [&](const nlohmann::json& golden) {
        const auto parts = golden["parts"].get<std::vector<int>>();
        std::vector<Tensor> weights, biases, dweights, dbiases;
        for (size_t i = 0; i < parts.size(); ++i) {
          weights.push_back(Parameter(fmt::format("weight{}", i)));
          dweights.push_back(OutF32(fmt::format("dweight{}", i)));
          if (!golden["bias"].get<bool>()) continue;
          biases.push_back(Parameter(fmt::format("bias{}", i)));
          dbiases.push_back(OutF32(fmt::format("dbias{}", i)));
        }
        const auto packed = backend_->NewLinear(Golden("x").dim(-1), parts);
        backend_->PackLinear(weights, biases, packed.get());
        const float scale = golden["scale"];
        backend_->Linear({.x = In("x"),
                          .weight = packed.get(),
                          .residual = In("residual"),
                          .scale = scale,
                          .out = Out("out")});
        const Tensor dout = Scaled(In("dout"), scale);
        if (Golden("residual")) outputs_["dresidual"] = dout;
        backend_->LinearBackward({.x = In("x"),
                                  .weight = packed.get(),
                                  .dout = dout,
                                  .dx = Out("dx"),
                                  .dweights = dweights,
                                  .dbiases = dbiases});
        // The same with something to add, in place.
        const Tensor sum = New(Golden("x").shape(), 1);
        backend_->LinearBackward(
            {.x = In("x"), .weight = packed.get(), .dout = dout, .add = sum, .dx = sum});
        backend_->Add(sum, 1, Tensor(), 0, -1, sum);
        EXPECT_LE(RelativeError(Values(sum), Values(outputs_["dx"])), 3 * tolerance());
      },
      [](nlohmann::json& golden) { golden["scale"] = golden["scale"].get<float>() * 1.0001f; }, 4);
}

TEST_P(OpTest, ALinearsRowHasTheSameBitsInAnyPlace) {
  struct Case {
    int rows, in, out;
    std::vector<int> parts;  // rows
  };
  const auto normal = [](uint64_t seed, int64_t count) {
    std::vector<float> values(count);
    for (int64_t i = 0; i < count; ++i) values[i] = PhiloxNormal(seed, 0, i / 4).v[i % 4];
    return values;
  };
  const auto rows_of = [](const std::vector<float>& of_all, int first, int rows, int columns) {
    return std::vector<float>(of_all.begin() + int64_t{first} * columns,
                              of_all.begin() + int64_t{first + rows} * columns);
  };
  // oneDNN has another kernel for products as large as the second.
  for (const Case& c : {Case{101, 40, 72, {1, 7, 12, 13, 48, 49, 100}},
                        Case{600, 512, 512, {1, 24, 241, 300, 599}}}) {
    const auto x = normal(1, c.rows * c.in), dout = normal(2, c.rows * c.out);
    const Tensor weight = OnDevice(*backend_, {c.out, c.in}, normal(3, c.out * c.in), DType::kF32);
    const Tensor bias = OnDevice(*backend_, {c.out}, normal(4, c.out), DType::kF32);
    const auto packed = backend_->NewLinear(c.in, {c.out});
    backend_->PackLinear({weight}, {bias}, packed.get());
    const auto run = [&](int first, int rows) {
      const Tensor in = Activations({rows, c.in}, rows_of(x, first, rows, c.in));
      const Tensor out = New({rows, c.out}), dx = New({rows, c.in});
      backend_->Linear({.x = in, .weight = packed.get(), .out = out});
      const Tensor d = Activations({rows, c.out}, rows_of(dout, first, rows, c.out));
      backend_->LinearBackward({.x = in, .weight = packed.get(), .dout = d, .dx = dx});
      return std::pair(Values(out), Values(dx));
    };
    const auto [out, dx] = run(0, c.rows);
    for (const int rows : c.parts) {
      for (const int first : {0, c.rows - rows}) {
        const auto [part_out, part_dx] = run(first, rows);
        EXPECT_TRUE(part_out == rows_of(out, first, rows, c.out)) << rows << " from " << first;
        EXPECT_TRUE(part_dx == rows_of(dx, first, rows, c.in)) << rows << " from " << first;
      }
    }
  }
}

TEST_P(OpTest, GroupNorm) {
  Run(
      "group_norm",
      [&](const nlohmann::json& golden) {
        Tensor x = In("x"), dout = In("dout"), dx = Out("dx"), out = Out("out");
        if (golden["tokens"].get<bool>()) {
          const auto tokens = [](Tensor& t) { t = t.Reshape({t.dim(0), t.dim(1), t.dim(3)}); };
          tokens(x), tokens(dout), tokens(dx), tokens(out);
        }
        const int groups = golden["groups"];
        const GroupNormArgs forward{.x = x,
                                    .gamma = Parameter("gamma"),
                                    .beta = Parameter("beta"),
                                    .groups = groups,
                                    .eps = golden["eps"],
                                    .scale_shift = In("scale_shift"),
                                    .activation = ActivationOf(golden),
                                    .statistics = NewF32({x.dim(0), groups, 2}),
                                    .out = out};
        backend_->GroupNorm(forward);
        GroupNormBackwardArgs backward{.forward = forward,
                                       .dout = dout,
                                       .dx = dx,
                                       .dgamma = OutF32("dgamma"),
                                       .dbeta = OutF32("dbeta")};
        if (forward.scale_shift) backward.dscale_shift = Out("dscale_shift");
        backend_->GroupNormBackward(backward);
        // In place of dout, and with a residual's gradient in place of dx.
        Tensor in_place = Scaled(dout, 1);
        backward.dout = backward.dx = in_place;
        backend_->GroupNormBackward(backward);
        EXPECT_EQ(Values(in_place), Values(dx));
        // Sums over pixels, which may cancel out, as those of a separate op.
        const int64_t rows = x.dim(0), channels = x.dim(-1);
        const Tensor sums = New({rows, channels}), expected_sums = New({rows, channels}),
                     sizes = New({rows, channels});
        backward.dout = dout;
        backward.dx = in_place;
        backward.dx_sums = sums;
        backend_->GroupNormBackward(backward);
        EXPECT_EQ(Values(in_place), Values(dx));
        backend_->SumPixels(dx, expected_sums);
        std::vector<float> absolute = Values(dx);
        for (float& value : absolute) value = std::abs(value);
        backend_->SumPixels(Activations(dx.shape(), absolute), sizes);
        for (int64_t i = 0; i < rows * channels; ++i)
          // In bf16 dx is rounded before one of the sums, and both sums are.
          EXPECT_NEAR(Values(sums)[i], Values(expected_sums)[i],
                      (bf16() ? 2 * kBf16Tolerance : 1e-6) * Values(sizes)[i]);
        backward.dx_sums = {};
        // In two parts.
        const int64_t first = channels >= 16 ? 8 : channels / 2, rest = channels - first;
        const bool tokens = golden["tokens"];
        const auto part = [&](int64_t count) {
          return tokens ? New({rows, x.dim(1), count}) : New({rows, x.dim(1), x.dim(2), count});
        };
        backward.dx = part(first);
        backward.dx_rest = part(rest);
        backend_->GroupNormBackward(backward);
        // Other bits only where the whole has vectors of eight and the parts have not.
        const bool same_bits = channels % 8 != 0 || first % 8 == 0;
        for (const auto& [of_parts, of_whole] :
             {std::pair{backward.dx, CopyOfColumns(dx, 0, first)},
              std::pair{backward.dx_rest, CopyOfColumns(dx, first, rest)}}) {
          if (same_bits) {
            EXPECT_EQ(Values(of_parts), Values(of_whole));
          }
          EXPECT_LE(RelativeError(Values(of_parts), Values(of_whole)),
                    bf16() ? kBf16Tolerance : 1e-6);
        }
        backward.dx_rest = {};
        Tensor sum = Scaled(x, 1);
        backward.dout = dout;
        backward.dx = backward.add = sum;
        backend_->GroupNormBackward(backward);
        Tensor expected = New(x.shape());
        backend_->Add(x, 1, dx, 1, 0, expected);
        EXPECT_LE(RelativeError(Values(sum), Values(expected)), bf16() ? kBf16Tolerance : 1e-6);
      },
      [](nlohmann::json& golden) { golden["eps"] = golden["eps"].get<double>() + 1e-3; }, 8,
      // dβ is the sum of the gradient behind the norm: what was normalised is not in it, but for
      // the activation's derivative. ReLU's is 0 or 1, and no z of these changes its sign.
      {.blind = [](const nlohmann::json& golden, const std::string& name) {
        return name == "dbeta" &&
               (golden["activation"] == "none" || golden["activation"] == "relu");
      }});
}

TEST_P(OpTest, Attention) {
  Run(
      "attention",
      [&](const nlohmann::json& golden) {
        // As columns of one tensor, as the fused linear makes them.
        const int64_t width = Golden("q").dim(2), n = Golden("q").dim(0), t = Golden("q").dim(1);
        const Tensor qk = New({n, t, 2 * width}), qkv = New({n, t, 3 * width});
        backend_->Concat(In("q"), In("k"), qk);
        backend_->Concat(qk, In("v"), qkv);
        const Tensor dqkv = New(qkv.shape());
        const int heads = golden["heads"];
        const AttentionArgs forward{.q = qkv.Columns(0, width),
                                    .k = qkv.Columns(width, width),
                                    .v = qkv.Columns(2 * width, width),
                                    .heads = heads,
                                    .scale = golden["scale"],
                                    .log_sum_exp = NewF32({n, heads, t}),
                                    .out = Out("out")};
        backend_->Attention(forward);
        backend_->AttentionBackward({.forward = forward,
                                     .dout = In("dout"),
                                     .dq = dqkv.Columns(0, width),
                                     .dk = dqkv.Columns(width, width),
                                     .dv = dqkv.Columns(2 * width, width)});
        outputs_["dq"] = CopyOfColumns(dqkv, 0, width);
        outputs_["dk"] = CopyOfColumns(dqkv, width, width);
        outputs_["dv"] = CopyOfColumns(dqkv, 2 * width, width);
        // Σ exp(scaled scores − log_sum_exp) is 1.
        const int64_t dim = width / heads;
        double sum = 0;
        for (int64_t j = 0; j < t; ++j) {
          double score = 0;
          for (int64_t c = 0; c < dim; ++c)
            score += Given("q", true).as<float>()[c] * Given("k", true).as<float>()[j * width + c];
          sum += std::exp(score * forward.scale - Values(forward.log_sum_exp)[0]);
        }
        EXPECT_NEAR(sum, 1, bf16() ? 2e-2 : 1e-5);
      },
      [](nlohmann::json& golden) { golden["scale"] = golden["scale"].get<float>() * 1.001f; }, 4);
}

TEST_P(OpTest, Activate) {
  Run(
      "activate",
      [&](const nlohmann::json& golden) {
        backend_->Activate(ActivationOf(golden), In("x"), Out("out"));
        backend_->ActivateBackward(ActivationOf(golden), In("x"), In("dout"), Out("dx"));
      },
      [](nlohmann::json& golden) {
        golden["activation"] = golden["activation"] == "silu" ? "mish" : "silu";
      },
      4);
}

TEST_P(OpTest, Resampling) {
  using enum Resample;
  for (const auto& [op, kind, wrong, count] : {std::tuple{"upsample2x", kNearestUp, kFirUp, 1},
                                               {"average_pool2x", kAveragePoolDown, kFirDown, 1},
                                               {"fir_up2x", kFirUp, kNearestUp, 2},
                                               {"fir_down2x", kFirDown, kAveragePoolDown, 2}}) {
    SCOPED_TRACE(op);
    Run(
        op,
        [&, kind = kind, wrong = wrong](const nlohmann::json& golden) {
          const Resample used = golden.contains("planted") ? wrong : kind;
          backend_->Resample2x(used, In("x"), 1, Out("out"));
          backend_->Resample2xBackward(used, In("dout"), Out("dx"));
        },
        Plant, count);
  }
}

/// Without a backward op: see the next test.
TEST_P(OpTest, Concat) {
  Run("concat",
      [&](const nlohmann::json& golden) {
        const bool swapped = golden.contains("planted");
        backend_->Concat(In(swapped ? "b" : "a"), In(swapped ? "a" : "b"), Out("out"));
      },
      Plant, 1, {.left_out = {"da", "db"}});
}

TEST_P(OpTest, ConcatHasItsGradientFromTheNormBehindIt) {
  Run(
      "concat_norm",
      [&](const nlohmann::json& golden) {
        const Tensor a = In("a"), b = In("b"), dout = In("dout"), x = New(dout.shape());
        backend_->Concat(a, b, x);
        const int groups = golden["groups"];
        const GroupNormArgs forward{.x = x,
                                    .gamma = Parameter("gamma"),
                                    .beta = Parameter("beta"),
                                    .groups = groups,
                                    .eps = golden.value("eps", 1e-5f),
                                    .activation = Activation::kSilu,
                                    .statistics = NewF32({x.dim(0), groups, 2}),
                                    .out = Out("out")};
        backend_->GroupNorm(forward);
        backend_->GroupNormBackward({.forward = forward,
                                     .dout = dout,
                                     .dx = Out("da"),
                                     .dx_rest = Out("db"),
                                     .dgamma = OutF32("dgamma"),
                                     .dbeta = OutF32("dbeta")});
      },
      [](nlohmann::json& golden) { golden["eps"] = 1e-3; }, 2);
}

TEST_P(OpTest, DivideRows) {
  Run("divide_rows",
      [&](const nlohmann::json& golden) {
        backend_->DivideRows(Parameter("x"), Parameter("divisor"), OutF32("out"));
        backend_->DivideRows(Parameter(golden.contains("planted") ? "x" : "dout"),
                             Parameter("divisor"), OutF32("dx"));
      },
      Plant, 1, {.blind = OnlyForward});
}

TEST_P(OpTest, Embedding) {
  Run("embedding",
      [&](const nlohmann::json& golden) {
        backend_->Embedding(Parameter("table"), Parameter("index"), Out("out"));
        const Tensor index = Parameter("index");
        backend_->EmbeddingBackward(golden.contains("planted") ? Rotated(index) : index, In("dout"),
                                    OutF32("dtable"));
      },
      Plant, 1, {.blind = OnlyForward});
}

TEST_P(OpTest, SamplesCropFlipAndMix) {
  // Two pictures of 3×4, one channel: 10·row + column, and the same plus 100.
  Tensor images = Tensor::Host({2, 3, 4, 1}, DType::kU8);
  for (int i = 0; i < 24; ++i)
    images.as<uint8_t>()[i] = static_cast<uint8_t>(i / 12 * 100 + i % 12 / 4 * 10 + i % 4);
  Tensor x = New({2, 2, 2, 1}), target = NewF32({2, 2, 2, 1}), condition = NewF32({2});
  Tensor label = OnDevice(*backend_, Tensor::Host({2}, DType::kI32));
  SampleRow plain{.image = 1,
                  .sample = 5,
                  .label = 3,
                  .top = 1,
                  .left = 2,
                  .signal = 127.5f,
                  .target_signal = 255.0f,
                  .target_noise = 0,
                  .condition = 0.25f,
                  .shift = 27.5f};
  SampleRow flipped = plain;
  flipped.flip = 1;
  flipped.image = 0;
  backend_->MakeSamples({.images = OnDevice(*backend_, images),
                         .rows = Rows({plain, flipped}),
                         .seed = 1,
                         .step = Step(0),
                         .x = x,
                         .target = target,
                         .condition = condition,
                         .label = label});
  const auto near = [](float value) { return testing::FloatNear(value, 1e-3f); };
  EXPECT_THAT(Values(x), testing::ElementsAre(near(112 - 100), near(113 - 100), near(122 - 100),
                                              near(123 - 100), near(13 - 100), near(12 - 100),
                                              near(23 - 100), near(22 - 100)));
  EXPECT_NEAR(Values(target)[0], 2 * (112 - 127.5f), 1e-3);
  EXPECT_EQ(Values(condition)[1], 0.25f);
  EXPECT_EQ(backend_->Download(label)->as<int32_t>()[0], 3);
}

TEST_P(OpTest, NoiseBelongsToSampleAndStepAlone) {
  Tensor images = Tensor::Host({1, 8, 8, 2}, DType::kU8);
  std::fill_n(images.as<uint8_t>(), images.elements(), uint8_t{0});
  const auto noise = [&](std::vector<uint32_t> samples, int step, uint64_t seed) {
    std::vector<SampleRow> rows(samples.size());
    for (size_t i = 0; i < rows.size(); ++i)
      rows[i] = {.sample = samples[i], .signal = 0, .noise = 1};
    const auto count = static_cast<int64_t>(rows.size());
    Tensor x = New({count, 8, 8, 2}), target = NewF32({count, 8, 8, 2}),
           condition = NewF32({count});
    backend_->MakeSamples({.images = OnDevice(*backend_, images),
                           .rows = Rows(rows),
                           .seed = seed,
                           .step = Step(step),
                           .x = x,
                           .target = target,
                           .condition = condition});
    EXPECT_LE(RelativeError(Values(x), Values(target)), bf16() ? kBf16Tolerance : 0);
    return Values(target);
  };
  const std::vector<float> both = noise({3, 4}, 7, 1);
  const std::vector<float> one = noise({4}, 7, 1);
  EXPECT_TRUE(std::equal(one.begin(), one.end(), both.begin() + 128));
  EXPECT_NE(noise({4}, 8, 1), one);
  EXPECT_NE(noise({5}, 7, 1), one);
  EXPECT_NE(noise({4}, 7, 2), one);
  double sum = 0, square = 0;
  std::vector<uint32_t> many(64);
  for (uint32_t i = 0; i < 64; ++i) many[i] = i;
  for (const float v : noise(many, 0, 9)) sum += v, square += v * v;
  EXPECT_NEAR(sum / 8192, 0, 0.05);
  EXPECT_NEAR(square / 8192, 1, 0.05);
}

TEST_P(OpTest, LossIsTheGradientOfItsValue) {
  const Tensor output =
      OnDevice(*backend_, {2, 1, 1, 2}, std::vector<float>{1, 2, 3, 5}, DType::kF32);
  const Tensor target =
      OnDevice(*backend_, {2, 1, 1, 2}, std::vector<float>{0, 4, 3, 1}, DType::kF32);
  Tensor loss = NewF32({2}), sum = NewF32({1}), gradient = NewF32(output.shape());
  backend_->SetChunkRows(1);
  backend_->Loss({.output = output,
                  .target = target,
                  .rows = Rows({{.weight = 2}, {.weight = 0.5f}}),
                  .scale = 0.25f,
                  .loss = loss,
                  .sum = sum,
                  .doutput = gradient});
  EXPECT_THAT(Values(loss), testing::ElementsAre(5.0f, 4.0f));
  EXPECT_EQ(Values(sum)[0], 2.25f);
  EXPECT_THAT(Values(gradient), testing::ElementsAre(0.5f, -1.0f, 0.0f, 0.5f));
}

TEST_P(OpTest, Loss) {
  Run(
      "loss",
      [&](const nlohmann::json& golden) {
        std::vector<SampleRow> rows(Golden("target").dim(0));
        for (size_t i = 0; i < rows.size(); ++i) rows[i].weight = golden["weights"][i];
        const float scale = golden["scale"].get<float>() * gain_;
        const Tensor sum = NewF32({1});
        backend_->Loss({.output = Parameter("output"),
                        .target = Parameter("target"),
                        .rows = Rows(rows),
                        .scale = scale,
                        .loss = OutF32("out"),
                        .sum = sum,
                        .doutput = OutF32("doutput")});
        ExpectSumOfLosses(sum, scale);
      },
      [](nlohmann::json& golden) {  // two samples' weights change places
        std::swap(golden["weights"][0], golden["weights"][2]);
      },
      1);
}

TEST_P(OpTest, VarianceLoss) {
  Run(
      "variance_loss",
      [&](const nlohmann::json& golden) {
        std::vector<SampleRow> rows(Golden("target").dim(0));
        for (size_t i = 0; i < rows.size(); ++i)
          rows[i] = {.condition = golden["condition"][i],
                     .weight = golden["weight"],
                     .mean_factor = golden["mean_factor"][i],
                     .log_variance_min = golden["log_variance_min"][i],
                     .log_variance_max = golden["log_variance_max"][i]};
        const float scale = golden["scale"].get<float>() * gain_;
        const Tensor sum = NewF32({1});
        backend_->VarianceLoss({.output = Parameter("output"),
                                .target = Parameter("target"),
                                .image = Parameter("image"),
                                .rows = Rows(rows),
                                .scale = scale,
                                .weight = golden["variance_weight"],
                                .loss = OutF32("out"),
                                .sum = sum,
                                .doutput = OutF32("doutput")});
        ExpectSumOfLosses(sum, scale);
      },
      [](nlohmann::json& golden) {
        golden["variance_weight"] = golden["variance_weight"].get<float>() * 1.001f;
      },
      3);
}

TEST_P(OpTest, DropoutKeepsItsShareAndItsBits) {
  const Tensor x = New({4, 25, 9, 3}, 1);
  std::vector<SampleRow> rows(4);
  for (uint32_t i = 0; i < 4; ++i) rows[i].sample = i;
  DropoutArgs args{.x = x,
                   .probability = 0.3f,
                   .seed = 3,
                   .step = Step(2),
                   .rows = Rows(rows),
                   .layer = 1,
                   .out = New(x.shape())};
  backend_->Dropout(args);
  const std::vector<float> first = Values(args.out);
  int dropped = 0;
  for (const float v : first) {
    EXPECT_TRUE(v == 0 || std::abs(v - 1 / 0.7f) < (bf16() ? 5e-3 : 1e-6)) << v;
    dropped += v == 0;
  }
  EXPECT_NEAR(dropped / 2700.0, 0.3, 0.03);
  backend_->Dropout(args);
  EXPECT_EQ(Values(args.out), first);
  args.layer = 2;
  backend_->Dropout(args);
  EXPECT_NE(Values(args.out), first);
}

/// The gradient of an element that was dropped is 0, that of another d / (1 − p): so the op on d is
/// its own backward, with the mask of the forward op.
TEST_P(OpTest, DropoutsGradientHasItsMask) {
  const Shape shape{4, 25, 9, 3};
  const auto normal = [&](uint64_t seed) {
    std::vector<float> values(shape.elements());
    for (size_t i = 0; i < values.size(); ++i) values[i] = PhiloxNormal(seed, 0, i / 4).v[i % 4];
    return values;
  };
  std::vector<SampleRow> rows(4);
  for (uint32_t i = 0; i < 4; ++i) rows[i].sample = i;
  DropoutArgs args{.x = Activations(shape, normal(1)),
                   .probability = 0.3f,
                   .seed = 3,
                   .step = Step(2),
                   .rows = Rows(rows),
                   .layer = 1,
                   .out = New(shape)};
  backend_->Dropout(args);
  const Tensor d = Activations(shape, normal(2));
  std::vector<float> expected = Values(d), forward = Values(args.out);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] *= forward[i] == 0 ? 0 : 1 / 0.7f;
  const auto error = [&](DropoutArgs backward) {
    backward.x = backward.out = Scaled(d, 1);  // in place, as in a network
    backend_->Dropout(backward);
    return RelativeError(Values(backward.out), expected);
  };
  const double tolerance = bf16() ? kBf16Tolerance : 1e-6;
  EXPECT_LE(error(args), tolerance);
  // Whatever the mask is drawn from is planted wrong.
  std::vector<DropoutArgs> planted(5, args);
  planted[0].seed = 4;
  planted[1].step = Step(3);
  planted[2].layer = 2;
  planted[3].probability = 0.31f;
  rows[2].sample = 7;
  planted[4].rows = Rows(rows);
  for (size_t i = 0; i < planted.size(); ++i) EXPECT_GT(error(planted[i]), 2 * tolerance) << i;
}

TEST_P(OpTest, UpdateSkipsWhatIsNotFinite) {
  UpdateArgs args{.master = NewF32({1}, 1),
                  .gradient = NewF32({1}, 1),
                  .m = NewF32({1}, 0),
                  .v = NewF32({1}, 0),
                  .averages = {NewF32({1}, 1)},
                  .squared_norm = NewF32({1}, INFINITY),
                  .scalars = NewF32({16})};
  const UpdateScalars scalars{
      .rate = 0.1f, .correction1 = 0.1f, .correction2 = 0.001f, .average_share = {0.5f}};
  backend_->Upload(&scalars, sizeof scalars, args.scalars);
  backend_->Update(args);
  args.squared_norm = NewF32({1}, NAN);
  backend_->Update(args);
  EXPECT_EQ(Values(args.master)[0], 1);
  EXPECT_EQ(Values(args.m)[0], 0);
  args.squared_norm = NewF32({1}, 1);
  backend_->Update(args);
  const float master = Values(args.master)[0];
  EXPECT_NEAR(master, 1 - 0.1f * 0.01f - 0.1f, 1e-6);
  EXPECT_NEAR(Values(args.averages[0])[0], 0.5f + 0.5f * master, 1e-6);
}

// In double. The rest of a decay near 1 must not be a difference of floats: 1 − 0.999f is 1.3e-5
// off.
TEST_P(OpTest, UpdatesRoundAsLittleAsFloatsCan) {
  const float weight = 0.75f, gradient = 3e-3f;
  UpdateArgs args{.master = NewF32({1}, weight),
                  .gradient = NewF32({1}, gradient),
                  .m = NewF32({1}, 0),
                  .v = NewF32({1}, 0),
                  .averages = {NewF32({1}, 0)},
                  .squared_norm = NewF32({1}, 1),
                  .scalars = NewF32({16})};
  const double share = 1e-5;
  double w = weight, m = 0, v = 0, average = 0;
  for (int step = 1; step <= 3; ++step) {
    const UpdateScalars scalars{.rate = 0.01f,
                                .correction1 = static_cast<float>(1 - std::pow(0.9, step)),
                                .correction2 = static_cast<float>(1 - std::pow(0.999, step)),
                                .average_share = {static_cast<float>(share)}};
    backend_->Upload(&scalars, sizeof scalars, args.scalars);
    backend_->Update(args);
    m += (1 - 0.9) * (double{gradient} - m);
    v += (1 - 0.999) * (double{gradient} * gradient - v);
    w -= 0.01 * 0.01 * w +
         0.01 / (1 - std::pow(0.9, step)) * m / (std::sqrt(v / (1 - std::pow(0.999, step))) + 1e-8);
    average += share * (w - average);
    EXPECT_NEAR(Values(args.m)[0] / m, 1, 3e-7) << step;
    EXPECT_NEAR(Values(args.v)[0] / v, 1, 3e-7) << step;
    EXPECT_NEAR(Values(args.master)[0] / w, 1, 3e-7) << step;
    EXPECT_NEAR(Values(args.averages[0])[0] / average, 1, 3e-7) << step;
  }
}

TEST_P(OpTest, SumsOfManyElements) {
  // More than a block of any backend.
  constexpr int64_t kCount = 200'003;
  std::vector<float> a(kCount), b(kCount);
  double squares = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    a[i] = static_cast<float>(i % 7) - 3;
    b[i] = static_cast<float>(i % 5);
    squares += (a[i] + b[i]) * (a[i] + b[i]);
  }
  const Tensor sum = OnDevice(*backend_, {kCount}, a, DType::kF32);
  const Tensor other = OnDevice(*backend_, {kCount}, b, DType::kF32), out = NewF32({1});
  backend_->Accumulate(sum, other);
  backend_->SquaredNorm(sum, out);
  EXPECT_NEAR(Values(out)[0] / squares, 1, 1e-6);
}

class LargeOpTest : public LargeOpFixture {
 protected:
  static constexpr int kChunks = 8;  // of gradients that are added as a tree
  using Gradients = std::array<Tensor, 2>;

  /// Chunks computed in passes of 8, 4, 2 or 1, whose gradients are then added as a binary tree,
  /// have the same bits. gradient(first, count): of these chunks.
  void ExpectSumsOfATree(const std::function<Gradients(int first, int count)>& gradient) {
    const Gradients expected = gradient(0, kChunks);
    for (const int pass : {8, 4, 2, 1}) {
      const std::function<Gradients(int, int)> sum = [&](int first, int count) {
        if (count == pass) return gradient(first, count);
        const Gradients left = sum(first, count / 2), right = sum(first + count / 2, count / 2);
        for (const size_t i : {0, 1}) cuda_->Accumulate(left[i], right[i]);
        return left;
      };
      const Gradients sums = sum(0, kChunks);
      for (const size_t i : {0, 1}) {
        EXPECT_EQ(OnHost(*cuda_, sums[i]), OnHost(*cuda_, expected[i]))
            << "passes of " << pass << " chunks, gradient " << i;
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, LargeOpTest, testing::Values("cuda_fp32", "cuda_bf16"),
                         [](const auto& instance) { return instance.param; });

TEST_P(LargeOpTest, Conv2d) {
  struct Case {
    int in, out, height, width, stride, kernel;
    bool upsample = false;
    bool before = true;  // padding at the top and on the left; always at the other edges
  };
  for (const Case& c : {Case{72, 136, 17, 16, 1, 3, false}, Case{40, 64, 16, 20, 2, 3, false},
                        Case{24, 72, 8, 8, 1, 3, true}, Case{3, 64, 16, 16, 1, 3, false},
                        Case{64, 3, 16, 16, 1, 3, false}, Case{80, 64, 24, 24, 1, 1, false},
                        Case{72, 136, 12, 10, 2, 3, false, false}, Case{72, 136, 17, 15, 2, 3},
                        Case{72, 136, 17, 16, 2, 3, false, false}, Case{128, 128, 32, 32, 2, 3},
                        Case{12, 20, 16, 20, 2, 3, false, false}, Case{32, 32, 32, 32, 1, 3, false},
                        Case{20, 32, 9, 18, 1, 3, false}, Case{32, 28, 8, 17, 1, 3, false},
                        Case{32, 32, 8, 8, 1, 3, false}, Case{12, 24, 16, 16, 2, 3}}) {
    SCOPED_TRACE(fmt::format("{} to {}, {}x{}, stride {}{}", c.in, c.out, c.height, c.width,
                             c.stride, c.before ? "" : ", not padded before"));
    const int edge = c.kernel / 2, before = c.before ? edge : 0, up = c.upsample ? 2 : 1;
    const auto extent = [&](int in) { return (up * in + before + edge - c.kernel) / c.stride + 1; };
    const Shape x_shape{kRows, c.height, c.width, c.in};
    const Shape out_shape{kRows, extent(c.height), extent(c.width), c.out};
    const Shape weight_shape{c.out, c.in, c.kernel, c.kernel};
    const auto x = Normal(x_shape), weight = Normal(weight_shape), bias = Normal({c.out});
    const auto add = Normal({kRows, c.out}), residual = Normal(out_shape), d = Normal(out_shape);
    Compare([&](Backend& backend) {
      const Conv2dGeometry geometry{c.stride, before, before, edge, edge};
      const auto packed = backend.NewConv2d(c.in, c.out, c.kernel, c.upsample, geometry);
      const Tensor master = Floats(backend, weight_shape, weight),
                   master_bias = Floats(backend, {c.out}, bias);
      backend.PackConv2d(master, master_bias, packed.get());
      const Tensor in = Activations(backend, x_shape, x), out = Activations(backend, out_shape),
                   dx = Activations(backend, x_shape), dweight = Floats(backend, weight_shape),
                   dbias = Floats(backend, {c.out});
      backend.Conv2d({.x = in,
                      .weight = packed.get(),
                      .geometry = geometry,
                      .add = Activations(backend, {kRows, c.out}, add),
                      .residual = Activations(backend, out_shape, residual),
                      .scale = 0.5f,
                      .out = out});
      backend.Conv2dBackward({.x = in,
                              .weight = packed.get(),
                              .geometry = geometry,
                              .dout = Activations(backend, out_shape, d),
                              .dx = dx,
                              .dweight = dweight,
                              .dbias = dbias});
      return std::vector<Tensor>{out, dx, dweight, dbias};
    });
  }
}

TEST_P(LargeOpTest, Linear) {
  const Shape x_shape{kRows, 300, 72}, out_shape{kRows, 300, 144};
  const auto x = Normal(x_shape), d = Normal(out_shape);
  const auto q = Normal({136, 72}), k = Normal({8, 72});
  Compare([&](Backend& backend) {
    const auto packed = backend.NewLinear(72, {136, 8});
    const std::vector<Tensor> masters{Floats(backend, {136, 72}, q), Floats(backend, {8, 72}, k)};
    backend.PackLinear(masters, {}, packed.get());
    const Tensor in = Activations(backend, x_shape, x), out = Activations(backend, out_shape),
                 dx = Activations(backend, x_shape), dq = Floats(backend, {136, 72}),
                 dk = Floats(backend, {8, 72});
    backend.Linear({.x = in, .weight = packed.get(), .out = out});
    backend.LinearBackward({.x = in,
                            .weight = packed.get(),
                            .dout = Activations(backend, out_shape, d),
                            .dx = dx,
                            .dweights = {dq, dk}});
    return std::vector<Tensor>{out, dx, dq, dk};
  });
}

/// Where two gradients of a weight [outputs, channels, taps] differ, for a message.
std::string Differences(const std::vector<float>& out, const std::vector<float>& expected,
                        const Shape& shape) {
  double square = 0;
  for (const float value : expected) square += value * value;
  const double rms = std::sqrt(square / static_cast<double>(expected.size()));
  const int64_t taps = shape.rank() == 4 ? shape[2] * shape[3] : 1, channels = shape[1];
  std::vector<int64_t> of_tap(taps);
  std::string first;
  for (int64_t i = 0; i < static_cast<int64_t>(expected.size()); ++i) {
    if (std::abs(out[i] - expected[i]) <= 1e-2 * rms) continue;
    if (first.empty())
      first = fmt::format("first at output {}, channel {}, tap {}: {} instead of {}",
                          i / taps / channels, i / taps % channels, i % taps, out[i], expected[i]);
    ++of_tap[i % taps];
  }
  return fmt::format("of {} for each tap, {} differ; {}", expected.size() / taps,
                     fmt::join(of_tap, " "), first);
}
/// Products of numbers that are rounded to bf16 anyway are exact, and their sums are fp32. A pixel
/// of 8192 that is left out changes 1e-2.
constexpr double kWeightTolerance = 1e-3;

TEST_P(LargeOpTest, WeightGradientsOfConvolutions) {
  struct Case {
    int in, out, images, height, width, chunk, kernel = 3;
    bool upsample = false;
    int stride = 1;
    bool before = true;  // padding at the top and on the left; always at the other edges
  };
  for (const Case& c :
       {Case{64, 64, 8, 8, 8, 1}, Case{64, 64, 1, 8, 8, 1}, Case{96, 128, 2, 16, 16, 1},
        Case{192, 200, 1, 32, 32, 1}, Case{320, 64, 8, 24, 64, 1}, Case{64, 192, 16, 32, 32, 2},
        Case{64, 72, 16, 4, 4, 2}, Case{64, 72, 4, 4, 4, 1}, Case{72, 64, 4, 12, 20, 2},
        Case{64, 136, 4, 3, 7, 4}, Case{3, 64, 8, 16, 16, 1}, Case{64, 3, 8, 16, 16, 1},
        Case{64, 128, 4, 8, 8, 1, 3, true}, Case{6, 128, 4, 4, 4, 2, 3, true},
        Case{256, 136, 8, 16, 16, 1, 1}, Case{200, 384, 2, 12, 20, 1, 1},
        Case{128, 64, 4, 32, 32, 1, 1},
        // More tiles than are computed at a time; more chunks than are added side by side.
        Case{640, 768, 16, 8, 8, 1}, Case{64, 64, 32, 8, 8, 1},
        // Tiles have two chunks an item, but one where they have a part of the bias; of the 16
        // chunks above they have four.
        Case{640, 768, 2, 8, 8, 1}, Case{192, 760, 8, 16, 16, 1}, Case{192, 760, 16, 12, 14, 2},
        // More items than CTAs, of which some warpgroups have outputs and some have none.
        Case{72, 832, 32, 8, 8, 1, 1},
        // Stride 2: odd widths, two images at a time, a chunk of one image, few pixels. Odd heights
        // are for gemm.cu.
        Case{128, 128, 16, 32, 32, 2, 3, false, 2},
        Case{128, 64, 16, 32, 32, 2, 3, false, 2, false}, Case{64, 64, 8, 16, 16, 1, 3, false, 2},
        Case{72, 136, 4, 17, 33, 2, 3, false, 2}, Case{72, 136, 4, 17, 33, 2, 3, false, 2, false},
        Case{72, 136, 4, 18, 35, 2, 3, false, 2}, Case{72, 136, 4, 18, 35, 2, 3, false, 2, false},
        Case{96, 72, 4, 8, 8, 2, 3, false, 2}, Case{96, 72, 4, 8, 8, 2, 3, false, 2, false},
        Case{96, 72, 4, 7, 9, 4, 3, false, 2}, Case{3, 64, 8, 16, 20, 1, 3, false, 2},
        Case{64, 3, 8, 16, 20, 1, 3, false, 2, false}, Case{64, 64, 2, 2, 3, 1, 3, false, 2},
        Case{8, 8, 2, 1, 5, 1, 3, false, 2},
        // More parts of chunks than a launch of gemm.cu takes.
        Case{1, 1, 2048, 128, 128, 1}}) {
    SCOPED_TRACE(fmt::format("{} to {}, {} images of {}x{}, chunks of {}, kernel {}, stride {}{}",
                             c.in, c.out, c.images, c.height, c.width, c.chunk, c.kernel, c.stride,
                             c.before ? "" : ", not padded before"));
    const int edge = c.kernel / 2, before = c.before ? edge : 0, up = c.upsample ? 2 : 1;
    const auto extent = [&](int in) { return (up * in + before + edge - c.kernel) / c.stride + 1; };
    const Shape x_shape{c.images, c.height, c.width, c.in},
        out_shape{c.images, extent(c.height), extent(c.width), c.out},
        weight_shape{c.out, c.in, c.kernel, c.kernel};
    const auto x = Normal(x_shape), d = Normal(out_shape);
    std::vector<std::vector<float>> gradients, of_biases;
    for (Backend* backend : {cpu_.get(), cuda_.get()}) {
      backend->SetChunkRows(c.chunk);
      const Conv2dGeometry geometry{c.stride, before, before, edge, edge};
      const auto packed = backend->NewConv2d(c.in, c.out, c.kernel, c.upsample, geometry);
      const Tensor master = Floats(*backend, weight_shape);  // read later, too
      backend->PackConv2d(master, Tensor(), packed.get());
      const Tensor dweight = Floats(*backend, weight_shape), dbias = Floats(*backend, {c.out});
      backend->Conv2dBackward({.x = Activations(*backend, x_shape, x),
                               .weight = packed.get(),
                               .geometry = geometry,
                               .dout = Activations(*backend, out_shape, d),
                               .dweight = dweight,
                               .dbias = dbias});
      gradients.push_back(OnHost(*backend, dweight));
      of_biases.push_back(OnHost(*backend, dbias));
      EXPECT_TRUE(backend->status().ok()) << backend->status();
    }
    EXPECT_LE(RelativeError(gradients[1], gradients[0]), kWeightTolerance)
        << Differences(gradients[1], gradients[0], weight_shape);
    EXPECT_LE(RelativeError(of_biases[1], of_biases[0]), kWeightTolerance);
  }
}

TEST_P(LargeOpTest, WeightGradientsOfLinears) {
  struct Case {
    int in, lines, images, chunk;
    std::vector<int> parts;
  };
  for (const Case& c : {Case{192, 64, 8, 1, {192}}, Case{384, 300, 8, 1, {384, 72, 200}},
                        Case{72, 1, 8, 1, {136}}, Case{136, 1, 64, 8, {64, 64}},
                        Case{64, 1000, 2, 1, {8, 256}}, Case{1, 16384, 2048, 1, {1}}}) {
    SCOPED_TRACE(fmt::format("{} to {}, {} x {} lines, chunks of {}", c.in, fmt::join(c.parts, "+"),
                             c.images, c.lines, c.chunk));
    int outputs = 0;
    for (const int part : c.parts) outputs += part;
    const Shape x_shape{c.images, c.lines, c.in}, out_shape{c.images, c.lines, outputs};
    const auto x = Normal(x_shape), d = Normal(out_shape);
    std::vector<std::vector<Tensor>> gradients, of_biases;
    for (Backend* backend : {cpu_.get(), cuda_.get()}) {
      backend->SetChunkRows(c.chunk);
      std::vector<Tensor> weights, &dweights = gradients.emplace_back(),
                                   &dbiases = of_biases.emplace_back();
      for (const int part : c.parts) {
        weights.push_back(Floats(*backend, {part, c.in}));
        dweights.push_back(Floats(*backend, {part, c.in}));
        dbiases.push_back(Floats(*backend, {part}));
      }
      const auto packed = backend->NewLinear(c.in, c.parts);
      backend->PackLinear(weights, {}, packed.get());
      backend->LinearBackward({.x = Activations(*backend, x_shape, x),
                               .weight = packed.get(),
                               .dout = Activations(*backend, out_shape, d),
                               .dweights = dweights,
                               .dbiases = dbiases});
      EXPECT_TRUE(backend->status().ok()) << backend->status();
    }
    for (size_t i = 0; i < c.parts.size(); ++i) {
      const auto out = OnHost(*cuda_, gradients[1][i]), expected = OnHost(*cpu_, gradients[0][i]);
      EXPECT_LE(RelativeError(out, expected), kWeightTolerance)
          << "part " << i << ": " << Differences(out, expected, {c.parts[i], c.in});
      EXPECT_LE(RelativeError(OnHost(*cuda_, of_biases[1][i]), OnHost(*cpu_, of_biases[0][i])),
                kWeightTolerance);
    }
  }
}

TEST_P(LargeOpTest, WeightGradientsAddAsATree) {
  // Of the larger weights, some tiles are computed in pairs of chunks or, of the last, in fours.
  for (const auto& [size, in, out] :
       {std::tuple{4, 72, 136}, {8, 72, 136}, {32, 72, 136}, {16, 192, 760}, {8, 640, 768}}) {
    for (const auto& [kernel, stride] : {std::pair{1, 1}, std::pair{3, 1}, std::pair{3, 2}}) {
      SCOPED_TRACE(
          fmt::format("{} to {}, {} pixels, kernel {}, stride {}", in, out, size, kernel, stride));
      const Shape x_shape{kChunks, size, size, in},
          out_shape{kChunks, size / stride, size / stride, out},
          weight_shape{out, in, kernel, kernel};
      const Tensor x = Activations(*cuda_, x_shape, Normal(x_shape)),
                   d = Activations(*cuda_, out_shape, Normal(out_shape));
      const Conv2dGeometry geometry{stride, kernel / 2, kernel / 2, kernel / 2, kernel / 2};
      const auto packed = cuda_->NewConv2d(in, out, kernel, false, geometry);
      const Tensor master = Floats(*cuda_, weight_shape);
      cuda_->PackConv2d(master, Tensor(), packed.get());
      cuda_->SetChunkRows(1);
      const auto gradient = [&, out = out](int first, int count) {
        const Gradients of = {Floats(*cuda_, weight_shape), Floats(*cuda_, {out})};
        cuda_->Conv2dBackward({.x = x.Slice(first, count),
                               .weight = packed.get(),
                               .geometry = geometry,
                               .dout = d.Slice(first, count),
                               .dweight = of[0],
                               .dbias = of[1]});
        return of;
      };
      ExpectSumsOfATree(gradient);
    }
  }
}

TEST_P(LargeOpTest, GroupNorm) {
  const Shape shape{kRows, 20, 20, 72}, columns{kRows, 144};
  auto x = Normal(shape);
  const bool bf16 = cuda_->activation_dtype() == DType::kBF16;
  for (float& value : x)  // a mean that is large beside the deviation
    value = bf16 ? BFloat16ToFloat(FloatToBFloat16(value + 30)) : value + 30;
  const auto d = Normal(shape), gamma = Normal({72}), beta = Normal({72}), scale = Normal(columns);
  for (const bool scaled : {false, true}) {
    Compare([&](Backend& backend) {
      GroupNormArgs forward{.x = Activations(backend, shape, x),
                            .gamma = Floats(backend, {72}, gamma),
                            .beta = Floats(backend, {72}, beta),
                            .groups = 9,
                            .activation = Activation::kSilu,
                            .statistics = Floats(backend, {kRows, 9, 2}),
                            .out = Activations(backend, shape)};
      if (scaled) forward.scale_shift = Activations(backend, columns, scale);
      backend.GroupNorm(forward);
      GroupNormBackwardArgs backward{.forward = forward,
                                     .dout = Activations(backend, shape, d),
                                     .dx = Activations(backend, shape),
                                     .dx_sums = Activations(backend, {kRows, 72}),
                                     .dgamma = Floats(backend, {72}),
                                     .dbeta = Floats(backend, {72})};
      if (scaled) backward.dscale_shift = Activations(backend, columns);
      backend.GroupNormBackward(backward);
      std::vector<Tensor> results{forward.out, backward.dx, backward.dx_sums, backward.dgamma,
                                  backward.dbeta};
      if (scaled) results.push_back(backward.dscale_shift);
      return results;
    });
  }
}

TEST_P(LargeOpTest, GradientsOfGroupNormsAddAsATree) {
  constexpr int kGroups = 8;
  // Of one CTA an image, of several, and of the smallest images.
  for (const auto& [size, channels] : {std::pair{16, 256}, {32, 72}, {4, 64}}) {
    for (const int chunk : {1, 4, 10}) {
      SCOPED_TRACE(fmt::format("{} channels, {} pixels, chunks of {}", channels, size, chunk));
      const int rows = kChunks * chunk;
      const Shape shape{rows, size, size, channels};
      const Tensor x = Activations(*cuda_, shape, Normal(shape)),
                   d = Activations(*cuda_, shape, Normal(shape)), dx = Activations(*cuda_, shape),
                   statistics = Floats(*cuda_, {rows, kGroups, 2});
      GroupNormArgs forward{.x = x,
                            .gamma = Floats(*cuda_, {channels}, Normal({channels})),
                            .beta = Floats(*cuda_, {channels}, Normal({channels})),
                            .groups = kGroups,
                            .activation = Activation::kSilu,
                            .statistics = statistics,
                            .out = Activations(*cuda_, shape)};
      cuda_->GroupNorm(forward);
      cuda_->SetChunkRows(chunk);
      const auto gradient = [&, channels = channels](int first, int count) {
        const Gradients of = {Floats(*cuda_, {channels}), Floats(*cuda_, {channels})};
        GroupNormArgs part = forward;
        part.x = x.Slice(first * chunk, count * chunk);
        part.statistics = statistics.Slice(first * chunk, count * chunk);
        part.out = Tensor();
        cuda_->GroupNormBackward({.forward = part,
                                  .dout = d.Slice(first * chunk, count * chunk),
                                  .dx = dx.Slice(first * chunk, count * chunk),
                                  .dgamma = of[0],
                                  .dbeta = of[1]});
        return of;
      };
      ExpectSumsOfATree(gradient);
    }
  }
}

TEST_P(LargeOpTest, Attention) {
  struct Case {
    int64_t tokens, keys;
    int heads;
    int64_t dim;
    bool causal = false;
  };
  // Head dimensions with kernels of their own, between these, above all of them and with no
  // vectors; tokens that fill tiles, do not, and are fewer. Then more blocks than a GPU has
  // multiprocessors. Then what one kernel computes, and what is too large for it by one token or
  // dimension. At last heads between the kernels' widths, and three items for some CTAs.
  for (const Case& c :
       {Case{136, 136, 3, 16},     Case{64, 64, 2, 32},        Case{129, 129, 1, 40},
        Case{256, 256, 2, 64},     Case{77, 77, 3, 64, true},  Case{200, 77, 2, 64},
        Case{16, 145, 1, 64},      Case{50, 50, 2, 80},        Case{70, 33, 1, 128},
        Case{96, 96, 1, 256},      Case{45, 45, 1, 256, true}, Case{37, 37, 2, 20},
        Case{33, 41, 3, 7},        Case{40, 40, 1, 264, true}, Case{1100, 130, 4, 64},
        Case{130, 1100, 4, 64},    Case{1100, 70, 4, 256},     Case{70, 1100, 2, 256},
        Case{64, 64, 2, 64},       Case{49, 49, 3, 64},        Case{16, 16, 1, 64},
        Case{1, 1, 2, 64},         Case{1, 64, 3, 64},         Case{64, 17, 1, 40},
        Case{33, 64, 2, 56},       Case{60, 60, 2, 64, true},  Case{33, 33, 1, 48, true},
        Case{50, 50, 3, 24, true}, Case{49, 30, 1, 8},         Case{65, 64, 1, 64},
        Case{64, 65, 1, 64},       Case{64, 64, 1, 72},        Case{130, 130, 2, 72},
        Case{130, 130, 2, 200},    Case{1100, 300, 8, 128},    Case{300, 1100, 8, 128},
        Case{130, 1100, 4, 256}}) {
    SCOPED_TRACE(testing::Message()
                 << c.tokens << " queries of " << c.keys << " keys in " << c.heads << " heads of "
                 << c.dim << (c.causal ? ", causal" : ""));
    const int64_t width = c.heads * c.dim;
    const Shape queries{kRows, c.tokens, width}, fused{kRows, c.keys, 2 * width};
    const auto q = Normal(queries), kv = Normal(fused), d = Normal(queries);
    // Of the images from `first` on.
    const auto run = [&](Backend& backend, int64_t first, int64_t count) {
      const auto of = [&](const Tensor& tensor) { return tensor.Slice(first, count); };
      const Tensor keys = Activations(backend, fused, kv), dkeys = Activations(backend, fused);
      const AttentionArgs forward{.q = of(Activations(backend, queries, q)),
                                  .k = of(keys).Columns(0, width),
                                  .v = of(keys).Columns(width, width),
                                  .heads = c.heads,
                                  .scale = 1 / std::sqrt(static_cast<float>(c.dim)),
                                  .causal = c.causal,
                                  .log_sum_exp = Floats(backend, {count, c.heads, c.tokens}),
                                  .out = of(Activations(backend, queries))};
      const Tensor dq = of(Activations(backend, queries));
      backend.Attention(forward);
      backend.AttentionBackward({.forward = forward,
                                 .dout = of(Activations(backend, queries, d)),
                                 .dq = dq,
                                 .dk = of(dkeys).Columns(0, width),
                                 .dv = of(dkeys).Columns(width, width)});
      std::vector<Tensor> results{forward.out, forward.log_sum_exp, of(dkeys)};
      if (c.keys > 1) {
        results.push_back(dq);
      } else {  // zero, except for rounding, whose relative error is any
        for (float gradient : OnHost(backend, dq)) EXPECT_NEAR(gradient, 0, 1e-4);
      }
      return results;
    };
    Compare([&](Backend& backend) { return run(backend, 0, kRows); });
    // An image's bits are its own.
    const std::vector<Tensor> all = run(*cuda_, 0, kRows), last = run(*cuda_, kRows - 1, 1);
    for (size_t i = 0; i < all.size(); ++i)
      EXPECT_EQ(OnHost(*cuda_, all[i].Slice(kRows - 1, 1)), OnHost(*cuda_, last[i]))
          << "result " << i;
  }
}

TEST_P(LargeOpTest, Pointwise) {
  const Shape shape{kRows, 6, 10, 72}, half{kRows, 3, 5, 72}, columns{kRows, 72};
  const auto x = Normal(shape), d = Normal(shape);
  Compare([&](Backend& backend) {
    const Tensor a = Activations(backend, shape, x), b = Activations(backend, shape, d);
    std::vector<Tensor> results;
    const auto out = [&](const Shape& of) {
      results.push_back(Activations(backend, of));
      return results.back();
    };
    backend.Activate(Activation::kSilu, a, out(shape));
    backend.ActivateBackward(Activation::kSilu, a, b, out(shape));
    for (const auto& [down, up] : {std::pair{Resample::kAveragePoolDown, Resample::kNearestUp},
                                   std::pair{Resample::kFirDown, Resample::kFirUp}}) {
      backend.Resample2x(down, a, 1, out(half));
      const Tensor halved = results.back();
      backend.Resample2x(up, halved, 1, out(shape));
      backend.Resample2xBackward(up, b, out(half));
      backend.Resample2xBackward(down, halved, out(shape));
    }
    backend.SumPixels(a, out(columns));
    backend.Add(a, 2, b, -0.5f, 1, out(shape));
    return results;
  });
}

TEST_P(LargeOpTest, SamplesAndDropoutAreTheCpus) {
  Tensor images = Tensor::Host({2, 20, 20, 3}, DType::kU8);
  for (int i = 0; i < images.elements(); ++i) images.as<uint8_t>()[i] = static_cast<uint8_t>(i * 7);
  std::vector<SampleRow> rows(kRows);
  for (uint32_t i = 0; i < kRows; ++i)
    rows[i] = {.image = i % 2, .sample = i, .top = 1, .left = 2, .signal = 0.6f, .noise = 0.8f};
  Tensor plan = Tensor::Host({kRows, kSampleNumbers}, DType::kI32),
         at = Tensor::Host({1}, DType::kI32);
  std::memcpy(plan.data(), rows.data(), plan.bytes());
  at.as<int32_t>()[0] = 3;
  const Shape shape{kRows, 17, 15, 3};
  Compare([&](Backend& backend) {
    const Tensor x = Activations(backend, shape), target = Floats(backend, shape),
                 dropped = Activations(backend, shape), step = OnDevice(backend, at),
                 planned = OnDevice(backend, plan);
    backend.MakeSamples({.images = OnDevice(backend, images),
                         .rows = planned,
                         .seed = 7,
                         .step = step,
                         .x = x,
                         .target = target,
                         .condition = Floats(backend, {kRows})});
    backend.Dropout({.x = x,
                     .probability = 0.25f,
                     .seed = 7,
                     .step = step,
                     .rows = planned,
                     .layer = 2,
                     .out = dropped});
    return std::vector<Tensor>{x, target, dropped};
  });
}

TEST(Random, PermutationsVisitEverythingOnce) {
  for (const int64_t count : {1, 2, 5, 64, 1000}) {
    std::vector<bool> seen(count);
    int64_t fixed = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t to = Permute(3, 1, count, i);
      ASSERT_TRUE(to >= 0 && to < count && !seen[to]) << count << " " << i;
      seen[to] = true;
      fixed += to == Permute(3, 2, count, i);
    }
    EXPECT_TRUE(count < 1000 || fixed < 20) << fixed;
  }
}

}  // namespace
}  // namespace denoised::training
