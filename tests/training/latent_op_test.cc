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
};

// CUDA has none of these ops yet, and refuses models that need them.
INSTANTIATE_TEST_SUITE_P(Backends, LatentOpTest, testing::Values("cpu"),
                         [](const auto& instance) { return instance.param; });

TEST_P(LatentOpTest, LayerNorm) {
  Run(
      "layer_norm",
      [&](const nlohmann::json& golden) {
        const Tensor x = In("x"), dx = Out("dx"), dout = In("dout");
        const LayerNormArgs forward{.x = x,
                                    .gamma = In("gamma"),
                                    .beta = In("beta"),
                                    .eps = golden["eps"],
                                    .statistics = New({x.dim(0), x.dim(1), 2}),
                                    .out = Out("out")};
        backend_->LayerNorm(forward);
        LayerNormBackwardArgs backward{.forward = forward,
                                       .dout = dout,
                                       .dx = dx,
                                       .dgamma = Out("dgamma"),
                                       .dbeta = Out("dbeta")};
        backend_->LayerNormBackward(backward);
        // In place of dout, and with a residual's gradient in place of dx.
        const Tensor in_place = Scaled(dout, 1);
        backward.dout = backward.dx = in_place;
        backend_->LayerNormBackward(backward);
        EXPECT_EQ(RelativeError(in_place.span<float>(), dx.ToFloats()), 0);
        const Tensor sum = Scaled(x, 1), expected = New(x.shape());
        backward.dout = dout;
        backward.dx = backward.add = sum;
        backend_->LayerNormBackward(backward);
        backend_->Add(x, 1, dx, 1, 0, expected);
        EXPECT_LE(RelativeError(sum.span<float>(), expected.ToFloats()), 1e-6);
      },
      [](nlohmann::json& golden) { golden["eps"] = golden["eps"].get<double>() + 1e-3; }, 3);
}

TEST_P(LatentOpTest, Geglu) {
  Run(
      "geglu",
      [&](const nlohmann::json& golden) {
        Tensor x = In("x");
        if (golden.contains("swapped")) {  // gate before value
          const Tensor value = New(In("dout").shape()), gate = New(value.shape());
          backend_->Split(x, value, gate);
          x = New(x.shape());
          backend_->Concat(gate, value, x);
        }
        backend_->Geglu(x, Out("out"));
        backend_->GegluBackward(x, In("dout"), Out("dx"));
        const Tensor in_place = Scaled(x, 1);
        backend_->GegluBackward(in_place, In("dout"), in_place);
        EXPECT_EQ(RelativeError(in_place.span<float>(), outputs_["dx"].ToFloats()), 0);
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
                                    .log_sum_exp = New({q.dim(0), heads, q.dim(1)}),
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
  Run(
      "embedding",
      [&](const nlohmann::json&) {
        backend_->Embedding(In("table"), In("index"), Out("out"));
        backend_->EmbeddingBackward(In("index"), In("dout"), Out("dtable"));
      },
      nullptr, 1);
}

TEST_P(LatentOpTest, Gaussian) {
  Run(
      "gaussian",
      [&](const nlohmann::json& golden) {
        const GaussianArgs forward{.moments = In("moments"),
                                   .noise = In("noise"),
                                   .weight = golden["weight"],
                                   .latents = Out("latents"),
                                   .kl = Out("kl")};
        backend_->Gaussian(forward);
        // The golden's gradient of KL differs from row to row; the op's is the same for all.
        const Tensor dmoments = Out("dmoments");
        const int64_t rows = dmoments.dim(0), each = dmoments.elements() / rows;
        for (int64_t n = 0; n < rows; ++n) {
          const Tensor row = New(dmoments.shape());
          backend_->GaussianBackward({.forward = forward,
                                      .dlatents = In("dlatents"),
                                      .scale = In("dkl").as<float>()[n],
                                      .dmoments = row});
          std::memcpy(dmoments.as<float>() + n * each, row.as<float>() + n * each,
                      static_cast<size_t>(each) * sizeof(float));
        }
      },
      [](nlohmann::json& golden) { golden["weight"] = golden["weight"].get<float>() * 1.001f; }, 1,
      "moments");
}

TEST_P(LatentOpTest, ReconstructionLoss) {
  Run(
      "reconstruction",
      [&](const nlohmann::json& golden) {
        const Tensor output = In("output");
        const int64_t rows = output.dim(0), each = output.elements() / rows;
        ReconstructionLossArgs args{.output = output,
                                    .target = In("target"),
                                    .edges = golden["edges"],
                                    .loss = Out("loss"),
                                    .sum = New({1}),
                                    .doutput = New(output.shape())};
        const Tensor doutput = Out("doutput");
        for (int64_t n = 0; n < rows; ++n) {
          args.scale = In("dloss").as<float>()[n];
          backend_->ReconstructionLoss(args);
          std::memcpy(doutput.as<float>() + n * each, args.doutput.as<float>() + n * each,
                      static_cast<size_t>(each) * sizeof(float));
        }
        const float* loss = args.loss.as<float>();
        EXPECT_NEAR(args.sum.as<float>()[0], args.scale * (loss[0] + loss[1]), 1e-5);
        // What is added has no gradient.
        const Tensor before = Scaled(args.doutput, 1), alone = Scaled(args.loss, 1);
        args.add = Tensor::HostF32({2}, std::vector<float>{3, 4});
        args.loss = New({2});
        backend_->ReconstructionLoss(args);
        EXPECT_FLOAT_EQ(args.loss.as<float>()[1], alone.as<float>()[1] + 4);
        EXPECT_EQ(RelativeError(args.doutput.span<float>(), before.ToFloats()), 0);
      },
      [](nlohmann::json& golden) { golden["edges"] = golden["edges"].get<float>() + 0.001f; }, 2,
      "output");
}

TEST_P(LatentOpTest, LatentsAreDrawnFromTheirPosterior) {
  // One posterior: mean 2 and deviation 0.5 in the first channel, −1 and 0 in the second.
  const Tensor posteriors = New({1, 8, 8, 4});
  for (int64_t p = 0; p < 64; ++p) {
    const float values[4] = {2, -1, 0.5f, 0};
    std::memcpy(posteriors.as<float>() + p * 4, values, sizeof values);
  }
  constexpr int64_t kRows = 32;
  std::vector<SampleRow> plan(kRows);
  for (uint32_t i = 0; i < kRows; ++i)
    plan[i] = {.sample = i, .signal = 1, .noise = 0, .target_signal = 0, .target_noise = 1};
  const Tensor rows = Tensor::Host({kRows, 16}, DType::kI32), step = Tensor::Host({1}, DType::kI32);
  std::memcpy(rows.data(), plan.data(), rows.bytes());
  step.as<int32_t>()[0] = 3;
  const Tensor x = New({kRows, 8, 8, 2}), target = New(x.shape()), condition = New({kRows});
  backend_->MakeSamples({.posteriors = posteriors,
                         .rows = rows,
                         .seed = 1,
                         .step = step,
                         .x = x,
                         .target = target,
                         .condition = condition});
  double sum = 0, square = 0, product = 0;
  for (int64_t i = 0; i < x.elements(); i += 2) {
    sum += x.as<float>()[i];
    square += std::pow(x.as<float>()[i] - 2, 2);
    product += (x.as<float>()[i] - 2) * target.as<float>()[i];
    EXPECT_EQ(x.as<float>()[i + 1], -1);
  }
  const double count = static_cast<double>(x.elements()) / 2;
  EXPECT_NEAR(sum / count, 2, 0.05);
  EXPECT_NEAR(square / count, 0.25, 0.03);
  EXPECT_NEAR(product / count, 0, 0.05);  // the two noises are different ones
  // Noise() is the same draw.
  const Tensor noise = New(x.shape());
  backend_->Noise(1, step, rows, noise);
  EXPECT_NEAR(noise.as<float>()[0] * 0.5f + 2, x.as<float>()[0], 1e-6);
}

}  // namespace
}  // namespace denoised::training
