// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "engine/io/model_directory.h"
#include "engine/models/codec.h"
#include "engine/models/denoiser.h"
#include "engine/models/text_encoder.h"

namespace denoised {

/// The classes of diffusers and transformers that can be loaded, by `_class_name`. A new one is a
/// file pair in this folder and a line in registry.cc; nothing outside this folder names one.

/// What a denoiser needs to know of the text encoders beside it.
struct TextStates {
  int features = 0;         // of a token, of all encoders together
  int pooled_features = 0;  // of a prompt
};

struct DenoiserClass {
  const char* name;
  bool reads_text;  // its pipeline has tokenizers, text encoders and a codec
  absl::StatusOr<std::unique_ptr<Denoiser>> (*load)(Backend& backend,
                                                    const ModelDirectory::Component& component,
                                                    const TextStates& text, const Weights& weights);
};
struct CodecClass {
  const char* name;
  bool small;  // quick enough for previews
  absl::StatusOr<std::unique_ptr<Codec>> (*load)(Backend& backend,
                                                 const ModelDirectory::Component& component,
                                                 const Weights& weights);
};
struct TextEncoderClass {
  const char* name;
  absl::StatusOr<std::unique_ptr<TextEncoder>> (*load)(Backend& backend,
                                                       const ModelDirectory::Component& component,
                                                       const Weights& weights);
};

// Finds a component's class. InvalidArgument lists the known classes; `name` is the component's
// name in the directory.
absl::StatusOr<const DenoiserClass*> FindDenoiser(const ModelDirectory& directory);
absl::StatusOr<const CodecClass*> FindCodec(const ModelDirectory& directory,
                                            const std::string& name);
absl::StatusOr<const TextEncoderClass*> FindTextEncoder(const ModelDirectory& directory,
                                                        const std::string& name);

}  // namespace denoised
