// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <string>
#include <vector>

#include "engine/core/status.h"
#include "engine/io/model_directory.h"
#include "engine/job.h"
#include "engine/models/text_encoder.h"
#include "engine/text/clip_tokenizer.h"

namespace denoised {

/// Turns the texts of requests into what a pipeline's text encoders read. Immutable, so safe to use
/// from several threads at once.
class PromptReader {
 public:
  struct Rules {
    /// diffusers' force_zeros_for_empty_prompt: without a negative text, zeros take the place of
    /// the states of an empty one.
    bool zeros_without_negative = false;
    /// SDXL reads the hidden layer before the last one that others read.
    int skip_layers = 0;
    int layers = 0;         // of the encoder that has the fewest
    int size_numbers = 0;   // 6: original size, crop and target size; 0: none
    bool guidance = false;  // the guidance scale is an input
    int max_chunks = 1;     // of a text
    /// Those of each tokenizer's text encoder.
    std::vector<TextEncoderTraits> encoders;
  };

  /// Reads the tokenizers of a directory: tokenizer/, and tokenizer_2/ if it has one. Errors name
  /// the file at fault.
  static absl::StatusOr<PromptReader> Load(const ModelDirectory& directory, const Rules& rules);

  /// What is the same for all prompts of a request.
  struct Request {
    int clip_skip = 0;
    int max_chunks = 1;         // of a text, at most those of the rules
    int height = 0, width = 0;  // pixels
    SizeConditions sizes;
    float guidance_scale = 1;
  };
  /// Appends an error for each text that cannot be read; `field` names the prompt in it. Fills in
  /// the prompt's own texts in `read`.
  TokenizedPrompt Condition(const TextPrompt& prompt, const Request& request,
                            const std::string& field, std::vector<FieldViolation>* violations,
                            PromptRead* read) const;
  /// The same for rows without guidance, with the negative texts.
  TokenizedPrompt Negative(const TextPrompt& prompt, const Request& request,
                           const std::string& field, std::vector<FieldViolation>* violations,
                           PromptRead* read) const;
  TextTraits traits() const;

 private:
  PromptReader(const Rules& rules, std::vector<ClipTokenizer> tokenizers)
      : rules_(rules), tokenizers_(std::move(tokenizers)) {}
  /// One text for each encoder. `read` may be null.
  struct Text {
    const std::string& text;
    std::string field;
    TextRead* read;
  };
  TokenizedPrompt Read(const std::array<Text, 2>& texts, const Request& request,
                       std::vector<FieldViolation>* violations) const;
  TokenizedPrompt Sized(const Request& request) const;

  Rules rules_;
  std::vector<ClipTokenizer> tokenizers_;
};

}  // namespace denoised
