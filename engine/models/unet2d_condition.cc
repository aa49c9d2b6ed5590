// SPDX-License-Identifier: Apache-2.0
#include "engine/models/unet2d_condition.h"

#include <algorithm>
#include <optional>

#include "engine/core/config_reader.h"
#include "engine/nn/resnet.h"
#include "engine/nn/timestep.h"
#include "engine/nn/transformer.h"

namespace denoised {
namespace {

using nn::Context;
using nn::Conv2d;
using nn::CrossAttentionInput;
using nn::ResnetBlock;
using nn::ResnetOptions;
using nn::Transformer2D;

constexpr int kMaxChannels = 1 << 16;
/// LCM's pipelines embed 1000 · (guidance scale − 1).
constexpr float kGuidanceFactor = 1000;

/// Without padding an odd size is halved downwards, and the way up, which doubles, would not meet
/// it again.
int SizeMultiple(const UNet2DConditionConfig& config) {
  return config.downsample_padding == 0 ? 1 << (config.block_out_channels.size() - 1) : 1;
}

/// One number for all levels, or a list with one for each.
void ReadPerLevel(ConfigReader& reader, const nlohmann::json& json, const char* field,
                  size_t levels, int most, std::vector<int>* values) {
  if (reader.Has(field) && json[field].is_array()) {
    reader.Read(field, values);
    if (values->size() != levels)
      reader.Complain(field,
                      fmt::format("needs one number, or one for each of the {} levels", levels));
    for (const int value : *values) reader.CheckRange(field, value, 1, most);
    values->resize(levels, 1);
  } else {
    int value = values->front();
    reader.Read(field, &value);
    reader.CheckRange(field, value, 1, most);
    values->assign(levels, value);
  }
}

void CheckBlockTypes(ConfigReader& reader, const char* field, const std::vector<std::string>& types,
                     const char* plain, const char* crossed, size_t levels) {
  for (const std::string& type : types)
    if (type != plain && type != crossed)
      reader.Complain(
          field, fmt::format("block '{}' is not supported; use {} or {}", type, plain, crossed));
  if (types.size() != levels)
    reader.Complain(field,
                    fmt::format("needs one block for each of the {} block_out_channels", levels));
}

}  // namespace

absl::StatusOr<UNet2DConditionConfig> UNet2DConditionConfig::Parse(const nlohmann::json& json,
                                                                   const std::string& file) {
  UNet2DConditionConfig config;
  ConfigReader reader(json, file);
  reader.Refuse("_class_name", "UNet2DConditionModel");

  if (reader.Has("sample_size") && json["sample_size"].is_array()) {
    std::vector<int> size;
    reader.Read("sample_size", &size);
    if (size.size() != 2)
      reader.Complain("sample_size", "expected one number, or height and width");
    size.resize(2);
    config.sample_height = size[0];
    config.sample_width = size[1];
  } else {
    reader.Read("sample_size", &config.sample_height);
    config.sample_width = config.sample_height;
  }
  reader.Read("in_channels", &config.in_channels);
  reader.Read("out_channels", &config.out_channels);
  reader.Read("center_input_sample", &config.center_input_sample);
  reader.Read("flip_sin_to_cos", &config.flip_sin_to_cos);
  reader.Read("freq_shift", &config.freq_shift);

  reader.Read("block_out_channels", &config.block_out_channels);
  const std::vector<int>& channels = config.block_out_channels;
  if (channels.empty() || channels.size() > 16)
    reader.Complain("block_out_channels", "needs 1 to 16 entries");
  const size_t levels = std::clamp<size_t>(channels.size(), 1, 16);
  for (const int c : channels) reader.CheckRange("block_out_channels", c, 1, kMaxChannels);
  reader.Read("down_block_types", &config.down_block_types);
  reader.Read("up_block_types", &config.up_block_types);
  CheckBlockTypes(reader, "down_block_types", config.down_block_types, "DownBlock2D",
                  "CrossAttnDownBlock2D", levels);
  CheckBlockTypes(reader, "up_block_types", config.up_block_types, "UpBlock2D",
                  "CrossAttnUpBlock2D", levels);
  reader.Refuse("mid_block_type", "UNetMidBlock2DCrossAttn");
  // In diffusers no mid block, which is not what a file without the field has.
  if (json.contains("mid_block_type") && json["mid_block_type"].is_null())
    reader.Complain("mid_block_type", "not supported; only UNetMidBlock2DCrossAttn is");
  reader.Read("mid_block_scale_factor", &config.mid_block_scale_factor);
  reader.CheckRange("mid_block_scale_factor", config.mid_block_scale_factor, 1e-3, 1e3);
  ReadPerLevel(reader, json, "layers_per_block", levels, 64, &config.layers_per_block);
  ReadPerLevel(reader, json, "transformer_layers_per_block", levels, 64,
               &config.transformer_layers_per_block);
  ReadPerLevel(reader, json, "attention_head_dim", levels, kMaxChannels,
               &config.attention_head_dim);
  reader.Read("downsample_padding", &config.downsample_padding);

  nn::ReadActivation(reader, "act_fn", &config.activation);
  reader.Read("norm_num_groups", &config.norm_num_groups);
  reader.RefuseNull("norm_num_groups");
  reader.Read("norm_eps", &config.norm_eps);
  if (!(config.norm_eps > 0)) reader.Complain("norm_eps", "must be greater than 0");
  std::vector<int> text_features = {config.cross_attention_dim};
  ReadPerLevel(reader, json, "cross_attention_dim", levels, kMaxChannels, &text_features);
  config.cross_attention_dim = text_features.front();
  if (std::ranges::any_of(text_features,
                          [&](int features) { return features != text_features.front(); }))
    reader.Complain("cross_attention_dim", "not supported; all levels must have the same");
  reader.Read("use_linear_projection", &config.use_linear_projection);
  std::string scale_shift = "default";
  reader.Read("resnet_time_scale_shift", &scale_shift);
  config.scale_shift = scale_shift == "scale_shift";
  if (scale_shift != "default" && scale_shift != "scale_shift")
    reader.Complain("resnet_time_scale_shift", "not supported; use default or scale_shift");

  reader.Read("time_embedding_dim", &config.time_embedding_dim);
  if (config.time_embedding_dim == 0 && !channels.empty())
    config.time_embedding_dim = 4 * channels[0];
  reader.Read("time_cond_proj_dim", &config.time_cond_proj_dim);
  // Half as many frequencies, less one, divide.
  if (config.time_cond_proj_dim != 0)
    reader.CheckRange("time_cond_proj_dim", config.time_cond_proj_dim, 4, kMaxChannels);
  std::string addition;
  reader.Read("addition_embed_type", &addition);
  config.text_time = addition == "text_time";
  if (!addition.empty() && addition != "text_time")
    reader.Complain("addition_embed_type", "not supported; use text_time or null");
  reader.Read("addition_time_embed_dim", &config.addition_time_embed_dim);
  reader.Read("projection_class_embeddings_input_dim",
              &config.projection_class_embeddings_input_dim);
  if (config.text_time) {
    reader.CheckRange("addition_time_embed_dim", config.addition_time_embed_dim, 2, kMaxChannels);
    if (static_cast<double>(config.addition_time_embed_dim / 2) == config.freq_shift)
      reader.Complain(
          "addition_time_embed_dim",
          fmt::format("half of it must not be the freq_shift of {}", config.freq_shift));
    reader.CheckRange("projection_class_embeddings_input_dim",
                      config.projection_class_embeddings_input_dim, 1, kMaxChannels);
  }

  const bool listed = reader.Has("only_cross_attention") && json["only_cross_attention"].is_array();
  reader.Refuse("only_cross_attention",
                listed ? nlohmann::json(std::vector<bool>(levels, false)) : nlohmann::json(false));
  reader.Refuse("dual_cross_attention", false);
  reader.Refuse("mid_block_only_cross_attention", false);
  reader.Refuse("reverse_transformer_layers_per_block", nullptr);
  reader.Refuse("num_attention_heads", nullptr);
  reader.Refuse("encoder_hid_dim", nullptr);
  reader.Refuse("encoder_hid_dim_type", nullptr);
  reader.Refuse("class_embed_type", nullptr);
  reader.Refuse("num_class_embeds", nullptr);
  reader.Refuse("class_embeddings_concat", false);
  reader.Refuse("time_embedding_type", "positional");
  reader.Refuse("time_embedding_act_fn", nullptr);
  reader.Refuse("timestep_post_act", nullptr);
  reader.Refuse("conv_in_kernel", 3);
  reader.Refuse("conv_out_kernel", 3);
  reader.Refuse("attention_type", "default");
  reader.Refuse("cross_attention_norm", nullptr);
  reader.Refuse("resnet_skip_time_act", false);
  reader.Refuse("resnet_out_scale_factor", 1.0);
  // Softmax is in fp32 anyway; dropout is for training; the last is for a type that is refused.
  reader.Ignore({"upcast_attention", "dropout", "addition_embed_type_num_heads"});

  reader.CheckRange("sample_size", std::min(config.sample_height, config.sample_width), 0, 8192);
  reader.CheckRange("sample_size", std::max(config.sample_height, config.sample_width), 0, 8192);
  reader.CheckRange("in_channels", config.in_channels, 1, kMaxChannels);
  reader.CheckRange("out_channels", config.out_channels, 1, kMaxChannels);
  reader.CheckRange("downsample_padding", config.downsample_padding, 0, 1);
  if (!channels.empty() && channels.size() <= 16)
    if (const int multiple = SizeMultiple(config);
        config.sample_height % multiple != 0 || config.sample_width % multiple != 0)
      reader.Complain("sample_size",
                      fmt::format("must be a multiple of {}, since {} blocks halve it without "
                                  "padding",
                                  multiple, channels.size() - 1));
  reader.CheckRange("norm_num_groups", config.norm_num_groups, 1, kMaxChannels);
  reader.CheckRange("time_embedding_dim", config.time_embedding_dim, 1, 4 * kMaxChannels);
  if (!channels.empty() &&
      (channels[0] < 2 || static_cast<double>(channels[0] / 2) == config.freq_shift))
    reader.Complain("block_out_channels",
                    "must begin with at least 2, and with twice of something else than freq_shift");
  DENOISED_RETURN_IF_ERROR(reader.Finish());
  return config;
}

namespace {

/// A level of the down or up path: resnets, each followed by a transformer in the CrossAttn blocks,
/// then resampling by a convolution, if any.
struct Level {
  std::vector<ResnetBlock> resnets;
  std::vector<Transformer2D> transformers;
  std::optional<Conv2d> resample;
};

class UNet2DCondition : public Denoiser {
 public:
  explicit UNet2DCondition(const UNet2DConditionConfig& config) : config_(config) {}

  absl::Status Load(NetworkOps& ops, int pooled_features, const Weights& weights);
  const DenoiserTraits& traits() const override { return traits_; }
  Tensor Forward(Context& context, const DenoiserInput& input) const override;
  void Condition(Context& context, const Prompts& prompts,
                 const ConditionSets& sets) const override;

 private:
  ResnetOptions Resnet(int in_channels, int out_channels) const {
    return {.in_channels = in_channels,
            .out_channels = out_channels,
            .time_channels = config_.time_embedding_dim,
            .groups = config_.norm_num_groups,
            .eps = config_.norm_eps,
            .activation = config_.activation,
            .scale_shift = config_.scale_shift};
  }
  nn::TransformerOptions Transformer(int level) const {
    return {.channels = config_.block_out_channels[level],
            .heads = config_.attention_head_dim[level],
            .depth = config_.transformer_layers_per_block[level],
            .text_features = config_.cross_attention_dim,
            .groups = config_.norm_num_groups,
            .linear_projection = config_.use_linear_projection};
  }
  absl::Status LoadEmbeddings(NetworkOps& ops, int pooled_features, const Weights& weights);
  absl::Status LoadBlocks(NetworkOps& ops, const Weights& weights, const UNetLevel& shape,
                          bool transformers, Level* to);
  absl::Status LoadMidBlock(NetworkOps& ops, const Weights& weights);

  Tensor Embed(Context& context, const DenoiserInput& input) const;

  UNet2DConditionConfig config_;
  DenoiserTraits traits_;
  nn::TimestepProjection time_projection_, size_projection_, guidance_projection_;
  nn::TimestepEmbedding time_embedding_;
  std::optional<nn::TimestepEmbedding> add_embedding_;  // text_time
  std::optional<nn::Linear> guidance_linear_;           // time_cond_proj_dim
  nn::LinearColumns resnet_projections_, key_values_{nn::Bias::kNo};
  Conv2d conv_in_, conv_out_;
  nn::GroupNorm conv_norm_out_;
  std::vector<Level> down_, up_;
  std::vector<ResnetBlock> mid_resnets_;
  std::optional<Transformer2D> mid_transformer_;
};

absl::Status UNet2DCondition::LoadEmbeddings(NetworkOps& ops, int pooled_features,
                                             const Weights& weights) {
  const int projected = config_.block_out_channels[0], embedded = config_.time_embedding_dim;
  const auto positional = [&](int features) {
    return nn::TimestepProjection::Positional(features, config_.flip_sin_to_cos,
                                              config_.freq_shift);
  };
  time_projection_ = positional(projected);
  DENOISED_ASSIGN_OR_RETURN(time_embedding_,
                            nn::TimestepEmbedding::Load(ops, weights / "time_embedding", projected,
                                                        embedded, config_.activation));
  if (config_.time_cond_proj_dim > 0) {
    // diffusers' get_guidance_scale_embedding: sine before cosine, frequencies over half − 1.
    guidance_projection_ = nn::TimestepProjection::Positional(config_.time_cond_proj_dim,
                                                              /*flip_sin_to_cos=*/false,
                                                              /*freq_shift=*/1);
    DENOISED_ASSIGN_OR_RETURN(
        guidance_linear_,
        nn::Linear::Load(ops, weights / "time_embedding" / "cond_proj", config_.time_cond_proj_dim,
                         projected, nn::Products::kWide, nn::Bias::kNo));
    traits_.guidance_embedding = true;
    traits_.time_features = projected;
  }
  if (!config_.text_time) return absl::OkStatus();
  const int numbers = config_.projection_class_embeddings_input_dim - pooled_features;
  if (pooled_features == 0 || numbers <= 0 || numbers % config_.addition_time_embed_dim != 0)
    return InvalidArgument(
        "{}: projection_class_embeddings_input_dim is {}; it must be the {} pooled features of the "
        "text encoder plus a multiple of addition_time_embed_dim, {}",
        weights.file(), config_.projection_class_embeddings_input_dim, pooled_features,
        config_.addition_time_embed_dim);
  traits_.pooled_features = pooled_features;
  traits_.size_numbers = numbers / config_.addition_time_embed_dim;
  traits_.vector_features = embedded;
  size_projection_ = positional(config_.addition_time_embed_dim);
  DENOISED_ASSIGN_OR_RETURN(
      add_embedding_,
      nn::TimestepEmbedding::Load(ops, weights / "add_embedding",
                                  config_.projection_class_embeddings_input_dim, embedded,
                                  Activation::kSilu));  // whatever act_fn is
  return absl::OkStatus();
}

absl::Status UNet2DCondition::Load(NetworkOps& ops, int pooled_features, const Weights& weights) {
  const std::vector<int>& channels = config_.block_out_channels;
  const int levels = static_cast<int>(channels.size());
  traits_.height = config_.sample_height;
  traits_.width = config_.sample_width;
  traits_.size_multiple = SizeMultiple(config_);
  // Input channels beyond those that are predicted are not noise, but a mask or an image.
  traits_.channels = std::min(config_.in_channels, config_.out_channels);
  traits_.extra_channels = config_.in_channels - traits_.channels;
  traits_.output_channels = config_.out_channels;
  traits_.text_features = config_.cross_attention_dim;
  DENOISED_RETURN_IF_ERROR(LoadEmbeddings(ops, pooled_features, weights));
  DENOISED_ASSIGN_OR_RETURN(
      conv_in_, Conv2d::Load(ops, weights / "conv_in", config_.in_channels, channels[0], 3));

  const UNetLevels shapes = LevelsOf(channels, config_.layers_per_block);
  down_.resize(levels);
  for (int i = 0; i < levels; ++i) {
    const Weights block = weights / "down_blocks" / i;
    DENOISED_RETURN_IF_ERROR(LoadBlocks(ops, block, shapes.down[i],
                                        config_.down_block_types[i] == "CrossAttnDownBlock2D",
                                        &down_[i]));
    if (!shapes.down[i].resamples) continue;
    DENOISED_ASSIGN_OR_RETURN(
        down_[i].resample,
        Conv2d::Load(ops, block / "downsamplers" / 0 / "conv", channels[i], channels[i], 3,
                     /*upsample2x=*/false, nn::Products::kOfModel));
  }
  DENOISED_RETURN_IF_ERROR(LoadMidBlock(ops, weights / "mid_block"));
  up_.resize(levels);
  for (int i = 0; i < levels; ++i) {
    const Weights block = weights / "up_blocks" / i;
    DENOISED_RETURN_IF_ERROR(LoadBlocks(
        ops, block, shapes.up[i], config_.up_block_types[i] == "CrossAttnUpBlock2D", &up_[i]));
    if (!shapes.up[i].resamples) continue;
    DENOISED_ASSIGN_OR_RETURN(
        up_[i].resample,
        Conv2d::LoadUpsample(ops, block / "upsamplers" / 0 / "conv", shapes.up[i].outputs));
  }

  DENOISED_ASSIGN_OR_RETURN(conv_norm_out_,
                            nn::GroupNorm::Load(ops, weights / "conv_norm_out", channels[0],
                                                config_.norm_num_groups, config_.norm_eps));
  DENOISED_ASSIGN_OR_RETURN(
      conv_out_, Conv2d::Load(ops, weights / "conv_out", channels[0], config_.out_channels, 3));
  DENOISED_RETURN_IF_ERROR(resnet_projections_.Pack(ops));
  DENOISED_RETURN_IF_ERROR(key_values_.Pack(ops));
  traits_.key_value_columns = key_values_.columns();
  traits_.parameters = weights.parameters();
  return absl::OkStatus();
}

absl::Status UNet2DCondition::LoadBlocks(NetworkOps& ops, const Weights& weights,
                                         const UNetLevel& shape, bool transformers, Level* to) {
  for (size_t i = 0; i < shape.inputs.size(); ++i) {
    const int layer = static_cast<int>(i);
    DENOISED_ASSIGN_OR_RETURN(
        ResnetBlock resnet,
        ResnetBlock::Load(ops, weights / "resnets" / layer, Resnet(shape.inputs[i], shape.outputs),
                          resnet_projections_));
    to->resnets.push_back(std::move(resnet));
    if (!transformers) continue;
    DENOISED_ASSIGN_OR_RETURN(Transformer2D transformer,
                              Transformer2D::Load(ops, weights / "attentions" / layer,
                                                  Transformer(shape.resolution), key_values_));
    to->transformers.push_back(std::move(transformer));
  }
  return absl::OkStatus();
}

absl::Status UNet2DCondition::LoadMidBlock(NetworkOps& ops, const Weights& weights) {
  const int level = static_cast<int>(config_.block_out_channels.size()) - 1,
            channels = config_.block_out_channels[level];
  ResnetOptions options = Resnet(channels, channels);
  options.output_scale_factor = config_.mid_block_scale_factor;
  for (int i = 0; i < 2; ++i) {
    DENOISED_ASSIGN_OR_RETURN(ResnetBlock resnet, ResnetBlock::Load(ops, weights / "resnets" / i,
                                                                    options, resnet_projections_));
    mid_resnets_.push_back(std::move(resnet));
  }
  DENOISED_ASSIGN_OR_RETURN(mid_transformer_, Transformer2D::Load(ops, weights / "attentions" / 0,
                                                                  Transformer(level), key_values_));
  return absl::OkStatus();
}

void UNet2DCondition::Condition(Context& context, const Prompts& prompts,
                                const ConditionSets& sets) const {
  if (prompts.states) key_values_(context, {.x = prompts.states, .out = sets.keys_values});
  if (guidance_linear_) {
    const Tensor scaled = context.NewF32(prompts.guidance.shape());
    context.ops.Add(prompts.guidance, kGuidanceFactor, Tensor(), -kGuidanceFactor,
                    Activation::kNone, scaled);
    (*guidance_linear_)(context, {.x = guidance_projection_(context, scaled), .out = sets.times});
  }
  if (add_embedding_) {
    const int64_t rows = prompts.pooled.dim(0);
    const int pooled = traits_.pooled_features,
              sizes = config_.projection_class_embeddings_input_dim - pooled;
    const Tensor embedded = size_projection_(context, prompts.sizes).Reshape({rows, sizes});
    const Tensor joined = context.New({rows, pooled + sizes});
    context.ops.Copy(prompts.pooled, joined.Columns(0, pooled));
    context.ops.Copy(embedded, joined.Columns(pooled, sizes));
    const Tensor vectors = (*add_embedding_)(context, joined, Tensor(), Activation::kNone);
    context.ops.Copy(vectors, sets.vectors);
  }
}

Tensor UNet2DCondition::Embed(Context& context, const DenoiserInput& input) const {
  const int64_t rows = input.x.dim(0);
  const auto of_set = [&](const Tensor& table) {
    if (!table) return Tensor();
    Tensor out = context.New({rows, table.dim(1)});
    context.ops.Embedding({.table = table, .index = input.label, .out = out});
    return out;
  };
  Tensor time = time_projection_(context, input.condition);
  if (const Tensor guidance = of_set(input.sets.times)) {
    const Tensor sum = context.New(time.shape());
    context.ops.Add(time, 1.0f, guidance, 0.0f, Activation::kNone, sum);
    time = sum;
  }
  // Only resnets read it, and all of them activate it first.
  return time_embedding_(context, time, of_set(input.sets.vectors), config_.activation);
}

Tensor UNet2DCondition::Forward(Context& context, const DenoiserInput& input) const {
  const Tensor embedding = Embed(context, input);
  context.Trace("emb", embedding);
  const Tensor time = resnet_projections_(context, {.x = embedding});
  const CrossAttentionInput text{.keys_values = input.sets.keys_values,
                                 .key_counts = input.sets.key_counts,
                                 .set = input.label};
  const auto layer = [&](const Level& level, size_t i, const Tensor& in, const Tensor& skip) {
    Tensor out = level.resnets[i](context, in, skip, time);
    return level.transformers.empty() ? out : level.transformers[i](context, out, text);
  };

  Tensor x = input.x;
  if (config_.center_input_sample) {
    const Tensor centered = context.New(x.shape());
    context.ops.Add(x, 2.0f, Tensor(), -1.0f, Activation::kNone, centered);
    x = centered;
  }
  x = conv_in_(context, {.x = x});
  context.Trace("conv_in", x);

  std::vector<Tensor> skips = {x};
  for (size_t i = 0; i < down_.size(); ++i) {
    for (size_t j = 0; j < down_[i].resnets.size(); ++j) {
      x = layer(down_[i], j, x, Tensor());
      skips.push_back(x);
    }
    if (down_[i].resample) {
      x = down_[i].resample->Downsample(context, x, config_.downsample_padding);
      skips.push_back(x);
    }
    context.Trace(fmt::format("down_blocks.{}", i), x);
  }
  x = mid_resnets_[0](context, x, Tensor(), time);
  x = (*mid_transformer_)(context, x, text);
  x = mid_resnets_[1](context, x, Tensor(), time);
  context.Trace("mid_block", x);
  for (size_t i = 0; i < up_.size(); ++i) {
    for (size_t j = 0; j < up_[i].resnets.size(); ++j) {
      const Tensor skip = std::move(skips.back());
      skips.pop_back();
      x = layer(up_[i], j, x, skip);
    }
    // To the size that the way down left off with: an odd one was halved upwards.
    if (up_[i].resample)
      x = up_[i].resample->Upsample(context, x, skips.back().dim(1), skips.back().dim(2));
    context.Trace(fmt::format("up_blocks.{}", i), x);
  }

  Tensor out = context.NewF32({x.dim(0), x.dim(1), x.dim(2), config_.out_channels});
  conv_out_(context,
            {.x = x, .prologue = {.norm = conv_norm_out_.Then(config_.activation)}, .out = out});
  return out;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Denoiser>> LoadUNet2DCondition(NetworkOps& ops,
                                                              const UNet2DConditionConfig& config,
                                                              int pooled_features,
                                                              const Weights& weights) {
  auto model = std::make_unique<UNet2DCondition>(config);
  DENOISED_RETURN_IF_ERROR(model->Load(ops, pooled_features, weights));
  DENOISED_RETURN_IF_ERROR(weights.CheckAllUsed());
  return model;
}

}  // namespace denoised
