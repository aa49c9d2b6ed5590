// SPDX-License-Identifier: Apache-2.0
// The gradients of the parts of a text-to-image pipeline against PyTorch in float64
// (latent_models.json): CLIPTextModel, UNet2DConditionModel, AutoencoderKL with its loss.

#include <gtest/gtest.h>

#include <cstring>

#include "engine/core/config_reader.h"
#include "engine/io/safetensors.h"
#include "engine/training/autoencoder_kl.h"
#include "engine/training/clip_text.h"
#include "engine/training/unet2d_condition.h"
#include "tests/models/golden.h"
#include "tests/training/golden.h"

namespace denoised::training {
namespace {

/// fp32 over a whole network, forward and backward, against float64; 4e-6 was measured at most.
constexpr double kTolerance = 2e-5;

std::filesystem::path Latent(const std::string& name) {
  return DENOISED_SOURCE_DIR "/tests/models/latent/" + name;
}

nlohmann::json Config(const std::string& name) {
  auto json = ReadJsonFile(Latent(name) / "config.json");
  EXPECT_TRUE(json.ok()) << json.status();
  return *json;
}

/// Weights, gradients and activations of one network.
class Bench {
 public:
  explicit Bench(bool recompute = false) : recompute_(recompute) {
    auto backend = OpenCpuBackend();
    EXPECT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
  }
  Declare declare() { return Declare(*backend_, parameters_); }

  void Load(const std::string& name, const std::string& stem) {
    trained_ = Zeros(parameters_.trained_elements());
    fixed_ = Zeros(parameters_.fixed_elements());
    gradient_ = Zeros(parameters_.trained_elements());
    auto tensors = Safetensors::OpenDirectory(Latent(name), stem);
    ASSERT_TRUE(tensors.ok()) << tensors.status();
    Weights weights(*std::move(tensors), name);
    weights.Ignore("text_model.embeddings.position_ids");
    const absl::Status loaded = parameters_.Load(weights, trained_, fixed_);
    ASSERT_TRUE(loaded.ok()) << loaded;
  }
  Masters masters() { return {*backend_, parameters_, trained_, fixed_}; }
  Pass NewPass() {
    // Whatever is not written stays NaN.
    for (size_t i = 0; i < parameters_.all().size(); ++i) {
      if (!parameters_[static_cast<int>(i)].trained) continue;
      const Tensor part = parameters_.Part(gradient_, static_cast<int>(i));
      std::fill_n(part.as<float>(), part.elements(), std::nanf(""));
    }
    arena_.emplace(Tensor::Host({32 << 20}, DType::kU8));
    return {.backend = *backend_,
            .arena = *arena_,
            .parameters = parameters_,
            .trained = trained_,
            .fixed = fixed_,
            .gradient = gradient_,
            .recompute_norms = recompute_};
  }

  /// The worst distance of a parameter's gradient from the golden.
  double Worst(const nlohmann::json& golden, std::string* name = nullptr) {
    double all = 0;
    for (size_t i = 0; i < parameters_.all().size(); ++i)
      all += std::pow(golden.at(parameters_[static_cast<int>(i)].name)[0].get<double>(), 2);
    all = std::sqrt(all);
    double worst = 0;
    for (size_t i = 0; i < parameters_.all().size(); ++i) {
      const Parameter& parameter = parameters_[static_cast<int>(i)];
      const nlohmann::json& summary = golden.at(parameter.name);
      const Tensor part = parameters_.Part(gradient_, static_cast<int>(i));
      // Some gradients are 0 but for rounding (a key's bias), so all count a little.
      const double scale = std::max(summary[0].get<double>(), 1e-2 * all);
      const double error = Distance(part.span<float>(), summary) / scale;
      if (error <= worst) continue;
      worst = error;  // NaN stays
      if (name != nullptr) *name = parameter.name;
    }
    return worst;
  }

  bool recompute_;
  std::unique_ptr<Backend> backend_;
  Parameters parameters_;
  Tensor trained_, fixed_, gradient_;
  std::optional<Arena> arena_;

 private:
  static Tensor Zeros(int64_t elements) {
    return Tensor::HostF32({elements}, std::vector<float>(elements));
  }
};

double Error(const Tensor& tensor, const nlohmann::json& summary) {
  return Distance(tensor.span<float>(), summary) / summary[0].get<double>();
}

std::map<std::string, Tensor> Tensors(const std::string& family) {
  const auto file = Safetensors::Open(Latent(family) / "goldens.safetensors");
  EXPECT_TRUE(file.ok()) << file.status();
  return file->tensors();
}

/// ±1 by the element's place; in NCHW where the tensor is an image.
void FillSigns(const Tensor& to, uint64_t stream) {
  const bool image = to.shape().rank() == 4;
  const int64_t c = to.dim(-1), pixels = image ? to.dim(1) * to.dim(2) : 1;
  for (int64_t i = 0; i < to.elements(); ++i) {
    const int64_t row = i / c / pixels, pixel = i / c % pixels;
    to.as<float>()[i] = Sign(image ? (row * c + i % c) * pixels + pixel : i, stream);
  }
}

struct TextCase {
  Tensor ids, positions;
};
TextCase Texts(const std::map<std::string, Tensor>& io) {
  const Tensor& from = io.at("text.ids");
  TextCase text{Tensor::Host(from.shape(), DType::kI32), Tensor::Host(from.shape(), DType::kI32)};
  for (int64_t i = 0; i < from.elements(); ++i) {
    text.ids.as<int32_t>()[i] = static_cast<int32_t>(from.as<int64_t>()[i]);
    text.positions.as<int32_t>()[i] = static_cast<int32_t>(i % from.dim(1));
  }
  return text;
}

absl::StatusOr<std::unique_ptr<ClipText>> MakeText(const Declare& declare,
                                                   const std::string& family) {
  DENOISED_ASSIGN_OR_RETURN(
      const ClipTextConfig config,
      ClipTextConfig::Parse(Config(family + "/text_encoder"), "config.json", "CLIPTextModel"));
  return ClipText::Make(declare, config);
}

TEST(LatentModelGradients, TextEncoder) {
  for (const bool recompute : {false, true}) {
    const nlohmann::json golden = ReadGolden("latent_models.json").at("sd1/text_encoder");
    Bench bench(recompute);
    auto model = MakeText(bench.declare(), "sd1");
    ASSERT_TRUE(model.ok()) << model.status();
    bench.Load("sd1/text_encoder", "model");
    (*model)->Pack(bench.masters());
    const TextCase text = Texts(Tensors("sd1"));
    for (const int64_t chunk : {text.ids.dim(0), int64_t{0}}) {
      bench.backend_->SetChunkRows(chunk);
      Pass pass = bench.NewPass();
      ClipText::Kept kept;
      const Tensor states = (*model)->Forward(pass, text.ids, text.positions, &kept);
      EXPECT_LE(Error(states, golden["output"]), kTolerance);
      const Tensor dstates = pass.New(states.shape());
      FillSigns(dstates, 0);
      (*model)->Backward(pass, text.ids, text.positions, std::move(kept), dstates);
      std::string name;
      EXPECT_LE(bench.Worst(golden, &name), kTolerance) << name;
      EXPECT_EQ(bench.parameters_.all().size() + 1, golden.size());
    }
    // A planted error is seen: one weight that is 2 % off.
    bench.trained_.as<float>()[bench.parameters_.all()[4].offset] *= 1.5f;
    bench.trained_.as<float>()[bench.parameters_.all()[4].offset] += 0.01f;
    (*model)->Pack(bench.masters());
    Pass pass = bench.NewPass();
    ClipText::Kept kept;
    const Tensor dstates =
        pass.New((*model)->Forward(pass, text.ids, text.positions, &kept).shape());
    FillSigns(dstates, 0);
    (*model)->Backward(pass, text.ids, text.positions, std::move(kept), dstates);
    EXPECT_GT(bench.Worst(golden), kTolerance);
  }
}

TEST(LatentModelGradients, FrozenTextEncoderHasNothingToTrain) {
  Bench bench;
  auto model = MakeText(bench.declare().Frozen(), "sd1");
  ASSERT_TRUE(model.ok()) << model.status();
  bench.Load("sd1/text_encoder", "model");
  EXPECT_EQ(bench.parameters_.trained_elements(), 0);
  (*model)->Pack(bench.masters());
  const TextCase text = Texts(Tensors("sd1"));
  Pass pass = bench.NewPass();
  ClipText::Kept kept;
  const Tensor states = (*model)->Forward(pass, text.ids, text.positions, &kept);
  EXPECT_LE(Error(states, ReadGolden("latent_models.json").at("sd1/text_encoder")["output"]),
            kTolerance);
}

class UNetGradients : public testing::TestWithParam<std::string> {};

TEST_P(UNetGradients, AgreeWithPyTorch) {
  const std::string family = GetParam(), name = family + "/unet";
  const nlohmann::json golden = ReadGolden("latent_models.json").at(name);
  const std::map<std::string, Tensor> io = Tensors(family);
  for (const bool recompute : {false, true}) {
    Bench bench(recompute);
    const auto config = UNet2DConditionConfig::Parse(Config(name), "config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    auto model = UNet2DCondition::Make(bench.declare(), *config);
    ASSERT_TRUE(model.ok()) << model.status();
    bench.Load(name, "diffusion_pytorch_model");
    (*model)->Pack(bench.masters());
    UNet2DCondition::Input input;
    input.x = ToNhwc(io.at("unet.sample"));
    const int64_t rows = input.x.dim(0);
    input.condition = Tensor::Host({rows}, DType::kF32);
    for (int64_t i = 0; i < rows; ++i)
      input.condition.as<float>()[i] = static_cast<float>(io.at("unet.timestep").as<int64_t>()[i]);
    const Tensor& all = io.at("text.states");
    input.states = Tensor::HostF32(all.shape(), all.ToFloats()).Slice(0, rows);
    const auto run = [&](Tensor* dstates) {
      Pass pass = bench.NewPass();
      UNet2DCondition::KeptPointer kept;
      const Tensor output = (*model)->Forward(pass, input, &kept);
      EXPECT_LE(Error(output, golden["output"]), kTolerance);
      const Tensor doutput = pass.NewF32(output.shape());
      FillSigns(doutput, 0);
      (*model)->Backward(pass, input, std::move(kept), doutput, dstates);
      if (dstates != nullptr)
        *dstates = Tensor::HostF32(dstates->shape(), dstates->ToFloats());  // outlives the arena
    };
    for (const int64_t chunk : {rows, int64_t{1}}) {
      bench.backend_->SetChunkRows(chunk);
      Tensor dstates;
      run(&dstates);
      std::string worst;
      EXPECT_LE(bench.Worst(golden, &worst), kTolerance) << worst << ", chunks of " << chunk;
      EXPECT_LE(Error(dstates, golden["states"]), kTolerance);
      EXPECT_EQ(bench.parameters_.all().size() + 2, golden.size());
      run(nullptr);  // without the gradient of the states
      EXPECT_LE(bench.Worst(golden, &worst), kTolerance) << worst;
    }
    if (recompute) continue;
    // A planted error is seen: heads that are merged in another way.
    UNet2DConditionConfig planted = *config;
    planted.attention_head_dim.assign(planted.attention_head_dim.size(), 1);
    Bench other;
    model = UNet2DCondition::Make(other.declare(), planted);
    ASSERT_TRUE(model.ok()) << model.status();
    other.Load(name, "diffusion_pytorch_model");
    (*model)->Pack(other.masters());
    Pass pass = other.NewPass();
    UNet2DCondition::KeptPointer kept;
    const Tensor output = (*model)->Forward(pass, input, &kept);
    const Tensor doutput = pass.NewF32(output.shape());
    FillSigns(doutput, 0);
    (*model)->Backward(pass, input, std::move(kept), doutput, nullptr);
    EXPECT_GT(other.Worst(golden), kTolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Goldens, UNetGradients, testing::Values("sd1", "sd2"),
                         [](const auto& instance) { return instance.param; });

TEST(LatentModelGradients, AutoencoderWithItsLoss) {
  const nlohmann::json golden = ReadGolden("latent_models.json").at("sd2/vae");
  const Tensor image = ToNhwc(Tensors("sd2").at("vae.image"));
  const int64_t rows = image.dim(0);
  for (const bool recompute : {false, true}) {
    Bench bench(recompute);
    const auto config = AutoencoderKLConfig::Parse(Config("sd2/vae"), "config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    auto model = AutoencoderKL::Make(bench.declare(), *config);
    ASSERT_TRUE(model.ok()) << model.status();
    bench.Load("sd2/vae", "diffusion_pytorch_model");
    (*model)->Pack(bench.masters());
    for (const float edges : {0.5f, 0.501f}) {  // the second is planted
      bench.backend_->SetChunkRows(edges == 0.5f ? rows : 1);
      Pass pass = bench.NewPass();
      AutoencoderKL::Kept encoder, decoder;
      const Tensor moments = (*model)->Encode(pass, image, &encoder);
      const Shape latent{rows, moments.dim(1), moments.dim(2), moments.dim(3) / 2};
      const Tensor noise = pass.NewF32(latent), latents = pass.New(latent),
                   kl = pass.NewF32({rows});
      for (int64_t i = 0; i < noise.elements(); ++i) noise.as<float>()[i] = Sign(i, 9);
      const GaussianArgs gaussian{
          .moments = moments, .noise = noise, .weight = 0.1f, .latents = latents, .kl = kl};
      bench.backend_->Gaussian(gaussian);
      const Tensor output = (*model)->Decode(pass, latents, &decoder);
      EXPECT_LE(Error(output, golden["output"]), kTolerance);
      const float scale = 1 / static_cast<float>(rows);
      const Tensor doutput = pass.NewF32(output.shape()), loss = pass.NewF32({rows});
      bench.backend_->ReconstructionLoss({.output = output,
                                          .target = image,
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
      std::string worst;
      if (edges == 0.5f) {
        EXPECT_LE(Error(loss, golden["loss"]), kTolerance);
        EXPECT_LE(bench.Worst(golden, &worst), kTolerance) << worst;
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
    Bench bench;
    const absl::Status status = UNet2DCondition::Make(bench.declare(), *config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(std::string(status.message()).find(message), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace denoised::training
