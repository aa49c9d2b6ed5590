// SPDX-License-Identifier: Apache-2.0
#include "engine/text/byte_pair_encoding.h"

#include <optional>
#include <queue>

#include "engine/text/unicode.h"

namespace denoised {
namespace {

constexpr char kEndOfWord[] = "</w>";

/// GPT-2's table: printable bytes of Latin-1 stand for themselves, the others follow from U+0100.
const std::array<char32_t, 256>& Characters() {
  static const std::array<char32_t, 256> table = [] {
    std::array<char32_t, 256> characters{};
    char32_t next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
      characters[byte] = printable ? char32_t{byte} : next++;
    }
    return characters;
  }();
  return table;
}

uint64_t Key(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

}  // namespace

std::string ByteSymbol(uint8_t byte) {
  std::string symbol;
  AppendUtf8(Characters()[byte], &symbol);
  return symbol;
}

std::string BytesOfToken(std::string_view token) {
  static const std::unordered_map<char32_t, char> bytes = [] {
    std::unordered_map<char32_t, char> table;
    for (unsigned byte = 0; byte < 256; ++byte) table[Characters()[byte]] = static_cast<char>(byte);
    return table;
  }();
  const auto points = DecodeUtf8(token);
  if (!points.ok()) return std::string(token);
  std::string text;
  for (const char32_t point : *points) {
    const auto byte = bytes.find(point);
    if (byte == bytes.end()) return std::string(token);
    text.push_back(byte->second);
  }
  return text;
}

absl::StatusOr<BytePairEncoding> BytePairEncoding::Make(const Vocabulary& vocabulary,
                                                        const Merges& merges,
                                                        const std::string& unknown) {
  const auto find = [&](std::string_view token) -> std::optional<int32_t> {
    const auto it = vocabulary.find(token);
    return it == vocabulary.end() ? std::nullopt : std::optional(it->second);
  };
  const std::optional<int32_t> unknown_id = find(unknown);
  if (!unknown_id)
    return InvalidArgument("the unknown token \"{}\" is not in the vocabulary", unknown);

  BytePairEncoding encoding;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const std::string symbol = ByteSymbol(static_cast<uint8_t>(byte));
    encoding.inner_[byte] = find(symbol).value_or(*unknown_id);
    encoding.last_[byte] = find(symbol + kEndOfWord).value_or(*unknown_id);
  }
  encoding.merges_.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const auto left_id = find(left), right_id = find(right), result = find(left + right);
    if (!left_id || !right_id || !result)
      return InvalidArgument("merge {}, \"{} {}\": {} is not in the vocabulary", rank + 1, left,
                             right,
                             !left_id    ? "its first part"
                             : !right_id ? "its second part"
                                         : "its result");
    encoding.merges_[Key(*left_id, *right_id)] = {static_cast<int32_t>(rank), *result};
  }
  return encoding;
}

const BytePairEncoding::Merge* BytePairEncoding::Find(int32_t left, int32_t right) const {
  const auto it = merges_.find(Key(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

void BytePairEncoding::Encode(std::string_view word, std::vector<int32_t>* ids) const {
  if (word.empty()) return;
  // Symbols are a linked list by positions. A merge keeps its left symbol and unlinks the right
  // one.
  struct Symbol {
    int32_t id;
    int32_t previous, next;  // −1: none
  };
  struct Candidate {
    int32_t rank, left, result;
    bool operator<(const Candidate& other) const {  // the queue's top is the largest
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  constexpr int32_t kUnlinked = -1;
  const auto size = static_cast<int32_t>(word.size());
  std::vector<Symbol> symbols(word.size());
  for (int32_t i = 0; i < size; ++i) {
    const auto byte = static_cast<uint8_t>(word[i]);
    symbols[i] = {i + 1 == size ? last_[byte] : inner_[byte], i - 1, i + 1 == size ? -1 : i + 1};
  }
  std::priority_queue<Candidate> queue;
  const auto consider = [&](int32_t left) {
    if (left < 0 || symbols[left].next < 0) return;
    if (const Merge* merge = Find(symbols[left].id, symbols[symbols[left].next].id))
      queue.push({merge->rank, left, merge->result});
  };
  for (int32_t i = 0; i + 1 < size; ++i) consider(i);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[best.left];
    if (left.id == kUnlinked || left.next < 0) continue;
    Symbol& right = symbols[left.next];
    // The pair may have changed since it was queued.
    const Merge* merge = Find(left.id, right.id);
    if (!merge || merge->rank != best.rank) continue;
    left.id = best.result;
    left.next = right.next;
    right.id = kUnlinked;
    if (left.next >= 0) symbols[left.next].previous = best.left;
    consider(left.previous);
    consider(best.left);
  }
  for (int32_t i = 0; i >= 0; i = symbols[i].next) ids->push_back(symbols[i].id);
}

}  // namespace denoised
