// SPDX-License-Identifier: Apache-2.0
#include "engine/pipelines/prompt_reader.h"

#include <algorithm>

namespace denoised {

absl::StatusOr<PromptReader> PromptReader::Load(const ModelDirectory& directory,
                                                const Rules& rules) {
  std::vector<ClipTokenizer> tokenizers;
  for (const char* name : {"tokenizer", "tokenizer_2"}) {
    const auto component = directory.components.find(name);
    if (component == directory.components.end()) continue;
    DENOISED_ASSIGN_OR_RETURN(ClipTokenizer tokenizer,
                              ClipTokenizer::Load(component->second.directory));
    tokenizers.push_back(std::move(tokenizer));
  }
  return PromptReader(rules, std::move(tokenizers));
}

TextTraits PromptReader::traits() const {
  return {.max_clip_skip = rules_.layers - 1 - rules_.skip_layers,
          .two_encoders = tokenizers_.size() == 2,
          .sizes = rules_.size_numbers > 0};
}

TokenizedPrompt PromptReader::Condition(const TextPrompt& prompt, const Request& request,
                                        const std::string& field,
                                        std::vector<FieldViolation>* violations,
                                        std::string* cut_off) const {
  TokenizedPrompt tokens = Read({prompt.text, prompt.text_2.value_or(prompt.text)},
                                {field + ".text", field + (prompt.text_2 ? ".text_2" : ".text")},
                                request, violations, cut_off);
  // diffusers skips layers of the prompt alone (StableDiffusionPipeline.encode_prompt).
  tokens.skip_layers += request.clip_skip;
  return tokens;
}

TokenizedPrompt PromptReader::Negative(const TextPrompt& prompt, const Request& request,
                                       const std::string& field,
                                       std::vector<FieldViolation>* violations) const {
  if (rules_.zeros_without_negative && !prompt.negative && !prompt.negative_2)
    return Sized(request);
  const std::string negative = prompt.negative.value_or("");
  return Read({negative, prompt.negative_2.value_or(negative)},
              {field + ".negative", field + (prompt.negative_2 ? ".negative_2" : ".negative")},
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

TokenizedPrompt PromptReader::Read(const std::array<std::string, 2>& texts,
                                   const std::array<std::string, 2>& fields, const Request& request,
                                   std::vector<FieldViolation>* violations,
                                   std::string* cut_off) const {
  TokenizedPrompt tokens = Sized(request);
  for (size_t i = 0; i < tokenizers_.size(); ++i) {
    const absl::StatusOr<TokenizedText> text = tokenizers_[i].Encode(texts[i]);
    if (!text.ok()) {
      // The same text may be read twice: one error is enough.
      const FieldViolation violation{fields[i], std::string(text.status().message())};
      const auto same = [&](const auto& each) { return each.field == violation.field; };
      if (std::none_of(violations->begin(), violations->end(), same))
        violations->push_back(violation);
      continue;
    }
    if (cut_off && i == 0) *cut_off = text->cut_off;
    // Pooled is the first end token, which is also the largest id where a config asks for that.
    const auto end = std::find(text->ids.begin(), text->ids.end(), tokenizers_[i].end());
    tokens.ends.push_back(static_cast<int>(end - text->ids.begin()));
    tokens.ids.push_back(text->ids);
  }
  return tokens;
}

}  // namespace denoised
