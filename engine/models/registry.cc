// SPDX-License-Identifier: Apache-2.0
#include "engine/models/registry.h"

#include "engine/models/autoencoder_kl.h"
#include "engine/models/autoencoder_tiny.h"
#include "engine/models/clip_text.h"
#include "engine/models/unet2d.h"
#include "engine/models/unet2d_condition.h"
#include "engine/models/vq_model.h"

namespace denoised {
namespace {

using Component = ModelDirectory::Component;

absl::StatusOr<std::unique_ptr<Denoiser>> UNet2D(NetworkOps& ops, const Component& component,
                                                 const TextStates& /*text*/,
                                                 const Weights& weights) {
  DENOISED_ASSIGN_OR_RETURN(const UNet2DConfig config,
                            UNet2DConfig::Parse(component.config, component.config_file));
  return LoadUNet2D(ops, config, weights);
}

absl::StatusOr<std::unique_ptr<Denoiser>> UNet2DCondition(NetworkOps& ops,
                                                          const Component& component,
                                                          const TextStates& text,
                                                          const Weights& weights) {
  DENOISED_ASSIGN_OR_RETURN(const UNet2DConditionConfig config,
                            UNet2DConditionConfig::Parse(component.config, component.config_file));
  if (text.features != config.cross_attention_dim)
    return InvalidArgument(
        "{}: field 'cross_attention_dim' is {}, but the text encoders have {} features",
        component.config_file, config.cross_attention_dim, text.features);
  return LoadUNet2DCondition(ops, config, text.pooled_features, weights);
}

template <typename Config, auto kLoad>
absl::StatusOr<std::unique_ptr<Codec>> CodecOf(NetworkOps& ops, const Component& component,
                                               const Weights& weights) {
  DENOISED_ASSIGN_OR_RETURN(const Config config,
                            Config::Parse(component.config, component.config_file));
  return kLoad(ops, config, weights);
}

absl::StatusOr<std::unique_ptr<TextEncoder>> ClipText(NetworkOps& ops, const Component& component,
                                                      const Weights& weights) {
  DENOISED_ASSIGN_OR_RETURN(
      const ClipTextConfig config,
      ClipTextConfig::Parse(component.config, component.config_file, component.class_name));
  return LoadClipText(ops, config, weights);
}

constexpr DenoiserClass kDenoisers[] = {
    {"UNet2DModel", false, UNet2D},
    {"UNet2DConditionModel", true, UNet2DCondition},
};
constexpr CodecClass kCodecs[] = {
    {"AutoencoderKL", false, CodecOf<AutoencoderKLConfig, LoadAutoencoderKL>},
    {"AutoencoderTiny", true, CodecOf<AutoencoderTinyConfig, LoadAutoencoderTiny>},
    {"VQModel", false, CodecOf<VQModelConfig, LoadVQModel>},
};
constexpr TextEncoderClass kTextEncoders[] = {
    {"CLIPTextModel", ClipText},
    {"CLIPTextModelWithProjection", ClipText},
};

template <typename Class, size_t N>
absl::StatusOr<const Class*> Find(const Class (&classes)[N], const ModelDirectory& directory,
                                  const std::string& name) {
  const Component& component = directory.components.at(name);
  std::string names;
  for (const Class& known : classes) {
    if (component.class_name == known.name) return &known;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", known.name);
  }
  return InvalidArgument("{}: component '{}' is of class {}, which is not supported; use {}{}",
                         directory.root, name, component.class_name, N > 1 ? "one of " : "", names);
}

}  // namespace

absl::StatusOr<const DenoiserClass*> FindDenoiser(const ModelDirectory& directory) {
  return Find(kDenoisers, directory, "unet");
}
absl::StatusOr<const CodecClass*> FindCodec(const ModelDirectory& directory,
                                            const std::string& name) {
  return Find(kCodecs, directory, name);
}
absl::StatusOr<const TextEncoderClass*> FindTextEncoder(const ModelDirectory& directory,
                                                        const std::string& name) {
  return Find(kTextEncoders, directory, name);
}

}  // namespace denoised
