// SPDX-License-Identifier: Apache-2.0
#include "engine/training/unet2d.h"

#include <cmath>

namespace denoised::training {

struct UNet2D::KeptLevel {
  std::vector<ResnetBlock::Kept> resnets;
  std::vector<SelfAttention::Kept> attentions;
  Tensor resample_input;
  ResnetBlock::Kept resample_resnet;
  // Of skip_conv: the image on the way down; on the way up the norm's output, unless it is
  // recomputed.
  Tensor skip_input;
  GroupNorm::Kept skip_norm;
};

struct UNet2D::Kept {
  TimestepEmbedding::Kept time, label;
  Tensor embedding, activated;  // before and after the activation that all resnets apply
  Tensor centered;              // the input of conv_in
  std::vector<KeptLevel> down, up;
  ResnetBlock::Kept mid_resnets[2];
  SelfAttention::Kept mid_attention;
  OutputLayers::Kept output;
};

namespace {

/// Adds the gradient of the last skip to d, which flows back along the path, where the skip
/// branched off. Never in place: the module that returned d may still read it.
Tensor Join(Pass& pass, const Tensor& d, std::vector<Tensor>* dskips) {
  const Tensor skip = std::move(dskips->back());
  dskips->pop_back();
  Tensor sum = pass.New(d.shape());
  pass.backend.Add(d, 1, skip, 1, 0, sum);
  return sum;
}

}  // namespace

void UNet2D::KeptDeleter::operator()(Kept* kept) const { delete kept; }

absl::StatusOr<std::unique_ptr<UNet2D>> UNet2D::Make(Backend& backend, Parameters& parameters,
                                                     const UNet2DConfig& config,
                                                     int augment_labels) {
  if (config.time_embedding_type == UNet2DConfig::Time::kLearned &&
      config.condition == ClassCondition::kValue)
    return InvalidArgument(
        "time_embedding_type is \"learned\" and class_embed_type \"timestep\": classes would share "
        "the table of timesteps, which cannot be trained; use \"positional\"");
  std::unique_ptr<UNet2D> model(new UNet2D(config, augment_labels));
  model->Build(Declare(backend, parameters));
  DENOISED_RETURN_IF_ERROR(parameters.status());
  return model;
}

ResnetBlock::Options UNet2D::Resnet(int in_channels, int out_channels) {
  return {.in_channels = in_channels,
          .out_channels = out_channels,
          .time_channels = config_.time_embedding_dim,
          .groups = config_.GroupsOf(out_channels),
          .eps = config_.norm_eps,
          .activation = config_.activation,
          .scale_shift = config_.scale_shift,
          .dropout_layer = dropout_layers_++};
}

SelfAttention::Options UNet2D::AttentionOf(int channels) const {
  return {.channels = channels,
          .head_dim = config_.attention_head_dim.value_or(channels),
          .groups = config_.GroupsOf(channels),
          .eps = config_.norm_eps};
}

Conv2dGeometry UNet2D::Down() const {
  const int pad = config_.downsample_padding, after = pad == 0 ? 1 : pad;
  return {2, pad, pad, after, after};
}

void UNet2D::Build(const Declare& declare) {
  const std::vector<int>& channels = config_.block_out_channels;
  const int levels = static_cast<int>(channels.size());
  const int embedded = config_.time_embedding_dim;
  int projected = channels[0];
  if (config_.time_embedding_type == UNet2DConfig::Time::kFourier) {
    fourier_weight_ = (declare / "time_proj")
                          .Add("weight", {channels[0]}, Initial::Normal(16), /*trained=*/false);
    projected = 2 * channels[0];
  } else if (config_.time_embedding_type == UNet2DConfig::Time::kLearned) {
    time_table_ =
        (declare / "time_proj")
            .Add("weight", {config_.num_train_timesteps, channels[0]}, Initial::Normal(1));
  }
  constexpr Activation kInner = Activation::kSilu;  // of embeddings, whatever act_fn is
  time_embedding_ = TimestepEmbedding(declare / "time_embedding", projected, embedded, kInner);
  if (augment_labels_ > 0)
    augment_ = Linear::OfTrainingAlone(declare / "map_augment", augment_labels_, projected);
  if (config_.condition == ClassCondition::kLabel)
    class_table_ = (declare / "class_embedding")
                       .Add("weight", {config_.num_class_embeds, embedded}, Initial::Normal(1));
  if (config_.condition == ClassCondition::kValue)
    class_embedding_.emplace(declare / "class_embedding", projected, embedded, kInner);
  conv_in_ = Conv2d(declare / "conv_in", config_.in_channels, channels[0], 3);

  const UNetLevels shapes = config_.Levels();
  down_.resize(levels);
  for (int i = 0; i < levels; ++i)
    BuildLevel(declare / "down_blocks" / i, DownBlockOf(config_.down_block_types[i]),
               shapes.down[i], &down_[i]);
  if (config_.mid_block) {
    const Declare mid = declare / "mid_block";
    ResnetBlock::Options options = Resnet(channels.back(), channels.back());
    options.output_scale_factor = config_.mid_block_scale_factor;
    mid_resnets_.emplace_back(mid / "resnets" / 0, options);
    options.dropout_layer = dropout_layers_++;
    mid_resnets_.emplace_back(mid / "resnets" / 1, options);
    if (config_.add_attention) {
      SelfAttention::Options attention = AttentionOf(channels.back());
      attention.output_scale_factor = config_.mid_block_scale_factor;
      // With scale_shift, the mid block's attention has no norm unless the config asks for one.
      attention.groups = config_.attn_norm_num_groups;
      if (!attention.groups && !config_.scale_shift)
        attention.groups = config_.GroupsOf(channels.back());
      mid_attention_.emplace(mid / "attentions" / 0, attention);
    }
  }
  up_.resize(levels);
  for (int i = 0; i < levels; ++i)
    BuildLevel(declare / "up_blocks" / i, UpBlockOf(config_.up_block_types[i]), shapes.up[i],
               &up_[i]);
  output_ = OutputLayers(declare, {.in_channels = channels[0],
                                   .out_channels = config_.out_channels,
                                   .groups = config_.GroupsOf(channels[0]),
                                   .eps = config_.norm_eps});
}

void UNet2D::BuildLevel(const Declare& declare, const UNet2DBlock& kind, const UNetLevel& shape,
                        Level* level) {
  if (kind.skip) return BuildSkipLevel(declare, kind, shape, level);
  for (size_t i = 0; i < shape.inputs.size(); ++i) {
    const int index = static_cast<int>(i);
    level->resnets.emplace_back(declare / "resnets" / index,
                                Resnet(shape.inputs[i], shape.outputs));
    if (kind.attention)
      level->attentions.emplace_back(declare / "attentions" / index, AttentionOf(shape.outputs));
  }
  if (!shape.resamples) return;
  const Declare resampler = declare / (kind.up ? "upsamplers" : "downsamplers") / 0;
  const std::string& type = kind.up ? config_.upsample_type : config_.downsample_type;
  if (kind.resnet_resampling || (kind.attention && type == "resnet")) {
    ResnetBlock::Options options = Resnet(shape.outputs, shape.outputs);
    options.resample = kind.up ? Resample::kNearestUp : Resample::kAveragePoolDown;
    level->resample_resnet.emplace(resampler, options);
  } else {
    level->resample_conv.emplace(resampler / "conv", shape.outputs, shape.outputs, 3,
                                 /*upsample2x=*/kind.up,
                                 kind.up ? std::nullopt : std::optional<Conv2dGeometry>(Down()));
  }
}

void UNet2D::BuildSkipLevel(const Declare& declare, const UNet2DBlock& kind, const UNetLevel& shape,
                            Level* level) {
  level->skip = true;
  const auto resnet_of = [&](int in, int groups) {
    ResnetBlock::Options options = Resnet(in, shape.outputs);
    options.groups = groups;
    options.groups_out = SkipGroups(shape.outputs);
    options.output_scale_factor = std::sqrt(2.0);
    return options;
  };
  for (int i = 0; i < static_cast<int>(shape.inputs.size()); ++i) {
    const int groups = SkipInputGroups(kind, shape, i);
    level->resnets.emplace_back(declare / "resnets" / i, resnet_of(shape.inputs[i], groups));
    // The way up has one, after all resnets.
    if (!kind.attention || (kind.up && i > 0)) continue;
    SelfAttention::Options attention = AttentionOf(shape.outputs);
    attention.groups = kSkipAttentionGroups;
    attention.output_scale_factor = std::sqrt(2.0);
    level->attentions.emplace_back(declare / "attentions" / i, attention);
  }
  if (!shape.resamples) return;
  ResnetBlock::Options options = resnet_of(shape.outputs, SkipGroups(shape.outputs));
  options.resample = kind.up ? Resample::kFirUp : Resample::kFirDown;
  options.shortcut = true;
  level->resample_resnet.emplace(declare / (kind.up ? "resnet_up" : "resnet_down"), options);
  if (kind.up) {
    level->skip_norm.emplace(declare / "skip_norm", shape.outputs, SkipGroups(shape.outputs),
                             config_.norm_eps, Activation::kSilu);
    level->skip_conv.emplace(declare / "skip_conv", shape.outputs, kSkipImageChannels, 3);
  } else {
    level->skip_conv.emplace(declare / "skip_conv", kSkipImageChannels, shape.outputs, 1);
  }
}

void UNet2D::Pack(const Masters& masters) const {
  time_embedding_.Pack(masters);
  if (class_embedding_) class_embedding_->Pack(masters);
  if (augment_) augment_->Pack(masters);
  conv_in_.Pack(masters);
  output_.Pack(masters);
  for (const std::vector<Level>* path : {&down_, &up_}) {
    for (const Level& level : *path) {
      for (const ResnetBlock& resnet : level.resnets) resnet.Pack(masters);
      for (const SelfAttention& attention : level.attentions) attention.Pack(masters);
      if (level.resample_conv) level.resample_conv->Pack(masters);
      if (level.resample_resnet) level.resample_resnet->Pack(masters);
      if (level.skip_conv) level.skip_conv->Pack(masters);
    }
  }
  for (const ResnetBlock& resnet : mid_resnets_) resnet.Pack(masters);
  if (mid_attention_) mid_attention_->Pack(masters);
}

Tensor UNet2D::Project(Pass& pass, const Tensor& t) const {
  if (fourier_weight_ >= 0) {
    const Tensor weight = pass.Weight(fourier_weight_);
    Tensor out = pass.New({t.dim(0), 2 * weight.dim(0)});
    pass.backend.FourierEmbedding(t, weight, out);
    return out;
  }
  Tensor out = pass.New({t.dim(0), config_.block_out_channels[0]});
  pass.backend.TimestepEmbedding(t, config_.flip_sin_to_cos, config_.freq_shift, out);
  return out;
}

Tensor UNet2D::Embed(Pass& pass, const NetworkInput& input, Kept* kept) const {
  const int64_t rows = input.x.dim(0);
  Tensor of_class;
  switch (config_.condition) {
    case ClassCondition::kNone:
      break;
    case ClassCondition::kLabel:
      of_class = pass.New({rows, config_.time_embedding_dim});
      pass.backend.Embedding(pass.Weight(class_table_), input.label, of_class);
      break;
    case ClassCondition::kValue:
      of_class = class_embedding_->Forward(pass, Project(pass, input.embedding.Reshape({rows})), {},
                                           &kept->label);
      break;
    case ClassCondition::kVector:
      of_class = input.embedding;
      break;
  }
  Tensor of_time;
  if (time_table_ >= 0) {
    of_time = pass.New({rows, config_.block_out_channels[0]});
    pass.backend.Embedding(pass.Weight(time_table_), input.timestep, of_time);
  } else {
    of_time = Project(pass, input.condition);
  }
  if (augment_) of_time = augment_->Forward(pass, input.augment, of_time);
  kept->embedding = time_embedding_.Forward(pass, of_time, of_class, &kept->time);
  kept->activated = pass.New(kept->embedding.shape());
  pass.backend.Activate(config_.activation, kept->embedding, kept->activated);
  return kept->activated;
}

void UNet2D::EmbedBackward(Pass& pass, const NetworkInput& input, const Kept& kept,
                           const Tensor& dtime) const {
  pass.backend.ActivateBackward(config_.activation, kept.embedding, dtime, dtime);
  const Tensor dof_time =
      time_embedding_.Backward(pass, kept.time, dtime, /*wants_dx=*/time_table_ >= 0 || augment_);
  if (augment_) augment_->Backward(pass, input.augment, dof_time, /*wants_dx=*/false);
  if (time_table_ >= 0)
    pass.backend.EmbeddingBackward(input.timestep, dof_time, pass.Gradient(time_table_));
  if (class_table_ >= 0)
    pass.backend.EmbeddingBackward(input.label, dtime, pass.Gradient(class_table_));
  if (class_embedding_) class_embedding_->Backward(pass, kept.label, dtime);
}

Tensor UNet2D::DownForward(Pass& pass, const Level& level, Tensor x, Tensor* image,
                           std::vector<Tensor>* skips, const Tensor& time, KeptLevel* kept) const {
  kept->resnets.resize(level.resnets.size());
  kept->attentions.resize(level.attentions.size());
  for (size_t layer = 0; layer < level.resnets.size(); ++layer) {
    x = level.resnets[layer].Forward(pass, x, {}, time, &kept->resnets[layer]);
    if (!level.attentions.empty())
      x = level.attentions[layer].Forward(pass, x, &kept->attentions[layer]);
    skips->push_back(x);
  }
  if (level.resample_conv) {
    kept->resample_input = x;
    x = level.resample_conv->Forward(pass, {.x = x, .geometry = Down()});
  } else if (level.resample_resnet) {
    x = level.resample_resnet->Forward(pass, x, {}, time, &kept->resample_resnet);
  } else {
    return x;
  }
  if (level.skip) {
    kept->skip_input = *image = pass.Resampled(Resample::kFirDown, *image);
    x = level.skip_conv->Forward(pass,
                                 {.x = *image, .geometry = level.skip_conv->Same(), .residual = x});
  }
  skips->push_back(x);
  return x;
}

Tensor UNet2D::DownBackward(Pass& pass, const Level& level, KeptLevel kept, const Tensor& time,
                            Tensor d, std::vector<Tensor>* dskips, Tensor* dtime) const {
  if (level.resample_conv || level.resample_resnet) d = Join(pass, d, dskips);
  if (level.skip_conv)
    level.skip_conv->Backward(pass, kept.skip_input, level.skip_conv->Same(), d,
                              /*wants_dx=*/false);
  kept.skip_input = {};
  if (level.resample_conv) d = level.resample_conv->Backward(pass, kept.resample_input, Down(), d);
  if (level.resample_resnet)
    d = level.resample_resnet->Backward(pass, kept.resample_resnet, time, d, nullptr, dtime);
  kept.resample_input = {};
  kept.resample_resnet = {};
  for (size_t layer = level.resnets.size(); layer-- > 0;) {
    d = Join(pass, d, dskips);
    if (!level.attentions.empty()) {
      d = level.attentions[layer].Backward(pass, kept.attentions[layer], d);
      kept.attentions[layer] = {};
    }
    d = level.resnets[layer].Backward(pass, kept.resnets[layer], time, d, nullptr, dtime);
    kept.resnets[layer] = {};
  }
  return d;
}

Tensor UNet2D::UpForward(Pass& pass, const Level& level, Tensor x, Tensor* image,
                         std::vector<Tensor>* skips, const Tensor& time, KeptLevel* kept) const {
  kept->resnets.resize(level.resnets.size());
  kept->attentions.resize(level.attentions.size());
  for (size_t layer = 0; layer < level.resnets.size(); ++layer) {
    const Tensor skip = std::move(skips->back());
    skips->pop_back();
    x = level.resnets[layer].Forward(pass, x, skip, time, &kept->resnets[layer]);
    if (!level.attentions.empty() && !level.skip)
      x = level.attentions[layer].Forward(pass, x, &kept->attentions[layer]);
  }
  if (level.skip) {
    if (!level.attentions.empty()) x = level.attentions[0].Forward(pass, x, &kept->attentions[0]);
    if (*image) *image = pass.Resampled(Resample::kFirUp, *image);
  }
  if (level.skip_conv) {
    const Tensor normed = level.skip_norm->Forward(pass, x, {}, &kept->skip_norm);
    if (!pass.recompute_norms) kept->skip_input = normed;
    *image = level.skip_conv->Forward(
        pass, {.x = normed, .geometry = level.skip_conv->Same(), .residual = *image});
  }
  if (level.resample_conv) {
    kept->resample_input = x;
    x = level.resample_conv->Forward(pass, {.x = x, .geometry = level.resample_conv->Same()});
  } else if (level.resample_resnet) {
    x = level.resample_resnet->Forward(pass, x, {}, time, &kept->resample_resnet);
  }
  return x;
}

Tensor UNet2D::UpBackward(Pass& pass, const Level& level, KeptLevel kept, const Tensor& time,
                          Tensor d, const Tensor& dimage, std::vector<Tensor>* dskips,
                          Tensor* dtime) const {
  if (level.resample_conv)
    d = level.resample_conv->Backward(pass, kept.resample_input, level.resample_conv->Same(), d);
  if (level.resample_resnet)
    d = level.resample_resnet->Backward(pass, kept.resample_resnet, time, d, nullptr, dtime);
  kept.resample_input = {};
  kept.resample_resnet = {};
  if (level.skip_conv) {
    const Tensor normed =
        kept.skip_input ? kept.skip_input : level.skip_norm->Again(pass, kept.skip_norm);
    const Tensor dnormed = level.skip_conv->Backward(pass, normed, level.skip_conv->Same(), dimage);
    d = level.skip_norm->Backward(pass, kept.skip_norm, dnormed, d);
    kept.skip_input = {};
    kept.skip_norm = {};
  }
  if (level.skip && !level.attentions.empty()) {
    d = level.attentions[0].Backward(pass, kept.attentions[0], d);
    kept.attentions[0] = {};
  }
  for (size_t layer = level.resnets.size(); layer-- > 0;) {
    if (!level.attentions.empty() && !level.skip) {
      d = level.attentions[layer].Backward(pass, kept.attentions[layer], d);
      kept.attentions[layer] = {};
    }
    Tensor dskip;
    d = level.resnets[layer].Backward(pass, kept.resnets[layer], time, d, &dskip, dtime);
    kept.resnets[layer] = {};
    dskips->push_back(std::move(dskip));
  }
  return d;
}

Tensor UNet2D::Forward(Pass& pass, const NetworkInput& input, KeptPointer* kept_pointer) const {
  kept_pointer->reset(new Kept);
  Kept& kept = **kept_pointer;
  const Tensor time = Embed(pass, input, &kept);

  kept.centered = input.x;
  if (config_.center_input_sample) {
    kept.centered = pass.New(input.x.shape());
    pass.backend.Add(input.x, 2, Tensor(), 0, -1, kept.centered);
  }
  Tensor image = kept.centered;  // beside Skip blocks
  Tensor x = conv_in_.Forward(pass, {.x = kept.centered, .geometry = conv_in_.Same()});
  std::vector<Tensor> skips = {x};
  kept.down.resize(down_.size());
  for (size_t i = 0; i < down_.size(); ++i)
    x = DownForward(pass, down_[i], std::move(x), &image, &skips, time, &kept.down[i]);
  if (!mid_resnets_.empty()) {
    x = mid_resnets_[0].Forward(pass, x, {}, time, &kept.mid_resnets[0]);
    if (mid_attention_) x = mid_attention_->Forward(pass, x, &kept.mid_attention);
    x = mid_resnets_[1].Forward(pass, x, {}, time, &kept.mid_resnets[1]);
  }
  image = {};
  kept.up.resize(up_.size());
  for (size_t i = 0; i < up_.size(); ++i)
    x = UpForward(pass, up_[i], std::move(x), &image, &skips, time, &kept.up[i]);

  Tensor out = output_.Forward(pass, x, &kept.output);
  if (image) pass.backend.Add(out, 1, image, 1, 0, out);
  if (fourier_weight_ >= 0) pass.backend.DivideRows(out, input.condition, out);
  return out;
}

void UNet2D::Backward(Pass& pass, const NetworkInput& input, KeptPointer kept_pointer,
                      const Tensor& doutput) const {
  Kept& kept = *kept_pointer;
  const Tensor& time = kept.activated;
  if (fourier_weight_ >= 0) pass.backend.DivideRows(doutput, input.condition, doutput);
  Tensor dimage;
  // Only Skip blocks before the last make the image.
  if (up_.size() > 1 && up_[up_.size() - 2].skip) dimage = pass.ToActivation(doutput);
  Tensor d = output_.Backward(pass, std::move(kept.output), doutput);

  // The up path yields the gradients of the skips in the order in which the down path, traversed
  // backwards, needs them.
  std::vector<Tensor> dskips;
  Tensor dtime;
  for (size_t i = up_.size(); i-- > 0;) {
    d = UpBackward(pass, up_[i], std::move(kept.up[i]), time, std::move(d), dimage, &dskips,
                   &dtime);
    // The first Skip block of the way up begins the image.
    if (up_[i].skip && i > 0 && up_[i - 1].skip)
      dimage = pass.ResampledBackward(Resample::kFirUp, dimage);
  }
  // The up path took the last skip first, so its gradient is the last one.
  if (!mid_resnets_.empty()) {
    d = mid_resnets_[1].Backward(pass, kept.mid_resnets[1], time, d, nullptr, &dtime);
    kept.mid_resnets[1] = {};
    if (mid_attention_) {
      d = mid_attention_->Backward(pass, kept.mid_attention, d);
      kept.mid_attention = {};
    }
    d = mid_resnets_[0].Backward(pass, kept.mid_resnets[0], time, d, nullptr, &dtime);
    kept.mid_resnets[0] = {};
  }
  for (size_t i = down_.size(); i-- > 0;)
    d = DownBackward(pass, down_[i], std::move(kept.down[i]), time, std::move(d), &dskips, &dtime);
  d = Join(pass, d, &dskips);
  conv_in_.Backward(pass, kept.centered, conv_in_.Same(), d, /*wants_dx=*/false);
  EmbedBackward(pass, input, kept, dtime);
}

}  // namespace denoised::training
