// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/models/denoiser.h"
#include "engine/models/unet_levels.h"

namespace denoised {

/// The config.json of diffusers' UNet2DConditionModel: what Stable Diffusion 1 and 2, SDXL, their
/// distillations, inpainting and InstructPix2Pix variants set. Names and defaults are diffusers'
/// own (models/unets/unet_2d_condition.py).
struct UNet2DConditionConfig {
  int sample_height = 0, sample_width = 0;  // sample_size, in latent pixels
  int in_channels = 4, out_channels = 4;
  bool center_input_sample = false;
  bool flip_sin_to_cos = true;
  double freq_shift = 0;
  std::vector<std::string> down_block_types = {"CrossAttnDownBlock2D", "CrossAttnDownBlock2D",
                                               "CrossAttnDownBlock2D", "DownBlock2D"};
  std::vector<std::string> up_block_types = {"UpBlock2D", "CrossAttnUpBlock2D",
                                             "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"};
  std::vector<int> block_out_channels = {320, 640, 1280, 1280};
  std::vector<int> layers_per_block = {2};              // one number, or one a level
  std::vector<int> transformer_layers_per_block = {1};  // likewise
  std::vector<int> attention_head_dim = {8};  // likewise: the number of heads, despite its name
  int downsample_padding = 1;
  double mid_block_scale_factor = 1;
  Activation activation = Activation::kSilu;  // act_fn
  int norm_num_groups = 32;
  double norm_eps = 1e-5;
  int cross_attention_dim = 1280;
  bool use_linear_projection = false;
  bool scale_shift = false;    // resnet_time_scale_shift: "scale_shift" or "default"
  int time_embedding_dim = 0;  // 4 · block_out_channels[0] when the file has none
  int time_cond_proj_dim = 0;  // 0: the guidance scale is no input
  bool text_time = false;      // addition_embed_type: "text_time" or null
  int addition_time_embed_dim = 0;
  int projection_class_embeddings_input_dim = 0;

  /// Refuses, by name, what cannot be honoured. Lists have an entry for each level on return.
  /// `file` appears in messages.
  static absl::StatusOr<UNet2DConditionConfig> Parse(const nlohmann::json& config,
                                                     const std::string& file);
  bool operator==(const UNet2DConditionConfig&) const = default;
};

/// diffusers' UNet2DConditionModel. `pooled_features` of the text encoder that pools, 0 if none
/// does: text_time needs it. InvalidArgument or NotFound name the tensor and both shapes when the
/// weights do not fit.
absl::StatusOr<std::unique_ptr<Denoiser>> LoadUNet2DCondition(NetworkOps& ops,
                                                              const UNet2DConditionConfig& config,
                                                              int pooled_features,
                                                              const Weights& weights);

}  // namespace denoised
