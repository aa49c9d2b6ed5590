// SPDX-License-Identifier: Apache-2.0
#include "engine/models/unet2d_condition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "engine/backend/counting.h"
#include "engine/core/config_reader.h"
#include "engine/io/safetensors.h"
#include "engine/nn/transformer.h"
#include "tests/io/temporary_directory.h"
#include "tests/models/golden.h"
#include "tests/needs_gpu.h"

/// UNet2DConditionModel against diffusers, part by part (tests/models/latent/README.md).

namespace denoised {
namespace {

namespace fs = std::filesystem;

struct Target {
  const char* name;
  BackendOptions options;
  // Measured: 1.1e-6 on the CPU. bf16 rounds each tensor to 8 bits; as parity_test.cc.
  double tolerance;
  double wrong_eps;  // that the comparison sees
};

class UNet2DConditionParity : public ::testing::TestWithParam<std::tuple<const char*, Target>> {
 protected:
  void SetUp() override {
    target_ = std::get<1>(GetParam());
    if (target_.options.device == "cuda") DENOISED_NEEDS_GPU();
    directory_ = fs::path(DENOISED_SOURCE_DIR "/tests/models/latent") / std::get<0>(GetParam());
    const auto goldens = Safetensors::Open(directory_ / "goldens.safetensors");
    ASSERT_TRUE(goldens.ok()) << goldens.status();
    goldens_ = goldens->tensors();
    if (!goldens_.contains("text.states")) {  // those of the family that the encoder is shared with
      const auto shared = Safetensors::Open(directory_ / "../sd1/goldens.safetensors");
      ASSERT_TRUE(shared.ok()) << shared.status();
      goldens_["text.states"] = shared->tensors().at("text.states");
    }
    const std::string file = directory_ / "unet/config.json";
    const auto json = ReadJsonFile(file);
    ASSERT_TRUE(json.ok()) << json.status();
    const auto config = UNet2DConditionConfig::Parse(*json, file);
    ASSERT_TRUE(config.ok()) << config.status();
    config_ = *config;
    auto backend = OpenBackend(target_.options);
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    unet_ = directory_ / "unet";
  }

  Tensor New(const Shape& shape, DType dtype) {
    return backend_->Allocate(shape, dtype, "test").value();
  }
  /// As F32 or I32, or in the activation dtype.
  Tensor Upload(const std::vector<float>& values, const Shape& shape, DType dtype) {
    const Tensor to = New(shape, dtype);
    std::vector<uint8_t> bytes(to.bytes());
    for (size_t i = 0; i < values.size(); ++i) {
      if (dtype == DType::kF32) reinterpret_cast<float*>(bytes.data())[i] = values[i];
      if (dtype == DType::kI32)
        reinterpret_cast<int32_t*>(bytes.data())[i] = static_cast<int32_t>(values[i]);
      if (dtype == DType::kBF16)
        reinterpret_cast<uint16_t*>(bytes.data())[i] = FloatToBFloat16(values[i]);
    }
    backend_->Upload(bytes.data(), bytes.size(), to);
    return to;
  }
  Tensor Activations(const Tensor& host) {
    return Upload(host.ToFloats(), host.shape(), backend_->activation_dtype());
  }
  std::vector<float> Floats(const std::string& name) {
    const Tensor& tensor = goldens_.at(name);
    if (tensor.dtype() != DType::kI64) return tensor.ToFloats();
    const auto values = tensor.span<int64_t>();
    return std::vector<float>(values.begin(), values.end());
  }

  /// Prompts 0 and 1 as the text states of two condition sets.
  Tensor States() {
    const bool two = goldens_.contains("text_2.states");
    const Tensor first = goldens_.at(two ? "text.penultimate" : "text.states").Slice(0, 2);
    if (!two) return Activations(Tensor::HostF32(first.shape(), first.ToFloats()));
    const Tensor second = goldens_.at("text_2.penultimate").Slice(0, 2);
    const int64_t tokens = 2 * first.dim(1), c1 = first.dim(2), c2 = second.dim(2);
    const std::vector<float> a = first.ToFloats(), b = second.ToFloats();
    std::vector<float> joined;
    for (int64_t t = 0; t < tokens; ++t) {
      joined.insert(joined.end(), a.begin() + t * c1, a.begin() + (t + 1) * c1);
      joined.insert(joined.end(), b.begin() + t * c2, b.begin() + (t + 1) * c2);
    }
    return Activations(Tensor::HostF32({2, first.dim(1), c1 + c2}, joined));
  }

  /// Outputs by the goldens' names. The sets are made in places 3 and 1 of five.
  std::map<std::string, std::vector<float>> Run(const UNet2DConditionConfig& config,
                                                const std::string& prefix = "unet") {
    const auto tensors = Safetensors::OpenDirectory(unet_, "diffusion_pytorch_model");
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    const bool pools = goldens_.contains("unet.text_embeds");
    const int pooled = pools ? static_cast<int>(goldens_.at("unet.text_embeds").dim(1)) : 0;
    const auto model = LoadUNet2DCondition(*backend_, config, pooled, Weights(*tensors, unet_));
    EXPECT_TRUE(model.ok()) << model.status();
    if (!model.ok()) return {};
    const DenoiserTraits& traits = (*model)->traits();

    Arena arena(New({64 << 20}, DType::kU8));
    nn::Context context{*backend_, arena};
    const DType dtype = backend_->activation_dtype();
    Prompts prompts{.states = States()};
    if (pools) {
      prompts.pooled = Activations(goldens_.at(prefix + ".text_embeds"));
      prompts.sizes = Upload(Floats(prefix + ".time_ids"), {2 * traits.size_numbers}, DType::kF32);
    }
    // The scales of the goldens' timestep_cond.
    if (traits.guidance_embedding) prompts.guidance = Upload({7.5f, 2.0f}, {2}, DType::kF32);
    const int64_t tokens = prompts.states.dim(1);
    ConditionSets made{.keys_values = context.New({2, tokens, traits.key_value_columns})};
    if (pools) made.vectors = context.New({2, traits.vector_features});
    if (traits.guidance_embedding) made.times = context.New({2, traits.time_features});
    (*model)->Condition(context, prompts, made);
    ConditionSets sets{
        .keys_values = New({5, tokens, traits.key_value_columns}, dtype),
        .key_counts = Upload(std::vector<float>(5, static_cast<float>(tokens)), {5}, DType::kI32)};
    if (pools) sets.vectors = New({5, traits.vector_features}, dtype);
    if (traits.guidance_embedding) sets.times = New({5, traits.time_features}, dtype);
    for (const auto& [row, set] : {std::pair{0, 3}, std::pair{1, 1}}) {
      backend_->Copy(made.keys_values.Slice(row, 1), sets.keys_values.Slice(set, 1));
      if (pools) backend_->Copy(made.vectors.Slice(row, 1), sets.vectors.Slice(set, 1));
      if (made.times) backend_->Copy(made.times.Slice(row, 1), sets.times.Slice(set, 1));
    }

    DenoiserInput input;
    input.x = Activations(ToNhwc(goldens_.at(prefix + ".sample")));
    input.condition = Upload(Floats(prefix + ".timestep"), {2}, DType::kF32);
    input.label = Upload({3, 1}, {2}, DType::kI32);
    input.sets = sets;
    std::map<std::string, std::unique_ptr<Download>> downloads;
    context.trace = [&](const std::string& module, const Tensor& output) {
      downloads[prefix + "." + module] = backend_->BeginDownload(output);
    };
    context.Trace("output", (*model)->Forward(context, input));
    std::map<std::string, std::vector<float>> outputs;
    for (const auto& [name, download] : downloads) {
      auto tensor = download->Wait();
      EXPECT_TRUE(tensor.ok()) << tensor.status();
      if (tensor.ok()) outputs[name] = tensor->ToFloats();
    }
    return outputs;
  }

  double Error(const std::vector<float>& out, const std::string& name) {
    return RelativeError(out, ToNhwc(goldens_.at(name)).span<float>());
  }

  Target target_;
  fs::path directory_, unet_;
  std::map<std::string, Tensor> goldens_;
  UNet2DConditionConfig config_;
  std::unique_ptr<Backend> backend_;
};

TEST_P(UNet2DConditionParity, EveryBlockAndTheWhole) {
  const auto outputs = Run(config_);
  ASSERT_TRUE(outputs.contains("unet.output"));
  int compared = 0;
  for (const auto& [name, values] : outputs) {
    if (name == "unet.emb") continue;  // activated; the goldens have its terms
    ASSERT_TRUE(goldens_.contains(name)) << name;
    const double error = Error(values, name);
    EXPECT_LE(error, target_.tolerance) << name;
    RecordProperty(name, std::to_string(error));
    ++compared;
  }
  EXPECT_EQ(compared, 3 + 2 * static_cast<int>(config_.block_out_channels.size()));
}

/// Sizes that do not halve are halved upwards and doubled to what they were.
TEST_P(UNet2DConditionParity, ASizeThatDoesNotHalve) {
  const auto outputs = Run(config_, "unet_7x5");
  ASSERT_TRUE(outputs.contains("unet_7x5.output"));
  EXPECT_LE(Error(outputs.at("unet_7x5.output"), "unet_7x5.output"), target_.tolerance);
}

/// The comparison can fail: what a reader of config and weights may get wrong is seen. In fp32 the
/// eps changes at least 5e-3 of an output, heads and swapped halves 0.25.
TEST_P(UNet2DConditionParity, PlantedErrorsAreSeen) {
  const auto expect_seen = [&](const char* error, const UNet2DConditionConfig& config) {
    const double change = Error(Run(config).at("unet.output"), "unet.output");
    EXPECT_GT(change, target_.tolerance) << error;
    RecordProperty(error, fmt::format("{:.2g}", change));
  };
  UNet2DConditionConfig wrong = config_;
  ASSERT_EQ(wrong.norm_eps, 1e-5);
  wrong.norm_eps = target_.wrong_eps;
  expect_seen("eps", wrong);
  wrong = config_;
  for (int& heads : wrong.attention_head_dim) heads *= 2;
  expect_seen("heads", wrong);
  wrong = config_;
  wrong.activation = Activation::kRelu;
  expect_seen("activation", wrong);

  const TemporaryDirectory copy;
  unet_ = copy.path();
  fs::copy(directory_ / "unet", unet_);
  const absl::Status swapped = SwapGegluHalves(unet_);
  ASSERT_TRUE(swapped.ok()) << swapped;
  expect_seen("geglu", config_);
}

nlohmann::json ConfigOf(const std::string& directory) {
  const auto config =
      ReadJsonFile(DENOISED_SOURCE_DIR "/tests/models/" + directory + "/config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

struct Size {
  const char* name;
  int edge;  // of latents
  int64_t parameters;
  double gflop;
};
// All figures were printed by PyTorch (torch.utils.flop_counter) and diffusers for the same
// configs, of one row with a text of 77 tokens.
const Size kSizes[] = {
    {"sd15-unet", 64, 859520964, 803.27},        {"sd21-unet", 96, 865910724, 2149.11},
    {"sd-turbo-unet", 64, 865910724, 804.26},    {"sdxl-unet", 128, 2567463684, 6761.24},
    {"sdxl-lcm-unet", 128, 2567545604, 6761.24}, {"sdxl-turbo-unet", 64, 2567463684, 1588.78},
};

TEST(UNet2DCondition, PublishedConfigsLoadAtTheirKnownSize) {
  for (const Size& size : kSizes) {
    SCOPED_TRACE(size.name);
    const nlohmann::json json = ConfigOf(fmt::format("configs/{}", size.name));
    const auto config = UNet2DConditionConfig::Parse(json, "config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    const bool xl = json.contains("addition_time_embed_dim") && json["addition_time_embed_dim"] > 0;
    const int pooled = xl ? 1280 : 0;
    CountingBackend backend(Device::kCpu, DType::kF32);
    const auto model = LoadUNet2DCondition(backend, *config, pooled, Weights::SyntheticToWrite(1));
    ASSERT_TRUE(model.ok()) << model.status();
    const DenoiserTraits& traits = (*model)->traits();
    EXPECT_EQ(traits.height, size.edge);
    EXPECT_EQ(traits.width, size.edge);
    EXPECT_EQ(traits.parameters, size.parameters);

    Arena arena = Arena::Measuring(Device::kCpu);
    nn::Context context{backend, arena};
    Prompts prompts{.states = context.New({1, 77, traits.text_features})};
    ConditionSets sets{.keys_values = context.New({1, 77, traits.key_value_columns}),
                       .key_counts = arena.New({1}, DType::kI32)};
    if (xl) {
      prompts.pooled = context.New({1, traits.pooled_features});
      prompts.sizes = context.NewF32({traits.size_numbers});
      sets.vectors = context.New({1, traits.vector_features});
    }
    EXPECT_EQ(traits.guidance_embedding, size.name == std::string("sdxl-lcm-unet"));
    if (traits.guidance_embedding) {
      prompts.guidance = context.NewF32({1});
      sets.times = context.New({1, traits.time_features});
    }
    backend.ResetWork();
    (*model)->Condition(context, prompts, sets);
    const DenoiserInput input{.x = context.New({1, traits.height, traits.width, traits.channels}),
                              .condition = context.NewF32({1}),
                              .label = arena.New({1}, DType::kI32),
                              .sets = sets};
    const Tensor out = (*model)->Forward(context, input);
    EXPECT_EQ(out.shape(), (Shape{1, size.edge, size.edge, traits.output_channels}));
    EXPECT_NEAR(backend.work().flops / 1e9 / size.gflop, 1, 0.01);
  }
}

TEST(UNet2DConditionConfigTest, RefusesByName) {
  const auto refused = [](const std::string& directory, const nlohmann::json& changes,
                          const std::string& message) {
    nlohmann::json json = ConfigOf("configs/" + directory);
    EXPECT_TRUE(UNet2DConditionConfig::Parse(json, "config.json").ok()) << directory;
    json.update(changes);
    const absl::Status status = UNet2DConditionConfig::Parse(json, "config.json").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << changes;
    EXPECT_EQ(status.message(), "config.json: field " + message);
  };
  // Fewer have no frequencies, or divide by zero.
  for (const int features : {-1, 1, 2, 3})
    refused("sdxl-lcm-unet", {{"time_cond_proj_dim", features}},
            fmt::format("'time_cond_proj_dim' is {}: must be between 4 and 65536", features));
  refused("sdxl-unet", {{"freq_shift", 128}},
          "'addition_time_embed_dim' is 256: half of it must not be the freq_shift of 128");
  refused("sd15-unet", {{"mid_block_type", nullptr}},
          "'mid_block_type' is null: not supported; only UNetMidBlock2DCrossAttn is");
  refused("sd15-unet", {{"downsample_padding", 0}, {"sample_size", 60}},
          "'sample_size' is 60: must be a multiple of 8, since 3 blocks halve it without padding");
}

/// Values of diffusers' class that this one does not honour, of each field that has some.
TEST(UNet2DConditionConfigTest, RefusesEachFieldThatItDoesNotHonour) {
  const std::vector<std::pair<std::string, nlohmann::json>> fields = {
      {"only_cross_attention", true},
      {"only_cross_attention", {false, true, false, false}},
      {"only_cross_attention", {false, false}},
      {"cross_attention_dim", {768, 768, 768, 1024}},
      {"cross_attention_dim", {768, 768}},
      {"cross_attention_dim", 0},
      {"dual_cross_attention", true},
      {"mid_block_only_cross_attention", true},
      {"reverse_transformer_layers_per_block", {1, 2, 3, 4}},
      {"num_attention_heads", 8},
      {"encoder_hid_dim", 768},
      {"encoder_hid_dim_type", "text_proj"},
      {"class_embed_type", "timestep"},
      {"num_class_embeds", 10},
      {"class_embeddings_concat", true},
      {"time_embedding_type", "fourier"},
      {"time_embedding_act_fn", "gelu"},
      {"timestep_post_act", "silu"},
      {"conv_in_kernel", 5},
      {"conv_out_kernel", 5},
      {"attention_type", "gated"},
      {"cross_attention_norm", "layer_norm"},
      {"resnet_skip_time_act", true},
      {"resnet_out_scale_factor", 0.5},
      {"down_block_types",
       {"SimpleCrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D",
        "DownBlock2D"}},
      {"up_block_types",
       {"UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "SimpleCrossAttnUpBlock2D"}},
      {"mid_block_type", "UNetMidBlock2DSimpleCrossAttn"},
      {"act_fn", "tanh"},
      {"resnet_time_scale_shift", "spatial"},
      {"addition_embed_type", "image"}};
  for (const auto& [field, value] : fields) {
    nlohmann::json json = ConfigOf("configs/sd15-unet");
    json[field] = value;
    const absl::Status status = UNet2DConditionConfig::Parse(json, "config.json").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(std::string(status.message()),
                ::testing::HasSubstr(fmt::format("field '{}' is ", field)));
  }
}

TEST(UNet2DConditionConfigTest, AcceptsListsThatMeanOneValue) {
  nlohmann::json json = ConfigOf("configs/sd15-unet");
  json["cross_attention_dim"] = {768, 768, 768, 768};
  json["only_cross_attention"] = {false, false, false, false};
  const auto config = UNet2DConditionConfig::Parse(json, "config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->cross_attention_dim, 768);
}

/// Without padding an odd size is halved downwards, which the way up does not meet again.
TEST(UNet2DConditionConfigTest, WithoutPaddingSizesMustHalve) {
  const auto backend = OpenBackend({.device = "cpu"}).value();
  const std::string directory = "latent/sd1/unet", path = DENOISED_SOURCE_DIR "/tests/models/";
  nlohmann::json json = ConfigOf(directory);
  for (const int padding : {0, 1}) {
    json["downsample_padding"] = padding;
    const auto config = UNet2DConditionConfig::Parse(json, "config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    const auto tensors = Safetensors::OpenDirectory(path + directory, "diffusion_pytorch_model");
    ASSERT_TRUE(tensors.ok()) << tensors.status();
    const auto model =
        LoadUNet2DCondition(*backend, *config, 0, Weights(*tensors, path + directory));
    ASSERT_TRUE(model.ok()) << model.status();
    ASSERT_GE(config->block_out_channels.size(), 2u);
    EXPECT_EQ((*model)->traits().size_multiple,
              padding == 0 ? 1 << (config->block_out_channels.size() - 1) : 1);
  }
}

// On CUDA: what layers in e4m3 read lies where nothing else is needed, but for the input of the
// gate, which the peak includes.
TEST(Transformer2DTest, E4m3TakesLittleMemory) {
  constexpr int64_t kRows = 2, kSize = 16, kTokens = kRows * kSize * kSize;
  constexpr int kChannels = 64;
  const auto peak = [](bool e4m3) {
    CountingBackend backend(Device::kCuda, DType::kBF16);
    const Weights weights = Weights::Synthetic(1);
    std::map<std::string, float> scales = {{"proj_in", 1}, {"proj_out", 1}};
    for (const char* layer : {"attn1.to_q", "attn1.to_out.0", "attn2.to_q", "attn2.to_out.0",
                              "ff.net.0.proj", "ff.net.2"})
      scales[fmt::format("transformer_blocks.0.{}", layer)] = 1;
    if (e4m3) weights.SetInputScales(scales);
    nn::LinearColumns key_values(nn::Bias::kNo);
    const auto transformer = nn::Transformer2D::Load(
        backend, weights, {.channels = kChannels, .heads = 2, .text_features = 32}, key_values);
    EXPECT_TRUE(transformer.ok()) << transformer.status();
    EXPECT_TRUE(key_values.Pack(backend).ok());
    Arena arena = Arena::Measuring(Device::kCuda);
    nn::Context context{backend, arena};
    const Tensor x = context.New({kRows, kSize, kSize, kChannels}),
                 keys_values = context.New({1, 77, 2 * kChannels}),
                 set = arena.New({kRows}, DType::kI32), counts = arena.New({1}, DType::kI32);
    (*transformer)(context, x, {.keys_values = keys_values, .key_counts = counts, .set = set});
    EXPECT_GT(backend.work().ops, 10);
    return arena.peak();
  };
  EXPECT_LE(peak(true), peak(false) + kTokens * kChannels);
}

const Target kTargets[] = {
    {"cpu", {.device = "cpu"}, 1e-5, 1e-6},
    {"cuda_fp32", {.device = "cuda", .fp32 = true}, 1e-5, 1e-6},
    {"cuda_bf16", {.device = "cuda"}, 4e-2, 0.1},
};

INSTANTIATE_TEST_SUITE_P(Diffusers, UNet2DConditionParity,
                         ::testing::Combine(::testing::Values("sd1", "sd2", "sdxl", "inpaint",
                                                              "pix2pix", "lcm", "act_gelu"),
                                            ::testing::ValuesIn(kTargets)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) + "_" +
                                  std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace denoised
