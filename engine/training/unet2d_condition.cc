// SPDX-License-Identifier: Apache-2.0
#include "engine/training/unet2d_condition.h"

namespace denoised::training {

struct UNet2DCondition::KeptLevel {
  std::vector<ResnetBlock::Kept> resnets;
  std::vector<Transformer2D::Kept> transformers;
  Tensor resample_input;
};

struct UNet2DCondition::Kept {
  TimestepEmbedding::Kept time;
  Tensor embedding, activated;  // before and after the activation that all resnets apply
  Tensor centered;              // the input of conv_in
  std::vector<KeptLevel> down, up;
  ResnetBlock::Kept mid_resnets[2];
  Transformer2D::Kept mid_transformer;
  OutputLayers::Kept output;
};

void UNet2DCondition::KeptDeleter::operator()(Kept* kept) const { delete kept; }

absl::StatusOr<std::unique_ptr<UNet2DCondition>> UNet2DCondition::Make(
    const Declare& declare, const UNet2DConditionConfig& config) {
  std::unique_ptr<UNet2DCondition> model(new UNet2DCondition(config));
  DENOISED_RETURN_IF_ERROR(model->Check());
  model->Build(declare);
  DENOISED_RETURN_IF_ERROR(declare.status());
  return model;
}

absl::Status UNet2DCondition::Check() const {
  if (config_.text_time)
    return InvalidArgument(
        "addition_embed_type is \"text_time\" (SDXL), which cannot be trained; use null");
  if (config_.time_cond_proj_dim != 0)
    return InvalidArgument("time_cond_proj_dim is {} (LCM), which cannot be trained; use null",
                           config_.time_cond_proj_dim);
  const std::vector<int>& channels = config_.block_out_channels;
  const int halvings = 1 << (channels.size() - 1);
  if (config_.sample_height % halvings != 0 || config_.sample_width % halvings != 0)
    return InvalidArgument(
        "sample_size is {} × {}: training needs multiples of {}, since the network halves it {} "
        "times",
        config_.sample_width, config_.sample_height, halvings, channels.size() - 1);
  return absl::OkStatus();
}

ResnetBlock::Options UNet2DCondition::Resnet(int in_channels, int out_channels) const {
  return {.in_channels = in_channels,
          .out_channels = out_channels,
          .time_channels = config_.time_embedding_dim,
          .groups = config_.norm_num_groups,
          .eps = config_.norm_eps,
          .activation = config_.activation,
          .scale_shift = config_.scale_shift};
}

Transformer2D::Options UNet2DCondition::TransformerOf(int level) const {
  return {.channels = config_.block_out_channels[level],
          .heads = config_.attention_head_dim[level],
          .depth = config_.transformer_layers_per_block[level],
          .text_features = config_.cross_attention_dim,
          .groups = config_.norm_num_groups,
          .linear_projection = config_.use_linear_projection};
}

Conv2dGeometry UNet2DCondition::Down() const {
  const int pad = config_.downsample_padding, after = pad == 0 ? 1 : pad;
  return {2, pad, pad, after, after};
}

void UNet2DCondition::Build(const Declare& declare) {
  const std::vector<int>& channels = config_.block_out_channels;
  const int levels = static_cast<int>(channels.size());
  time_embedding_ = TimestepEmbedding(declare / "time_embedding", channels[0],
                                      config_.time_embedding_dim, config_.activation);
  conv_in_ = Conv2d(declare / "conv_in", config_.in_channels, channels[0], 3);
  const UNetLevels shapes = LevelsOf(channels, config_.layers_per_block);
  down_.resize(levels);
  for (int i = 0; i < levels; ++i) {
    const Declare block = declare / "down_blocks" / i;
    BuildLevel(block, shapes.down[i], config_.down_block_types[i] == "CrossAttnDownBlock2D",
               &down_[i]);
    if (shapes.down[i].resamples)
      down_[i].resample.emplace(block / "downsamplers" / 0 / "conv", channels[i], channels[i], 3,
                                /*upsample2x=*/false, Down());
  }
  const Declare mid = declare / "mid_block";
  ResnetBlock::Options options = Resnet(channels.back(), channels.back());
  options.output_scale_factor = config_.mid_block_scale_factor;
  for (int i = 0; i < 2; ++i) mid_resnets_.emplace_back(mid / "resnets" / i, options);
  mid_transformer_.emplace(mid / "attentions" / 0, TransformerOf(levels - 1));
  up_.resize(levels);
  for (int i = 0; i < levels; ++i) {
    const Declare block = declare / "up_blocks" / i;
    const int out = shapes.up[i].outputs;
    BuildLevel(block, shapes.up[i], config_.up_block_types[i] == "CrossAttnUpBlock2D", &up_[i]);
    if (shapes.up[i].resamples)
      up_[i].resample.emplace(block / "upsamplers" / 0 / "conv", out, out, 3, /*upsample2x=*/true);
  }
  output_ = OutputLayers(declare, {.in_channels = channels[0],
                                   .out_channels = config_.out_channels,
                                   .groups = config_.norm_num_groups,
                                   .eps = config_.norm_eps,
                                   .activation = config_.activation});
}

void UNet2DCondition::BuildLevel(const Declare& declare, const UNetLevel& shape, bool transformers,
                                 Level* to) {
  for (size_t i = 0; i < shape.inputs.size(); ++i) {
    const int index = static_cast<int>(i);
    to->resnets.emplace_back(declare / "resnets" / index, Resnet(shape.inputs[i], shape.outputs));
    if (transformers)
      to->transformers.emplace_back(declare / "attentions" / index,
                                    TransformerOf(shape.resolution));
  }
}

void UNet2DCondition::Pack(const Masters& masters) const {
  time_embedding_.Pack(masters);
  conv_in_.Pack(masters);
  output_.Pack(masters);
  for (const std::vector<Level>* path : {&down_, &up_}) {
    for (const Level& level : *path) {
      for (const ResnetBlock& resnet : level.resnets) resnet.Pack(masters);
      for (const Transformer2D& transformer : level.transformers) transformer.Pack(masters);
      if (level.resample) level.resample->Pack(masters);
    }
  }
  for (const ResnetBlock& resnet : mid_resnets_) resnet.Pack(masters);
  mid_transformer_->Pack(masters);
}

Tensor UNet2DCondition::Forward(Pass& pass, const Input& input, KeptPointer* kept_pointer) const {
  kept_pointer->reset(new Kept);
  Kept& kept = **kept_pointer;
  const int64_t rows = input.x.dim(0);
  const Tensor sines = pass.New({rows, config_.block_out_channels[0]});
  pass.backend.TimestepEmbedding(input.condition, config_.flip_sin_to_cos, config_.freq_shift,
                                 sines);
  kept.embedding = time_embedding_.Forward(pass, sines, {}, &kept.time);
  kept.activated = pass.New(kept.embedding.shape());
  pass.backend.Activate(config_.activation, kept.embedding, kept.activated);
  const Tensor& time = kept.activated;

  kept.centered = input.x;
  if (config_.center_input_sample) {
    kept.centered = pass.New(input.x.shape());
    pass.backend.Add(input.x, 2, Tensor(), 0, -1, kept.centered);
  }
  const auto layer = [&](const Level& level, size_t i, const Tensor& in, const Tensor& skip,
                         KeptLevel* to) {
    to->resnets.resize(level.resnets.size());
    to->transformers.resize(level.transformers.size());
    Tensor out = level.resnets[i].Forward(pass, in, skip, time, &to->resnets[i]);
    if (level.transformers.empty()) return out;
    return level.transformers[i].Forward(pass, out, input.states, &to->transformers[i]);
  };
  Tensor x = conv_in_.Forward(pass, {.x = kept.centered, .geometry = conv_in_.Same()});
  std::vector<Tensor> skips = {x};
  kept.down.resize(down_.size());
  for (size_t i = 0; i < down_.size(); ++i) {
    for (size_t j = 0; j < down_[i].resnets.size(); ++j) {
      x = layer(down_[i], j, x, {}, &kept.down[i]);
      skips.push_back(x);
    }
    if (!down_[i].resample) continue;
    kept.down[i].resample_input = x;
    x = down_[i].resample->Forward(pass, {.x = x, .geometry = Down()});
    skips.push_back(x);
  }
  x = mid_resnets_[0].Forward(pass, x, {}, time, &kept.mid_resnets[0]);
  x = mid_transformer_->Forward(pass, x, input.states, &kept.mid_transformer);
  x = mid_resnets_[1].Forward(pass, x, {}, time, &kept.mid_resnets[1]);
  kept.up.resize(up_.size());
  for (size_t i = 0; i < up_.size(); ++i) {
    for (size_t j = 0; j < up_[i].resnets.size(); ++j) {
      const Tensor skip = std::move(skips.back());
      skips.pop_back();
      x = layer(up_[i], j, x, skip, &kept.up[i]);
    }
    if (!up_[i].resample) continue;
    kept.up[i].resample_input = x;
    x = up_[i].resample->Forward(pass, {.x = x, .geometry = up_[i].resample->Same()});
  }
  return output_.Forward(pass, x, &kept.output);
}

void UNet2DCondition::Backward(Pass& pass, const Input& input, KeptPointer kept_pointer,
                               const Tensor& doutput, Tensor* dstates) const {
  Kept& kept = *kept_pointer;
  const Tensor& time = kept.activated;
  Tensor d = output_.Backward(pass, std::move(kept.output), doutput), dtime;
  const auto layer = [&](const Level& level, size_t i, KeptLevel* from, Tensor* dskip) {
    if (!level.transformers.empty()) {
      d = level.transformers[i].Backward(pass, from->transformers[i], input.states, d, dstates);
      from->transformers[i] = {};
    }
    d = level.resnets[i].Backward(pass, from->resnets[i], time, d, dskip, &dtime);
    from->resnets[i] = {};
  };

  // The up path yields the gradients of the skips in the order in which the down path, traversed
  // backwards, needs them.
  std::vector<Tensor> dskips;
  for (size_t i = up_.size(); i-- > 0;) {
    KeptLevel from = std::move(kept.up[i]);
    if (up_[i].resample) {
      d = up_[i].resample->Backward(pass, from.resample_input, up_[i].resample->Same(), d);
      from.resample_input = {};
    }
    for (size_t j = up_[i].resnets.size(); j-- > 0;) {
      Tensor dskip;
      layer(up_[i], j, &from, &dskip);
      dskips.push_back(std::move(dskip));
    }
  }
  d = mid_resnets_[1].Backward(pass, kept.mid_resnets[1], time, d, nullptr, &dtime);
  kept.mid_resnets[1] = {};
  d = mid_transformer_->Backward(pass, kept.mid_transformer, input.states, d, dstates);
  kept.mid_transformer = {};
  d = mid_resnets_[0].Backward(pass, kept.mid_resnets[0], time, d, nullptr, &dtime);
  kept.mid_resnets[0] = {};
  // Never in place: the module that returned d may still read it.
  const auto join = [&] {
    const Tensor skip = std::move(dskips.back());
    dskips.pop_back();
    const Tensor sum = pass.New(d.shape());
    pass.backend.Add(d, 1, skip, 1, 0, sum);
    d = sum;
  };
  for (size_t i = down_.size(); i-- > 0;) {
    KeptLevel from = std::move(kept.down[i]);
    if (down_[i].resample) {
      join();
      d = down_[i].resample->Backward(pass, from.resample_input, Down(), d);
      from.resample_input = {};
    }
    for (size_t j = down_[i].resnets.size(); j-- > 0;) {
      join();
      layer(down_[i], j, &from, nullptr);
    }
  }
  join();
  conv_in_.Backward(pass, kept.centered, conv_in_.Same(), d, /*wants_dx=*/false);
  pass.backend.ActivateBackward(config_.activation, kept.embedding, dtime, dtime);
  time_embedding_.Backward(pass, kept.time, dtime);
}

}  // namespace denoised::training
