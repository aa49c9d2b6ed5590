// SPDX-License-Identifier: Apache-2.0
// The gradients of whole networks: against PyTorch in float64 (models.json), against finite
// differences, and ten AdamW steps (steps.json).

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <tuple>

#include "engine/core/config_reader.h"
#include "engine/io/safetensors.h"
#include "engine/training/unet2d.h"
#include "tests/models/golden.h"
#include "tests/training/backends.h"
#include "tests/training/finite_differences.h"
#include "tests/training/golden.h"

namespace denoised::training {
namespace {

/// A tiny model of tests/models/goldens with its input, ready for passes.
class Network {
 public:
  /// With `augment_labels`, random ones, and a map of them that no file has.
  Network(const std::string& name, Backend& backend, bool recompute = false, int augment_labels = 0)
      : backend_(backend), recompute_(recompute) {
    const auto directory = Goldens() / name;
    const auto json = ReadJsonFile(directory / "config.json");
    EXPECT_TRUE(json.ok()) << json.status();
    const auto config = UNet2DConfig::Parse(*json, "config.json");
    EXPECT_TRUE(config.ok()) << config.status();
    auto model = UNet2D::Make(backend, parameters_, *config, augment_labels);
    EXPECT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    const Tensor trained = New(parameters_.trained_elements());
    const Tensor fixed = New(std::max<int64_t>(16, parameters_.fixed_elements()));
    parameters_.Initialize(1, trained, fixed);
    const auto tensors = Safetensors::OpenDirectory(directory, "diffusion_pytorch_model");
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    const absl::Status loaded = parameters_.Load(Weights(*tensors, name), trained, fixed);
    EXPECT_TRUE(loaded.ok()) << loaded;
    trained_ = OnDevice(backend, trained);
    fixed_ = OnDevice(backend, fixed);
    gradient_ = OnDevice(backend, trained);
    const auto io = Safetensors::Open(directory / "io.safetensors");
    EXPECT_TRUE(io.ok()) << io.status();
    const DType dtype = backend.activation_dtype();
    const Tensor x = ToNhwc(io->tensors().at("sample"));
    input_.x = OnDevice(backend, x.shape(), x.ToFloats(), dtype);
    const Tensor& timestep = io->tensors().at("timestep");
    const Tensor condition = Tensor::Host({x.dim(0)}, DType::kF32),
                 whole_condition = Tensor::Host({x.dim(0)}, DType::kI32);
    for (int64_t i = 0; i < x.dim(0); ++i) {
      const bool whole = timestep.dtype() == DType::kI64;
      condition.as<float>()[i] =
          whole ? static_cast<float>(timestep.as<int64_t>()[i]) : timestep.ToFloats()[i];
      whole_condition.as<int32_t>()[i] = static_cast<int32_t>(condition.as<float>()[i]);
    }
    input_.condition = OnDevice(backend, condition);
    input_.timestep = OnDevice(backend, whole_condition);
    if (const auto labels = io->tensors().find("class_labels"); labels != io->tensors().end()) {
      const Tensor& from = labels->second;
      const int64_t rows = from.dim(0);
      if (config->condition == ClassCondition::kLabel) {
        const Tensor label = Tensor::Host({rows}, DType::kI32);
        for (int64_t i = 0; i < rows; ++i)
          label.as<int32_t>()[i] = static_cast<int32_t>(from.as<int64_t>()[i]);
        input_.label = OnDevice(backend, label);
      } else {
        // A vector is an activation; a number is embedded in F32.
        input_.embedding =
            OnDevice(backend, {rows, from.elements() / rows}, from.ToFloats(),
                     config->condition == ClassCondition::kVector ? dtype : DType::kF32);
      }
    }
    if (augment_labels > 0) {
      std::vector<float> labels(input_.x.dim(0) * augment_labels);
      for (size_t i = 0; i < labels.size(); ++i) labels[i] = Sign(i, 3) * (0.2f + 0.1f * (i % 7));
      input_.augment = OnDevice(backend, {input_.x.dim(0), augment_labels}, labels, dtype);
    }
    expected_ = ToNhwc(io->tensors().at("output"));
    std::vector<SampleRow> rows(input_.x.dim(0));  // of dropout
    for (size_t i = 0; i < rows.size(); ++i) rows[i].sample = static_cast<uint32_t>(i);
    const Tensor plan = Tensor::Host({x.dim(0), kSampleNumbers}, DType::kI32);
    std::memcpy(plan.data(), rows.data(), plan.bytes());
    rows_ = OnDevice(backend, plan);
    step_ = OnDevice(backend, Tensor::Host({1}, DType::kI32));
    constexpr int32_t kStep = 4;
    backend.Upload(&kStep, sizeof kStep, step_);
    Pack();
  }

  void Pack() { model_->Pack({backend_, parameters_, trained_}); }

  /// Forward, and the sum over the output of what `loss` makes of (output, ±1 of its place in
  /// NCHW), which also sets the output's gradient; backward if asked for.
  template <typename Loss>
  double Run(const Loss& loss, bool backward = true) {
    if (backward) {
      // Whatever is not written stays NaN.
      const Tensor none = New(gradient_.elements());
      for (size_t i = 0; i < parameters_.all().size(); ++i) {
        if (!parameters_[static_cast<int>(i)].trained) continue;
        const Tensor part = parameters_.Part(none, static_cast<int>(i));
        std::fill_n(part.as<float>(), part.elements(), std::nanf(""));
      }
      backend_.Upload(none.data(), none.bytes(), gradient_);
    }
    if (!arena_) arena_.emplace(OnDevice(backend_, Tensor::Host({16 << 20}, DType::kU8)));
    Pass pass{.backend = backend_,
              .arena = *arena_,
              .parameters = parameters_,
              .trained = trained_,
              .fixed = fixed_,
              .gradient = gradient_,
              .rows = rows_,
              .step = step_,
              .seed = 3,
              .dropout = dropout_,
              .recompute_norms = recompute_};
    UNet2D::KeptPointer kept;
    const Tensor out = model_->Forward(pass, input_, &kept);
    output_ = OnHost(backend_, out);
    const int64_t h = out.dim(1), w = out.dim(2), c = out.dim(3);
    const Tensor doutput = pass.NewF32(out.shape());
    std::vector<float> gradient(output_.size());
    double sum = 0;
    for (int64_t i = 0; i < out.elements(); ++i) {
      const int64_t channel = i % c, pixel = i / c % (h * w), row = i / c / (h * w);
      const float sign = Sign((row * c + channel) * h * w + pixel, 0);
      sum += loss(output_[i], sign, &gradient[i]);
    }
    backend_.Upload(gradient.data(), gradient.size() * sizeof(float), doutput);
    if (backward) model_->Backward(pass, input_, std::move(kept), doutput);
    on_host_ = Tensor::HostF32(gradient_.shape(), OnHost(backend_, gradient_));
    return sum;
  }

  Backend& backend_;
  const bool recompute_;
  Parameters parameters_;
  std::unique_ptr<UNet2D> model_;
  Tensor trained_, fixed_, gradient_, expected_;
  Tensor rows_, step_;
  float dropout_ = 0;
  std::vector<float> output_;
  Tensor on_host_;  // the gradient
  NetworkInput input_;

 private:
  static Tensor New(int64_t elements) {
    Tensor tensor = Tensor::Host({elements}, DType::kF32);
    std::memset(tensor.data(), 0, tensor.bytes());
    return tensor;
  }
  std::optional<Arena> arena_;
};

double Projected(float output, float sign, float* gradient) {
  *gradient = sign;
  return static_cast<double>(output) * sign;
}

std::unique_ptr<Backend> Cpu() { return OpenForTest("cpu"); }

/// A model and a backend.
class ModelGradients : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void SetUp() override {
    if (std::get<1>(GetParam()) != "cpu") DENOISED_NEEDS_GPU();
  }
};

/// fp32 over a whole network, forward and backward, against float64.
constexpr double kTolerance = 2e-5;
/// The error of all gradients together in bf16 at a cosine of 0.999: √(2 − 2·cosine). ReLU is
/// allowed more, since rounding moves some of its inputs over its kink.
const double kBf16Tolerance = std::sqrt(2 - 2 * 0.999), kBf16ReluTolerance = 0.1;

TEST_P(ModelGradients, AgreeWithPyTorch) {
  const auto& [model, device] = GetParam();
  const auto backend = OpenForTest(device);
  const bool bf16 = backend->activation_dtype() == DType::kBF16;
  const double tolerance = !bf16                 ? kTolerance
                           : model == "act_relu" ? kBf16ReluTolerance
                                                 : kBf16Tolerance;
  const nlohmann::json golden = ReadGolden("models.json").at(model);
  for (const bool recompute : {false, true}) {
    Network network(model, *backend, recompute);
    const int64_t rows = network.input_.x.dim(0);
    // As one chunk, and as a tree of chunks of one sample.
    for (const int64_t chunk : {rows, int64_t{1}}) {
      backend->SetChunkRows(chunk);
      network.Run(Projected);
      EXPECT_TRUE(backend->status().ok()) << backend->status();
      EXPECT_LE(RelativeError(network.output_, network.expected_.ToFloats()), tolerance);
      double all = 0, error = 0;
      for (const auto& [name, summary] : golden.items())
        all += std::pow(summary[0].get<double>(), 2);
      all = std::sqrt(all);
      size_t seen = 0;
      for (size_t i = 0; i < network.parameters_.all().size(); ++i) {
        const Parameter& parameter = network.parameters_[static_cast<int>(i)];
        if (!parameter.trained) continue;
        ASSERT_TRUE(golden.contains(parameter.name)) << parameter.name;
        ++seen;
        const nlohmann::json& summary = golden[parameter.name];
        const Tensor gradient = network.parameters_.Part(network.on_host_, static_cast<int>(i));
        const double distance = Distance(gradient.span<float>(), summary);
        EXPECT_TRUE(std::isfinite(distance)) << parameter.name;
        error += distance * distance;
        // Some gradients are 0 but for rounding (a key's bias), so all count a little.
        const double scale = std::max(summary[0].get<double>(), 1e-2 * all);
        // In bf16 single parameters may be further off; their shares of the whole are checked.
        EXPECT_LE(distance, tolerance * (bf16 ? all : scale))
            << parameter.name << ", recompute " << recompute << ", chunks of " << chunk;
      }
      EXPECT_LE(std::sqrt(error), tolerance * all);
      EXPECT_EQ(seen, golden.size());
    }
  }
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  const nlohmann::json golden = ReadGolden("models.json");
  for (const auto& [name, gradients] : golden.items()) names.push_back(name);
  return names;
}
INSTANTIATE_TEST_SUITE_P(Goldens, ModelGradients,
                         testing::Combine(testing::ValuesIn(Names()), testing::ValuesIn(kBackends)),
                         [](const auto& instance) {
                           return std::get<0>(instance.param) + "_" + std::get<1>(instance.param);
                         });

TEST(ModelGradientsTest, PlantedErrorsAreSeen) {
  const auto backend = Cpu();
  const std::string name = "class_labels";
  const nlohmann::json golden = ReadGolden("models.json").at(name);
  Network network(name, *backend);
  // A single weight that is 2 % off changes gradients elsewhere.
  const auto worst = [&] {
    network.Run(Projected);
    double worst = 0;
    for (size_t i = 0; i < network.parameters_.all().size(); ++i) {
      const nlohmann::json& summary = golden[network.parameters_[static_cast<int>(i)].name];
      const Tensor gradient = network.parameters_.Part(network.on_host_, static_cast<int>(i));
      if (summary[0].get<double>() > 1e-3)
        worst =
            std::max(worst, Distance(gradient.span<float>(), summary) / summary[0].get<double>());
    }
    return worst;
  };
  EXPECT_LE(worst(), kTolerance * 5);
  network.trained_.as<float>()[3] *= 1.02f;
  network.Pack();
  EXPECT_GT(worst(), kTolerance * 5);
}

/// A step of 0.02 is measured: of 5e-3 the slopes are off by up to 4 % by rounding, of 0.1 by 7 %
/// by curvature; of 0.02 by 1.4 %, where the slope is small. Rounding alone (keys' biases): 7e-4.
void ExpectSlopes(Network& network) {
  network.Run(Projected);
  const std::vector<float> gradient = network.gradient_.ToFloats();
  const auto value = [&] {
    network.Pack();
    return network.Run(Projected, /*backward=*/false);
  };
  ExpectSlopes(network.parameters_, network.trained_, gradient, value,
               {.length = 0.02, .tolerance = 0.01, .noise = 1e-3, .is_flat = IsKeysBias});
}

struct SlopeCase {
  const char* name;
  int augment_labels = 0;
  float dropout = 0;
  bool recompute = false;
};
/// Each on one thread, as a trainer's passes. Threads that share an op of a network as small as
/// these wait for each other for longer than they work.
void ExpectSlopes(const std::vector<SlopeCase>& cases) {
  Cpu()->ForEachPass(static_cast<int64_t>(cases.size()), [&](int64_t i, int) {
    const SlopeCase& of = cases[i];
    SCOPED_TRACE(testing::Message() << of.name << ", augment labels " << of.augment_labels
                                    << ", recompute " << of.recompute);
    const auto backend = Cpu();
    Network network(of.name, *backend, of.recompute, of.augment_labels);
    network.dropout_ = of.dropout;
    ExpectSlopes(network);
    if (of.dropout > 0) {
      EXPECT_GT(RelativeError(network.output_, network.expected_.ToFloats()), 0.05);
    }
  });
}

TEST(ModelGradientsTest, AgreeWithFiniteDifferences) {
  ExpectSlopes({{"class_labels"},
                {"scale_shift_resnet"},
                {"time_fourier"},
                {"like_ncsnpp"},
                {"class_labels", 9},
                {"time_learned", 9}});
}

/// A step has the same masks whenever it is computed, so a network with dropout has slopes, too.
TEST(ModelGradientsTest, WithDropoutAgreeWithFiniteDifferences) {
  std::vector<SlopeCase> cases;
  for (const char* const name : {"class_labels", "scale_shift_resnet"})
    for (const bool recompute : {false, true})
      cases.push_back({.name = name, .dropout = 0.3f, .recompute = recompute});
  ExpectSlopes(cases);
}

/// Without labels the network is the one that is served.
TEST(ModelGradientsTest, LabelsOfZeroChangeNothing) {
  const auto backend = Cpu();
  Network network("class_labels", *backend, false, 9);
  network.Run(Projected, /*backward=*/false);
  EXPECT_GT(RelativeError(network.output_, network.expected_.ToFloats()), 1e-3);
  std::fill_n(network.input_.augment.as<float>(), network.input_.augment.elements(), 0.0f);
  network.Run(Projected, /*backward=*/false);
  EXPECT_LE(RelativeError(network.output_, network.expected_.ToFloats()), kTolerance);
}

class ModelSteps : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Backends, ModelSteps, testing::Values("cpu", "cuda_fp32"),
                         [](const auto& instance) { return instance.param; });

TEST_P(ModelSteps, TenAdamWStepsAgreeWithPyTorch) {
  if (GetParam() != "cpu") DENOISED_NEEDS_GPU();
  const auto backend = OpenForTest(GetParam());
  const nlohmann::json goldens = ReadGolden("steps.json");
  EXPECT_EQ(goldens.size(), 4u);
  for (const auto& [name, golden] : goldens.items()) {
    Network network(name, *backend);
    const Tensor start =
        Tensor::HostF32(network.trained_.shape(), OnHost(*backend, network.trained_));
    const auto floats = [&](int64_t count) {
      return OnDevice(*backend, {count}, std::vector<float>(count), DType::kF32);
    };
    UpdateArgs args{.master = network.trained_,
                    .gradient = network.gradient_,
                    .m = floats(start.elements()),
                    .v = floats(start.elements()),
                    .averages = {OnDevice(*backend, start)},
                    .squared_norm = floats(1),
                    .scalars = floats(16),
                    .beta1 = 0.9,
                    .beta2 = 0.99,
                    .eps = 1e-6f,
                    .weight_decay = 0.02f,
                    .clip = 0.5f};
    for (int step = 1; step <= 10; ++step) {
      const auto count = static_cast<float>(network.expected_.elements());
      const double loss = network.Run([&](float output, float target, float* gradient) {
        *gradient = 2 * (output - target) / count;
        return std::pow(static_cast<double>(output) - target, 2);
      });
      EXPECT_NEAR(loss / count, golden["losses"][step - 1].get<double>(), 1e-4) << name << step;
      const UpdateScalars scalars{.rate = 3e-3f,
                                  .correction1 = static_cast<float>(1 - std::pow(0.9, step)),
                                  .correction2 = static_cast<float>(1 - std::pow(0.99, step)),
                                  .average_share = {0.2f}};
      backend->Upload(&scalars, sizeof scalars, args.scalars);
      backend->SquaredNorm(args.gradient, args.squared_norm);
      backend->Update(args);
      network.Pack();
    }
    const auto compare = [&](const Tensor& on_device, const nlohmann::json& expected) {
      const Tensor flat = Tensor::HostF32(start.shape(), OnHost(*backend, on_device));
      // Adam divides by √v, so weights whose gradient is rounding alone move at random: all
      // weights together are compared, and each where it moved for a reason.
      double error = 0, length = 0;
      for (size_t i = 0; i < network.parameters_.all().size(); ++i) {
        const Parameter& parameter = network.parameters_[static_cast<int>(i)];
        if (!parameter.trained) continue;
        const Tensor part = network.parameters_.Part(flat, static_cast<int>(i));
        const Tensor from = network.parameters_.Part(start, static_cast<int>(i));
        std::vector<float> moved(part.elements());
        for (int64_t j = 0; j < part.elements(); ++j)
          moved[j] = part.as<float>()[j] - from.as<float>()[j];
        const nlohmann::json& summary = expected.at(parameter.name);
        if (parameter.name.find("to_k.bias") != std::string::npos) continue;
        error += std::pow(Distance(moved, summary), 2);
        length += std::pow(summary[0].get<double>(), 2);
      }
      return std::sqrt(error / length);
    };
    EXPECT_LE(compare(network.trained_, golden["moved"]), 1e-4) << name;
    EXPECT_LE(compare(args.averages[0], golden["average"]), 1e-4) << name;
  }
}

TEST(Models, WhatCannotBeTrainedIsRefusedByName) {
  for (const auto& [name, change, message] :
       {std::tuple{"like_ncsnpp", R"({"block_out_channels": [32, 40]})", "32 groups"},
        std::tuple{"attn_head_dim_4", R"({"norm_num_groups": 3})", "which 3 groups do not"},
        std::tuple{"attn_head_dim_4", R"({"attn_norm_num_groups": 5})",
                   "'mid_block.attentions.0.group_norm' has"},
        std::tuple{"attn_head_dim_4", R"({"attention_head_dim": 3})",
                   "attention_head_dim does not divide"},
        std::tuple{"time_learned", R"({"class_embed_type": "timestep"})", "time_embedding_type"}}) {
    auto json = ReadJsonFile(Goldens() / name / "config.json");
    ASSERT_TRUE(json.ok()) << json.status();
    json->update(nlohmann::json::parse(change));
    const auto config = UNet2DConfig::Parse(*json, "config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    const auto backend = Cpu();
    Parameters parameters;
    const absl::Status status = UNet2D::Make(*backend, parameters, *config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(std::string(status.message()).find(message), std::string::npos) << status;
  }
}

}  // namespace
}  // namespace denoised::training
