// SPDX-License-Identifier: Apache-2.0
#include "engine/models/vae.h"

namespace denoised {
namespace {

using nn::Attention;
using nn::Context;
using nn::Conv2d;
using nn::ResnetBlock;

constexpr int kMaxChannels = 1 << 14;

struct BlockKind {
  const char* name;
  bool attention;
};
constexpr BlockKind kDownBlocks[] = {{"DownEncoderBlock2D", false},
                                     {"AttnDownEncoderBlock2D", true}};
constexpr BlockKind kUpBlocks[] = {{"UpDecoderBlock2D", false}, {"AttnUpDecoderBlock2D", true}};

const BlockKind* FindKind(const BlockKind (&kinds)[2], const std::string& type) {
  for (const BlockKind& kind : kinds)
    if (type == kind.name) return &kind;
  return nullptr;
}

void CheckBlockTypes(ConfigReader& reader, const char* field, const BlockKind (&kinds)[2],
                     const std::vector<std::string>& types, size_t levels) {
  for (const std::string& type : types)
    if (!FindKind(kinds, type))
      reader.Complain(field, fmt::format("block '{}' is not supported; use {} or {}", type,
                                         kinds[0].name, kinds[1].name));
  if (types.size() != levels)
    reader.Complain(field,
                    fmt::format("needs one block for each of the {} block_out_channels", levels));
}

nn::ResnetOptions Resnet(const VaeConfig& config, int in_channels, int out_channels) {
  return {.in_channels = in_channels,
          .out_channels = out_channels,
          .groups = config.norm_num_groups,
          .eps = config.norm_eps,
          .activation = config.activation};
}

/// One head as wide as the block.
nn::AttentionOptions SelfAttention(const VaeConfig& config, int channels) {
  return {.channels = channels,
          .head_dim = channels,
          .groups = config.norm_num_groups,
          .eps = config.norm_eps};
}

absl::StatusOr<VaeLevel> LoadLevel(NetworkOps& ops, const Weights& weights, const VaeConfig& config,
                                   bool attention, int layers, int in_channels, int out_channels) {
  VaeLevel level;
  for (int i = 0; i < layers; ++i) {
    DENOISED_ASSIGN_OR_RETURN(
        ResnetBlock resnet,
        ResnetBlock::Load(ops, weights / "resnets" / i,
                          Resnet(config, i == 0 ? in_channels : out_channels, out_channels)));
    level.resnets.push_back(std::move(resnet));
    if (!attention) continue;
    DENOISED_ASSIGN_OR_RETURN(
        Attention block,
        Attention::Load(ops, weights / "attentions" / i, SelfAttention(config, out_channels)));
    level.attentions.push_back(std::move(block));
  }
  return level;
}

Tensor Run(Context& context, const VaeLevel& level, Tensor x) {
  for (size_t i = 0; i < level.resnets.size(); ++i) {
    x = level.resnets[i](context, x, Tensor(), Tensor());
    if (!level.attentions.empty()) x = level.attentions[i](context, x);
  }
  return x;
}

}  // namespace

void VaeConfig::Read(ConfigReader& reader) {
  reader.Read("in_channels", &in_channels);
  reader.Read("out_channels", &out_channels);
  reader.Read("down_block_types", &down_block_types);
  reader.Read("up_block_types", &up_block_types);
  reader.Read("block_out_channels", &block_out_channels);
  reader.Read("layers_per_block", &layers_per_block);
  reader.Read("latent_channels", &latent_channels);
  reader.Read("norm_num_groups", &norm_num_groups);
  reader.RefuseNull("norm_num_groups");
  reader.Read("scaling_factor", &scaling_factor);
  reader.RefuseNull("scaling_factor");
  reader.Read("mid_block_add_attention", &mid_block_add_attention);
  nn::ReadActivation(reader, "act_fn", &activation);
  // The sizes of diffusers' tiles; and a remedy for fp16, in which nothing is computed here.
  reader.Ignore({"sample_size", "force_upcast"});

  const size_t levels = block_out_channels.size();
  if (levels < 1 || levels > 8) reader.Complain("block_out_channels", "needs 1 to 8 entries");
  for (const int channels : block_out_channels)
    reader.CheckRange("block_out_channels", channels, 1, kMaxChannels);
  CheckBlockTypes(reader, "down_block_types", kDownBlocks, down_block_types, levels);
  CheckBlockTypes(reader, "up_block_types", kUpBlocks, up_block_types, levels);
  reader.CheckRange("in_channels", in_channels, 1, kMaxChannels);
  reader.CheckRange("out_channels", out_channels, 1, kMaxChannels);
  reader.CheckRange("layers_per_block", layers_per_block, 1, 64);
  reader.CheckRange("latent_channels", latent_channels, 1, kMaxChannels);
  reader.CheckRange("norm_num_groups", norm_num_groups, 1, kMaxChannels);
  for (size_t i = 0; i < levels; ++i) {
    const bool attention =
        (mid_block_add_attention && i + 1 == levels) ||
        (i < down_block_types.size() && down_block_types[i] == kDownBlocks[1].name) ||
        (levels - 1 - i < up_block_types.size() &&
         up_block_types[levels - 1 - i] == kUpBlocks[1].name);
    if (attention && block_out_channels[i] > kMaxHeadDim)
      reader.Complain("block_out_channels",
                      fmt::format("attention over {} channels is one head, which may be at most {} "
                                  "wide",
                                  block_out_channels[i], kMaxHeadDim));
  }
  if (!(scaling_factor > 0)) reader.Complain("scaling_factor", "must be greater than 0");
}

absl::StatusOr<VaeMidBlock> VaeMidBlock::Load(NetworkOps& ops, const Weights& weights,
                                              const VaeConfig& config) {
  const int channels = config.block_out_channels.back();
  VaeMidBlock block;
  for (int i = 0; i < 2; ++i) {
    DENOISED_ASSIGN_OR_RETURN(
        ResnetBlock resnet,
        ResnetBlock::Load(ops, weights / "resnets" / i, Resnet(config, channels, channels)));
    block.resnets_.push_back(std::move(resnet));
  }
  if (config.mid_block_add_attention) {
    DENOISED_ASSIGN_OR_RETURN(block.attention_, Attention::Load(ops, weights / "attentions" / 0,
                                                                SelfAttention(config, channels)));
  }
  return block;
}

Tensor VaeMidBlock::operator()(Context& context, Tensor x) const {
  x = resnets_[0](context, x, Tensor(), Tensor());
  if (attention_) x = (*attention_)(context, x);
  return resnets_[1](context, x, Tensor(), Tensor());
}

absl::StatusOr<VaeEncoder> VaeEncoder::Load(NetworkOps& ops, const Weights& weights,
                                            const VaeConfig& config, int out_channels) {
  const std::vector<int>& channels = config.block_out_channels;
  VaeEncoder encoder;
  DENOISED_ASSIGN_OR_RETURN(
      encoder.conv_in_, Conv2d::Load(ops, weights / "conv_in", config.in_channels, channels[0], 3));
  for (size_t i = 0; i < channels.size(); ++i) {
    const Weights block = weights / "down_blocks" / static_cast<int>(i);
    const bool attention = FindKind(kDownBlocks, config.down_block_types[i])->attention;
    DENOISED_ASSIGN_OR_RETURN(VaeLevel level,
                              LoadLevel(ops, block, config, attention, config.layers_per_block,
                                        channels[i == 0 ? 0 : i - 1], channels[i]));
    if (i + 1 < channels.size()) {
      DENOISED_ASSIGN_OR_RETURN(
          level.resample,
          Conv2d::Load(ops, block / "downsamplers" / 0 / "conv", channels[i], channels[i], 3));
    }
    encoder.levels_.push_back(std::move(level));
  }
  DENOISED_ASSIGN_OR_RETURN(encoder.mid_block_,
                            VaeMidBlock::Load(ops, weights / "mid_block", config));
  DENOISED_ASSIGN_OR_RETURN(encoder.norm_out_,
                            nn::GroupNorm::Load(ops, weights / "conv_norm_out", channels.back(),
                                                config.norm_num_groups, config.norm_eps));
  DENOISED_ASSIGN_OR_RETURN(
      encoder.conv_out_, Conv2d::Load(ops, weights / "conv_out", channels.back(), out_channels, 3));
  return encoder;
}

Tensor VaeEncoder::operator()(Context& context, const Tensor& x, Tensor out) const {
  Tensor h = conv_in_(context, {.x = x});
  for (size_t i = 0; i < levels_.size(); ++i) {
    h = Run(context, levels_[i], std::move(h));
    if (levels_[i].resample) h = levels_[i].resample->Downsample(context, h, /*padding=*/0);
    context.Trace(fmt::format("encoder.down_blocks.{}", i), h);
  }
  h = mid_block_(context, std::move(h));
  context.Trace("encoder.mid_block", h);
  return conv_out_(
      context,
      {.x = h, .prologue = {.norm = norm_out_.Then(Activation::kSilu)}, .out = std::move(out)});
}

absl::StatusOr<VaeDecoder> VaeDecoder::Load(NetworkOps& ops, const Weights& weights,
                                            const VaeConfig& config) {
  const std::vector<int> channels(config.block_out_channels.rbegin(),
                                  config.block_out_channels.rend());
  VaeDecoder decoder;
  decoder.out_channels_ = config.out_channels;
  DENOISED_ASSIGN_OR_RETURN(decoder.conv_in_, Conv2d::Load(ops, weights / "conv_in",
                                                           config.latent_channels, channels[0], 3));
  DENOISED_ASSIGN_OR_RETURN(decoder.mid_block_,
                            VaeMidBlock::Load(ops, weights / "mid_block", config));
  for (size_t i = 0; i < channels.size(); ++i) {
    const Weights block = weights / "up_blocks" / static_cast<int>(i);
    const bool attention = FindKind(kUpBlocks, config.up_block_types[i])->attention;
    DENOISED_ASSIGN_OR_RETURN(VaeLevel level,
                              LoadLevel(ops, block, config, attention, config.layers_per_block + 1,
                                        channels[i == 0 ? 0 : i - 1], channels[i]));
    if (i + 1 < channels.size()) {
      DENOISED_ASSIGN_OR_RETURN(level.resample,
                                Conv2d::Load(ops, block / "upsamplers" / 0 / "conv", channels[i],
                                             channels[i], 3, /*upsample2x=*/true));
    }
    decoder.levels_.push_back(std::move(level));
  }
  DENOISED_ASSIGN_OR_RETURN(decoder.norm_out_,
                            nn::GroupNorm::Load(ops, weights / "conv_norm_out", channels.back(),
                                                config.norm_num_groups, config.norm_eps));
  DENOISED_ASSIGN_OR_RETURN(
      decoder.conv_out_,
      Conv2d::Load(ops, weights / "conv_out", channels.back(), config.out_channels, 3));
  return decoder;
}

Tensor VaeDecoder::operator()(Context& context, const Tensor& x) const {
  Tensor h = conv_in_(context, {.x = x});
  h = mid_block_(context, std::move(h));
  context.Trace("decoder.mid_block", h);
  for (size_t i = 0; i < levels_.size(); ++i) {
    h = Run(context, levels_[i], std::move(h));
    if (levels_[i].resample) h = (*levels_[i].resample)(context, {.x = h});
    context.Trace(fmt::format("decoder.up_blocks.{}", i), h);
  }
  Tensor out = context.NewF32({h.dim(0), h.dim(1), h.dim(2), out_channels_});
  return conv_out_(
      context,
      {.x = h, .prologue = {.norm = norm_out_.Then(Activation::kSilu)}, .out = std::move(out)});
}

}  // namespace denoised
