// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "engine/backend/counting.h"
#include "engine/core/config_reader.h"
#include "engine/models/unet2d_condition.h"

namespace {

using namespace denoised;  // NOLINT(google-build-using-namespace)

/// Small enough to build many times a second.
bool IsSmall(const UNet2DConditionConfig& config) {
  const auto most = [](const std::vector<int>& values) {
    return *std::max_element(values.begin(), values.end());
  };
  return config.block_out_channels.size() <= 3 && most(config.block_out_channels) <= 64 &&
         most(config.layers_per_block) <= 2 && most(config.transformer_layers_per_block) <= 2 &&
         config.in_channels <= 12 && config.out_channels <= 12 &&
         config.cross_attention_dim <= 128 && config.time_embedding_dim <= 256 &&
         config.time_cond_proj_dim <= 64 && config.projection_class_embeddings_input_dim <= 256;
}

/// Conditions two sets of three tokens, then evaluates one row of the smallest size.
void Run(CountingBackend& backend, const Denoiser& model) {
  const DenoiserTraits& traits = model.traits();
  Arena arena = Arena::Measuring(Device::kCpu);
  nn::Context context{backend, arena, {}};
  constexpr int kSets = 2, kTokens = 3;
  const auto rows = [&](int features) {
    return features > 0 ? context.New({kSets, features}) : Tensor();
  };
  Prompts prompts{.states = context.New({kSets, kTokens, traits.text_features}),
                  .pooled = rows(traits.pooled_features)};
  if (traits.size_numbers > 0) prompts.sizes = context.NewF32({kSets * traits.size_numbers});
  if (traits.guidance_embedding) prompts.guidance = context.NewF32({kSets});
  const ConditionSets sets{.keys_values = context.New({kSets, kTokens, traits.key_value_columns}),
                           .key_counts = arena.New({kSets}, DType::kI32),
                           .vectors = rows(traits.vector_features),
                           .times = rows(traits.time_features)};
  model.Condition(context, prompts, sets);
  const int64_t height = traits.size_multiple, width = 2 * height;
  DenoiserInput input{.x = context.New({1, height, width, traits.channels + traits.extra_channels}),
                      .condition = context.NewF32({1}),
                      .label = arena.New({1}, DType::kI32),
                      .sets = sets};
  const Tensor out = model.Forward(context, input);
  if (out.shape() != Shape({1, height, width, traits.output_channels})) std::abort();
}

}  // namespace

/// A config is refused with a message, or its model is, or the model runs: no shape that comes from
/// a config may reach a CHECK. The first byte chooses the width of the pooled prompt.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto json = ParseJsonObject(text, "config.json");
  if (!json.ok()) return 0;
  const auto config = UNet2DConditionConfig::Parse(*json, "config.json");
  if (!config.ok() && config.status().message().empty()) std::abort();
  if (!config.ok() || !IsSmall(*config)) return 0;
  const int pooled = data[0] % 64;
  CountingBackend backend(Device::kCpu, DType::kF32);
  const auto model = LoadUNet2DCondition(backend, *config, pooled, Weights::Synthetic(1));
  if (!model.ok() && model.status().message().empty()) std::abort();
  if (model.ok()) Run(backend, **model);
  return 0;
}
