// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/core/status.h"
#include "engine/text/byte_pair_encoding.h"

namespace denoised {

/// A prompt as CLIP's text encoders read it.
struct TokenizedText {
  /// [chunks, max_length()]: each chunk is the begin token, at most max_length() − 2 tokens of the
  /// text, the end token, and padding.
  std::vector<int32_t> ids;
  int chunks = 1;

  int tokens = 0;       // of the whole text, without begin, end and padding
  int kept_tokens = 0;  // how many of them are in `ids`
  /// The end of the text that is not in `ids`, decoded from its tokens: in lower case, with one
  /// space between words. Valid UTF-8; empty unless kept_tokens < tokens.
  std::string cut_off;
};

/// CLIP's tokenizer, equal to CLIPTokenizer of transformers 5.23: special tokens are cut out first;
/// the rest is composed (NFC), put into lower case, split into words, and encoded by byte pairs.
/// docs/text.md describes it. Immutable, so safe to use from several threads at once.
class ClipTokenizer {
 public:
  /// Longer texts are refused, and those of more tokens. Encoding takes up to a second for so many.
  static constexpr size_t kMaxTextBytes = 1 << 20;

  /// Reads the folder of a tokenizer: tokenizer_config.json and either tokenizer.json, as
  /// transformers 5 writes it, or vocab.json and merges.txt, with special_tokens_map.json if it is
  /// there. NotFound if a file is missing, InvalidArgument if one cannot be honoured: the message
  /// names file, field and remedy.
  static absl::StatusOr<ClipTokenizer> Load(const std::string& directory);

  /// The tokens of the text alone. InvalidArgument if the text is too long, is not UTF-8 or has a
  /// NUL character.
  absl::StatusOr<std::vector<int32_t>> Tokenize(std::string_view text) const;

  /// The same in chunks, each added token with its further vectors (WithVectors()).
  /// As many chunks as the text needs, at most `max_chunks` and at least one; what remains is cut
  /// off. With more than one chunk, each takes the next max_length() − 2 tokens. InvalidArgument as
  /// Tokenize(), or if the vectors are too many.
  absl::StatusOr<TokenizedText> Encode(std::string_view text, int max_chunks = 1) const;

  /// The text of tokens, in lower case. U+FFFD stands for parts of characters and unknown ids.
  std::string Decode(std::span<const int32_t> ids) const;

  int max_length() const { return max_length_; }               // tokens of a chunk
  int vocabulary_size() const { return int(tokens_.size()); }  // the highest id plus one
  int32_t begin() const { return begin_; }
  int32_t end() const { return end_; }
  int32_t pad() const { return pad_; }

 private:
  friend class ClipTokenizerFiles;

  /// A token that is cut out of the text before words are.
  struct Special {
    std::u32string content;
    int32_t id;
  };

  explicit ClipTokenizer(BytePairEncoding words) : words_(std::move(words)) {}

  void EncodeWords(std::u32string_view text, std::vector<int32_t>* ids) const;
  /// As maybe_convert_prompt of diffusers' pipelines: textual inversion with several vectors adds
  /// tokens t, t_1, t_2 and so on, and a prompt that has t means all of them.
  absl::StatusOr<std::vector<int32_t>> WithVectors(std::vector<int32_t> ids) const;

  BytePairEncoding words_;
  std::vector<std::string> tokens_;  // by id; empty where there is none
  // Longest first. The first kind is sought in the text as it is, the second after normalization.
  std::vector<Special> verbatim_, normalized_;
  std::map<int32_t, std::vector<int32_t>> vectors_;  // of t: t_1, t_2, ...
  int32_t begin_ = 0, end_ = 0, pad_ = 0;
  int max_length_ = 0;
};

}  // namespace denoised
