// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "engine/backend/counting.h"
#include "engine/core/config_reader.h"
#include "engine/models/autoencoder_kl.h"
#include "engine/models/autoencoder_tiny.h"
#include "engine/models/clip_text.h"
#include "engine/models/unet2d.h"
#include "engine/models/unet2d_condition.h"
#include "tests/io/temporary_directory.h"

namespace denoised {
namespace {

using ::testing::HasSubstr;

class BiasesTest : public ::testing::Test {
 protected:
  using Load = std::function<absl::Status(const nlohmann::json& config, const Weights& weights)>;

  /// The model of a folder below tests/models/ loads, but neither without one of its biases nor
  /// with one for each of `without`.
  void ExpectExactlyItsBiases(const std::string& folder, const std::string& stem,
                              const std::vector<std::string>& without, const Load& load) {
    const std::string directory = DENOISED_SOURCE_DIR "/tests/models/" + folder;
    const nlohmann::json config = ReadJsonFile(directory + "/config.json").value();
    const auto opened = Safetensors::OpenDirectory(directory, stem);
    ASSERT_TRUE(opened.ok()) << opened.status();
    const std::map<std::string, Tensor>& whole = opened->tensors();
    const auto loaded = [&](const std::map<std::string, Tensor>& tensors) {
      const std::string file = temporary_.path() + "/weights.safetensors";
      EXPECT_TRUE(WriteSafetensors(file, tensors, {}).ok());
      return load(config, Weights(Safetensors::Open(file).value(), file));
    };
    EXPECT_TRUE(loaded(whole).ok()) << loaded(whole);
    int biases = 0;
    for (const auto& [name, tensor] : whole) {
      if (!name.ends_with(".bias")) continue;
      ++biases;
      auto fewer = whole;
      fewer.erase(name);
      const absl::Status status = loaded(fewer);
      EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << name;
      EXPECT_THAT(std::string(status.message()), HasSubstr("no tensor '" + name + "'"));
    }
    EXPECT_GT(biases, 5);
    for (const std::string& layer : without) {
      ASSERT_TRUE(whole.contains(layer + ".weight")) << layer;
      auto more = whole;
      const int64_t outputs = whole.at(layer + ".weight").dim(0);
      more[layer + ".bias"] = Tensor::HostF32({outputs}, std::vector<float>(outputs, 1));
      EXPECT_THAT(std::string(loaded(more).message()), HasSubstr(layer + ".bias"));
    }
  }

  TemporaryDirectory temporary_;
  CountingBackend backend_{Device::kCpu, DType::kF32};
};

constexpr char kModel[] = "diffusion_pytorch_model";

TEST_F(BiasesTest, OfUNet2D) {
  for (const char* name : {"attn", "skip_then_plain", "class_timestep"}) {
    ExpectExactlyItsBiases(
        std::string("goldens/") + name, kModel, {}, [&](const auto& config, const auto& weights) {
          return LoadUNet2D(backend_, UNet2DConfig::Parse(config, name).value(), weights).status();
        });
  }
}

TEST_F(BiasesTest, OfUNet2DCondition) {
  const std::string block = "mid_block.attentions.0.transformer_blocks.0.";
  ExpectExactlyItsBiases("latent/lcm/unet", kModel,
                         {block + "attn1.to_q", block + "attn1.to_v", block + "attn2.to_q",
                          block + "attn2.to_k", "time_embedding.cond_proj"},
                         [&](const auto& config, const auto& weights) {
                           const auto parsed = UNet2DConditionConfig::Parse(config, "lcm").value();
                           return LoadUNet2DCondition(backend_, parsed, 0, weights).status();
                         });
}

TEST_F(BiasesTest, OfCodecs) {
  ExpectExactlyItsBiases("parts/kl", kModel, {}, [&](const auto& config, const auto& weights) {
    return LoadAutoencoderKL(backend_, AutoencoderKLConfig::Parse(config, "kl").value(), weights)
        .status();
  });
  ExpectExactlyItsBiases(
      "parts/tiny", kModel,
      {"decoder.layers.5", "decoder.layers.8", "encoder.layers.2", "encoder.layers.5"},
      [&](const auto& config, const auto& weights) {
        return LoadAutoencoderTiny(backend_, AutoencoderTinyConfig::Parse(config, "tiny").value(),
                                   weights)
            .status();
      });
}

TEST_F(BiasesTest, OfClipText) {
  ExpectExactlyItsBiases("parts/text_projection", "model", {"text_projection"},
                         [&](const auto& config, const auto& weights) {
                           const auto parsed =
                               ClipTextConfig::Parse(config, "text", "CLIPTextModelWithProjection");
                           return LoadClipText(backend_, parsed.value(), weights).status();
                         });
}

}  // namespace
}  // namespace denoised
