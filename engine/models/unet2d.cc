// SPDX-License-Identifier: Apache-2.0
#include "engine/models/unet2d.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "engine/core/config_reader.h"
#include "engine/nn/attention.h"
#include "engine/nn/resnet.h"
#include "engine/nn/timestep.h"

namespace denoised {
namespace {

using nn::Attention;
using nn::Context;
using nn::Conv2d;
using nn::ResnetBlock;
using nn::ResnetOptions;
using Time = UNet2DConfig::Time;

constexpr int kMaxChannels = 1 << 16;

// diffusers accepts "UNetRes" in front of every block type.
std::string WithoutPrefix(const std::string& type) {
  return type.rfind("UNetRes", 0) == 0 ? type.substr(7) : type;
}

using BlockKind = UNet2DBlock;
constexpr BlockKind kDownBlocks[] = {
    {.name = "DownBlock2D"},
    {.name = "AttnDownBlock2D", .attention = true},
    {.name = "ResnetDownsampleBlock2D", .resnet_resampling = true},
    {.name = "SkipDownBlock2D", .skip = true},
    {.name = "AttnSkipDownBlock2D", .attention = true, .skip = true}};
constexpr BlockKind kUpBlocks[] = {
    {.name = "UpBlock2D", .up = true},
    {.name = "AttnUpBlock2D", .attention = true, .up = true},
    {.name = "ResnetUpsampleBlock2D", .resnet_resampling = true, .up = true},
    {.name = "SkipUpBlock2D", .up = true, .skip = true},
    {.name = "AttnSkipUpBlock2D", .attention = true, .up = true, .skip = true}};

constexpr int kMaxSkipGroups = 32;

template <size_t N>
const BlockKind* FindKind(const BlockKind (&kinds)[N], const std::string& type) {
  for (const BlockKind& kind : kinds)
    if (WithoutPrefix(type) == kind.name) return &kind;
  return nullptr;
}

template <size_t N>
void CheckBlockTypes(ConfigReader& reader, const char* field, const BlockKind (&kinds)[N],
                     const std::vector<std::string>& types, size_t levels) {
  std::string names;
  for (const BlockKind& kind : kinds) names += fmt::format(" {}", kind.name);
  for (const std::string& type : types)
    if (!FindKind(kinds, type))
      reader.Complain(field, fmt::format("block '{}' is not supported; use one of{}", type, names));
  if (types.size() != levels)
    reader.Complain(field,
                    fmt::format("needs one block for each of the {} block_out_channels", levels));
}

/// The image beside Skip blocks must have their size: on the way down it is halved by them alone,
/// from the first block on; on the way up from the first of them to the end.
template <size_t N>
void CheckSkipBlocks(ConfigReader& reader, const char* field, const BlockKind (&kinds)[N],
                     std::vector<std::string> types, int channels, const std::vector<int>& widths) {
  const auto skips = [&](const std::string& type) {
    const BlockKind* kind = FindKind(kinds, type);
    return kind && kind->skip;
  };
  if (std::none_of(types.begin(), types.end(), skips)) return;
  if (channels != kSkipImageChannels)
    reader.Complain(field, fmt::format("has Skip blocks, which are for images of {} channels, but "
                                       "the model has {}",
                                       kSkipImageChannels, channels));
  if (std::any_of(widths.begin(), widths.end(), [](int width) { return width < 4; }))
    reader.Complain(field, "has Skip blocks, which need block_out_channels of at least 4");
  const bool down = std::string_view(field) == "down_block_types";
  // The last block of the way down does not halve; whatever is before the first Skip block of the
  // way up has no such image yet.
  if (down) types.pop_back();
  const auto plain = [&](const std::string& type) { return !skips(type); };
  const auto first = down ? types.begin() : std::find_if(types.begin(), types.end(), skips);
  const auto wrong = std::find_if(first, types.end(), plain);
  const bool matters =
      down ? std::find_if(wrong, types.end(), skips) != types.end() : wrong != types.end();
  if (matters)
    reader.Complain(field, fmt::format("mixes {} with Skip blocks, which then have images of "
                                       "different sizes; put them {} others",
                                       *wrong, down ? "before" : "after"));
}

/// Every level but the last halves the image, and the way up must meet the same sizes again.
int SizeMultiple(size_t levels) { return 1 << (levels - 1); }

}  // namespace

const UNet2DBlock& DownBlockOf(const std::string& type) {
  const BlockKind* kind = FindKind(kDownBlocks, type);
  DENOISED_CHECK(kind != nullptr, "{}", type);
  return *kind;
}

const UNet2DBlock& UpBlockOf(const std::string& type) {
  const BlockKind* kind = FindKind(kUpBlocks, type);
  DENOISED_CHECK(kind != nullptr, "{}", type);
  return *kind;
}

int SkipGroups(int channels) { return std::clamp(channels / 4, 1, kMaxSkipGroups); }

int SkipInputGroups(const UNet2DBlock& block, const UNetLevel& shape, int index) {
  if (!block.attention || !block.up) return SkipGroups(shape.inputs[index]);
  // diffusers: min(resnet_in_channels + res_skip_channels // 4, 32). Of the last resnet it takes
  // the skip's channels, which gives 32 too, as attention needs multiples of 32.
  const int before = index == 0 ? shape.inputs[0] - shape.outputs : shape.outputs;
  return std::min(before + shape.outputs / 4, kMaxSkipGroups);
}

int UNet2DConfig::GroupsOf(int channels) const {
  return norm_num_groups.value_or(SkipGroups(channels));
}

UNetLevels UNet2DConfig::Levels() const {
  return LevelsOf(block_out_channels,
                  std::vector<int>(block_out_channels.size(), layers_per_block));
}

absl::StatusOr<UNet2DConfig> UNet2DConfig::Parse(const nlohmann::json& json,
                                                 const std::string& file) {
  UNet2DConfig config;
  ConfigReader reader(json, file);
  std::string class_name = "UNet2DModel";
  reader.Read("_class_name", &class_name);
  if (class_name != "UNet2DModel")
    return InvalidArgument("{}: field '_class_name' is \"{}\": not supported; only UNet2DModel is",
                           file, class_name);

  if (reader.Has("sample_size") && json["sample_size"].is_array()) {
    std::vector<int> size;
    reader.Read("sample_size", &size);
    if (size.size() == 2) {
      config.sample_height = size[0];
      config.sample_width = size[1];
    } else {
      reader.Complain("sample_size", "expected one number, or height and width");
    }
  } else {
    reader.Read("sample_size", &config.sample_height);
    config.sample_width = config.sample_height;
  }
  reader.Read("in_channels", &config.in_channels);
  reader.Read("out_channels", &config.out_channels);
  reader.Read("center_input_sample", &config.center_input_sample);

  std::string time_type = "positional";
  reader.Read("time_embedding_type", &time_type);
  if (time_type == "fourier") config.time_embedding_type = Time::kFourier;
  if (time_type == "learned") config.time_embedding_type = Time::kLearned;
  if (time_type != "fourier" && time_type != "positional" && time_type != "learned")
    reader.Complain("time_embedding_type", "not supported; use positional, fourier or learned");
  reader.Read("num_train_timesteps", &config.num_train_timesteps);
  if (config.time_embedding_type == Time::kLearned)
    reader.CheckRange("num_train_timesteps", config.num_train_timesteps, 1, 1 << 20);
  reader.Read("freq_shift", &config.freq_shift);
  reader.Read("flip_sin_to_cos", &config.flip_sin_to_cos);

  reader.Read("down_block_types", &config.down_block_types);
  reader.Read("up_block_types", &config.up_block_types);
  reader.Read("block_out_channels", &config.block_out_channels);
  const std::vector<int>& channels = config.block_out_channels;
  if (channels.empty() || channels.size() > 16) {
    reader.Complain("block_out_channels", "needs 1 to 16 entries");
  } else if (const int multiple = SizeMultiple(channels.size());
             config.sample_height % multiple != 0 || config.sample_width % multiple != 0) {
    reader.Complain("sample_size", fmt::format("must be a multiple of {}, since {} blocks halve it",
                                               multiple, channels.size() - 1));
  }
  for (const int c : channels) reader.CheckRange("block_out_channels", c, 1, kMaxChannels);
  CheckBlockTypes(reader, "down_block_types", kDownBlocks, config.down_block_types,
                  channels.size());
  CheckBlockTypes(reader, "up_block_types", kUpBlocks, config.up_block_types, channels.size());
  CheckSkipBlocks(reader, "down_block_types", kDownBlocks, config.down_block_types,
                  config.in_channels, channels);
  CheckSkipBlocks(reader, "up_block_types", kUpBlocks, config.up_block_types, config.out_channels,
                  channels);

  std::string mid_type = "UNetMidBlock2D";
  if (json.contains("mid_block_type") && json["mid_block_type"].is_null()) config.mid_block = false;
  reader.Read("mid_block_type", &mid_type);
  if (mid_type != "UNetMidBlock2D")
    reader.Complain("mid_block_type", "not supported; use UNetMidBlock2D or null");
  reader.Read("mid_block_scale_factor", &config.mid_block_scale_factor);
  // The mid block's activations are divided by it; far from 1 they would not stay finite.
  reader.CheckRange("mid_block_scale_factor", config.mid_block_scale_factor, 1e-3, 1e3);

  reader.Read("layers_per_block", &config.layers_per_block);
  reader.Read("downsample_padding", &config.downsample_padding);
  reader.Read("downsample_type", &config.downsample_type);
  reader.Read("upsample_type", &config.upsample_type);
  for (const auto& [field, type] : {std::pair{"downsample_type", config.downsample_type},
                                    std::pair{"upsample_type", config.upsample_type}})
    if (type != "conv" && type != "resnet")
      reader.Complain(field, "not supported; use conv or resnet");
  nn::ReadActivation(reader, "act_fn", &config.activation);

  if (json.contains("attention_head_dim") && json["attention_head_dim"].is_null())
    config.attention_head_dim.reset();
  reader.Read("attention_head_dim", &config.attention_head_dim);
  if (json.contains("norm_num_groups") && json["norm_num_groups"].is_null())
    config.norm_num_groups.reset();
  reader.Read("norm_num_groups", &config.norm_num_groups);
  const auto needs_groups = [](const std::string& type) {
    return type.find("Skip") == std::string::npos;
  };
  const auto need_groups = [&](const std::vector<std::string>& types) {
    return std::any_of(types.begin(), types.end(), needs_groups);
  };
  if (!config.norm_num_groups &&
      (need_groups(config.down_block_types) || need_groups(config.up_block_types)))
    reader.Complain("norm_num_groups",
                    "only Skip blocks can do without groups; set it, to 32 for example");
  reader.Read("attn_norm_num_groups", &config.attn_norm_num_groups);
  reader.Read("norm_eps", &config.norm_eps);
  std::string scale_shift = "default";
  reader.Read("resnet_time_scale_shift", &scale_shift);
  config.scale_shift = scale_shift == "scale_shift";
  if (scale_shift != "default" && scale_shift != "scale_shift")
    reader.Complain("resnet_time_scale_shift", "not supported; use default or scale_shift");
  reader.Read("add_attention", &config.add_attention);

  std::optional<std::string> class_embed_type;
  std::optional<int> num_class_embeds;
  reader.Read("class_embed_type", &class_embed_type);
  reader.Read("num_class_embeds", &num_class_embeds);
  if (class_embed_type && *class_embed_type != "timestep" && *class_embed_type != "identity")
    reader.Complain("class_embed_type", "not supported; use timestep, identity or null");
  if (class_embed_type) {
    config.condition =
        *class_embed_type == "identity" ? ClassCondition::kVector : ClassCondition::kValue;
  } else if (num_class_embeds) {
    config.condition = ClassCondition::kLabel;
    config.num_class_embeds = *num_class_embeds;
    reader.CheckRange("num_class_embeds", *num_class_embeds, 1, 1 << 24);
  }
  // Dropout is for training.
  reader.Ignore({"dropout"});

  reader.CheckRange("sample_size", std::min(config.sample_height, config.sample_width), 0, 65536);
  reader.CheckRange("sample_size", std::max(config.sample_height, config.sample_width), 0, 65536);
  reader.CheckRange("in_channels", config.in_channels, 1, kMaxChannels);
  reader.CheckRange("out_channels", config.out_channels, 1, kMaxChannels);
  reader.CheckRange("layers_per_block", config.layers_per_block, 1, 64);
  reader.CheckRange("downsample_padding", config.downsample_padding, 0, 1);
  if (config.norm_num_groups)
    reader.CheckRange("norm_num_groups", *config.norm_num_groups, 1, kMaxChannels);
  if (config.attn_norm_num_groups)
    reader.CheckRange("attn_norm_num_groups", *config.attn_norm_num_groups, 1, kMaxChannels);
  if (config.attention_head_dim)
    reader.CheckRange("attention_head_dim", *config.attention_head_dim, 1, kMaxChannels);
  if (!(config.norm_eps > 0)) reader.Complain("norm_eps", "must be greater than 0");
  config.time_embedding_dim = channels.empty() ? 0 : 4 * channels[0];
  reader.Read("time_embedding_dim", &config.time_embedding_dim);
  if (config.time_embedding_dim == 0 && !channels.empty())
    config.time_embedding_dim = 4 * channels[0];  // diffusers: `time_embedding_dim or 4 · …`
  reader.CheckRange("time_embedding_dim", config.time_embedding_dim, 1, 4 * kMaxChannels);
  const bool positional = config.time_embedding_type == Time::kPositional;
  if (positional && !channels.empty() && channels[0] < 2)
    reader.Complain(
        "block_out_channels",
        "must begin with at least 2: a positional time embedding is a sine and a "
        "cosine of that many channels in all; use more, or time_embedding_type fourier");
  else if (positional && !channels.empty() && channels[0] / 2 - config.freq_shift == 0)
    reader.Complain("freq_shift", "must differ from half of block_out_channels[0]");
  DENOISED_RETURN_IF_ERROR(reader.Finish());
  return config;
}

namespace {

/// A level of the down or up path: resnets, each followed by attention in the Attn blocks, then
/// resampling by a convolution or by a resnet, if any.
struct Level {
  std::vector<ResnetBlock> resnets;
  std::vector<Attention> attentions;
  std::optional<Conv2d> resample_conv;
  std::optional<ResnetBlock> resample_resnet;
  // For Skip blocks that resample: the convolution from the skip image, or, after a norm, to it.
  std::optional<Conv2d> skip_conv;
  std::optional<nn::GroupNorm> skip_norm;
  bool skip = false;
};

class UNet2D : public Denoiser {
 public:
  explicit UNet2D(const UNet2DConfig& config) : config_(config) {}

  absl::Status Load(NetworkOps& ops, const Weights& weights);
  const DenoiserTraits& traits() const override { return traits_; }
  Tensor Forward(Context& context, const DenoiserInput& input) const override;

 private:
  ResnetOptions Resnet(int in_channels, int out_channels) const {
    return {.in_channels = in_channels,
            .out_channels = out_channels,
            .time_channels = config_.time_embedding_dim,
            .groups = config_.GroupsOf(out_channels),
            .eps = config_.norm_eps,
            .activation = config_.activation,
            .scale_shift = config_.scale_shift};
  }
  nn::AttentionOptions SelfAttention(int channels) const {
    return {.channels = channels,
            .head_dim = config_.attention_head_dim.value_or(channels),
            .groups = config_.GroupsOf(channels),
            .eps = config_.norm_eps};
  }
  absl::Status LoadLevel(NetworkOps& ops, const Weights& weights, const BlockKind& kind,
                         const UNetLevel& shape, Level* level);
  absl::Status LoadSkipLevel(NetworkOps& ops, const Weights& weights, const BlockKind& kind,
                             const UNetLevel& shape, Level* level);
  absl::Status LoadMidBlock(NetworkOps& ops, const Weights& weights);

  Tensor Embed(Context& context, const DenoiserInput& input) const;
  Tensor Down(Context& context, const Level& level, Tensor x, Tensor* image,
              std::vector<Tensor>& skips, const Tensor& time) const;
  Tensor Up(Context& context, const Level& level, Tensor x, Tensor* image,
            std::vector<Tensor>& skips, const Tensor& time) const;

  UNet2DConfig config_;
  DenoiserTraits traits_;
  nn::TimestepProjection time_projection_;
  Tensor time_table_;  // kLearned
  nn::TimestepEmbedding time_embedding_;
  Tensor class_table_;                                    // kLabel
  std::optional<nn::TimestepEmbedding> class_embedding_;  // kValue
  nn::LinearColumns resnet_projections_;
  Conv2d conv_in_, conv_out_;
  nn::GroupNorm conv_norm_out_;
  std::vector<Level> down_, up_;
  std::vector<ResnetBlock> mid_resnets_;
  std::optional<Attention> mid_attention_;
};

absl::Status UNet2D::Load(NetworkOps& ops, const Weights& weights) {
  const std::vector<int>& channels = config_.block_out_channels;
  const int levels = static_cast<int>(channels.size());

  traits_.height = config_.sample_height;
  traits_.width = config_.sample_width;
  traits_.size_multiple = SizeMultiple(channels.size());
  traits_.channels = config_.in_channels;
  traits_.output_channels = config_.out_channels;
  traits_.logarithmic_time = config_.time_embedding_type == Time::kFourier;
  traits_.condition = config_.condition;
  traits_.class_embeddings = config_.num_class_embeds;

  int projected = channels[0];
  if (config_.time_embedding_type == Time::kLearned) {
    DENOISED_ASSIGN_OR_RETURN(
        const Tensor table,
        (weights / "time_proj").Get("weight", {config_.num_train_timesteps, projected}));
    DENOISED_ASSIGN_OR_RETURN(time_table_, ops.PackVector(table));
  } else if (config_.time_embedding_type == Time::kFourier) {
    DENOISED_ASSIGN_OR_RETURN(
        time_projection_, nn::TimestepProjection::Fourier(ops, weights / "time_proj", channels[0]));
  } else {
    time_projection_ = nn::TimestepProjection::Positional(channels[0], config_.flip_sin_to_cos,
                                                          config_.freq_shift);
  }
  if (!time_table_) projected = time_projection_.out_features();
  const int embedded = config_.time_embedding_dim;
  constexpr Activation kInner = Activation::kSilu;  // whatever act_fn is
  DENOISED_ASSIGN_OR_RETURN(
      time_embedding_,
      nn::TimestepEmbedding::Load(ops, weights / "time_embedding", projected, embedded, kInner));
  switch (config_.condition) {
    case ClassCondition::kNone:
      break;
    case ClassCondition::kLabel: {
      DENOISED_ASSIGN_OR_RETURN(
          Tensor table,
          (weights / "class_embedding").Get("weight", {config_.num_class_embeds, embedded}));
      DENOISED_ASSIGN_OR_RETURN(class_table_, ops.PackVector(table));
      break;
    }
    case ClassCondition::kValue: {
      DENOISED_ASSIGN_OR_RETURN(
          class_embedding_, nn::TimestepEmbedding::Load(ops, weights / "class_embedding", projected,
                                                        embedded, kInner));
      traits_.class_vector_size = 1;
      break;
    }
    case ClassCondition::kVector:
      traits_.class_vector_size = embedded;
      break;
  }

  DENOISED_ASSIGN_OR_RETURN(
      conv_in_, Conv2d::Load(ops, weights / "conv_in", config_.in_channels, channels[0], 3));

  const UNetLevels shapes = config_.Levels();
  down_.resize(levels);
  for (int i = 0; i < levels; ++i)
    DENOISED_RETURN_IF_ERROR(LoadLevel(ops, weights / "down_blocks" / i,
                                       DownBlockOf(config_.down_block_types[i]), shapes.down[i],
                                       &down_[i]));
  if (config_.mid_block) DENOISED_RETURN_IF_ERROR(LoadMidBlock(ops, weights / "mid_block"));
  up_.resize(levels);
  for (int i = 0; i < levels; ++i)
    DENOISED_RETURN_IF_ERROR(LoadLevel(ops, weights / "up_blocks" / i,
                                       UpBlockOf(config_.up_block_types[i]), shapes.up[i],
                                       &up_[i]));

  DENOISED_ASSIGN_OR_RETURN(conv_norm_out_,
                            nn::GroupNorm::Load(ops, weights / "conv_norm_out", channels[0],
                                                config_.GroupsOf(channels[0]), config_.norm_eps));
  DENOISED_ASSIGN_OR_RETURN(
      conv_out_, Conv2d::Load(ops, weights / "conv_out", channels[0], config_.out_channels, 3));
  DENOISED_RETURN_IF_ERROR(resnet_projections_.Pack(ops));
  traits_.parameters = weights.parameters();
  return absl::OkStatus();
}

absl::Status UNet2D::LoadLevel(NetworkOps& ops, const Weights& weights, const BlockKind& kind,
                               const UNetLevel& shape, Level* level) {
  if (kind.skip) return LoadSkipLevel(ops, weights, kind, shape, level);
  for (size_t i = 0; i < shape.inputs.size(); ++i) {
    DENOISED_ASSIGN_OR_RETURN(
        ResnetBlock resnet,
        ResnetBlock::Load(ops, weights / "resnets" / static_cast<int>(i),
                          Resnet(shape.inputs[i], shape.outputs), resnet_projections_));
    level->resnets.push_back(std::move(resnet));
    if (!kind.attention) continue;
    DENOISED_ASSIGN_OR_RETURN(Attention attention,
                              Attention::Load(ops, weights / "attentions" / static_cast<int>(i),
                                              SelfAttention(shape.outputs)));
    level->attentions.push_back(std::move(attention));
  }
  if (!shape.resamples) return absl::OkStatus();

  const Weights resampler = weights / (kind.up ? "upsamplers" : "downsamplers") / 0;
  // Only the Attn blocks resample as the config says; the plain blocks always use a convolution.
  const std::string& type = kind.up ? config_.upsample_type : config_.downsample_type;
  if (kind.resnet_resampling || (kind.attention && type == "resnet")) {
    ResnetOptions options = Resnet(shape.outputs, shape.outputs);
    options.resample = kind.up ? Resample::kNearestUp : Resample::kAveragePoolDown;
    DENOISED_ASSIGN_OR_RETURN(level->resample_resnet,
                              ResnetBlock::Load(ops, resampler, options, resnet_projections_));
  } else {
    DENOISED_ASSIGN_OR_RETURN(level->resample_conv,
                              Conv2d::Load(ops, resampler / "conv", shape.outputs, shape.outputs, 3,
                                           /*upsample2x=*/kind.up, nn::Products::kOfModel));
  }
  return absl::OkStatus();
}

absl::Status UNet2D::LoadSkipLevel(NetworkOps& ops, const Weights& weights, const BlockKind& kind,
                                   const UNetLevel& shape, Level* level) {
  level->skip = true;
  const auto resnet_of = [&](int in, int groups) {
    ResnetOptions options = Resnet(in, shape.outputs);
    options.groups = groups;
    options.groups_out = SkipGroups(shape.outputs);
    options.output_scale_factor = std::sqrt(2.0);
    return options;
  };
  for (int i = 0; i < static_cast<int>(shape.inputs.size()); ++i) {
    const ResnetOptions options = resnet_of(shape.inputs[i], SkipInputGroups(kind, shape, i));
    DENOISED_ASSIGN_OR_RETURN(ResnetBlock resnet, ResnetBlock::Load(ops, weights / "resnets" / i,
                                                                    options, resnet_projections_));
    level->resnets.push_back(std::move(resnet));
    // The way up has one, after all resnets.
    if (!kind.attention || (kind.up && i > 0)) continue;
    nn::AttentionOptions attention = SelfAttention(shape.outputs);
    attention.groups = kSkipAttentionGroups;
    attention.output_scale_factor = std::sqrt(2.0);
    DENOISED_ASSIGN_OR_RETURN(Attention loaded,
                              Attention::Load(ops, weights / "attentions" / i, attention));
    level->attentions.push_back(std::move(loaded));
  }
  if (!shape.resamples) return absl::OkStatus();
  ResnetOptions options = resnet_of(shape.outputs, SkipGroups(shape.outputs));
  options.resample = kind.up ? Resample::kFirUp : Resample::kFirDown;
  options.shortcut = true;
  DENOISED_ASSIGN_OR_RETURN(
      level->resample_resnet,
      ResnetBlock::Load(ops, weights / (kind.up ? "resnet_up" : "resnet_down"), options,
                        resnet_projections_));
  if (!kind.up) {
    DENOISED_ASSIGN_OR_RETURN(level->skip_conv, Conv2d::Load(ops, weights / "skip_conv",
                                                             kSkipImageChannels, shape.outputs, 1));
    return absl::OkStatus();
  }
  DENOISED_ASSIGN_OR_RETURN(level->skip_norm,
                            nn::GroupNorm::Load(ops, weights / "skip_norm", shape.outputs,
                                                SkipGroups(shape.outputs), config_.norm_eps));
  DENOISED_ASSIGN_OR_RETURN(level->skip_conv, Conv2d::Load(ops, weights / "skip_conv",
                                                           shape.outputs, kSkipImageChannels, 3));
  return absl::OkStatus();
}

absl::Status UNet2D::LoadMidBlock(NetworkOps& ops, const Weights& weights) {
  const int channels = config_.block_out_channels.back();
  ResnetOptions options = Resnet(channels, channels);
  options.output_scale_factor = config_.mid_block_scale_factor;
  for (int i = 0; i < 2; ++i) {
    DENOISED_ASSIGN_OR_RETURN(ResnetBlock resnet, ResnetBlock::Load(ops, weights / "resnets" / i,
                                                                    options, resnet_projections_));
    mid_resnets_.push_back(std::move(resnet));
  }
  if (!config_.add_attention) return absl::OkStatus();
  nn::AttentionOptions attention = SelfAttention(channels);
  attention.output_scale_factor = config_.mid_block_scale_factor;
  // Unlike elsewhere, the mid block's attention has no norm with scale_shift, unless asked for.
  attention.groups = config_.attn_norm_num_groups;
  if (!attention.groups && !config_.scale_shift) attention.groups = config_.GroupsOf(channels);
  DENOISED_ASSIGN_OR_RETURN(mid_attention_,
                            Attention::Load(ops, weights / "attentions" / 0, attention));
  return absl::OkStatus();
}

Tensor UNet2D::Embed(Context& context, const DenoiserInput& input) const {
  const int64_t rows = input.x.dim(0);
  const auto projected = [&](const Tensor& number) {
    if (!time_table_) return time_projection_(context, number);
    Tensor out = context.New({rows, time_table_.dim(1)});
    context.ops.Embedding({.table = time_table_, .index = number, .out = out});
    return out;
  };
  Tensor class_embedding;
  switch (config_.condition) {
    case ClassCondition::kNone:
      break;
    case ClassCondition::kLabel:
      class_embedding = context.New({rows, config_.time_embedding_dim});
      context.ops.Embedding({.table = class_table_, .index = input.label, .out = class_embedding});
      break;
    case ClassCondition::kValue:
      class_embedding = (*class_embedding_)(context, projected(input.embedding.Reshape({rows})),
                                            Tensor(), Activation::kNone);
      break;
    case ClassCondition::kVector:
      class_embedding = context.New({rows, config_.time_embedding_dim});
      context.ops.Add(input.embedding, 1.0f, Tensor(), 0.0f, Activation::kNone, class_embedding);
      break;
  }
  // Only resnets read it, and all of them activate it first.
  return time_embedding_(context, projected(input.condition), class_embedding, config_.activation);
}

Tensor UNet2D::Forward(Context& context, const DenoiserInput& input) const {
  const Tensor embedding = Embed(context, input);
  context.Trace("emb", embedding);
  const Tensor time = resnet_projections_(context, {.x = embedding});

  Tensor x = input.x;
  if (config_.center_input_sample) {
    const Tensor centered = context.New(x.shape());
    context.ops.Add(x, 2.0f, Tensor(), -1.0f, Activation::kNone, centered);
    x = centered;
  }
  Tensor image = x;  // beside Skip blocks
  x = conv_in_(context, {.x = x});
  context.Trace("conv_in", x);

  std::vector<Tensor> skips = {x};
  for (size_t i = 0; i < down_.size(); ++i) {
    x = Down(context, down_[i], std::move(x), &image, skips, time);
    context.Trace(fmt::format("down_blocks.{}", i), x);
  }

  if (config_.mid_block) {
    x = mid_resnets_[0](context, x, Tensor(), time);
    if (mid_attention_) x = (*mid_attention_)(context, x);
    x = mid_resnets_[1](context, x, Tensor(), time);
    context.Trace("mid_block", x);
  }

  image = Tensor();
  for (size_t i = 0; i < up_.size(); ++i) {
    x = Up(context, up_[i], std::move(x), &image, skips, time);
    context.Trace(fmt::format("up_blocks.{}", i), x);
  }

  Tensor out = context.NewF32({x.dim(0), x.dim(1), x.dim(2), config_.out_channels});
  conv_out_(context,
            {.x = x, .prologue = {.norm = conv_norm_out_.Then(Activation::kSilu)}, .out = out});
  if (image) {
    const Tensor sum = context.NewF32(out.shape());
    context.ops.Add(out, 1.0f, image, 0.0f, Activation::kNone, sum);
    out = sum;
  }
  if (config_.time_embedding_type == Time::kFourier) {  // diffusers divides by the noise level
    const Tensor scaled = context.NewF32(out.shape());
    context.ops.DivideRows(out, input.condition, scaled);
    out = scaled;
  }
  return out;
}

Tensor UNet2D::Down(Context& context, const Level& level, Tensor x, Tensor* image,
                    std::vector<Tensor>& skips, const Tensor& time) const {
  for (size_t layer = 0; layer < level.resnets.size(); ++layer) {
    x = level.resnets[layer](context, x, Tensor(), time);
    if (!level.attentions.empty()) x = level.attentions[layer](context, x);
    skips.push_back(x);
  }
  if (level.resample_conv) {
    x = level.resample_conv->Downsample(context, x, config_.downsample_padding);
  } else if (level.resample_resnet) {
    x = (*level.resample_resnet)(context, x, Tensor(), time);
  } else {
    return x;
  }
  if (level.skip) {
    *image = nn::Resampled(context, Resample::kFirDown, *image);
    x = (*level.skip_conv)(context, {.x = *image, .epilogue = {.residual = x}});
  }
  skips.push_back(x);
  return x;
}

Tensor UNet2D::Up(Context& context, const Level& level, Tensor x, Tensor* image,
                  std::vector<Tensor>& skips, const Tensor& time) const {
  for (size_t layer = 0; layer < level.resnets.size(); ++layer) {
    const Tensor skip = std::move(skips.back());
    skips.pop_back();
    x = level.resnets[layer](context, x, skip, time);
    if (!level.attentions.empty() && !level.skip) x = level.attentions[layer](context, x);
  }
  if (level.skip) {
    if (!level.attentions.empty()) x = level.attentions[0](context, x);
    if (*image) *image = nn::Resampled(context, Resample::kFirUp, *image);
    if (level.skip_conv) {
      *image = (*level.skip_conv)(context,
                                  {.x = x,
                                   .prologue = {.norm = level.skip_norm->Then(Activation::kSilu)},
                                   .epilogue = {.residual = *image}});
    }
  }
  if (level.resample_conv) return (*level.resample_conv)(context, {.x = x});
  if (level.resample_resnet) return (*level.resample_resnet)(context, x, Tensor(), time);
  return x;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Denoiser>> LoadUNet2D(NetworkOps& ops, const UNet2DConfig& config,
                                                     const Weights& weights) {
  auto model = std::make_unique<UNet2D>(config);
  DENOISED_RETURN_IF_ERROR(model->Load(ops, weights));
  DENOISED_RETURN_IF_ERROR(weights.CheckAllUsed());
  return model;
}

}  // namespace denoised
