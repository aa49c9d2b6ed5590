// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "engine/text/clip_tokenizer.h"
#include "engine/text/unicode.h"
#include "tests/io/temporary_directory.h"

namespace {

/// The files of a tokenizer that an input fills, in its order, separated by zero bytes; its rest is
/// a prompt. An empty part is a file that is not there.
constexpr const char* kFiles[] = {"tokenizer_config.json", "special_tokens_map.json", "vocab.json",
                                  "merges.txt", "tokenizer.json"};

void Require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

/// Any files are refused with a message, or the tokenizer turns any prompt into tokens of its
/// vocabulary.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const denoised::TemporaryDirectory folder;
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  for (const char* file : kFiles) {
    const std::string_view content = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(rest.size(), content.size() + 1));
    if (content.empty())
      std::filesystem::remove(folder / file);
    else
      folder.Write(file, std::string(content));
  }
  const auto tokenizer = denoised::ClipTokenizer::Load(folder.path());
  if (!tokenizer.ok()) {
    Require(!tokenizer.status().message().empty());
    return 0;
  }
  for (const int max_chunks : {1, 1000}) {
    const auto text = tokenizer->Encode(rest, max_chunks);
    if (!text.ok()) {
      Require(!text.status().message().empty());
      return 0;
    }
    Require(text->chunks >= 1 && text->chunks <= max_chunks);
    Require(text->ids.size() == static_cast<size_t>(text->chunks) * tokenizer->max_length());
    Require(text->kept_tokens <= text->tokens);
    Require(text->kept_tokens < text->tokens || text->cut_off.empty());
    for (const int32_t id : text->ids) Require(id >= 0 && id < tokenizer->vocabulary_size());
    // Tokens may stand for NUL, which is UTF-8 all the same.
    Require(denoised::ReplaceInvalidUtf8(text->cut_off) == text->cut_off);
  }
  return 0;
}
