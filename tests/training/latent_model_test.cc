// SPDX-License-Identifier: Apache-2.0
// The gradients of the parts of a text-to-image pipeline against PyTorch in float64
// (latent_models.json): CLIPTextModel, UNet2DConditionModel, AutoencoderKL with its loss.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "engine/core/config_reader.h"
#include "engine/io/safetensors.h"
#include "engine/training/autoencoder_kl.h"
#include "engine/training/clip_text.h"
#include "engine/training/unet2d_condition.h"
#include "tests/models/golden.h"
#include "tests/training/backends.h"
#include "tests/training/golden.h"

namespace denoised::training {
namespace {

/// fp32 over a whole network, forward and backward, against float64; 4e-6 was measured at most.
constexpr double kTolerance = 2e-5;
/// The error of all gradients together in bf16 at a cosine of 0.999: √(2 − 2·cosine).
const double kBf16Tolerance = std::sqrt(2 - 2 * 0.999);

std::filesystem::path Latent(const std::string& name) {
  return DENOISED_SOURCE_DIR "/tests/models/latent/" + name;
}

nlohmann::json Config(const std::string& name) {
  auto json = ReadJsonFile(Latent(name) / "config.json");
  EXPECT_TRUE(json.ok()) << json.status();
  return *json;
}

/// Weights, gradients and activations of one network, on the backend of that name.
class Bench {
 public:
  explicit Bench(const std::string& device, bool recompute = false)
      : recompute_(recompute), backend_(OpenForTest(device)) {}
  Declare declare() { return Declare(*backend_, parameters_); }
  bool bf16() const { return backend_->activation_dtype() == DType::kBF16; }
  double tolerance() const { return bf16() ? kBf16Tolerance : kTolerance; }

  void Load(const std::string& name, const std::string& stem) {
    const Tensor trained = Filled(parameters_.trained_elements(), 0),
                 fixed = Filled(std::max<int64_t>(16, parameters_.fixed_elements()), 0);
    auto tensors = Safetensors::OpenDirectory(Latent(name), stem);
    ASSERT_TRUE(tensors.ok()) << tensors.status();
    Weights weights(*std::move(tensors), name);
    weights.Ignore("text_model.embeddings.position_ids");
    const absl::Status loaded = parameters_.Load(weights, trained, fixed);
    ASSERT_TRUE(loaded.ok()) << loaded;
    trained_ = trained.elements() > 0 ? OnDevice(*backend_, trained) : Tensor();
    fixed_ = OnDevice(*backend_, fixed);
  }
  Masters masters() { return {*backend_, parameters_, trained_, fixed_}; }
  Pass NewPass() {
    // Whatever is not written stays NaN.
    if (trained_) gradient_ = OnDevice(*backend_, Filled(trained_.elements(), std::nanf("")));
    arena_.emplace(OnDevice(*backend_, Tensor::Host({32 << 20}, DType::kU8)));
    return {.backend = *backend_,
            .arena = *arena_,
            .parameters = parameters_,
            .trained = trained_,
            .fixed = fixed_,
            .gradient = gradient_,
            .recompute_norms = recompute_};
  }
  Tensor Activations(const Tensor& host) {
    return OnDevice(*backend_, host.shape(), host.ToFloats(), backend_->activation_dtype());
  }
  Tensor Floats(const Tensor& host) {
    return OnDevice(*backend_, host.shape(), host.ToFloats(), DType::kF32);
  }
  std::vector<float> Values(const Tensor& tensor) { return OnHost(*backend_, tensor); }
  double Error(const Tensor& tensor, const nlohmann::json& summary) {
    return Distance(Values(tensor), summary) / summary[0].get<double>();
  }

  /// The worst distance of a parameter's gradient from the golden; in bf16 that of all together,
  /// since single parameters may be further off.
  double Worst(const nlohmann::json& golden, std::string* name = nullptr) {
    const Tensor gradient = Tensor::HostF32(gradient_.shape(), Values(gradient_));
    double all = 0;
    for (size_t i = 0; i < parameters_.all().size(); ++i)
      all += std::pow(golden.at(parameters_[static_cast<int>(i)].name)[0].get<double>(), 2);
    all = std::sqrt(all);
    double worst = 0, squares = 0;
    for (size_t i = 0; i < parameters_.all().size(); ++i) {
      const Parameter& parameter = parameters_[static_cast<int>(i)];
      const nlohmann::json& summary = golden.at(parameter.name);
      const Tensor part = parameters_.Part(gradient, static_cast<int>(i));
      const double distance = Distance(part.span<float>(), summary);
      squares += distance * distance;
      // Some gradients are 0 but for rounding (a key's bias), so all count a little.
      const double error = distance / std::max(summary[0].get<double>(), 1e-2 * all);
      if (error <= worst) continue;
      worst = error;  // NaN stays
      if (name != nullptr) *name = parameter.name;
    }
    return bf16() ? std::sqrt(squares) / all : worst;
  }

  bool recompute_;
  std::unique_ptr<Backend> backend_;
  Parameters parameters_;
  Tensor trained_, fixed_, gradient_;
  std::optional<Arena> arena_;

 private:
  static Tensor Filled(int64_t elements, float value) {
    return Tensor::HostF32({elements}, std::vector<float>(elements, value));
  }
};

std::map<std::string, Tensor> Tensors(const std::string& family) {
  const auto file = Safetensors::Open(Latent(family) / "goldens.safetensors");
  EXPECT_TRUE(file.ok()) << file.status();
  return file->tensors();
}

/// ±1 by the element's place; in NCHW where the tensor is an image.
Tensor Signs(const Shape& shape, uint64_t stream) {
  const bool image = shape.rank() == 4;
  const int64_t c = shape[-1], pixels = image ? shape[1] * shape[2] : 1;
  const Tensor to = Tensor::Host(shape, DType::kF32);
  for (int64_t i = 0; i < to.elements(); ++i) {
    const int64_t row = i / c / pixels, pixel = i / c % pixels;
    to.as<float>()[i] = Sign(image ? (row * c + i % c) * pixels + pixel : i, stream);
  }
  return to;
}

struct TextCase {
  Tensor ids, positions;
};
TextCase Texts(Backend& backend, const std::map<std::string, Tensor>& io) {
  const Tensor& from = io.at("text.ids");
  const Tensor ids = Tensor::Host(from.shape(), DType::kI32),
               positions = Tensor::Host(from.shape(), DType::kI32);
  for (int64_t i = 0; i < from.elements(); ++i) {
    ids.as<int32_t>()[i] = static_cast<int32_t>(from.as<int64_t>()[i]);
    positions.as<int32_t>()[i] = static_cast<int32_t>(i % from.dim(1));
  }
  return {OnDevice(backend, ids), OnDevice(backend, positions)};
}

absl::StatusOr<std::unique_ptr<ClipText>> MakeText(const Declare& declare,
                                                   const std::string& family) {
  DENOISED_ASSIGN_OR_RETURN(
      const ClipTextConfig config,
      ClipTextConfig::Parse(Config(family + "/text_encoder"), "config.json", "CLIPTextModel"));
  return ClipText::Make(declare, config);
}

/// Cases of each backend.
class LatentModelGradients : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() != "cpu") DENOISED_NEEDS_GPU();
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, LatentModelGradients, testing::ValuesIn(kBackends),
                         [](const auto& instance) { return instance.param; });

TEST_P(LatentModelGradients, TextEncoder) {
  for (const bool recompute : {false, true}) {
    const nlohmann::json golden = ReadGolden("latent_models.json").at("sd1/text_encoder");
    Bench bench(GetParam(), recompute);
    auto model = MakeText(bench.declare(), "sd1");
    ASSERT_TRUE(model.ok()) << model.status();
    bench.Load("sd1/text_encoder", "model");
    (*model)->Pack(bench.masters());
    const TextCase text = Texts(*bench.backend_, Tensors("sd1"));
    const auto run = [&](bool check) {
      Pass pass = bench.NewPass();
      ClipText::Kept kept;
      const Tensor states = (*model)->Forward(pass, text.ids, text.positions, &kept);
      if (check) {
        EXPECT_LE(bench.Error(states, golden["output"]), bench.tolerance());
      }
      (*model)->Backward(pass, text.ids, text.positions, std::move(kept),
                         bench.Activations(Signs(states.shape(), 0)));
      EXPECT_TRUE(bench.backend_->status().ok()) << bench.backend_->status();
    };
    for (const int64_t chunk : {text.ids.dim(0), int64_t{0}}) {
      bench.backend_->SetChunkRows(chunk);
      run(true);
      std::string name;
      EXPECT_LE(bench.Worst(golden, &name), bench.tolerance()) << name;
      EXPECT_EQ(bench.parameters_.all().size() + 1, golden.size());
    }
    if (GetParam() != "cpu") continue;
    // A planted error is seen: one weight, half as large again and 0.01 more.
    bench.trained_.as<float>()[bench.parameters_.all()[4].offset] *= 1.5f;
    bench.trained_.as<float>()[bench.parameters_.all()[4].offset] += 0.01f;
    (*model)->Pack(bench.masters());
    run(false);
    EXPECT_GT(bench.Worst(golden), kTolerance);
  }
}

TEST_P(LatentModelGradients, FrozenTextEncoderHasNothingToTrain) {
  Bench bench(GetParam());
  auto model = MakeText(bench.declare().Frozen(), "sd1");
  ASSERT_TRUE(model.ok()) << model.status();
  bench.Load("sd1/text_encoder", "model");
  EXPECT_EQ(bench.parameters_.trained_elements(), 0);
  (*model)->Pack(bench.masters());
  const TextCase text = Texts(*bench.backend_, Tensors("sd1"));
  Pass pass = bench.NewPass();
  ClipText::Kept kept;
  const Tensor states = (*model)->Forward(pass, text.ids, text.positions, &kept);
  EXPECT_LE(bench.Error(states, ReadGolden("latent_models.json").at("sd1/text_encoder")["output"]),
            bench.tolerance());
}

/// A family of pipelines, the act_fn of its UNet, and a backend.
class UNetGradients
    : public testing::TestWithParam<std::tuple<std::string, const char*, std::string>> {
 protected:
  void SetUp() override {
    if (std::get<2>(GetParam()) != "cpu") DENOISED_NEEDS_GPU();
  }
};

TEST_P(UNetGradients, AgreeWithPyTorch) {
  const auto& [family, act_fn, device] = GetParam();
  const std::string name = family + "/unet";
  nlohmann::json json = Config(name);
  const bool changed = json.at("act_fn") != act_fn;
  json["act_fn"] = act_fn;
  const nlohmann::json golden =
      ReadGolden("latent_models.json").at(changed ? fmt::format("{} act_{}", name, act_fn) : name);
  const std::map<std::string, Tensor> io = Tensors(family);
  const Tensor sample = ToNhwc(io.at("unet.sample")), &all = io.at("text.states");
  const int64_t rows = sample.dim(0);
  const Tensor condition = Tensor::Host({rows}, DType::kF32);
  for (int64_t i = 0; i < rows; ++i)
    condition.as<float>()[i] = static_cast<float>(io.at("unet.timestep").as<int64_t>()[i]);
  const auto input_of = [&](Bench& bench) {
    return UNet2DCondition::Input{
        .x = bench.Activations(sample),
        .condition = bench.Floats(condition),
        .states = bench.Activations(Tensor::HostF32(all.shape(), all.ToFloats()).Slice(0, rows))};
  };
  for (const bool recompute : {false, true}) {
    Bench bench(device, recompute);
    // GELU's derivative has more curvature than SiLU's: 0.049 was measured at most on an H200.
    const double tolerance =
        bench.tolerance() * (bench.bf16() && act_fn == std::string("gelu") ? 1.3 : 1);
    const auto config = UNet2DConditionConfig::Parse(json, "config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    auto model = UNet2DCondition::Make(bench.declare(), *config);
    ASSERT_TRUE(model.ok()) << model.status();
    bench.Load(name, "diffusion_pytorch_model");
    (*model)->Pack(bench.masters());
    const UNet2DCondition::Input input = input_of(bench);
    const auto run = [&](bool wants_dstates) {
      Pass pass = bench.NewPass();
      UNet2DCondition::KeptPointer kept;
      const Tensor output = (*model)->Forward(pass, input, &kept);
      EXPECT_LE(bench.Error(output, golden["output"]), bench.tolerance());
      Tensor dstates;
      (*model)->Backward(pass, input, std::move(kept), bench.Floats(Signs(output.shape(), 0)),
                         wants_dstates ? &dstates : nullptr);
      EXPECT_TRUE(bench.backend_->status().ok()) << bench.backend_->status();
      if (wants_dstates) {
        EXPECT_LE(bench.Error(dstates, golden["states"]), tolerance);
      }
      std::string worst;
      EXPECT_LE(bench.Worst(golden, &worst), tolerance) << worst;
    };
    for (const int64_t chunk : {rows, int64_t{1}}) {
      SCOPED_TRACE(testing::Message() << "chunks of " << chunk);
      bench.backend_->SetChunkRows(chunk);
      run(true);
      EXPECT_EQ(bench.parameters_.all().size() + 2, golden.size());
      run(false);  // without the gradient of the states
    }
    if (recompute || device != "cpu") continue;
    // A planted error is seen: heads that are merged in another way.
    UNet2DConditionConfig planted = *config;
    planted.attention_head_dim.assign(planted.attention_head_dim.size(), 1);
    Bench other(device);
    model = UNet2DCondition::Make(other.declare(), planted);
    ASSERT_TRUE(model.ok()) << model.status();
    other.Load(name, "diffusion_pytorch_model");
    (*model)->Pack(other.masters());
    Pass pass = other.NewPass();
    UNet2DCondition::KeptPointer kept;
    const Tensor output = (*model)->Forward(pass, input, &kept);
    (*model)->Backward(pass, input, std::move(kept), Signs(output.shape(), 0), nullptr);
    EXPECT_GT(other.Worst(golden), kTolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Goldens, UNetGradients,
                         testing::Combine(testing::Values("sd1", "sd2"),
                                          testing::Values("silu", "gelu"),
                                          testing::ValuesIn(kBackends)),
                         [](const auto& instance) {
                           return fmt::format("{}_{}_{}", std::get<0>(instance.param),
                                              std::get<1>(instance.param),
                                              std::get<2>(instance.param));
                         });

TEST_P(LatentModelGradients, AutoencoderWithItsLoss) {
  const nlohmann::json golden = ReadGolden("latent_models.json").at("sd2/vae");
  const Tensor image = ToNhwc(Tensors("sd2").at("vae.image"));
  const int64_t rows = image.dim(0);
  for (const bool recompute : {false, true}) {
    Bench bench(GetParam(), recompute);
    const auto config = AutoencoderKLConfig::Parse(Config("sd2/vae"), "config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    auto model = AutoencoderKL::Make(bench.declare(), *config);
    ASSERT_TRUE(model.ok()) << model.status();
    bench.Load("sd2/vae", "diffusion_pytorch_model");
    (*model)->Pack(bench.masters());
    const Tensor x = bench.Activations(image), target = bench.Floats(image);
    for (const float edges : {0.5f, 0.501f}) {  // the second is planted
      if (edges != 0.5f && bench.bf16()) continue;
      bench.backend_->SetChunkRows(edges == 0.5f ? rows : 1);
      Pass pass = bench.NewPass();
      AutoencoderKL::Kept encoder, decoder;
      const Tensor moments = (*model)->Encode(pass, x, &encoder);
      const Shape latent{rows, moments.dim(1), moments.dim(2), moments.dim(3) / 2};
      Tensor noise = Tensor::Host(latent, DType::kF32);
      for (int64_t i = 0; i < noise.elements(); ++i) noise.as<float>()[i] = Sign(i, 9);
      noise = bench.Floats(noise);
      const Tensor latents = pass.New(latent), kl = pass.NewF32({rows});
      const GaussianArgs gaussian{
          .moments = moments, .noise = noise, .weight = 0.1f, .latents = latents, .kl = kl};
      bench.backend_->Gaussian(gaussian);
      const Tensor output = (*model)->Decode(pass, latents, &decoder);
      EXPECT_LE(bench.Error(output, golden["output"]), bench.tolerance());
      const float scale = 1 / static_cast<float>(rows);
      const Tensor doutput = pass.NewF32(output.shape()), loss = pass.NewF32({rows});
      bench.backend_->ReconstructionLoss({.output = output,
                                          .target = target,
                                          .edges = edges,
                                          .add = kl,
                                          .scale = scale,
                                          .loss = loss,
                                          .sum = pass.NewF32({1}),
                                          .doutput = doutput});
      const Tensor dlatents = (*model)->DecodeBackward(pass, std::move(decoder), doutput);
      const Tensor dmoments = pass.NewF32(moments.shape());
      bench.backend_->GaussianBackward(
          {.forward = gaussian, .dlatents = dlatents, .scale = scale, .dmoments = dmoments});
      (*model)->EncodeBackward(pass, std::move(encoder), dmoments);
      EXPECT_TRUE(bench.backend_->status().ok()) << bench.backend_->status();
      std::string worst;
      if (edges == 0.5f) {
        EXPECT_LE(bench.Error(loss, golden["loss"]), bench.tolerance());
        // The loss is made of signs, and rounding turns those of pixels that are nearly right: the
        // worst gradient is off by 0.063 in bf16 on an H100.
        EXPECT_LE(bench.Worst(golden, &worst), bench.tolerance() * (bench.bf16() ? 2 : 1)) << worst;
        EXPECT_EQ(bench.parameters_.all().size() + 2, golden.size());
      } else {
        EXPECT_GT(bench.Worst(golden, &worst), kTolerance);
      }
    }
  }
}

TEST(LatentModels, WhatCannotBeTrainedIsRefusedByName) {
  for (const auto& [family, message] :
       {std::pair{"sdxl", "addition_embed_type"}, std::pair{"lcm", "time_cond_proj_dim"}}) {
    const auto config =
        UNet2DConditionConfig::Parse(Config(std::string(family) + "/unet"), "config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    Bench bench("cpu");
    const absl::Status status = UNet2DCondition::Make(bench.declare(), *config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(std::string(status.message()).find(message), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace denoised::training
