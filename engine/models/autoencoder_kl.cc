// SPDX-License-Identifier: Apache-2.0
#include "engine/models/autoencoder_kl.h"

namespace denoised {

using nn::Context;
using nn::Conv2d;

absl::StatusOr<AutoencoderKLConfig> AutoencoderKLConfig::Parse(const nlohmann::json& json,
                                                               const std::string& file) {
  AutoencoderKLConfig config;
  ConfigReader reader(json, file);
  reader.Refuse("_class_name", "AutoencoderKL");
  config.vae.Read(reader);
  reader.Read("shift_factor", &config.shift_factor);
  reader.Read("latents_mean", &config.latents_mean);
  reader.Read("latents_std", &config.latents_std);
  reader.Read("use_quant_conv", &config.use_quant_conv);
  reader.Read("use_post_quant_conv", &config.use_post_quant_conv);
  if (config.vae.in_channels != config.vae.out_channels)
    reader.Complain("in_channels",
                    fmt::format("must equal the out_channels of {}", config.vae.out_channels));
  const auto channels = static_cast<size_t>(config.vae.latent_channels);
  if (config.latents_mean.empty() && config.latents_std.empty()) {
    DENOISED_RETURN_IF_ERROR(reader.Finish());
    return config;
  }
  for (const auto& [field, values] : {std::pair{"latents_mean", &config.latents_mean},
                                      std::pair{"latents_std", &config.latents_std}})
    if (values->size() != channels)
      reader.Complain(field, fmt::format("needs {} numbers, one for each of the latent_channels, "
                                         "in latents_mean and in latents_std",
                                         channels));
  for (const double std : config.latents_std)
    if (!(std > 0)) reader.Complain("latents_std", "must be greater than 0");
  if (config.shift_factor != 0)
    reader.Complain("shift_factor", "not supported beside latents_mean; only 0 is");
  DENOISED_RETURN_IF_ERROR(reader.Finish());
  return config;
}

namespace {

class AutoencoderKL : public Codec {
 public:
  explicit AutoencoderKL(const AutoencoderKLConfig& config) : config_(config) {}

  absl::Status Load(NetworkOps& ops, const Weights& weights);
  const CodecTraits& traits() const override { return traits_; }
  Tensor Decode(Context& context, const Tensor& latents) const override;
  Tensor Encode(Context& context, const Tensor& pixels) const override;
  void SampleLatents(NetworkOps& ops, const SampleLatentsArgs& args) const override;

 private:
  absl::Status LoadLatentConv(NetworkOps& ops, const Weights& weights);
  absl::Status LoadScales(NetworkOps& ops);

  AutoencoderKLConfig config_;
  CodecTraits traits_;
  VaeEncoder encoder_;
  VaeDecoder decoder_;
  std::optional<Conv2d> quant_conv_;
  /// post_quant_conv of latents · latents_std + latents_mean.
  std::optional<Conv2d> latent_conv_;
  Tensor scale_, shift_;  // F32 [latent_channels]: latents = z · scale + shift
  Tensor ones_, zeros_;   // F32 [latent_channels]
};

absl::Status AutoencoderKL::Load(NetworkOps& ops, const Weights& weights) {
  const VaeConfig& vae = config_.vae;
  const int moments = 2 * vae.latent_channels;
  traits_ = {.image_channels = vae.out_channels,
             .latent_channels = vae.latent_channels,
             .factor = vae.factor(),
             .encoded_channels = moments};
  DENOISED_ASSIGN_OR_RETURN(encoder_, VaeEncoder::Load(ops, weights / "encoder", vae, moments));
  DENOISED_ASSIGN_OR_RETURN(decoder_, VaeDecoder::Load(ops, weights / "decoder", vae));
  if (config_.use_quant_conv) {
    DENOISED_ASSIGN_OR_RETURN(quant_conv_,
                              Conv2d::Load(ops, weights / "quant_conv", moments, moments, 1));
  }
  DENOISED_RETURN_IF_ERROR(LoadLatentConv(ops, weights / "post_quant_conv"));
  DENOISED_RETURN_IF_ERROR(LoadScales(ops));
  traits_.parameters = weights.parameters();
  return absl::OkStatus();
}

absl::Status AutoencoderKL::LoadLatentConv(NetworkOps& ops, const Weights& weights) {
  const int channels = config_.vae.latent_channels;
  const std::vector<double>&mean = config_.latents_mean, &std = config_.latents_std;
  if (mean.empty() && !config_.use_post_quant_conv) return absl::OkStatus();
  const Tensor weight = Tensor::Host({channels, channels, 1, 1}, DType::kF32);
  const Tensor bias = Tensor::HostF32({channels}, std::vector<float>(channels));
  if (config_.use_post_quant_conv) {
    DENOISED_ASSIGN_OR_RETURN(const Tensor read, weights.Get("weight", weight.shape()));
    DENOISED_ASSIGN_OR_RETURN(const Tensor read_bias, weights.Get("bias", bias.shape()));
    const std::vector<float> w = read.ToFloats(), b = read_bias.ToFloats();
    std::copy(w.begin(), w.end(), weight.as<float>());
    std::copy(b.begin(), b.end(), bias.as<float>());
  } else {
    for (int i = 0; i < channels * channels; ++i)
      weight.as<float>()[i] = i % (channels + 1) == 0 ? 1.0f : 0.0f;
  }
  for (int o = 0; o < channels && !mean.empty(); ++o) {
    double shift = bias.as<float>()[o];
    for (int i = 0; i < channels; ++i) {
      float& w = weight.as<float>()[o * channels + i];
      shift += w * mean[i];
      w = static_cast<float>(w * std[i]);
    }
    bias.as<float>()[o] = static_cast<float>(shift);
  }
  DENOISED_ASSIGN_OR_RETURN(latent_conv_, Conv2d::Pack(ops, weight, bias));
  return absl::OkStatus();
}

absl::Status AutoencoderKL::LoadScales(NetworkOps& ops) {
  const int channels = config_.vae.latent_channels;
  std::vector<float> scale, shift;
  for (int c = 0; c < channels; ++c) {
    const double mean =
        config_.latents_mean.empty() ? config_.shift_factor : config_.latents_mean[c];
    const double std = config_.latents_std.empty() ? 1 : config_.latents_std[c];
    scale.push_back(static_cast<float>(config_.vae.scaling_factor / std));
    shift.push_back(static_cast<float>(-mean * config_.vae.scaling_factor / std));
  }
  DENOISED_ASSIGN_OR_RETURN(scale_, ops.PackVector(Tensor::HostF32({channels}, scale)));
  DENOISED_ASSIGN_OR_RETURN(shift_, ops.PackVector(Tensor::HostF32({channels}, shift)));
  const std::vector<float> one(channels, 1.0f), zero(channels, 0.0f);
  DENOISED_ASSIGN_OR_RETURN(ones_, ops.PackVector(Tensor::HostF32({channels}, one)));
  DENOISED_ASSIGN_OR_RETURN(zeros_, ops.PackVector(Tensor::HostF32({channels}, zero)));
  return absl::OkStatus();
}

Tensor AutoencoderKL::Decode(Context& context, const Tensor& latents) const {
  Tensor x = context.New(latents.shape());
  context.ops.Add(latents, static_cast<float>(1 / config_.vae.scaling_factor), Tensor(),
                  static_cast<float>(config_.shift_factor), Activation::kNone, x);
  if (latent_conv_) x = (*latent_conv_)(context, {.x = x});
  return decoder_(context, x);
}

Tensor AutoencoderKL::Encode(Context& context, const Tensor& pixels) const {
  const int64_t rows = pixels.dim(0), height = pixels.dim(1) / traits_.factor,
                width = pixels.dim(2) / traits_.factor;
  const Tensor x = context.New(pixels.shape());
  context.ops.Add(pixels, 1.0f, Tensor(), 0.0f, Activation::kNone, x);
  Tensor moments = context.NewF32({rows, height, width, traits_.encoded_channels});
  if (quant_conv_) {
    const Tensor encoded = encoder_(context, x, Tensor());
    (*quant_conv_)(context, {.x = encoded, .out = moments});
  } else {
    encoder_(context, x, moments);
  }
  context.Trace("moments", moments);
  return moments;
}

void AutoencoderKL::SampleLatents(NetworkOps& ops, const SampleLatentsArgs& args) const {
  ops.Gaussian({.moments = args.encoded,
                .noise = args.noise,
                .scale = args.unscaled ? ones_ : scale_,
                .shift = args.unscaled ? zeros_ : shift_,
                .out = args.out});
}

}  // namespace

absl::StatusOr<std::unique_ptr<Codec>> LoadAutoencoderKL(NetworkOps& ops,
                                                         const AutoencoderKLConfig& config,
                                                         const Weights& weights) {
  auto model = std::make_unique<AutoencoderKL>(config);
  DENOISED_RETURN_IF_ERROR(model->Load(ops, weights));
  DENOISED_RETURN_IF_ERROR(weights.CheckAllUsed());
  return model;
}

}  // namespace denoised
