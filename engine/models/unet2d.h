// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/models/denoiser.h"
#include "engine/models/unet_levels.h"

namespace denoised {

/// The config.json of diffusers' UNet2DModel. Names and defaults are diffusers' own
/// (models/unets/unet_2d.py).
struct UNet2DConfig {
  int sample_height = 0, sample_width = 0;  // sample_size
  int in_channels = 3, out_channels = 3;
  bool center_input_sample = false;
  enum class Time { kPositional, kFourier, kLearned };
  Time time_embedding_type = Time::kPositional;
  int num_train_timesteps = 0;  // of the learned embedding
  int time_embedding_dim = 0;   // 4 · block_out_channels[0] when the file has none
  double freq_shift = 0;
  bool flip_sin_to_cos = true;
  std::vector<std::string> down_block_types = {"DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D",
                                               "AttnDownBlock2D"};
  std::vector<std::string> up_block_types = {"AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D",
                                             "UpBlock2D"};
  bool mid_block = true;  // mid_block_type: "UNetMidBlock2D" or null
  std::vector<int> block_out_channels = {224, 448, 672, 896};
  int layers_per_block = 2;
  double mid_block_scale_factor = 1;
  int downsample_padding = 1;
  std::string downsample_type = "conv", upsample_type = "conv";  // of the Attn blocks; or "resnet"
  Activation activation = Activation::kSilu;                     // act_fn
  std::optional<int> attention_head_dim = 8;  // null: one head as wide as the block
  std::optional<int> norm_num_groups = 32;    // null: a fourth of the channels, at most 32
  std::optional<int> attn_norm_num_groups;    // of the mid block's attention
  double norm_eps = 1e-5;
  bool scale_shift = false;  // resnet_time_scale_shift: "scale_shift" or "default"
  bool add_attention = true;
  ClassCondition condition = ClassCondition::kNone;  // from class_embed_type, num_class_embeds
  int num_class_embeds = 0;

  /// Of the norms over so many channels outside Skip blocks.
  int GroupsOf(int channels) const;
  /// Every block has layers_per_block.
  UNetLevels Levels() const;

  /// Refuses, by name, what cannot be honoured. `file` appears in messages.
  static absl::StatusOr<UNet2DConfig> Parse(const nlohmann::json& config, const std::string& file);
  bool operator==(const UNet2DConfig&) const = default;
};

/// What a block type of the config stands for, as Parse() accepted it.
struct UNet2DBlock {
  const char* name;
  bool attention = false;  // after every resnet; on the way up of Skip blocks after the last
  bool resnet_resampling = false;  // resamples by a resnet, whatever downsample_type says
  bool up = false;
  bool skip = false;  // NCSN++: beside it runs a path of the image itself, filtered and resampled
};
const UNet2DBlock& DownBlockOf(const std::string& type);
const UNet2DBlock& UpBlockOf(const std::string& type);

/// Skip blocks (diffusers' models/unets/unet_2d_blocks.py): the image beside them is RGB. The
/// groups of their norms follow from the channels, but for attention's. Sums of resnets and
/// attentions are divided by √2; those with the image are not.
constexpr int kSkipImageChannels = 3, kSkipAttentionGroups = 32;
int SkipGroups(int channels);
/// Of the first norm of resnet `index`.
int SkipInputGroups(const UNet2DBlock& block, const UNetLevel& shape, int index);

/// diffusers' UNet2DModel: DDPM, ADM, NCSN++, EDM-preconditioned networks.
/// InvalidArgument or NotFound name the tensor and both shapes when the weights do not fit.
absl::StatusOr<std::unique_ptr<Denoiser>> LoadUNet2D(NetworkOps& ops, const UNet2DConfig& config,
                                                     const Weights& weights);

}  // namespace denoised
