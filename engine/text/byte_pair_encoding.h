// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/core/status.h"

namespace denoised {

/// Byte-level byte pair encoding (Sennrich et al., arXiv 1508.07909; bytes as in GPT-2) whose last
/// symbol of a word ends in "</w>". Immutable, so safe to share between threads.
class BytePairEncoding {
 public:
  using Vocabulary = std::map<std::string, int32_t, std::less<>>;
  using Merges = std::vector<std::pair<std::string, std::string>>;

  /// In `vocabulary` and `merges` each byte is written as a printable character, as GPT-2 maps
  /// them. Earlier merges take precedence. InvalidArgument if `unknown`, a part of a merge or its
  /// result is not a token.
  static absl::StatusOr<BytePairEncoding> Make(const Vocabulary& vocabulary, const Merges& merges,
                                               const std::string& unknown);

  /// Appends the tokens of one word. Time is n log n in its bytes.
  void Encode(std::string_view word, std::vector<int32_t>* ids) const;

 private:
  BytePairEncoding() = default;

  struct Merge {
    int32_t rank;
    int32_t result;
  };
  const Merge* Find(int32_t left, int32_t right) const;

  std::array<int32_t, 256> inner_;  // the token of each byte, inside a word
  std::array<int32_t, 256> last_;   // and at its end
  std::unordered_map<uint64_t, Merge> merges_;
};

/// The character that stands for a byte, and the bytes that a token stands for. A token with a
/// character that stands for no byte is returned unchanged.
std::string ByteSymbol(uint8_t byte);
std::string BytesOfToken(std::string_view token);

}  // namespace denoised
