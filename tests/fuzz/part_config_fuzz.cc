// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "engine/backend/counting.h"
#include "engine/core/config_reader.h"
#include "engine/models/autoencoder_kl.h"
#include "engine/models/autoencoder_tiny.h"
#include "engine/models/clip_text.h"
#include "engine/models/vq_model.h"
#include "tests/models/encode_latents.h"

namespace {

using namespace denoised;  // NOLINT(google-build-using-namespace)

/// Small enough to build many times a second.
bool IsSmall(const VaeConfig& config) {
  const auto& channels = config.block_out_channels;
  return *std::max_element(channels.begin(), channels.end()) <= 32 && channels.size() <= 3 &&
         config.layers_per_block <= 2 && config.in_channels <= 8 && config.latent_channels <= 8;
}
bool IsSmall(const AutoencoderKLConfig& config) { return IsSmall(config.vae); }
bool IsSmall(const VQModelConfig& config) {
  return IsSmall(config.vae) && config.num_vq_embeddings <= 64 && config.vq_embed_dim <= 8;
}
bool IsSmall(const AutoencoderTinyConfig& config) {
  const auto most = [](const std::vector<int>& values) {
    return *std::max_element(values.begin(), values.end());
  };
  return config.encoder_block_out_channels.size() <= 3 && config.in_channels <= 8 &&
         config.latent_channels <= 8 && most(config.encoder_block_out_channels) <= 32 &&
         most(config.decoder_block_out_channels) <= 32 && most(config.num_encoder_blocks) <= 3 &&
         most(config.num_decoder_blocks) <= 3;
}
bool IsSmall(const ClipTextConfig& config) {
  return config.vocab_size <= 128 && config.hidden_size <= 64 && config.intermediate_size <= 128 &&
         config.projection_dim <= 64 && config.num_hidden_layers <= 3 &&
         config.max_position_embeddings <= 128;
}

void Run(CountingBackend& backend, const Codec& codec) {
  const CodecTraits& traits = codec.traits();
  Arena arena = Arena::Measuring(Device::kCpu);
  nn::Context context{backend, arena, {}};
  const Tensor latents = arena.New({1, 2, 3, traits.latent_channels}, DType::kF32);
  const Tensor pixels = codec.Decode(context, latents);
  const Shape image = {1, int64_t{2} * traits.factor, int64_t{3} * traits.factor,
                       traits.image_channels};
  if (pixels.shape() != image) std::abort();
  if (EncodeLatents(codec, context, pixels, latents).shape() != latents.shape()) std::abort();
}

void Run(CountingBackend& backend, const TextEncoder& encoder) {
  const TextEncoderTraits& traits = encoder.traits();
  Arena arena = Arena::Measuring(Device::kCpu);
  nn::Context context{backend, arena, {}};
  const TextInput input = {arena.New({traits.max_tokens}, DType::kI32),
                           arena.New({traits.max_tokens}, DType::kI32),
                           arena.New({1}, DType::kI32)};
  const TextOutput out =
      encoder.Forward(context, input, {.skip_layers = traits.layers, .pool = true});
  if (out.pooled.shape() != Shape({1, traits.pooled_features})) std::abort();
}

template <typename Config, typename Load>
void Try(const absl::StatusOr<Config>& config, const Load& load) {
  if (!config.ok() && config.status().message().empty()) std::abort();
  if (!config.ok() || !IsSmall(*config)) return;
  CountingBackend backend(Device::kCpu, DType::kF32);
  const auto model = load(backend, *config, Weights::Synthetic(1));
  if (!model.ok() && model.status().message().empty()) std::abort();
  if (model.ok()) Run(backend, **model);
}

}  // namespace

/// A config is refused with a message, or its model is, or the model runs: no shape that comes from
/// a config may reach a CHECK.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size), file = "config.json";
  const auto json = ParseJsonObject(text, file);
  if (!json.ok()) return 0;
  Try(AutoencoderKLConfig::Parse(*json, file), LoadAutoencoderKL);
  Try(VQModelConfig::Parse(*json, file), LoadVQModel);
  Try(AutoencoderTinyConfig::Parse(*json, file), LoadAutoencoderTiny);
  for (const char* name : {"CLIPTextModel", "CLIPTextModelWithProjection"})
    Try(ClipTextConfig::Parse(*json, file, name), LoadClipText);
  return 0;
}
