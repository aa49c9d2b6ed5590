// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "engine/models/denoiser.h"

namespace denoised {

/// What a pipeline's class has in its code, and no file has: the signature of its __call__.
struct PipelineDefaults {
  double guidance_scale = 1;
  int steps = 50;
  double strength = 0.8;            // of image to image
  double masked_strength = 1;       // the same with a mask
  double image_guidance_scale = 0;  // of models that read a whole image
};

/// How the pipelines of a family read texts.
struct TextFamily {
  bool text_time = false;  // addition_embed_type of its UNets: they read a pooled state and sizes
  bool final_norm = true;  // of the text encoders' states
  int skip_layers = 0;     // of the text encoders
  /// Unless model_index.json has force_zeros_for_empty_prompt: see Pipeline.
  bool zeros_without_negative = false;
};

/// What a class corrects in files of 2022: see old_configs.h.
struct Corrections {
  bool clip_sample = false, skip_prk_steps = false;
};

/// All that is known of a class of diffusers' pipelines that read text. A new one is a row in
/// registry.cc. Pipelines that read none have no row: all about them follows from their parts, as
/// does which parts a directory must have (DenoiserClass::reads_text).
struct PipelineClass {
  const char* name;
  PipelineDefaults defaults;
  TextFamily family = {};
  ImageInput image_input = ImageInput::kNone;  // what extra input channels of its UNet are
  std::optional<Corrections> corrections = {};
};

std::span<const PipelineClass> AllPipelines();
/// Null if there is none.
const PipelineClass* FindPipeline(std::string_view name);

}  // namespace denoised
