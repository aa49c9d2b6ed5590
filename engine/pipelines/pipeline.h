// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/io/model_directory.h"
#include "engine/models/codec.h"
#include "engine/models/denoiser.h"
#include "engine/models/text_encoder.h"
#include "engine/pipelines/registry.h"
#include "engine/sampling/sampler.h"

namespace denoised {

/// A diffusers pipeline in three stages: text encoders make conditions, a UNet denoises, a codec
/// decodes. A pixel UNet has the second stage alone.

/// A pipeline as its files describe it, before any device has it. Immutable.
struct PipelineFiles {
  ModelDirectory directory;
  SchedulerConfig scheduler;

  PipelineDefaults defaults;

  /// The denoiser's precision; Read() sets it to the directory's. kFp8 needs a Calibration, which
  /// is looked for in `calibrations`, unless that is empty, and in the model's directory.
  Precision precision = Precision::kDefault;
  std::string calibrations;

  /// NotFound or InvalidArgument name the file, the field and the remedy. Configs of the parts are
  /// checked by LoadPipeline().
  static absl::StatusOr<PipelineFiles> Read(const std::string& path);
  /// The same of a directory that was read.
  static absl::StatusOr<PipelineFiles> Of(ModelDirectory directory);

  /// Steps of a request that names neither sampler nor steps. They must be valid, since the client
  /// did not choose them. InvalidArgument if the directory's default_steps cannot be done, or if no
  /// sampler can follow the schedule; `setting` names where default_steps comes from, if not from
  /// the directory. This may compile many plans, so no device should wait for it.
  absl::StatusOr<int> DefaultSteps(int max_evaluations, const std::string& setting = "") const;
};

/// A pipeline on one device. Its parts are immutable.
struct Pipeline {
  std::shared_ptr<const Denoiser> denoiser;
  std::shared_ptr<const Codec> codec;          // null: the state is the image
  std::shared_ptr<const Codec> preview_codec;  // a small one with the same latents; may be null
  ImageInput image_input = ImageInput::kNone;  // what the denoiser reads beside the state
  std::vector<std::shared_ptr<const TextEncoder>> text_encoders;  // none: it reads no text
  bool final_norm = true;                                         // of the text encoders' states
  int skip_layers = 0;  // of the text encoders, before a request's clip_skip
  /// Without a negative text, zeros take the place of the states of an empty one.
  bool zeros_without_negative = false;
  int64_t parameters = 0;
};

/// Packs all weights. The errors of the parts, which name file and field or tensor; InvalidArgument
/// if the parts do not fit together; those of Calibration::Find(), and FailedPrecondition if the
/// backend cannot multiply in the precision. `progress`, if not empty, is told what is done next:
/// each tensor is read from its file before it is packed (Weights::SetProgress()).
absl::StatusOr<Pipeline> LoadPipeline(NetworkOps& ops, const PipelineFiles& files,
                                      const LoadProgress& progress = {});

}  // namespace denoised
