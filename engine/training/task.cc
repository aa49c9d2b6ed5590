// SPDX-License-Identifier: Apache-2.0
#include "engine/training/task.h"

#include <algorithm>

#include "engine/training/autoencoder_kl.h"
#include "engine/training/clip_text.h"
#include "engine/training/unet2d.h"
#include "engine/training/unet2d_condition.h"

namespace denoised::training {
namespace {

/// The samples of a diffusion objective, as a network reads them.
struct Noised {
  Tensor x, target, condition, label, image;
};
struct Wanted {
  bool latents = false, label = false, image = false;
};
Noised MakeSamples(Pass& pass, const TaskInput& in, const Shape& sample, const Wanted& wanted) {
  const int64_t rows = in.samples.rows.dim(0);
  const Shape shape{rows, sample[0], sample[1], sample[2]};
  Noised made{pass.New(shape), pass.NewF32(shape), pass.NewF32({rows}), {}, {}};
  if (wanted.label) made.label = pass.arena.New({rows}, DType::kI32);
  if (wanted.image) made.image = pass.NewF32(shape);
  pass.backend.MakeSamples({.images = wanted.latents ? Tensor() : in.images,
                            .posteriors = wanted.latents ? in.images : Tensor(),
                            .rows = in.samples.rows,
                            .seed = pass.seed,
                            .step = pass.step,
                            .x = made.x,
                            .target = made.target,
                            .condition = made.condition,
                            .label = made.label,
                            .image = made.image});
  return made;
}

/// The gradient of the squared error.
Tensor LossOf(Pass& pass, const TaskInput& in, const Tensor& output, const Tensor& target) {
  Tensor doutput = pass.NewF32(output.shape());
  pass.backend.Loss({.output = output,
                     .target = target,
                     .rows = in.samples.rows,
                     .scale = in.scale,
                     .loss = pass.NewF32({output.dim(0)}),
                     .sum = in.loss,
                     .doutput = doutput});
  return doutput;
}

Tensor VarianceLossOf(Pass& pass, const TaskInput& in, const Tensor& output, const Tensor& target,
                      const Tensor& image) {
  Tensor doutput = pass.NewF32(output.shape());
  pass.backend.VarianceLoss({.output = output,
                             .target = target,
                             .image = image,
                             .rows = in.samples.rows,
                             .scale = in.scale,
                             .weight = in.variance_weight,
                             .loss = pass.NewF32({output.dim(0)}),
                             .sum = in.loss,
                             .doutput = doutput});
  return doutput;
}

class PixelTask final : public Task {
 public:
  explicit PixelTask(std::unique_ptr<UNet2D> model) : model_(std::move(model)) {}
  void Pack(const Masters& masters) const override { model_->Pack(masters); }
  void Run(Pass& pass, const TaskInput& in) const override {
    const UNet2DConfig& config = model_->config();
    const bool learned_variance = config.out_channels != config.in_channels;
    Noised made = MakeSamples(
        pass, in, SampleShape(config),
        {.label = config.condition == ClassCondition::kLabel, .image = learned_variance});
    NetworkInput input{.x = made.x,
                       .condition = made.condition,
                       .timestep = in.samples.timesteps,
                       .label = made.label,
                       .embedding = {},
                       .augment = {}};
    if (config.condition == ClassCondition::kValue) input.embedding = in.samples.vectors;
    if (config.condition == ClassCondition::kVector)
      input.embedding = pass.ToActivation(in.samples.vectors);
    if (in.samples.augment) input.augment = pass.ToActivation(in.samples.augment);
    UNet2D::KeptPointer kept;
    Tensor output = model_->Forward(pass, input, &kept);
    const Tensor doutput = learned_variance
                               ? VarianceLossOf(pass, in, output, made.target, made.image)
                               : LossOf(pass, in, output, made.target);
    output = made.target = made.image = {};
    model_->Backward(pass, input, std::move(kept), doutput);
  }

 private:
  const std::unique_ptr<UNet2D> model_;
};

class TextToImageTask final : public Task {
 public:
  TextToImageTask(const TextToImageConfig& config, std::unique_ptr<UNet2DCondition> unet,
                  std::unique_ptr<ClipText> text)
      : config_(config), unet_(std::move(unet)), text_(std::move(text)) {}
  void Pack(const Masters& masters) const override {
    unet_->Pack(masters);
    text_->Pack(masters);
  }
  void Run(Pass& pass, const TaskInput& in) const override {
    Noised made = MakeSamples(pass, in, SampleShape(config_), {.latents = true});
    ClipText::Kept kept_text;
    UNet2DCondition::Input input{.x = made.x, .condition = made.condition, .states = {}};
    input.states = text_->Forward(pass, in.samples.tokens, in.samples.positions, &kept_text);
    if (!config_.train_text) kept_text = {};
    UNet2DCondition::KeptPointer kept;
    Tensor output = unet_->Forward(pass, input, &kept);
    const Tensor doutput = LossOf(pass, in, output, made.target);
    output = made.target = {};
    Tensor dstates;
    unet_->Backward(pass, input, std::move(kept), doutput, config_.train_text ? &dstates : nullptr);
    if (config_.train_text)
      text_->Backward(pass, in.samples.tokens, in.samples.positions, std::move(kept_text), dstates);
  }

 private:
  const TextToImageConfig config_;
  const std::unique_ptr<UNet2DCondition> unet_;
  const std::unique_ptr<ClipText> text_;
};

class AutoencoderTask final : public Task {
 public:
  AutoencoderTask(const AutoencoderConfig& config, std::unique_ptr<AutoencoderKL> model)
      : config_(config), model_(std::move(model)) {}
  void Pack(const Masters& masters) const override { model_->Pack(masters); }
  void Run(Pass& pass, const TaskInput& in) const override {
    // The plan's signal is 1 and its noise 0, so x is the picture, and so is the target.
    const Noised picture = MakeSamples(pass, in, SampleShape(config_), {});
    const int64_t rows = in.samples.rows.dim(0);
    AutoencoderKL::Kept encoder, decoder;
    const Tensor moments = model_->Encode(pass, picture.x, &encoder);
    const Shape latent{rows, moments.dim(1), moments.dim(2), moments.dim(3) / 2};
    const GaussianArgs gaussian{.moments = moments,
                                .noise = pass.NewF32(latent),
                                .weight = static_cast<float>(config_.kl),
                                .latents = pass.New(latent),
                                .kl = pass.NewF32({rows})};
    pass.backend.Noise(pass.seed, pass.step, in.samples.rows, gaussian.noise);
    pass.backend.Gaussian(gaussian);
    Tensor output = model_->Decode(pass, gaussian.latents, &decoder);
    const Tensor doutput = pass.NewF32(output.shape());
    pass.backend.ReconstructionLoss({.output = output,
                                     .target = picture.target,
                                     .edges = static_cast<float>(config_.edges),
                                     .add = gaussian.kl,
                                     .scale = in.scale,
                                     .loss = pass.NewF32({rows}),
                                     .sum = in.loss,
                                     .doutput = doutput});
    output = {};
    const Tensor dlatents = model_->DecodeBackward(pass, std::move(decoder), doutput);
    const Tensor dmoments = pass.NewF32(moments.shape());
    pass.backend.GaussianBackward(
        {.forward = gaussian, .dlatents = dlatents, .scale = in.scale, .dmoments = dmoments});
    model_->EncodeBackward(pass, std::move(encoder), dmoments);
  }

 private:
  const AutoencoderConfig config_;
  const std::unique_ptr<AutoencoderKL> model_;
};

absl::StatusOr<std::unique_ptr<Task>> MakeOne(Backend& backend, Parameters& parameters,
                                              const UNet2DConfig& config, int augment_labels) {
  DENOISED_ASSIGN_OR_RETURN(std::unique_ptr<UNet2D> model,
                            UNet2D::Make(backend, parameters, config, augment_labels));
  return std::make_unique<PixelTask>(std::move(model));
}

absl::StatusOr<std::unique_ptr<Task>> MakeOne(Backend& backend, Parameters& parameters,
                                              const TextToImageConfig& config,
                                              int /*augment_labels*/) {
  if (config.text.hidden_size != config.unet.cross_attention_dim)
    return InvalidArgument(
        "the text encoder's hidden_size is {}, but the network's cross_attention_dim is {}; make "
        "them equal",
        config.text.hidden_size, config.unet.cross_attention_dim);
  const Declare declare(backend, parameters), text_encoder = declare / "text_encoder";
  DENOISED_ASSIGN_OR_RETURN(std::unique_ptr<UNet2DCondition> unet,
                            UNet2DCondition::Make(declare / "unet", config.unet));
  DENOISED_ASSIGN_OR_RETURN(
      std::unique_ptr<ClipText> text,
      ClipText::Make(config.train_text ? text_encoder : text_encoder.Frozen(), config.text));
  return std::make_unique<TextToImageTask>(config, std::move(unet), std::move(text));
}

absl::StatusOr<std::unique_ptr<Task>> MakeOne(Backend& backend, Parameters& parameters,
                                              const AutoencoderConfig& config,
                                              int /*augment_labels*/) {
  constexpr int kScales = 8;  // ReconstructionLoss() halves three times
  for (const int edge : {config.sample_height, config.sample_width}) {
    const int factor = std::max(config.vae.vae.factor(), kScales);
    if (edge < 2 * kScales || edge % factor != 0)
      return InvalidArgument("the pictures have an edge of {}; use multiples of {}, at least {}",
                             edge, factor, 2 * kScales);
  }
  DENOISED_ASSIGN_OR_RETURN(std::unique_ptr<AutoencoderKL> model,
                            AutoencoderKL::Make(Declare(backend, parameters), config.vae));
  return std::make_unique<AutoencoderTask>(config, std::move(model));
}

struct ShapeOf {
  Shape operator()(const UNet2DConfig& config) const {
    return {config.sample_height, config.sample_width, config.in_channels};
  }
  Shape operator()(const TextToImageConfig& config) const {
    return {config.unet.sample_height, config.unet.sample_width, config.unet.in_channels};
  }
  Shape operator()(const AutoencoderConfig& config) const {
    return {config.sample_height, config.sample_width, config.vae.vae.in_channels};
  }
};

}  // namespace

Shape SampleShape(const NetworkConfig& config) { return std::visit(ShapeOf(), config); }

absl::StatusOr<std::unique_ptr<Task>> Task::Make(Backend& backend, Parameters& parameters,
                                                 const NetworkConfig& config, int augment_labels) {
  return std::visit(
      [&](const auto& one) { return MakeOne(backend, parameters, one, augment_labels); }, config);
}

}  // namespace denoised::training
