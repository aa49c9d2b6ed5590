// SPDX-License-Identifier: Apache-2.0
#include "engine/pipelines/registry.h"

namespace denoised {
namespace {

/// Stable Diffusion XL: text states are hidden_states[-2] without the final norm.
constexpr TextFamily kXl = {
    .text_time = true, .final_norm = false, .skip_layers = 1, .zeros_without_negative = true};

/// The registry of pipelines; models/registry.cc has that of their parts. The first of a family is
/// the one that messages name.
// clang-format off
constexpr PipelineClass kPipelines[] = {
    {.name = "StableDiffusionPipeline", .defaults = {.guidance_scale = 7.5},
     .corrections = Corrections{.clip_sample = true}},
    {.name = "StableDiffusionImg2ImgPipeline", .defaults = {.guidance_scale = 7.5},
     .corrections = Corrections{.clip_sample = true}},
    {.name = "StableDiffusionInpaintPipeline", .defaults = {.guidance_scale = 7.5},
     .image_input = ImageInput::kMasked, .corrections = Corrections{.skip_prk_steps = true}},
    {.name = "StableDiffusionInstructPix2PixPipeline",
     .defaults = {.guidance_scale = 7.5, .steps = 100, .image_guidance_scale = 1.5},
     .image_input = ImageInput::kWhole},
    {.name = "StableDiffusionXLPipeline", .defaults = {.guidance_scale = 5}, .family = kXl},
    {.name = "StableDiffusionXLImg2ImgPipeline",
     .defaults = {.guidance_scale = 5, .strength = 0.3}, .family = kXl},
    {.name = "StableDiffusionXLInpaintPipeline",
     .defaults = {.guidance_scale = 7.5, .masked_strength = 0.9999}, .family = kXl,
     .image_input = ImageInput::kMasked},
    {.name = "LatentConsistencyModelPipeline", .defaults = {.guidance_scale = 8.5, .steps = 4}},
    {.name = "LatentConsistencyModelImg2ImgPipeline",
     .defaults = {.guidance_scale = 8.5, .steps = 4}},
};
// clang-format on

}  // namespace

std::span<const PipelineClass> AllPipelines() { return kPipelines; }

const PipelineClass* FindPipeline(std::string_view name) {
  for (const PipelineClass& known : kPipelines)
    if (name == known.name) return &known;
  return nullptr;
}

}  // namespace denoised
