// SPDX-License-Identifier: Apache-2.0
#include "engine/models/autoencoder_tiny.h"

#include <optional>

#include "engine/core/config_reader.h"

namespace denoised {

using nn::Context;
using nn::Conv2d;

absl::StatusOr<AutoencoderTinyConfig> AutoencoderTinyConfig::Parse(const nlohmann::json& json,
                                                                   const std::string& file) {
  constexpr int kMaxChannels = 1 << 14;
  AutoencoderTinyConfig config;
  ConfigReader reader(json, file);
  reader.Refuse("_class_name", "AutoencoderTiny");
  reader.Read("in_channels", &config.in_channels);
  reader.Read("out_channels", &config.out_channels);
  reader.Read("encoder_block_out_channels", &config.encoder_block_out_channels);
  reader.Read("decoder_block_out_channels", &config.decoder_block_out_channels);
  reader.Read("latent_channels", &config.latent_channels);
  reader.Read("num_encoder_blocks", &config.num_encoder_blocks);
  reader.Read("num_decoder_blocks", &config.num_decoder_blocks);
  reader.Read("scaling_factor", &config.scaling_factor);
  reader.RefuseNull("scaling_factor");
  reader.Read("shift_factor", &config.shift_factor);
  reader.Refuse("upsampling_scaling_factor", 2);
  reader.Refuse("upsample_fn", "nearest");
  nn::ReadActivation(reader, "act_fn", &config.activation);
  // For storing latents as bytes; a copy of decoder_block_out_channels; a workaround for fp16.
  reader.Ignore({"latent_magnitude", "latent_shift", "block_out_channels", "force_upcast"});

  reader.CheckRange("in_channels", config.in_channels, 1, kMaxChannels);
  if (config.in_channels != config.out_channels)
    reader.Complain("in_channels",
                    fmt::format("must equal the out_channels of {}", config.out_channels));
  reader.CheckRange("latent_channels", config.latent_channels, 1, kMaxChannels);
  const auto check_levels = [&](const char* channels_field, const std::vector<int>& channels,
                                const char* blocks_field, const std::vector<int>& blocks) {
    if (channels.empty() || channels.size() > 8)
      reader.Complain(channels_field, "needs 1 to 8 entries");
    for (const int c : channels) reader.CheckRange(channels_field, c, 1, kMaxChannels);
    for (const int count : blocks) reader.CheckRange(blocks_field, count, 0, 64);
    if (blocks.size() != channels.size())
      reader.Complain(blocks_field, fmt::format("needs one number for each of the {} {}",
                                                channels.size(), channels_field));
  };
  check_levels("encoder_block_out_channels", config.encoder_block_out_channels,
               "num_encoder_blocks", config.num_encoder_blocks);
  check_levels("decoder_block_out_channels", config.decoder_block_out_channels,
               "num_decoder_blocks", config.num_decoder_blocks);
  // The convolutions between levels keep the number of channels.
  for (const auto& [field, channels] :
       {std::pair{"encoder_block_out_channels", &config.encoder_block_out_channels},
        std::pair{"decoder_block_out_channels", &config.decoder_block_out_channels}})
    for (const int c : *channels)
      if (c != channels->front()) reader.Complain(field, "all levels must be equally wide");
  if (config.encoder_block_out_channels.size() != config.decoder_block_out_channels.size())
    reader.Complain("encoder_block_out_channels",
                    fmt::format("needs as many entries as decoder_block_out_channels, {}",
                                config.decoder_block_out_channels.size()));
  if (!(config.scaling_factor > 0)) reader.Complain("scaling_factor", "must be greater than 0");
  DENOISED_RETURN_IF_ERROR(reader.Finish());
  return config;
}

namespace {

/// diffusers' AutoencoderTinyBlock: three convolutions and the input.
class Block {
 public:
  static absl::StatusOr<Block> Load(NetworkOps& ops, const Weights& weights, int channels,
                                    Activation activation) {
    Block block;
    block.activation_ = activation;
    for (int i = 0; i < 3; ++i) {
      DENOISED_ASSIGN_OR_RETURN(
          block.convs_[i], Conv2d::Load(ops, weights / "conv" / (2 * i), channels, channels, 3));
    }
    return block;
  }

  Tensor operator()(Context& context, const Tensor& x) const {
    Tensor h = convs_[0](context, {.x = x, .epilogue = {.activation = activation_}});
    h = convs_[1](context, {.x = h, .epilogue = {.activation = activation_}});
    return convs_[2](context,
                     {.x = h, .epilogue = {.residual = x, .activation = Activation::kRelu}});
  }

 private:
  Activation activation_ = Activation::kRelu;
  Conv2d convs_[3];
};

/// Blocks between convolutions that resample: those of the encoder before the blocks of a level,
/// those of the decoder behind them.
struct Level {
  std::optional<Conv2d> resample;  // not in the first level of an encoder, the last of a decoder
  std::vector<Block> blocks;
};

class AutoencoderTiny : public Codec {
 public:
  explicit AutoencoderTiny(const AutoencoderTinyConfig& config) : config_(config) {}

  absl::Status Load(NetworkOps& ops, const Weights& weights);
  const CodecTraits& traits() const override { return traits_; }
  Tensor Decode(Context& context, const Tensor& latents) const override;
  Tensor Encode(Context& context, const Tensor& pixels) const override;
  void SampleLatents(NetworkOps& ops, const SampleLatentsArgs& args) const override;

 private:
  absl::Status LoadEncoder(NetworkOps& ops, const Weights& layers);
  absl::Status LoadDecoder(NetworkOps& ops, const Weights& layers);
  absl::Status LoadBlocks(NetworkOps& ops, const Weights& layers, int count, int channels,
                          int* layer, std::vector<Block>* blocks) const;

  AutoencoderTinyConfig config_;
  CodecTraits traits_;
  Conv2d encoder_in_, encoder_out_, decoder_in_, decoder_out_;
  std::vector<Level> encoder_, decoder_;
};

absl::Status AutoencoderTiny::Load(NetworkOps& ops, const Weights& weights) {
  traits_ = {.image_channels = config_.out_channels,
             .latent_channels = config_.latent_channels,
             .factor = 1 << (config_.decoder_block_out_channels.size() - 1),
             .encoded_channels = config_.latent_channels};
  DENOISED_RETURN_IF_ERROR(LoadEncoder(ops, weights / "encoder" / "layers"));
  DENOISED_RETURN_IF_ERROR(LoadDecoder(ops, weights / "decoder" / "layers"));
  traits_.parameters = weights.parameters();
  return absl::OkStatus();
}

absl::Status AutoencoderTiny::LoadBlocks(NetworkOps& ops, const Weights& layers, int count,
                                         int channels, int* layer,
                                         std::vector<Block>* blocks) const {
  for (int i = 0; i < count; ++i) {
    DENOISED_ASSIGN_OR_RETURN(Block block,
                              Block::Load(ops, layers / (*layer)++, channels, config_.activation));
    blocks->push_back(std::move(block));
  }
  return absl::OkStatus();
}

absl::Status AutoencoderTiny::LoadEncoder(NetworkOps& ops, const Weights& layers) {
  const int channels = config_.encoder_block_out_channels[0];
  int layer = 0;  // diffusers numbers all layers in one sequence
  DENOISED_ASSIGN_OR_RETURN(encoder_in_,
                            Conv2d::Load(ops, layers / layer++, config_.in_channels, channels, 3));
  for (size_t i = 0; i < config_.num_encoder_blocks.size(); ++i) {
    Level level;
    if (i > 0) {
      DENOISED_ASSIGN_OR_RETURN(
          level.resample, Conv2d::Load(ops, layers / layer++, channels, channels, 3,
                                       /*upsample2x=*/false, nn::Products::kWide, nn::Bias::kNo));
    }
    DENOISED_RETURN_IF_ERROR(
        LoadBlocks(ops, layers, config_.num_encoder_blocks[i], channels, &layer, &level.blocks));
    encoder_.push_back(std::move(level));
  }
  DENOISED_ASSIGN_OR_RETURN(
      encoder_out_, Conv2d::Load(ops, layers / layer, channels, config_.latent_channels, 3));
  return absl::OkStatus();
}

absl::Status AutoencoderTiny::LoadDecoder(NetworkOps& ops, const Weights& layers) {
  const int channels = config_.decoder_block_out_channels[0];
  DENOISED_ASSIGN_OR_RETURN(decoder_in_,
                            Conv2d::Load(ops, layers / 0, config_.latent_channels, channels, 3));
  int layer = 2;  // 1 is an activation
  for (size_t i = 0; i < config_.num_decoder_blocks.size(); ++i) {
    Level level;
    DENOISED_RETURN_IF_ERROR(
        LoadBlocks(ops, layers, config_.num_decoder_blocks[i], channels, &layer, &level.blocks));
    if (i + 1 < config_.num_decoder_blocks.size()) {
      ++layer;  // the doubling
      DENOISED_ASSIGN_OR_RETURN(
          level.resample, Conv2d::Load(ops, layers / layer++, channels, channels, 3,
                                       /*upsample2x=*/true, nn::Products::kWide, nn::Bias::kNo));
    }
    decoder_.push_back(std::move(level));
  }
  DENOISED_ASSIGN_OR_RETURN(decoder_out_,
                            Conv2d::Load(ops, layers / layer, channels, config_.out_channels, 3));
  return absl::OkStatus();
}

Tensor AutoencoderTiny::Decode(Context& context, const Tensor& latents) const {
  NetworkOps& ops = context.ops;
  const auto scale = static_cast<float>(1 / config_.scaling_factor);
  const auto shift = static_cast<float>(config_.shift_factor);
  // Latents are bounded smoothly: 3 · tanh(z / 3).
  const Tensor bounded = context.NewF32(latents.shape());
  ops.Add(latents, scale / 3, Tensor(), shift / 3, Activation::kTanh, bounded);
  Tensor x = context.New(latents.shape());
  ops.Add(bounded, 3.0f, Tensor(), 0.0f, Activation::kNone, x);

  x = decoder_in_(context, {.x = x, .epilogue = {.activation = config_.activation}});
  for (const Level& level : decoder_) {
    for (const Block& block : level.blocks) x = block(context, x);
    if (level.resample) x = (*level.resample)(context, {.x = x});
  }
  Tensor out = context.NewF32({x.dim(0), x.dim(1), x.dim(2), config_.out_channels});
  decoder_out_(context, {.x = x, .out = out});
  // The network's pixels are in [0, 1].
  ops.Add(out, 2.0f, Tensor(), -1.0f, Activation::kNone, out);
  return out;
}

void AutoencoderTiny::SampleLatents(NetworkOps& ops, const SampleLatentsArgs& args) const {
  const double scale = args.unscaled ? 1 : config_.scaling_factor,
               shift = args.unscaled ? 0 : -config_.shift_factor * config_.scaling_factor;
  ops.Add(args.encoded, static_cast<float>(scale), Tensor(), static_cast<float>(shift),
          Activation::kNone, args.out);
}

Tensor AutoencoderTiny::Encode(Context& context, const Tensor& pixels) const {
  Tensor x = context.New(pixels.shape());
  context.ops.Add(pixels, 0.5f, Tensor(), 0.5f, Activation::kNone, x);
  x = encoder_in_(context, {.x = x});
  for (const Level& level : encoder_) {
    if (level.resample) x = level.resample->Downsample(context, x, /*padding=*/1);
    for (const Block& block : level.blocks) x = block(context, x);
  }
  Tensor latents = context.NewF32({x.dim(0), x.dim(1), x.dim(2), config_.latent_channels});
  encoder_out_(context, {.x = x, .out = latents});
  return latents;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Codec>> LoadAutoencoderTiny(NetworkOps& ops,
                                                           const AutoencoderTinyConfig& config,
                                                           const Weights& weights) {
  auto model = std::make_unique<AutoencoderTiny>(config);
  DENOISED_RETURN_IF_ERROR(model->Load(ops, weights));
  DENOISED_RETURN_IF_ERROR(weights.CheckAllUsed());
  return model;
}

}  // namespace denoised
