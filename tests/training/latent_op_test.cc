// SPDX-License-Identifier: Apache-2.0
// The ops that only text encoders, text-conditional networks and autoencoders have.

#include <cstring>

#include "engine/training/random.h"
#include "tests/training/op_fixture.h"

namespace denoised::training {
namespace {

class LatentOpTest : public OpFixture {
 protected:
  LatentOpTest() : OpFixture("latent_ops") {}

  /// Row n of `to` is that of what `op` makes of all rows, for each n.
  void RowByRow(const Tensor& to, const std::function<void(int64_t, const Tensor&)>& op) {
    const int64_t rows = to.dim(0), each = to.elements() / rows;
    std::vector<float> values;
    for (int64_t n = 0; n < rows; ++n) {
      const Tensor all = NewF32(to.shape());
      op(n, all);
      const std::vector<float> made = Values(all);
      values.insert(values.end(), made.begin() + n * each, made.begin() + (n + 1) * each);
    }
    backend_->Upload(values.data(), values.size() * sizeof(float), to);
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, LatentOpTest, testing::ValuesIn(kBackends),
                         [](const auto& instance) { return instance.param; });

TEST_P(LatentOpTest, LayerNorm) {
  Run(
      "layer_norm",
      [&](const nlohmann::json& golden) {
        const Tensor x = In("x"), dx = Out("dx"), dout = In("dout");
        const LayerNormArgs forward{.x = x,
                                    .gamma = Parameter("gamma"),
                                    .beta = Parameter("beta"),
                                    .eps = golden["eps"],
                                    .statistics = NewF32({x.dim(0), x.dim(1), 2}),
                                    .out = Out("out")};
        backend_->LayerNorm(forward);
        LayerNormBackwardArgs backward{.forward = forward,
                                       .dout = dout,
                                       .dx = dx,
                                       .dgamma = OutF32("dgamma"),
                                       .dbeta = OutF32("dbeta")};
        backend_->LayerNormBackward(backward);
        // In place of dout, and with a residual's gradient in place of dx.
        const Tensor in_place = Scaled(dout, 1);
        backward.dout = backward.dx = in_place;
        backend_->LayerNormBackward(backward);
        EXPECT_EQ(Values(in_place), Values(dx));
        const Tensor sum = Scaled(x, 1), expected = New(x.shape());
        backward.dout = dout;
        backward.dx = backward.add = sum;
        backend_->LayerNormBackward(backward);
        backend_->Add(x, 1, dx, 1, 0, expected);
        EXPECT_LE(RelativeError(Values(sum), Values(expected)), bf16() ? kBf16Tolerance : 1e-6);
      },
      [](nlohmann::json& golden) { golden["eps"] = golden["eps"].get<double>() + 1e-3; }, 3,
      // The sum of the cotangent: what was normalised is not in it.
      {.blind = [](const nlohmann::json&, const std::string& name) { return name == "dbeta"; }});
}

TEST_P(LatentOpTest, Geglu) {
  Run(
      "geglu",
      [&](const nlohmann::json& golden) {
        Tensor x = In("x");
        if (golden.contains("swapped")) {  // gate before value
          const int64_t width = x.dim(-1) / 2;
          x = New(x.shape());
          backend_->Concat(CopyOfColumns(In("x"), width, width), CopyOfColumns(In("x"), 0, width),
                           x);
        }
        backend_->Geglu(x, Out("out"));
        backend_->GegluBackward(x, In("dout"), Out("dx"));
        const Tensor in_place = Scaled(x, 1);
        backend_->GegluBackward(in_place, In("dout"), in_place);
        EXPECT_EQ(Values(in_place), Values(outputs_["dx"]));
      },
      [](nlohmann::json& golden) { golden["swapped"] = true; }, 2);
}

TEST_P(LatentOpTest, QuickGelu) {
  Run(
      "activate",
      [&](const nlohmann::json& golden) {
        backend_->Activate(ActivationOf(golden), In("x"), Out("out"));
        backend_->ActivateBackward(ActivationOf(golden), In("x"), In("dout"), Out("dx"));
      },
      [](nlohmann::json& golden) { golden["activation"] = "gelu"; }, 1);
}

TEST_P(LatentOpTest, AttentionToOtherKeysAndCausal) {
  Run(
      "attention",
      [&](const nlohmann::json& golden) {
        const Tensor q = In("q"), k = In("k");
        const int heads = golden["heads"];
        const AttentionArgs forward{.q = q,
                                    .k = k,
                                    .v = In("v"),
                                    .heads = heads,
                                    .scale = golden["scale"],
                                    .causal = golden["causal"],
                                    .log_sum_exp = NewF32({q.dim(0), heads, q.dim(1)}),
                                    .out = Out("out")};
        backend_->Attention(forward);
        backend_->AttentionBackward({.forward = forward,
                                     .dout = In("dout"),
                                     .dq = Out("dq"),
                                     .dk = Out("dk"),
                                     .dv = Out("dv")});
      },
      [](nlohmann::json& golden) {
        if (golden["causal"].get<bool>()) {
          golden["causal"] = false;
        } else {
          golden["scale"] = golden["scale"].get<float>() * 1.001f;
        }
      },
      5);
}

TEST_P(LatentOpTest, EmbeddingOfSequences) {
  Run("embedding",
      [&](const nlohmann::json& golden) {
        backend_->Embedding(Parameter("table"), In("index"), Out("out"));
        const Tensor index = In("index");
        backend_->EmbeddingBackward(golden.contains("planted") ? Rotated(index) : index, In("dout"),
                                    OutF32("dtable"));
      },
      Plant, 1, {.blind = OnlyForward});
}

TEST_P(LatentOpTest, Gaussian) {
  Run(
      "gaussian",
      [&](const nlohmann::json& golden) {
        const GaussianArgs forward{.moments = Parameter("moments"),
                                   .noise = Parameter("noise"),
                                   .weight = golden["weight"],
                                   .latents = Out("latents"),
                                   .kl = OutF32("kl")};
        backend_->Gaussian(forward);
        // The golden's gradient of KL differs from row to row; the op's is the same for all.
        const Tensor dmoments = OutF32("dmoments");
        RowByRow(dmoments, [&](int64_t n, const Tensor& all) {
          backend_->GaussianBackward({.forward = forward,
                                      .dlatents = In("dlatents"),
                                      .scale = Given("dkl").as<float>()[n],
                                      .dmoments = all});
        });
      },
      // KL's share of the gradient is a hundredth.
      [](nlohmann::json& golden) { golden["weight"] = golden["weight"].get<float>() * 1.01f; }, 1,
      {.first = "moments",
       .blind = [](const nlohmann::json&, const std::string& name) { return name == "latents"; }});
}

TEST_P(LatentOpTest, ReconstructionLoss) {
  Run(
      "reconstruction",
      [&](const nlohmann::json& golden) {
        const Tensor output = Parameter("output");
        ReconstructionLossArgs args{.output = output,
                                    .target = Parameter("target"),
                                    .edges = golden["edges"],
                                    .loss = OutF32("loss"),
                                    .sum = NewF32({1})};
        RowByRow(OutF32("doutput"), [&](int64_t n, const Tensor& all) {
          args.scale = Given("dloss").as<float>()[n];
          args.doutput = all;
          backend_->ReconstructionLoss(args);
        });
        const std::vector<float> loss = Values(args.loss);
        EXPECT_NEAR(Values(args.sum)[0], args.scale * (loss[0] + loss[1]), 1e-5);
        // What is added has no gradient.
        const std::vector<float> before = Values(args.doutput);
        args.add = OnDevice(*backend_, {2}, std::vector<float>{3, 4}, DType::kF32);
        args.loss = NewF32({2});
        backend_->ReconstructionLoss(args);
        EXPECT_FLOAT_EQ(Values(args.loss)[1], loss[1] + 4);
        EXPECT_EQ(Values(args.doutput), before);
      },
      [](nlohmann::json& golden) { golden["edges"] = golden["edges"].get<float>() + 0.001f; }, 2,
      {.first = "output"});
}

TEST_P(LatentOpTest, LatentsAreDrawnFromTheirPosterior) {
  // One posterior: mean 2 and deviation 0.5 in the first channel, −1 and 0 in the second.
  std::vector<float> moments;
  for (int64_t p = 0; p < 64; ++p)
    for (const float value : {2.0f, -1.0f, 0.5f, 0.0f}) moments.push_back(value);
  constexpr int64_t kRows = 32;
  std::vector<SampleRow> plan(kRows);
  for (uint32_t i = 0; i < kRows; ++i)
    plan[i] = {.sample = i, .signal = 1, .noise = 0, .target_signal = 0, .target_noise = 1};
  const Tensor rows = Rows(plan), step = Step(3);
  const Shape shape{kRows, 8, 8, 2};
  const Tensor x = New(shape), target = NewF32(shape), image = NewF32(shape);
  backend_->MakeSamples({.posteriors = OnDevice(*backend_, {1, 8, 8, 4}, moments, DType::kF32),
                         .rows = rows,
                         .seed = 1,
                         .step = step,
                         .x = x,
                         .target = target,
                         .condition = NewF32({kRows}),
                         .image = image});
  const std::vector<float> y = Values(x), noise = Values(target);
  EXPECT_LE(RelativeError(y, Values(image)), bf16() ? kBf16Tolerance : 0);
  double sum = 0, square = 0, product = 0;
  for (size_t i = 0; i < y.size(); i += 2) {
    sum += y[i];
    square += std::pow(y[i] - 2, 2);
    product += (y[i] - 2) * noise[i];
    EXPECT_EQ(y[i + 1], -1);
  }
  const double count = static_cast<double>(y.size()) / 2;
  EXPECT_NEAR(sum / count, 2, 0.05);
  EXPECT_NEAR(square / count, 0.25, 0.03);
  EXPECT_NEAR(product / count, 0, 0.05);  // the two noises are different ones
  // Noise() is the same draw.
  const Tensor drawn = NewF32(shape);
  backend_->Noise(1, step, rows, drawn);
  EXPECT_NEAR(Values(drawn)[0] * 0.5f + 2, Values(image)[0], 1e-6);
}

/// Gradients of parameters in chunks of one row: of all rows at once, and row by row, added as the
/// trainer adds passes.
TEST_P(LatentOpTest, SumsDoNotDependOnPasses) {
  constexpr int64_t kRows = 4, kTokens = 77, kChannels = 40, kEntries = 50;
  const Shape shape{kRows, kTokens, kChannels};
  const auto normal = [](const Shape& of, uint64_t seed) {
    std::vector<float> values(of.elements());
    for (size_t i = 0; i < values.size(); ++i) values[i] = PhiloxNormal(seed, 0, i / 4).v[i % 4];
    return values;
  };
  const Tensor x = Activations(shape, normal(shape, 1)),
               dout = Activations(shape, normal(shape, 2)),
               picture = OnDevice(*backend_, {kRows, 16, 16, 3}, normal({kRows, 16, 16, 3}, 3),
                                  DType::kF32),
               target = NewF32(picture.shape(), 0.1f);
  Tensor index = Tensor::Host({kRows, kTokens}, DType::kI32);
  for (int64_t i = 0; i < index.elements(); ++i)
    index.as<int32_t>()[i] = static_cast<int32_t>(i % 3 == 0 ? i * 7 % kEntries : kEntries - 1);
  index = OnDevice(*backend_, index);
  backend_->SetChunkRows(1);
  const auto run = [&](int64_t first, int64_t rows) {
    const auto of = [&](const Tensor& all) { return all.Slice(first, rows); };
    const LayerNormArgs forward{.x = of(x),
                                .gamma = NewF32({kChannels}, 1.5f),
                                .beta = NewF32({kChannels}, 0),
                                .statistics = NewF32({rows, kTokens, 2}),
                                .out = New({rows, kTokens, kChannels})};
    backend_->LayerNorm(forward);
    const std::vector<Tensor> sums = {NewF32({kChannels}), NewF32({kChannels}),
                                      NewF32({kEntries, kChannels}), NewF32({1})};
    backend_->LayerNormBackward({.forward = forward,
                                 .dout = of(dout),
                                 .dx = New(forward.x.shape()),
                                 .dgamma = sums[0],
                                 .dbeta = sums[1]});
    backend_->EmbeddingBackward(of(index), of(dout), sums[2]);
    backend_->ReconstructionLoss({.output = of(picture),
                                  .target = of(target),
                                  .edges = 0.5f,
                                  .scale = 0.25f,
                                  .loss = NewF32({rows}),
                                  .sum = sums[3],
                                  .doutput = NewF32({rows, 16, 16, 3})});
    return sums;
  };
  const std::vector<Tensor> whole = run(0, kRows), again = run(0, kRows);
  std::vector<std::vector<Tensor>> passes;
  for (int64_t row = 0; row < kRows; ++row) passes.push_back(run(row, 1));
  for (size_t i = 0; i < whole.size(); ++i) {
    TreeSum(kRows, [&](int64_t a, int64_t b) { backend_->Accumulate(passes[a][i], passes[b][i]); });
    EXPECT_EQ(Values(passes[0][i]), Values(whole[i])) << i;
    EXPECT_EQ(Values(again[i]), Values(whole[i])) << i;
  }
}

class LargeLatentOpTest : public LargeOpFixture {};
INSTANTIATE_TEST_SUITE_P(Backends, LargeLatentOpTest, testing::Values("cuda_fp32", "cuda_bf16"),
                         [](const auto& instance) { return instance.param; });

TEST_P(LargeLatentOpTest, LayerNorm) {
  for (const int64_t channels : {72, 320}) {
    const Shape shape{kRows, 300, channels};
    const auto x = Normal(shape), d = Normal(shape), residual = Normal(shape),
               gamma = Normal({channels}), beta = Normal({channels});
    Compare([&](Backend& backend) {
      const LayerNormArgs forward{.x = Activations(backend, shape, x),
                                  .gamma = Floats(backend, {channels}, gamma),
                                  .beta = Floats(backend, {channels}, beta),
                                  .statistics = Floats(backend, {kRows, 300, 2}),
                                  .out = Activations(backend, shape)};
      backend.LayerNorm(forward);
      const LayerNormBackwardArgs backward{.forward = forward,
                                           .dout = Activations(backend, shape, d),
                                           .add = Activations(backend, shape, residual),
                                           .dx = Activations(backend, shape),
                                           .dgamma = Floats(backend, {channels}),
                                           .dbeta = Floats(backend, {channels})};
      backend.LayerNormBackward(backward);
      return std::vector<Tensor>{forward.out, forward.statistics, backward.dx, backward.dgamma,
                                 backward.dbeta};
    });
  }
}

TEST_P(LargeLatentOpTest, Geglu) {
  const Shape wide{kRows, 30, 144}, shape{kRows, 30, 72};
  const auto x = Normal(wide), d = Normal(shape);
  Compare([&](Backend& backend) {
    const Tensor in = Activations(backend, wide, x), out = Activations(backend, shape),
                 dx = Activations(backend, wide);
    backend.Geglu(in, out);
    backend.GegluBackward(in, Activations(backend, shape, d), dx);
    return std::vector<Tensor>{out, dx};
  });
}

/// 77 keys are no multiple of a vector; what lies behind them are the next row's.
TEST_P(LargeLatentOpTest, Attention) {
  struct Case {
    int64_t tokens, keys;
    bool causal;
  };
  for (const Case& c : {Case{136, 77, false}, Case{77, 77, true}, Case{40, 129, false}}) {
    SCOPED_TRACE(testing::Message() << c.tokens << " queries of " << c.keys << " keys");
    const Shape queries{kRows, c.tokens, 48}, fused{kRows, c.keys, 96};
    const auto q = Normal(queries), kv = Normal(fused), d = Normal(queries);
    for (const int heads : {1, 3}) {
      Compare([&](Backend& backend) {
        const Tensor keys = Activations(backend, fused, kv), dkeys = Activations(backend, fused),
                     dq = Activations(backend, queries);
        const AttentionArgs forward{.q = Activations(backend, queries, q),
                                    .k = keys.Columns(0, 48),
                                    .v = keys.Columns(48, 48),
                                    .heads = heads,
                                    .scale = 0.2f,
                                    .causal = c.causal,
                                    .log_sum_exp = Floats(backend, {kRows, heads, c.tokens}),
                                    .out = Activations(backend, queries)};
        backend.Attention(forward);
        backend.AttentionBackward({.forward = forward,
                                   .dout = Activations(backend, queries, d),
                                   .dq = dq,
                                   .dk = dkeys.Columns(0, 48),
                                   .dv = dkeys.Columns(48, 48)});
        return std::vector<Tensor>{forward.out, forward.log_sum_exp, dq, dkeys};
      });
    }
  }
}

/// As captions: most tokens are the last entry, and most entries are in none.
TEST_P(LargeLatentOpTest, Embedding) {
  constexpr int64_t kTokens = 77;
  for (const int64_t dim : {72, 9}) {
    const Shape shape{kRows, kTokens, dim};
    const auto table = Normal({500, dim}), d = Normal(shape);
    Tensor index = Tensor::Host({kRows, kTokens}, DType::kI32);
    for (int64_t i = 0; i < index.elements(); ++i)
      index.as<int32_t>()[i] = static_cast<int32_t>(i % kTokens < 9 ? i * i % 499
                                                    : i % 31 == 0   ? 3
                                                                    : 499);
    Compare([&](Backend& backend) {
      const Tensor at = OnDevice(backend, index), out = Activations(backend, shape),
                   dtable = Floats(backend, {500, dim});
      backend.Embedding(Floats(backend, {500, dim}, table), at, out);
      backend.EmbeddingBackward(at, Activations(backend, shape, d), dtable);
      return std::vector<Tensor>{out, dtable};
    });
  }
}

TEST_P(LargeLatentOpTest, PicturesAndPosteriors) {
  const Shape picture{kRows, 48, 32, 3}, latent{kRows, 12, 8, 4}, moments{kRows, 12, 8, 8};
  const auto output = Normal(picture), target = Normal(picture), of = Normal(moments),
             noise = Normal(latent), d = Normal(latent);
  Compare([&](Backend& backend) {
    const GaussianArgs gaussian{.moments = Floats(backend, moments, of),
                                .noise = Floats(backend, latent, noise),
                                .weight = 0.5f,
                                .latents = Activations(backend, latent),
                                .kl = Floats(backend, {kRows})};
    backend.Gaussian(gaussian);
    const Tensor dmoments = Floats(backend, moments);
    backend.GaussianBackward({.forward = gaussian,
                              .dlatents = Activations(backend, latent, d),
                              .scale = 0.25f,
                              .dmoments = dmoments});
    const ReconstructionLossArgs loss{.output = Floats(backend, picture, output),
                                      .target = Floats(backend, picture, target),
                                      .edges = 0.5f,
                                      .add = gaussian.kl,
                                      .scale = 0.25f,
                                      .loss = Floats(backend, {kRows}),
                                      .sum = Floats(backend, {1}),
                                      .doutput = Floats(backend, picture)};
    backend.ReconstructionLoss(loss);
    return std::vector<Tensor>{gaussian.latents, gaussian.kl, dmoments,
                               loss.loss,        loss.sum,    loss.doutput};
  });
}

}  // namespace
}  // namespace denoised::training
