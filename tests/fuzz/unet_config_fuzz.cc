// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "engine/backend/counting.h"
#include "engine/core/config_reader.h"
#include "engine/models/unet2d.h"

namespace {

using denoised::DType;
using denoised::UNet2DConfig;

/// Small enough to build many times a second.
bool IsSmall(const UNet2DConfig& config) {
  const auto& channels = config.block_out_channels;
  return *std::max_element(channels.begin(), channels.end()) <= 32 && channels.size() <= 3 &&
         config.layers_per_block <= 2 && config.in_channels <= 8 && config.sample_height <= 64 &&
         config.sample_width <= 64 && config.time_embedding_dim <= 128 &&
         config.num_class_embeds <= 32;
}

}  // namespace

/// A config is refused with a message, or its model is, or the model runs at its native size: no
/// shape that comes from a config may reach a CHECK.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto json = denoised::ParseJsonObject(text, "config.json");
  if (!json.ok()) return 0;
  const auto config = UNet2DConfig::Parse(*json, "config.json");
  if (!config.ok()) {
    if (config.status().message().empty()) std::abort();
    return 0;
  }
  if (!IsSmall(*config)) return 0;
  denoised::CountingBackend backend(denoised::Device::kCpu, DType::kF32);
  const auto model = denoised::LoadUNet2D(backend, *config, denoised::Weights::Synthetic(1));
  if (!model.ok()) {
    if (model.status().message().empty()) std::abort();
    return 0;
  }
  const denoised::DenoiserTraits& traits = (*model)->traits();
  if (traits.height == 0 || traits.width == 0) return 0;
  denoised::Arena arena = denoised::Arena::Measuring(denoised::Device::kCpu);
  denoised::nn::Context context{backend, arena};
  denoised::DenoiserInput input;
  input.x = arena.New({1, traits.height, traits.width, traits.channels}, DType::kF32);
  input.condition = arena.New({1}, DType::kF32);
  input.label = arena.New({1}, DType::kI32);
  if (traits.class_vector_size > 0)
    input.embedding = arena.New({1, traits.class_vector_size}, DType::kF32);
  const denoised::Tensor out = (*model)->Forward(context, input);
  if (out.shape() != denoised::Shape({1, traits.height, traits.width, traits.output_channels}))
    std::abort();
  return 0;
}
