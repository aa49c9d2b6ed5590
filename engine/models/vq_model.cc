// SPDX-License-Identifier: Apache-2.0
#include "engine/models/vq_model.h"

namespace denoised {

using nn::Context;
using nn::Conv2d;

absl::StatusOr<VQModelConfig> VQModelConfig::Parse(const nlohmann::json& json,
                                                   const std::string& file) {
  VQModelConfig config;
  config.vae.latent_channels = 3;
  ConfigReader reader(json, file);
  reader.Refuse("_class_name", "VQModel");
  config.vae.Read(reader);
  reader.Read("num_vq_embeddings", &config.num_vq_embeddings);
  config.vq_embed_dim = config.vae.latent_channels;
  reader.Read("vq_embed_dim", &config.vq_embed_dim);
  reader.Refuse("norm_type", "group");
  reader.Ignore({"lookup_from_codebook"});  // of decoding what was quantised before
  if (config.vae.in_channels != config.vae.out_channels)
    reader.Complain("in_channels",
                    fmt::format("must equal the out_channels of {}", config.vae.out_channels));
  reader.CheckRange("num_vq_embeddings", config.num_vq_embeddings, 1, 1 << 24);
  reader.CheckRange("vq_embed_dim", config.vq_embed_dim, 1, 1 << 14);
  DENOISED_RETURN_IF_ERROR(reader.Finish());
  return config;
}

namespace {

class VQModel : public Codec {
 public:
  explicit VQModel(const VQModelConfig& config) : config_(config) {}

  absl::Status Load(NetworkOps& ops, const Weights& weights);
  const CodecTraits& traits() const override { return traits_; }
  Tensor Decode(Context& context, const Tensor& latents) const override;
  Tensor Encode(Context& context, const Tensor& pixels) const override;
  void SampleLatents(NetworkOps& ops, const SampleLatentsArgs& args) const override;

 private:
  VQModelConfig config_;
  CodecTraits traits_;
  VaeEncoder encoder_;
  VaeDecoder decoder_;
  Conv2d quant_conv_, post_quant_conv_;
  Tensor codebook_;  // F32 [num_vq_embeddings, vq_embed_dim]
};

absl::Status VQModel::Load(NetworkOps& ops, const Weights& weights) {
  const VaeConfig& vae = config_.vae;
  const int channels = vae.latent_channels, code = config_.vq_embed_dim;
  traits_ = {.image_channels = vae.out_channels,
             .latent_channels = code,
             .factor = vae.factor(),
             .encoded_channels = code};
  DENOISED_ASSIGN_OR_RETURN(encoder_, VaeEncoder::Load(ops, weights / "encoder", vae, channels));
  DENOISED_ASSIGN_OR_RETURN(quant_conv_,
                            Conv2d::Load(ops, weights / "quant_conv", channels, code, 1));
  DENOISED_ASSIGN_OR_RETURN(
      const Tensor codebook,
      (weights / "quantize" / "embedding").Get("weight", {config_.num_vq_embeddings, code}));
  DENOISED_ASSIGN_OR_RETURN(codebook_, ops.PackVector(codebook));
  DENOISED_ASSIGN_OR_RETURN(post_quant_conv_,
                            Conv2d::Load(ops, weights / "post_quant_conv", code, channels, 1));
  DENOISED_ASSIGN_OR_RETURN(decoder_, VaeDecoder::Load(ops, weights / "decoder", vae));
  traits_.parameters = weights.parameters();
  return absl::OkStatus();
}

Tensor VQModel::Decode(Context& context, const Tensor& latents) const {
  const Tensor unscaled = context.NewF32(latents.shape());  // rounding it could change the codes
  context.ops.Add(latents, static_cast<float>(1 / config_.vae.scaling_factor), Tensor(), 0.0f,
                  Activation::kNone, unscaled);
  const Tensor codes = context.New(latents.shape());
  context.ops.NearestCode(unscaled, codebook_, codes);
  return decoder_(context, post_quant_conv_(context, {.x = codes}));
}

Tensor VQModel::Encode(Context& context, const Tensor& pixels) const {
  const Tensor x = context.New(pixels.shape());
  context.ops.Add(pixels, 1.0f, Tensor(), 0.0f, Activation::kNone, x);
  const Tensor encoded = encoder_(context, x, Tensor());
  Tensor latents =
      context.NewF32({encoded.dim(0), encoded.dim(1), encoded.dim(2), traits_.latent_channels});
  return quant_conv_(context, {.x = encoded, .out = std::move(latents)});
}

void VQModel::SampleLatents(NetworkOps& ops, const SampleLatentsArgs& args) const {
  const double scale = args.unscaled ? 1 : config_.vae.scaling_factor;
  ops.Add(args.encoded, static_cast<float>(scale), Tensor(), 0.0f, Activation::kNone, args.out);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Codec>> LoadVQModel(NetworkOps& ops, const VQModelConfig& config,
                                                   const Weights& weights) {
  auto model = std::make_unique<VQModel>(config);
  DENOISED_RETURN_IF_ERROR(model->Load(ops, weights));
  DENOISED_RETURN_IF_ERROR(weights.CheckAllUsed());
  return model;
}

}  // namespace denoised
