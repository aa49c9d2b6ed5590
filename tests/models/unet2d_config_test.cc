// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "engine/backend/counting.h"
#include "engine/core/config_reader.h"
#include "engine/models/unet2d.h"

namespace denoised {
namespace {

using ::testing::HasSubstr;

const std::string kConfigs = DENOISED_SOURCE_DIR "/tests/models/configs/";

UNet2DConfig Published(const std::string& name) {
  const std::string file = kConfigs + name + "/config.json";
  const auto json = ReadJsonFile(file);
  EXPECT_TRUE(json.ok()) << json.status();
  const auto config = UNet2DConfig::Parse(*json, file);
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

struct Size {
  const char* name;
  double million_parameters;
  double gflop_of_one_image;  // torch.utils.flop_counter over diffusers; 0: not measured
};

// Both figures were printed by PyTorch 2.11 and diffusers for the same configs: a block too many or
// too few, or a channel count that is off, changes them. docs/models.md says which checkpoints have
// these configs.
const Size kSizes[] = {
    {"cifar10-32", 35.7, 12.4},
    {"adm-64", 295.9, 219.3},
    {"celebahq-256", 113.7, 497.0},
    {"ddpm-cifar10-32", 35.7, 12.4},
    {"ldm-celebahq-256", 274.1, 0},
    {"consistency-imagenet-64", 295.9, 0},
    {"consistency-lsun-256", 526.3, 0},
    {"consistency-test", 1.281, 0.909},
    {"ncsnpp-256", 65.6, 533.4},
    {"ncsnpp-ffhq-1024", 105.8, 0},  // PyTorch counts 1.3 % more, for filters that we do not count
    {"ddpm-butterflies-128", 113.7, 124.1},
    {"ldm-super-resolution-4x", 113.6, 80.46},
};

TEST(UNet2D, PublishedConfigsLoadAtTheirKnownSize) {
  for (const Size& size : kSizes) {
    SCOPED_TRACE(size.name);
    const UNet2DConfig config = Published(size.name);
    CountingBackend backend(Device::kCpu, DType::kF32);
    const auto model = LoadUNet2D(backend, config, Weights::Synthetic(1));
    ASSERT_TRUE(model.ok()) << model.status();
    const DenoiserTraits& traits = (*model)->traits();
    EXPECT_NEAR(static_cast<double>(traits.parameters) / 1e6, size.million_parameters, 0.06);

    Arena arena = Arena::Measuring(Device::kCpu);
    nn::Context context{backend, arena};
    DenoiserInput input;
    input.x = arena.New({1, traits.height, traits.width, traits.channels}, DType::kF32);
    input.condition = arena.New({1}, DType::kF32);
    input.label = arena.New({1}, DType::kI32);
    backend.ResetWork();
    const Tensor out = (*model)->Forward(context, input);
    EXPECT_EQ(out.shape(), (Shape{1, traits.height, traits.width, traits.output_channels}));
    if (size.gflop_of_one_image > 0) {
      EXPECT_NEAR(backend.work().flops / 1e9 / size.gflop_of_one_image, 1, 0.01);
    }
  }
}

nlohmann::json Tiny() {
  return nlohmann::json::parse(R"({
    "_class_name": "UNet2DModel", "sample_size": 16, "in_channels": 3, "out_channels": 3,
    "block_out_channels": [32, 64], "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"]})");
}

std::string Complaint(const char* field, const nlohmann::json& value) {
  nlohmann::json json = Tiny();
  json[field] = value;
  const auto config = UNet2DConfig::Parse(json, "unet/config.json");
  EXPECT_FALSE(config.ok()) << field << " = " << value;
  return std::string(config.status().message());
}

TEST(UNet2DConfig, RefusesByNameWhatItCannotHonour) {
  using json = nlohmann::json;
  const std::pair<const char*, json> bad[] = {
      {"_class_name", "UNet2DConditionModel"},
      {"down_block_types", {"DownBlock2D", "CrossAttnDownBlock2D"}},
      {"down_block_types", {"DownBlock2D"}},
      {"up_block_types", {"SkipUpBlock2D", "UpBlock2D"}},
      {"up_block_types", "UpBlock2D"},
      {"block_out_channels", json::array()},
      {"block_out_channels", {32, -64}},
      {"block_out_channels", {32, 1 << 30}},
      {"block_out_channels", {1, 64}},  // no room for a sine and a cosine
      {"mid_block_type", "UNetMidBlock2DCrossAttn"},
      {"time_embedding_type", "sinusoidal"},
      {"norm_num_groups", nullptr},
      {"class_embed_type", "projection"},
      {"num_class_embeds", 0},
      {"act_fn", "tanh"},
      {"resnet_time_scale_shift", "spatial"},
      {"downsample_type", "fir"},
      {"upsample_type", 3},
      {"downsample_padding", 2},
      {"norm_num_groups", 0},
      {"norm_eps", 0},
      {"layers_per_block", 0},
      {"layers_per_block", 1e9},
      {"act_fn", "quick_gelu"},  // transformers' alone
      {"mid_block_scale_factor", 0},
      {"mid_block_scale_factor", 1e-20},
      {"attention_head_dim", 0},
      {"sample_size", -16},
      {"sample_size", {1, 2, 3}},
      {"in_channels", 0},
      {"freq_shift", 16},
      {"encoder_hid_dim", 768},
  };
  for (const auto& [field, value] : bad) {
    const std::string message = Complaint(field, value);
    EXPECT_THAT(message, HasSubstr(field));
    EXPECT_THAT(message, HasSubstr("unet/config.json"));
  }
}

TEST(UNet2DConfig, ALearnedTimeEmbeddingHasASize) {
  nlohmann::json json = Tiny();
  json["time_embedding_type"] = "learned";
  for (const nlohmann::json& wrong : {nlohmann::json(nullptr), nlohmann::json(0)}) {
    json["num_train_timesteps"] = wrong;
    EXPECT_THAT(std::string(UNet2DConfig::Parse(json, "config.json").status().message()),
                HasSubstr("num_train_timesteps"));
  }
  json["num_train_timesteps"] = 1000;
  EXPECT_TRUE(UNet2DConfig::Parse(json, "config.json").ok());
}

/// The image beside Skip blocks must have their size and three channels.
TEST(UNet2DConfig, SkipBlocksWhereTheirImageFits) {
  const std::string plain = "DownBlock2D", skip = "SkipDownBlock2D", plain_up = "UpBlock2D",
                    skip_up = "AttnSkipUpBlock2D";
  nlohmann::json json = Tiny();
  json["sample_size"] = 16;
  json["block_out_channels"] = {32, 32, 32};
  const auto complaint = [&](const std::vector<std::string>& down,
                             const std::vector<std::string>& up) {
    json["down_block_types"] = down;
    json["up_block_types"] = up;
    const auto config = UNet2DConfig::Parse(json, "config.json");
    return std::string(config.status().message());
  };
  const std::vector<std::string> plains(3, plain), plain_ups(3, plain_up);
  EXPECT_EQ(complaint({skip, skip, skip}, {skip_up, skip_up, skip_up}), "");
  EXPECT_EQ(complaint({skip, plain, plain}, {plain_up, skip_up, skip_up}), "");
  EXPECT_EQ(complaint({plain, plain, skip}, {plain_up, plain_up, skip_up}), "");
  EXPECT_THAT(complaint({plain, skip, plain}, plain_ups), HasSubstr("down_block_types"));
  EXPECT_THAT(complaint(plains, {skip_up, plain_up, skip_up}), HasSubstr("up_block_types"));
  EXPECT_THAT(complaint(plains, {skip_up, skip_up, plain_up}), HasSubstr("up_block_types"));
  json["norm_num_groups"] = nullptr;
  EXPECT_EQ(complaint({skip, skip, skip}, {skip_up, skip_up, skip_up}), "");
  EXPECT_THAT(complaint({skip, skip, skip}, {skip_up, skip_up, plain_up}),
              HasSubstr("norm_num_groups"));
  json["norm_num_groups"] = 1;
  json["block_out_channels"] = {32, 32, 3};
  EXPECT_THAT(complaint({skip, skip, skip}, plain_ups), HasSubstr("down_block_types"));
  json["block_out_channels"] = {32, 32, 32};
  json["in_channels"] = json["out_channels"] = 1;
  EXPECT_THAT(complaint({skip, skip, skip}, plain_ups), HasSubstr("down_block_types"));
  EXPECT_THAT(complaint(plains, {skip_up, skip_up, skip_up}), HasSubstr("up_block_types"));
}

TEST(UNet2DConfig, OneChannelIsEnoughForAFourierEmbedding) {
  nlohmann::json json = Tiny();
  json["block_out_channels"] = {1, 1};
  json["norm_num_groups"] = 1;
  json["freq_shift"] = 1;  // with the positional one half of 1, less this, divides by no zero
  EXPECT_FALSE(UNet2DConfig::Parse(json, "unet/config.json").ok());
  json["time_embedding_type"] = "fourier";
  const auto config = UNet2DConfig::Parse(json, "unet/config.json");
  EXPECT_TRUE(config.ok()) << config.status();
}

TEST(UNet2DConfig, DefaultsAreThoseOfDiffusers) {
  const auto config =
      UNet2DConfig::Parse(nlohmann::json::parse(R"({"_class_name": "UNet2DModel"})"), "c.json");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->block_out_channels, (std::vector<int>{224, 448, 672, 896}));
  EXPECT_EQ(config->attention_head_dim, 8);
  EXPECT_EQ(config->norm_eps, 1e-5);
  EXPECT_EQ(config->time_embedding_dim, 4 * 224);
  EXPECT_TRUE(config->mid_block);
}

TEST(UNet2D, ChannelsThatTheGroupsDoNotDivideAreRefused) {
  nlohmann::json json = Tiny();
  json["norm_num_groups"] = 24;
  const auto config = UNet2DConfig::Parse(json, "unet/config.json");
  ASSERT_TRUE(config.ok());
  CountingBackend backend(Device::kCpu, DType::kF32);
  const auto model = LoadUNet2D(backend, *config, Weights::Synthetic(1));
  ASSERT_FALSE(model.ok());
  EXPECT_THAT(std::string(model.status().message()), HasSubstr("norm_num_groups"));
}

}  // namespace
}  // namespace denoised
