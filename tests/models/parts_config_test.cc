// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/backend/counting.h"
#include "engine/core/config_reader.h"
#include "engine/models/autoencoder_kl.h"
#include "engine/models/autoencoder_tiny.h"
#include "engine/models/clip_text.h"
#include "engine/models/vq_model.h"
#include "tests/models/encode_latents.h"

namespace denoised {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

json Published(const std::string& name) {
  const auto config =
      ReadJsonFile(DENOISED_SOURCE_DIR "/tests/models/configs/" + name + "/config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

// All figures were printed by PyTorch and diffusers or transformers for the same configs.

struct CodecSize {
  const char* name;
  int64_t latent;  // height and width
  double million_parameters, gflop_decode, gflop_encode;
};

void ExpectSize(const CodecSize& size, CountingBackend& backend,
                const absl::StatusOr<std::unique_ptr<Codec>>& codec) {
  SCOPED_TRACE(size.name);
  ASSERT_TRUE(codec.ok()) << codec.status();
  const CodecTraits& traits = (*codec)->traits();
  EXPECT_NEAR(static_cast<double>(traits.parameters) / 1e6, size.million_parameters, 0.001);
  Arena arena = Arena::Measuring(Device::kCpu);
  nn::Context context{backend, arena, {}};
  const Tensor latents =
      arena.New({1, size.latent, size.latent, traits.latent_channels}, DType::kF32);
  const int64_t edge = size.latent * traits.factor;
  const Shape image = {1, edge, edge, traits.image_channels};
  backend.ResetWork();
  EXPECT_EQ((*codec)->Decode(context, latents).shape(), image);
  EXPECT_NEAR(backend.work().flops / 1e9 / size.gflop_decode, 1, 0.01);
  const Tensor pixels = arena.New(image, DType::kF32);
  backend.ResetWork();
  EXPECT_EQ(EncodeLatents(**codec, context, pixels, Tensor()).shape(), latents.shape());
  EXPECT_NEAR(backend.work().flops / 1e9 / size.gflop_encode, 1, 0.01);
}

TEST(Codecs, PublishedConfigsLoadAtTheirKnownSize) {
  CountingBackend backend(Device::kCpu, DType::kF32);
  for (const CodecSize& size : {CodecSize{"sd15-vae", 64, 83.654, 2514.5, 1116.7},
                                CodecSize{"sd21-vae", 64, 83.654, 2514.5, 1116.7},
                                CodecSize{"sdxl-vae", 128, 83.654, 10470.4, 4879.0}}) {
    const auto config = AutoencoderKLConfig::Parse(Published(size.name), size.name);
    ASSERT_TRUE(config.ok()) << config.status();
    ExpectSize(size, backend, LoadAutoencoderKL(backend, *config, Weights::Synthetic(1)));
  }
  const CodecSize vq_size = {"ldm-celebahq-256-vqvae", 64, 55.323, 670.6, 345.2};
  const auto vq = VQModelConfig::Parse(Published(vq_size.name), vq_size.name);
  ASSERT_TRUE(vq.ok()) << vq.status();
  EXPECT_EQ(vq->vae.scaling_factor, 0.18215) << "diffusers' default where the file has none";
  ExpectSize(vq_size, backend, LoadVQModel(backend, *vq, Weights::Synthetic(1)));
  // TAESD is what the class is without a config.
  const auto tiny =
      AutoencoderTinyConfig::Parse(json{{"_class_name", "AutoencoderTiny"}}, "config.json");
  ASSERT_TRUE(tiny.ok()) << tiny.status();
  ExpectSize({"taesd", 64, 2.445063, 141.35, 122.32}, backend,
             LoadAutoencoderTiny(backend, *tiny, Weights::Synthetic(1)));
}

TEST(ClipText, PublishedConfigsLoadAtTheirKnownSize) {
  struct Size {
    const char *name, *class_name;
    int features, pooled_features;
    double million_parameters, gflop;
  };
  for (const Size& size :
       {Size{"sd15-text", "CLIPTextModel", 768, 768, 123.060, 13.30},
        Size{"sdxl-text", "CLIPTextModel", 768, 768, 123.060, 13.30},
        Size{"sd21-text", "CLIPTextModel", 1024, 1024, 340.388, 45.13},
        Size{"sdxl-text-2", "CLIPTextModelWithProjection", 1280, 1280, 694.660, 97.86}}) {
    SCOPED_TRACE(size.name);
    const auto config = ClipTextConfig::Parse(Published(size.name), size.name, size.class_name);
    ASSERT_TRUE(config.ok()) << config.status();
    CountingBackend backend(Device::kCpu, DType::kF32);
    const auto model = LoadClipText(backend, *config, Weights::Synthetic(1));
    ASSERT_TRUE(model.ok()) << model.status();
    const TextEncoderTraits& traits = (*model)->traits();
    EXPECT_NEAR(static_cast<double>(traits.parameters) / 1e6, size.million_parameters, 0.001);
    EXPECT_EQ(traits.features, size.features);
    EXPECT_EQ(traits.pooled_features, size.pooled_features);
    EXPECT_EQ(traits.end_token, -1) << "eos_token_id 2 means the largest id";
    Arena arena = Arena::Measuring(Device::kCpu);
    nn::Context context{backend, arena, {}};
    const TextInput input = {arena.New({77}, DType::kI32), arena.New({77}, DType::kI32),
                             arena.New({1}, DType::kI32)};
    backend.ResetWork();
    const TextOutput out = (*model)->Forward(context, input, {.pool = true});
    EXPECT_EQ(out.states.shape(), (Shape{1, 77, size.features}));
    EXPECT_EQ(out.pooled.shape(), (Shape{1, size.pooled_features}));
    EXPECT_NEAR(backend.work().flops / 1e9 / size.gflop, 1, 0.01);
  }
}

using Parse = absl::Status (*)(const json&);

absl::Status ParseKL(const json& config) {
  return AutoencoderKLConfig::Parse(config, "vae/config.json").status();
}
absl::Status ParseVQ(const json& config) {
  return VQModelConfig::Parse(config, "vae/config.json").status();
}
absl::Status ParseTiny(const json& config) {
  return AutoencoderTinyConfig::Parse(config, "vae/config.json").status();
}
absl::Status ParseText(const json& config) {
  return ClipTextConfig::Parse(config, "vae/config.json", "CLIPTextModel").status();
}

void ExpectRefusals(Parse parse, const json& good,
                    const std::vector<std::pair<const char*, json>>& bad) {
  EXPECT_TRUE(parse(good).ok()) << parse(good);
  for (const auto& [field, value] : bad) {
    json config = good;
    config[field] = value;
    const absl::Status status = parse(config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field << " = " << value;
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
    EXPECT_THAT(std::string(status.message()), HasSubstr("vae/config.json"));
  }
}

const std::vector<std::pair<const char*, json>> kBadVaes = {
    {"down_block_types", {"DownEncoderBlock2D", "DownBlock2D"}},
    {"down_block_types", {"DownEncoderBlock2D"}},
    {"up_block_types", {"UpDecoderBlock2D", "UpBlock2D"}},
    {"block_out_channels", json::array()},
    {"block_out_channels", {64, 0}},
    {"block_out_channels", {64, 1024}},  // a head that is too wide
    {"layers_per_block", 0},
    {"act_fn", "tanh"},
    {"latent_channels", 0},
    {"norm_num_groups", 0},
    {"scaling_factor", 0},
    {"scaling_factor", "0.5"},
    {"in_channels", 4},  // and 3 out
    {"out_channels", -3},
    {"mid_block_add_attention", 1},
    {"decoder_block_type", "x"},
};

TEST(AutoencoderKLConfig, RefusesByNameWhatItCannotHonour) {
  const json good = {{"_class_name", "AutoencoderKL"},
                     {"block_out_channels", {32, 64}},
                     {"down_block_types", {"DownEncoderBlock2D", "AttnDownEncoderBlock2D"}},
                     {"up_block_types", {"UpDecoderBlock2D", "AttnUpDecoderBlock2D"}}};
  ExpectRefusals(ParseKL, good, kBadVaes);
  ExpectRefusals(ParseKL, good,
                 {{"_class_name", "AsymmetricAutoencoderKL"},
                  {"latents_mean", {1, 2, 3, 4}},  // without latents_std
                  {"latents_std", {1, 2, 3}},
                  {"use_quant_conv", "no"}});
  json scaled = good;
  scaled["latents_mean"] = scaled["latents_std"] = {1, 2, 3, 4};
  ExpectRefusals(ParseKL, scaled, {{"shift_factor", 0.5}, {"latents_std", {1, 2, 0, 4}}});
}

TEST(VQModelConfig, RefusesByNameWhatItCannotHonour) {
  const json good = {{"_class_name", "VQModel"},
                     {"block_out_channels", {32, 64}},
                     {"down_block_types", {"DownEncoderBlock2D", "DownEncoderBlock2D"}},
                     {"up_block_types", {"UpDecoderBlock2D", "UpDecoderBlock2D"}}};
  ExpectRefusals(ParseVQ, good, kBadVaes);
  ExpectRefusals(ParseVQ, good,
                 {{"_class_name", "AutoencoderKL"},
                  {"norm_type", "spatial"},
                  {"num_vq_embeddings", 0},
                  {"vq_embed_dim", -1}});
}

TEST(AutoencoderTinyConfig, RefusesByNameWhatItCannotHonour) {
  ExpectRefusals(ParseTiny, {{"_class_name", "AutoencoderTiny"}},
                 {{"_class_name", "AutoencoderKL"},
                  {"upsampling_scaling_factor", 4},
                  {"upsample_fn", "bilinear"},
                  {"encoder_block_out_channels", {64, 64, 64}},
                  {"decoder_block_out_channels", {64, 64, 64, 32}},
                  {"num_encoder_blocks", {1, 1, 1}},
                  {"num_decoder_blocks", {1, 1, 1, -1}},
                  {"act_fn", "tanh"},
                  {"in_channels", 1},
                  {"scaling_factor", 0},
                  {"latent_channels", 0}});
}

TEST(ClipTextConfig, RefusesByNameWhatItCannotHonour) {
  ExpectRefusals(ParseText, {{"model_type", "clip_text_model"}},
                 {{"model_type", "t5"},
                  {"hidden_act", "gelu_new"},
                  {"num_attention_heads", 7},
                  {"num_attention_heads", 0},
                  {"hidden_size", 100},
                  {"eos_token_id", {1, 2}},
                  {"eos_token_id", -1},
                  {"layer_norm_eps", 0},
                  {"num_hidden_layers", 0},
                  {"max_position_embeddings", 0},
                  {"quantization_config", {{"bits", 4}}},
                  {"is_decoder", true},
                  {"pruned_heads", {{"1", {0, 2}}}},
                  {"use_attention_mask", true}});
  // transformers pools the first token then.
  EXPECT_TRUE(ParseText({{"model_type", "clip_text_model"}, {"eos_token_id", 49408}}).ok());
  const absl::Status status =
      ClipTextConfig::Parse(json::object(), "text_encoder/config.json", "T5EncoderModel").status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("T5EncoderModel"));
}

TEST(VaeConfig, ChannelsThatTheGroupsDoNotDivideAreRefused) {
  const auto config = AutoencoderKLConfig::Parse(
      {{"block_out_channels", {48}}, {"norm_num_groups", 32}}, "config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  CountingBackend backend(Device::kCpu, DType::kF32);
  const auto model = LoadAutoencoderKL(backend, *config, Weights::Synthetic(1));
  EXPECT_THAT(std::string(model.status().message()), HasSubstr("norm_num_groups"));
}

}  // namespace
}  // namespace denoised
