// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/io/model_directory.h"
#include "engine/pipelines/pipeline.h"
#include "engine/training/objective.h"
#include "engine/training/trainer.h"
#include "trainer/checkpoint.h"

/// Runs whose model is a StableDiffusionPipeline: its parts are read from a directory, one stage
/// trains some of them, and snapshots are such directories again.

namespace denoised::trainer {

enum class Stage {
  kAutoencoder,  // vae
  kDiffusion,    // unet, and text_encoder unless it is frozen
};

struct PipelineParts {
  ModelDirectory directory;
  training::TextToImageConfig network;
  AutoencoderKLConfig vae;
  PipelineFiles served;                  // as the server reads the directory
  training::ObjectiveOptions objective;  // as the scheduler samples it

  /// Reads the configs; weights may be absent. Every part must have a folder of its own.
  /// InvalidArgument and NotFound name the file, the field and the remedy.
  static absl::StatusOr<PipelineParts> Read(const std::string& directory, Stage stage);

  const nlohmann::json& config(const std::string& part) const {
    return directory.components.at(part).config;
  }
  std::string folder(const std::string& part) const {
    return directory.components.at(part).directory;
  }
  /// The size of the pictures, in pixels.
  int height() const { return network.unet.sample_height * vae.vae.factor(); }
  int width() const { return network.unet.sample_width * vae.vae.factor(); }
  /// What a stage trains.
  training::NetworkConfig Network(Stage stage) const;
};

/// By picture: its path below the folder, and its texts.
using Captions = std::map<std::string, std::vector<std::string>>;

/// Captions of a folder's pictures: of metadata.jsonl ({"file_name":
/// "a.png", "text": "a cat"}, or a list of texts), else a.txt beside a.png, a caption a line.
absl::StatusOr<Captions> ReadCaptions(const std::string& folder,
                                      const std::vector<std::string>& files);

/// What is wrong with the captions of a picture, or "".
std::string CheckCaptions(const Captions& captions, const std::string& file);

/// Fills in tokens and first_caption of `dataset` for pictures with these captions. Returns how
/// many captions were too long for the encoder, so that their ends were cut off. InvalidArgument if
/// CheckCaptions() finds a fault.
absl::StatusOr<int64_t> Tokenize(const PipelineParts& parts, const std::vector<std::string>& files,
                                 const Captions& captions, training::Dataset* dataset);

/// Weights of a part, `part` being its name: of `directory`, a StableDiffusionPipeline.
absl::StatusOr<Weights> OpenPart(const std::string& directory, const std::string& part);

/// What a run begins with, by the prefix of its parameters: weights of `init_from` if it is not
/// empty, else of what is frozen.
absl::StatusOr<std::map<std::string, Weights>> OpenParts(const PipelineParts& parts, Stage stage,
                                                         const std::string& init_from);

/// A snapshot: the trained parts with these weights (by parameter), and everything else as it is in
/// the pipeline's directory, with what only diffusers reads. `pictures` are those that latents are
/// standardised by.
absl::StatusOr<Pipeline> MakeSnapshot(const PipelineParts& parts, Stage stage,
                                      std::map<std::string, Tensor> weights,
                                      training::Backend& backend, const Tensor& pictures);

}  // namespace denoised::trainer
