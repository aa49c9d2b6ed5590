// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <variant>

#include "engine/models/autoencoder_kl.h"
#include "engine/models/clip_text.h"
#include "engine/models/unet2d.h"
#include "engine/models/unet2d_condition.h"
#include "engine/training/layers.h"

namespace denoised::training {

/// A UNet2DConditionModel over latents, with its text encoder. Their parameters are named
/// "unet.…" and "text_encoder.…".
struct TextToImageConfig {
  UNet2DConditionConfig unet;
  ClipTextConfig text;
  bool train_text = true;  // false: the text encoder does not change
};

/// An AutoencoderKL and its loss: mean |error| + edges · (errors of the differences of neighbours
/// at four scales) + kl · KL. Its parameters are named as in its checkpoint.
struct AutoencoderConfig {
  AutoencoderKLConfig vae;
  int sample_height = 0, sample_width = 0;  // of the pictures
  double edges = 0.5, kl = 1e-4;
};

/// What a run trains.
using NetworkConfig = std::variant<UNet2DConfig, TextToImageConfig, AutoencoderConfig>;

/// [height, width, channels] of a sample: pixels, or latents.
Shape SampleShape(const NetworkConfig& config);

/// What the host says of every sample, a row each. Undefined: the network does not read it.
struct Samples {
  Tensor rows;       // I32 [N, kSampleNumbers]: SampleRow
  Tensor timesteps;  // I32 [N], of a learned time embedding
  Tensor vectors;    // F32 [N, D]: class vectors
  Tensor augment;    // F32 [N, kAugmentLabels]
  Tensor tokens;     // I32 [N, tokens], of text to image
  Tensor positions;  // I32 [N, tokens]: 0, 1, …

  /// Calls of(member) for each member.
  template <typename Function>
  Samples Map(const Function& of) const {
    return {of(rows), of(timesteps), of(vectors), of(augment), of(tokens), of(positions)};
  }
};

/// The samples of a pass.
struct TaskInput {
  Tensor images;  // U8 pictures; for text to image posteriors, see SamplesArgs
  Samples samples;
  float scale = 1;            // of the gradient: 1 / samples of the global batch
  float variance_weight = 0;  // of a learned variance, see VarianceLossArgs
  Tensor loss;                // F32 [1]: scale · Σ loss over the pass
};

/// The networks that are trained together and their loss. Immutable during passes, so several
/// passes may use one at a time.
class Task {
 public:
  virtual ~Task() = default;
  /// Declares the parameters. `augment_labels` applies to a UNet2DConfig, see UNet2D::Make().
  /// InvalidArgument names what cannot be trained.
  static absl::StatusOr<std::unique_ptr<Task>> Make(Backend& backend, Parameters& parameters,
                                                    const NetworkConfig& config,
                                                    int augment_labels);
  /// Lays out the weights for the kernels; call after every change of them.
  virtual void Pack(const Masters& masters) const = 0;
  /// Forward, loss, backward: writes the gradient of every trained parameter, and the loss.
  virtual void Run(Pass& pass, const TaskInput& input) const = 0;
};

}  // namespace denoised::training
