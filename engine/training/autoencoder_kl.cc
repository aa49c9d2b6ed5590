// SPDX-License-Identifier: Apache-2.0
#include "engine/training/autoencoder_kl.h"

#include <algorithm>

namespace denoised::training {
namespace {

constexpr double kNormEps = 1e-6;  // for all norms; not in the config
// An encoder pads on the right and at the bottom.
constexpr Conv2dGeometry kDown = {2, 0, 0, 1, 1};

}  // namespace

struct VaeHalf::KeptLevel {
  std::vector<ResnetBlock::Kept> resnets;
  std::vector<SelfAttention::Kept> attentions;
  Tensor resample_input;
};

struct VaeHalf::Kept {
  Tensor x;
  std::vector<KeptLevel> levels;
  ResnetBlock::Kept mid_resnets[2];
  SelfAttention::Kept mid_attention;
  OutputLayers::Kept output;
};

void VaeHalf::KeptDeleter::operator()(Kept* kept) const { delete kept; }

VaeHalf::VaeHalf(const Declare& declare, const VaeConfig& config, bool encoder, int in_channels,
                 int out_channels)
    : encoder_(encoder) {
  const auto resnet = [&](int in, int out) {
    return ResnetBlock::Options{.in_channels = in,
                                .out_channels = out,
                                .groups = config.norm_num_groups,
                                .eps = kNormEps,
                                .activation = config.activation};
  };
  const auto attention = [&](int channels) {
    return SelfAttention::Options{.channels = channels,
                                  .head_dim = channels,  // one head
                                  .groups = config.norm_num_groups,
                                  .eps = kNormEps};
  };
  std::vector<int> channels = config.block_out_channels;
  const int deepest = channels.back();
  if (!encoder) std::reverse(channels.begin(), channels.end());
  const std::vector<std::string>& types = encoder ? config.down_block_types : config.up_block_types;
  conv_in_ = Conv2d(declare / "conv_in", in_channels, channels[0], 3);
  const int layers = config.layers_per_block + (encoder ? 0 : 1);
  for (size_t i = 0; i < channels.size(); ++i) {
    const int index = static_cast<int>(i), out = channels[i];
    const Declare block = declare / (encoder ? "down_blocks" : "up_blocks") / index;
    Level level;
    for (int j = 0; j < layers; ++j) {
      const int in = j > 0 ? out : channels[i == 0 ? 0 : i - 1];
      level.resnets.emplace_back(block / "resnets" / j, resnet(in, out));
      if (types[i].rfind("Attn", 0) == 0)
        level.attentions.emplace_back(block / "attentions" / j, attention(out));
    }
    if (i + 1 < channels.size())
      level.resample.emplace(block / (encoder ? "downsamplers" : "upsamplers") / 0 / "conv", out,
                             out, 3, /*upsample2x=*/!encoder,
                             encoder ? std::optional<Conv2dGeometry>(kDown) : std::nullopt);
    levels_.push_back(std::move(level));
  }
  const Declare mid = declare / "mid_block";
  for (int i = 0; i < 2; ++i)
    mid_resnets_.emplace_back(mid / "resnets" / i, resnet(deepest, deepest));
  if (config.mid_block_add_attention)
    mid_attention_.emplace(mid / "attentions" / 0, attention(deepest));
  output_ = OutputLayers(declare, {.in_channels = channels.back(),
                                   .out_channels = out_channels,
                                   .groups = config.norm_num_groups,
                                   .eps = kNormEps});
}

void VaeHalf::Pack(const Masters& masters) const {
  conv_in_.Pack(masters);
  output_.Pack(masters);
  for (const Level& level : levels_) {
    for (const ResnetBlock& resnet : level.resnets) resnet.Pack(masters);
    for (const SelfAttention& attention : level.attentions) attention.Pack(masters);
    if (level.resample) level.resample->Pack(masters);
  }
  for (const ResnetBlock& resnet : mid_resnets_) resnet.Pack(masters);
  if (mid_attention_) mid_attention_->Pack(masters);
}

Conv2dGeometry VaeHalf::Geometry(const Conv2d& resample) const {
  return encoder_ ? kDown : resample.Same();
}

Tensor VaeHalf::Middle(Pass& pass, Tensor x, Kept* kept) const {
  x = mid_resnets_[0].Forward(pass, x, {}, {}, &kept->mid_resnets[0]);
  pass.DropIfForwardOnly(&kept->mid_resnets[0]);
  if (mid_attention_) x = mid_attention_->Forward(pass, x, &kept->mid_attention);
  pass.DropIfForwardOnly(&kept->mid_attention);
  return mid_resnets_[1].Forward(pass, x, {}, {}, &kept->mid_resnets[1]);
}

Tensor VaeHalf::MiddleBackward(Pass& pass, Kept* kept, Tensor d) const {
  d = mid_resnets_[1].Backward(pass, kept->mid_resnets[1], {}, d, nullptr, nullptr);
  kept->mid_resnets[1] = {};
  if (mid_attention_) {
    d = mid_attention_->Backward(pass, kept->mid_attention, d);
    kept->mid_attention = {};
  }
  d = mid_resnets_[0].Backward(pass, kept->mid_resnets[0], {}, d, nullptr, nullptr);
  kept->mid_resnets[0] = {};
  return d;
}

Tensor VaeHalf::Forward(Pass& pass, const Tensor& input, KeptPointer* kept_pointer) const {
  kept_pointer->reset(new Kept);
  Kept& kept = **kept_pointer;
  kept.x = input;
  Tensor x = conv_in_.Forward(pass, {.x = input, .geometry = conv_in_.Same()});
  if (!encoder_) x = Middle(pass, x, &kept);
  kept.levels.resize(levels_.size());
  for (size_t i = 0; i < levels_.size(); ++i) {
    const Level& level = levels_[i];
    KeptLevel& to = kept.levels[i];
    to.resnets.resize(level.resnets.size());
    to.attentions.resize(level.attentions.size());
    for (size_t j = 0; j < level.resnets.size(); ++j) {
      x = level.resnets[j].Forward(pass, x, {}, {}, &to.resnets[j]);
      pass.DropIfForwardOnly(&to.resnets[j]);
      if (level.attentions.empty()) continue;
      x = level.attentions[j].Forward(pass, x, &to.attentions[j]);
      pass.DropIfForwardOnly(&to.attentions[j]);
    }
    if (!level.resample) continue;
    to.resample_input = x;
    x = level.resample->Forward(pass, {.x = x, .geometry = Geometry(*level.resample)});
    pass.DropIfForwardOnly(&to.resample_input);
  }
  if (encoder_) x = Middle(pass, x, &kept);
  pass.DropIfForwardOnly(&kept.mid_resnets[1]);
  return output_.Forward(pass, x, &kept.output);
}

Tensor VaeHalf::Backward(Pass& pass, KeptPointer kept_pointer, const Tensor& doutput,
                         bool wants_dx) const {
  Kept& kept = *kept_pointer;
  Tensor d = output_.Backward(pass, std::move(kept.output), doutput);
  if (encoder_) d = MiddleBackward(pass, &kept, d);
  for (size_t i = levels_.size(); i-- > 0;) {
    const Level& level = levels_[i];
    KeptLevel from = std::move(kept.levels[i]);
    if (level.resample) {
      d = level.resample->Backward(pass, from.resample_input, Geometry(*level.resample), d);
      from.resample_input = {};
    }
    for (size_t j = level.resnets.size(); j-- > 0;) {
      if (!level.attentions.empty()) {
        d = level.attentions[j].Backward(pass, from.attentions[j], d);
        from.attentions[j] = {};
      }
      d = level.resnets[j].Backward(pass, from.resnets[j], {}, d, nullptr, nullptr);
      from.resnets[j] = {};
    }
  }
  if (!encoder_) d = MiddleBackward(pass, &kept, d);
  return conv_in_.Backward(pass, kept.x, conv_in_.Same(), d, wants_dx);
}

absl::StatusOr<std::unique_ptr<AutoencoderKL>> AutoencoderKL::Make(
    const Declare& declare, const AutoencoderKLConfig& config) {
  const VaeConfig& vae = config.vae;
  std::unique_ptr<AutoencoderKL> model(new AutoencoderKL());
  const int latent = vae.latent_channels;
  model->encoder_ = VaeHalf(declare / "encoder", vae, true, vae.in_channels, 2 * latent);
  model->decoder_ = VaeHalf(declare / "decoder", vae, false, latent, vae.out_channels);
  if (config.use_quant_conv)
    model->quant_conv_ = Linear::Conv1x1(declare / "quant_conv", 2 * latent, 2 * latent);
  if (config.use_post_quant_conv)
    model->post_quant_conv_ = Linear::Conv1x1(declare / "post_quant_conv", latent, latent);
  DENOISED_RETURN_IF_ERROR(declare.status());
  return model;
}

void AutoencoderKL::Pack(const Masters& masters) const {
  encoder_.Pack(masters);
  decoder_.Pack(masters);
  if (quant_conv_) quant_conv_->Pack(masters);
  if (post_quant_conv_) post_quant_conv_->Pack(masters);
}

Tensor AutoencoderKL::Encode(Pass& pass, const Tensor& x, Kept* kept) const {
  Tensor encoded = encoder_.Forward(pass, x, &kept->half);
  if (!quant_conv_) return encoded;
  kept->projected = pass.ToActivation(encoded);
  return pass.ToF32(quant_conv_->Forward(pass, kept->projected));
}

void AutoencoderKL::EncodeBackward(Pass& pass, Kept kept, const Tensor& dmoments) const {
  Tensor d = dmoments;
  if (quant_conv_) d = quant_conv_->Backward(pass, kept.projected, pass.ToActivation(dmoments));
  kept.projected = {};
  encoder_.Backward(pass, std::move(kept.half), d, /*wants_dx=*/false);
}

Tensor AutoencoderKL::Decode(Pass& pass, const Tensor& z, Kept* kept) const {
  kept->projected = z;
  const Tensor x = post_quant_conv_ ? post_quant_conv_->Forward(pass, z) : z;
  return decoder_.Forward(pass, x, &kept->half);
}

Tensor AutoencoderKL::DecodeBackward(Pass& pass, Kept kept, const Tensor& doutput) const {
  const Tensor d = decoder_.Backward(pass, std::move(kept.half), doutput, /*wants_dx=*/true);
  return post_quant_conv_ ? post_quant_conv_->Backward(pass, kept.projected, d) : d;
}

}  // namespace denoised::training
