// SPDX-License-Identifier: Apache-2.0
#include "engine/pipelines/prompt_reader.h"

#include <algorithm>
#include <optional>
#include <span>

namespace denoised {
namespace {

/// The token of a chunk that is pooled, as transformers' CLIPTextModel finds it.
int PooledToken(std::span<const int32_t> ids, int end_token) {
  if (end_token < 0)
    return static_cast<int>(std::max_element(ids.begin(), ids.end()) - ids.begin());
  const auto end = std::find(ids.begin(), ids.end(), end_token);
  return end == ids.end() ? 0 : static_cast<int>(end - ids.begin());
}

/// diffusers' `prompt_2 or prompt`: an empty second text is none.
bool IsGiven(const std::optional<std::string>& second) { return second && !second->empty(); }

}  // namespace

absl::StatusOr<PromptReader> PromptReader::Load(const ModelDirectory& directory,
                                                const Rules& rules) {
  std::vector<ClipTokenizer> tokenizers;
  for (const char* name : {"tokenizer", "tokenizer_2"}) {
    const auto component = directory.components.find(name);
    if (component == directory.components.end()) continue;
    DENOISED_ASSIGN_OR_RETURN(ClipTokenizer tokenizer,
                              ClipTokenizer::Load(component->second.directory));
    const size_t place = tokenizers.size();
    if (place < rules.encoders.size()) {
      const TextEncoderTraits& encoder = rules.encoders[place];
      if (tokenizer.max_length() != encoder.max_tokens)
        return InvalidArgument(
            "{}: model_max_length is {}, but the text encoder reads {} tokens; take both from one "
            "model",
            component->second.directory, tokenizer.max_length(), encoder.max_tokens);
      if (tokenizer.vocabulary_size() > encoder.vocabulary)
        return InvalidArgument(
            "{}: there are {} tokens, but the text encoder's vocab_size is {}; take both from one "
            "model, or resize its embeddings",
            component->second.directory, tokenizer.vocabulary_size(), encoder.vocabulary);
    }
    tokenizers.push_back(std::move(tokenizer));
  }
  return PromptReader(rules, std::move(tokenizers));
}

TextTraits PromptReader::traits() const {
  return {.max_clip_skip = rules_.layers - 1 - rules_.skip_layers,
          .max_chunks = rules_.max_chunks,
          .chunk_tokens = tokenizers_.front().max_length() - 2,
          .two_encoders = tokenizers_.size() == 2,
          .sizes = rules_.size_numbers > 0};
}

TokenizedPrompt PromptReader::Condition(const TextPrompt& prompt, const Request& request,
                                        const std::string& field,
                                        std::vector<FieldViolation>* violations,
                                        PromptRead* read) const {
  const Text text{prompt.text, field + ".text", &read->text};
  TokenizedPrompt tokens =
      Read({text, IsGiven(prompt.text_2) ? Text{*prompt.text_2, field + ".text_2", &read->text_2}
                                         : Text{prompt.text, text.field, nullptr}},
           request, violations);
  // diffusers skips layers of the prompt alone (StableDiffusionPipeline.encode_prompt).
  tokens.skip_layers += request.clip_skip;
  return tokens;
}

TokenizedPrompt PromptReader::Negative(const TextPrompt& prompt, const Request& request,
                                       const std::string& field,
                                       std::vector<FieldViolation>* violations,
                                       PromptRead* read) const {
  if (rules_.zeros_without_negative && !prompt.negative && !IsGiven(prompt.negative_2))
    return Sized(request);
  const std::string negative = prompt.negative.value_or("");
  const Text text{negative, field + ".negative", &read->negative};
  return Read({text, IsGiven(prompt.negative_2)
                         ? Text{*prompt.negative_2, field + ".negative_2", &read->negative_2}
                         : Text{negative, text.field, nullptr}},
              request, violations);
}

TokenizedPrompt PromptReader::Sized(const Request& request) const {
  TokenizedPrompt tokens;
  tokens.skip_layers = rules_.skip_layers;
  if (rules_.guidance) tokens.guidance = request.guidance_scale;
  if (rules_.size_numbers == 0) return tokens;
  const std::array<int, 2> own = {request.height, request.width};
  for (const std::array<int, 2>& pair :
       {request.sizes.original_size.value_or(own), request.sizes.crop.value_or(std::array{0, 0}),
        request.sizes.target_size.value_or(own)})
    for (const int number : pair) tokens.sizes.push_back(static_cast<float>(number));
  return tokens;
}

TokenizedPrompt PromptReader::Read(const std::array<Text, 2>& texts, const Request& request,
                                   std::vector<FieldViolation>* violations) const {
  TokenizedPrompt tokens = Sized(request);
  std::vector<TokenizedText> encoded;
  for (size_t i = 0; i < tokenizers_.size(); ++i) {
    const Text& text = texts[i];
    absl::StatusOr<TokenizedText> chunks = tokenizers_[i].Encode(text.text, request.max_chunks);
    if (!chunks.ok()) {
      // The same text may be read twice: one error is enough.
      const FieldViolation violation{text.field, std::string(chunks.status().message())};
      const auto same = [&](const auto& each) { return each.field == violation.field; };
      if (std::none_of(violations->begin(), violations->end(), same))
        violations->push_back(violation);
      return tokens;
    }
    if (text.read) *text.read = {.tokens = chunks->kept_tokens, .cut_off = chunks->cut_off};
    tokens.chunks = std::max(tokens.chunks, chunks->chunks);
    encoded.push_back(*std::move(chunks));
  }
  for (size_t i = 0; i < tokenizers_.size(); ++i) {
    const ClipTokenizer& tokenizer = tokenizers_[i];
    std::vector<int32_t>& ids = tokens.ids.emplace_back(std::move(encoded[i].ids));
    tokens.ends.push_back(
        PooledToken(std::span(ids).first(tokenizer.max_length()),
                    i < rules_.encoders.size() ? rules_.encoders[i].end_token : tokenizer.end()));
    // The states of both encoders lie side by side, so the shorter text gets empty chunks.
    for (int chunk = encoded[i].chunks; chunk < tokens.chunks; ++chunk) {
      ids.push_back(tokenizer.begin());
      ids.push_back(tokenizer.end());
      ids.resize((chunk + 1) * tokenizer.max_length(), tokenizer.pad());
    }
  }
  return tokens;
}

}  // namespace denoised
