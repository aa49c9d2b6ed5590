// SPDX-License-Identifier: Apache-2.0
#include "engine/text/clip_tokenizer.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "engine/core/config_reader.h"
#include "engine/text/unicode.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::json;

/// Composed, with one space for each run of them, in lower case.
std::u32string Normalize(std::u32string_view text) {
  std::u32string normalized;
  bool after_space = false;
  for (const char32_t point : ComposeCanonically(text)) {
    const bool space = IsSpace(point);
    if (!space)
      AppendLowerCase(point, &normalized);
    else if (!after_space)
      normalized.push_back(U' ');
    after_space = space;
  }
  return normalized;
}

std::string ToUtf8(std::u32string_view text) {
  std::string bytes;
  for (const char32_t point : text) AppendUtf8(point, &bytes);
  return bytes;
}

/// The length of the word at the start of `text`, which is not a space. The pattern of CLIP:
/// 's|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+
size_t WordLength(std::u32string_view text) {
  for (const std::u32string_view suffix : {U"'s", U"'t", U"'re", U"'ve", U"'m", U"'ll", U"'d"})
    if (text.starts_with(suffix)) return suffix.size();
  if (IsNumber(text[0])) return 1;
  const bool letters = IsLetter(text[0]);
  const auto end = std::find_if(text.begin(), text.end(), [&](char32_t point) {
    return letters ? !IsLetter(point) : IsSpace(point) || IsLetter(point) || IsNumber(point);
  });
  return static_cast<size_t>(end - text.begin());
}

}  // namespace

void ClipTokenizer::EncodeWords(std::u32string_view text, std::vector<int32_t>* ids) const {
  while (!text.empty()) {
    if (IsSpace(text[0])) {
      text.remove_prefix(1);
      continue;
    }
    const auto encode = [&](size_t length) {
      words_.Encode(ToUtf8(text.substr(0, length)), ids);
      text.remove_prefix(length);
    };
    // CLIP's pattern also has these two as words. GPT-2's pattern splits them after it.
    const bool name = text.starts_with(U"<|startoftext|>") || text.starts_with(U"<|endoftext|>");
    if (name) {
      encode(2);
      encode(WordLength(text));
      encode(2);
    } else {
      encode(WordLength(text));
    }
  }
}

absl::StatusOr<std::vector<int32_t>> ClipTokenizer::Tokenize(std::string_view text) const {
  if (text.size() > kMaxTextBytes)
    return InvalidArgument("text has {} bytes; send at most {}", text.size(), kMaxTextBytes);
  DENOISED_ASSIGN_OR_RETURN(const std::u32string points, DecodeUtf8(text));

  std::vector<int32_t> ids;
  /// Calls `between` with the text between special tokens, and appends their ids.
  const auto cut_out = [&ids](std::u32string_view rest, const std::vector<Special>& specials,
                              const auto& between) {
    size_t start = 0;  // of what has not been passed on
    for (size_t i = 0; i < rest.size();) {
      const auto special = std::find_if(specials.begin(), specials.end(), [&](const Special& s) {
        return rest.substr(i).starts_with(s.content);
      });
      if (special == specials.end()) {
        ++i;
        continue;
      }
      between(rest.substr(start, i - start));
      ids.push_back(special->id);
      start = i += special->content.size();
    }
    between(rest.substr(start));
  };
  cut_out(points, verbatim_, [&](std::u32string_view part) {
    cut_out(Normalize(part), normalized_,
            [&](std::u32string_view words) { EncodeWords(words, &ids); });
  });
  return ids;
}

absl::StatusOr<std::vector<int32_t>> ClipTokenizer::WithVectors(std::vector<int32_t> ids) const {
  if (vectors_.empty()) return ids;
  std::vector<int32_t> all;
  for (size_t i = 0; i < ids.size(); ++i) {
    all.push_back(ids[i]);
    const auto found = vectors_.find(ids[i]);
    if (found == vectors_.end()) continue;
    const std::vector<int32_t>& further = found->second;
    // A prompt may spell them out.
    if (i + 1 < ids.size() && ids[i + 1] == further.front()) continue;
    all.insert(all.end(), further.begin(), further.end());
    if (all.size() > kMaxTextBytes)
      return InvalidArgument("text has more than {} tokens; send fewer with several vectors",
                             kMaxTextBytes);
  }
  return all;
}

absl::StatusOr<TokenizedText> ClipTokenizer::Encode(std::string_view text, int max_chunks) const {
  DENOISED_CHECK(max_chunks >= 1, "{} chunks", max_chunks);
  DENOISED_ASSIGN_OR_RETURN(std::vector<int32_t> ids, Tokenize(text));
  DENOISED_ASSIGN_OR_RETURN(ids, WithVectors(std::move(ids)));

  TokenizedText result;
  const size_t room = static_cast<size_t>(max_length_) - 2;
  const size_t chunks =
      std::clamp<size_t>((ids.size() + room - 1) / room, 1, static_cast<size_t>(max_chunks));
  const size_t kept = std::min(ids.size(), chunks * room);
  result.chunks = static_cast<int>(chunks);
  result.tokens = static_cast<int>(ids.size());
  result.kept_tokens = static_cast<int>(kept);
  result.ids.reserve(chunks * (room + 2));
  for (size_t chunk = 0; chunk < chunks; ++chunk) {
    result.ids.push_back(begin_);
    for (size_t i = chunk * room; i < std::min(kept, (chunk + 1) * room); ++i)
      result.ids.push_back(ids[i]);
    result.ids.push_back(end_);
    result.ids.resize((chunk + 1) * (room + 2), pad_);
  }
  if (kept < ids.size()) result.cut_off = Decode(std::span(ids).subspan(kept));
  return result;
}

std::string ClipTokenizer::Decode(std::span<const int32_t> ids) const {
  constexpr std::string_view kEndOfWord = "</w>";
  std::string bytes;
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocabulary_size() || tokens_[id].empty())
      bytes += "\uFFFD";
    else
      bytes += BytesOfToken(tokens_[id]);
  }
  std::string text;
  for (size_t i = 0; i < bytes.size();) {
    const bool end = bytes.compare(i, kEndOfWord.size(), kEndOfWord) == 0;
    text.push_back(end ? ' ' : bytes[i]);
    i += end ? kEndOfWord.size() : 1;
  }
  const size_t first = text.find_first_not_of(' ');
  if (first == std::string::npos) return "";
  return ReplaceInvalidUtf8(
      std::string_view(text).substr(first, text.find_last_not_of(' ') + 1 - first));
}

/// Reads the files of a tokenizer as CLIPTokenizer.from_pretrained of transformers 5.23 does
/// (tokenization_utils_base.py, _from_pretrained; tokenization_utils_tokenizers.py, __init__).
class ClipTokenizerFiles {
 public:
  explicit ClipTokenizerFiles(const std::string& directory) : root_(directory) {}

  absl::StatusOr<ClipTokenizer> Read() {
    std::error_code error;
    if (!fs::is_directory(root_, error))
      return NotFound("{}: no such tokenizer directory", root_.string());
    DENOISED_RETURN_IF_ERROR(ReadConfig());
    DENOISED_RETURN_IF_ERROR(Has("tokenizer.json") ? ReadTokenizerFile() : ReadVocabularyFiles());
    DENOISED_RETURN_IF_ERROR(CollectSpecials());
    absl::StatusOr<BytePairEncoding> words =
        BytePairEncoding::Make(vocabulary_, merges_, named_.at("unk_token").content);
    if (!words.ok()) return Annotate(words.status(), vocabulary_file_);

    ClipTokenizer tokenizer(*std::move(words));
    tokenizer.max_length_ = max_length_;
    DENOISED_RETURN_IF_ERROR(FillTokens(&tokenizer.tokens_));
    DENOISED_ASSIGN_OR_RETURN(tokenizer.begin_, IdOf(named_.at("bos_token").content));
    DENOISED_ASSIGN_OR_RETURN(tokenizer.end_, IdOf(named_.at("eos_token").content));
    DENOISED_ASSIGN_OR_RETURN(tokenizer.pad_, IdOf(named_.at("pad_token").content));
    for (const auto& [content, normalized] : specials_) {
      ClipTokenizer::Special special;
      DENOISED_ASSIGN_OR_RETURN(special.id, IdOf(content));
      DENOISED_ASSIGN_OR_RETURN(special.content, DecodeUtf8(content));
      if (normalized) special.content = Normalize(special.content);
      (normalized ? tokenizer.normalized_ : tokenizer.verbatim_).push_back(std::move(special));
    }
    for (const auto& [content, normalized] : specials_) {
      std::vector<int32_t> further;
      for (int i = 1; specials_.contains(fmt::format("{}_{}", content, i)); ++i) {
        DENOISED_ASSIGN_OR_RETURN(further.emplace_back(), IdOf(fmt::format("{}_{}", content, i)));
      }
      if (further.empty()) continue;
      DENOISED_ASSIGN_OR_RETURN(const int32_t id, IdOf(content));
      tokenizer.vectors_[id] = std::move(further);
    }
    for (auto* specials : {&tokenizer.verbatim_, &tokenizer.normalized_})
      std::stable_sort(specials->begin(), specials->end(), [](const auto& a, const auto& b) {
        return a.content.size() > b.content.size();
      });
    return tokenizer;
  }

 private:
  /// A special token as the files describe it. One that is written as a plain string is sought in
  /// the text as it is.
  struct Token {
    std::string content;
    bool normalized = false;
  };

  bool Has(const char* name) const {
    std::error_code error;
    return fs::is_regular_file(root_ / name, error);
  }
  std::string Path(const char* name) const { return (root_ / name).string(); }

  /// Reads a token: "text" or {"content": "text", "normalized": true, …}.
  static absl::StatusOr<Token> ReadToken(const json& value, const std::string& file,
                                         const std::string& field) {
    Token token;
    if (value.is_string()) {
      token.content = value.get<std::string>();
    } else if (value.is_object()) {
      ConfigReader reader(value, fmt::format("{}, {}", file, field));
      bool special = true;
      reader.Read("content", &token.content);
      reader.Read("special", &special);
      token.normalized = !special;
      reader.Read("normalized", &token.normalized);
      reader.Refuse("lstrip", false);
      reader.Refuse("rstrip", false);
      reader.Refuse("single_word", false);
      reader.Ignore({"id"});
      DENOISED_RETURN_IF_ERROR(reader.Finish());
    } else {
      return InvalidArgument("{}: field '{}' is no token: expected a string or an object", file,
                             field);
    }
    if (token.content.empty())
      return InvalidArgument("{}: field '{}': a special token must not be empty", file, field);
    if (const auto valid = DecodeUtf8(token.content); !valid.ok())
      return Annotate(valid.status(), fmt::format("{}: field '{}'", file, field));
    return token;
  }

  /// tokenizer_config.json, special_tokens_map.json and added_tokens.json.
  absl::Status ReadConfig() {
    const std::string file = Path("tokenizer_config.json");
    DENOISED_ASSIGN_OR_RETURN(config_, ReadJsonFile(file));
    ConfigReader reader(config_, file);
    // The others describe the Python class.
    for (const auto& [field, value] : config_.items()) reader.Ignore({field.c_str()});
    std::string kind = "CLIPTokenizer";
    reader.Read("tokenizer_class", &kind);
    if (kind != "CLIPTokenizer" && kind != "CLIPTokenizerFast")
      reader.Complain("tokenizer_class", "only \"CLIPTokenizer\" is supported");
    reader.Read("model_max_length", &max_length_);
    if (max_length_ < 3 || max_length_ > 65536)
      reader.Complain("model_max_length",
                      "expected the length of the text encoder's input, from 3; CLIP's is 77");
    reader.Refuse("padding_side", "right");
    reader.Refuse("truncation_side", "right");
    reader.Refuse("split_special_tokens", false);
    reader.Refuse("add_bos_token", true);
    reader.Refuse("add_eos_token", true);
    DENOISED_RETURN_IF_ERROR(reader.Finish());

    std::map<std::string, json> fields;
    const auto take_over = [&](const json& object) {
      for (const auto& [field, value] : object.items())
        if (!value.is_null()) fields[field] = value;
    };
    take_over(config_);
    std::string map_file = file;
    json map = json::object();
    const json decoder = config_.value("added_tokens_decoder", json());
    if (decoder.is_null() && Has("special_tokens_map.json")) {
      map_file = Path("special_tokens_map.json");
      DENOISED_ASSIGN_OR_RETURN(map, ReadJsonFile(map_file));
      take_over(map);
    }
    if (decoder.is_object()) {
      for (const auto& [id, value] : decoder.items())
        DENOISED_RETURN_IF_ERROR(AddListed(id, value, file));
    } else if (!decoder.is_null()) {
      return InvalidArgument("{}: field 'added_tokens_decoder': expected an object", file);
    }
    // Later ones prevail where several have one content.
    for (const char* field : kNames) {
      const auto found = fields.find(field);
      if (found == fields.end()) continue;
      DENOISED_ASSIGN_OR_RETURN(named_[field], ReadToken(found->second, map_file, field));
      if (found->second.is_string() || map.contains(field)) special_.insert(named_[field].content);
    }
    for (const char* field : {"bos_token", "eos_token", "unk_token", "pad_token"})
      if (!named_.count(field))
        named_[field].content =
            std::string_view(field) == "bos_token" ? "<|startoftext|>" : "<|endoftext|>";
    constexpr const char *kExtra = "extra_special_tokens", *kOld = "additional_special_tokens";
    DENOISED_RETURN_IF_ERROR(ReadExtra(config_, file, kExtra));
    if (extra_.empty()) DENOISED_RETURN_IF_ERROR(ReadExtra(config_, file, kOld));
    DENOISED_RETURN_IF_ERROR(ReadExtra(map, map_file, kExtra));
    DENOISED_RETURN_IF_ERROR(ReadAddedTokensFile());
    // After added_tokens.json, whose tokens they do not make special. Any list of the others
    // replaces these, even an empty one.
    if (config_.contains(kExtra) || config_.contains(kOld) || map.contains(kExtra))
      return absl::OkStatus();
    return ReadExtra(map, map_file, kOld);
  }

  /// Appends a field's tokens to extra_.
  absl::Status ReadExtra(const json& object, const std::string& file, const char* field) {
    const json tokens = object.value(field, json());
    if (tokens.empty()) return absl::OkStatus();
    if (!tokens.is_array())
      return InvalidArgument("{}: field '{}': expected a list of tokens", file, field);
    for (const json& value : tokens) {
      DENOISED_ASSIGN_OR_RETURN(Token token, ReadToken(value, file, field));
      if (value.is_string() || &object != &config_) special_.insert(token.content);
      extra_.push_back(std::move(token));
    }
    return absl::OkStatus();
  }

  /// Adds a token that the files list with its id.
  absl::Status AddListed(const std::string& id, const json& value, const std::string& file) {
    DENOISED_ASSIGN_OR_RETURN(Token token, ReadToken(value, file, "token " + id));
    int32_t number = -1;
    const auto [end, error] = std::from_chars(id.data(), id.data() + id.size(), number);
    if (error != std::errc() || end != id.data() + id.size() || number < 0 || number > kMaxId)
      return InvalidArgument("{}: token \"{}\" has id {}; expected one from 0 to {}", file,
                             token.content, id, kMaxId);
    listed_[number] = std::move(token);
    return absl::OkStatus();
  }

  absl::Status ReadVocabulary(const json& vocabulary) {
    if (!vocabulary.is_object() || vocabulary.empty())
      return InvalidArgument("{}: expected an object of tokens and their ids", vocabulary_file_);
    for (const auto& [token, value] : vocabulary.items()) {
      if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t{kMaxId})
        return InvalidArgument("{}: token \"{}\": expected an id from 0 to {}", vocabulary_file_,
                               ReplaceInvalidUtf8(token), kMaxId);
      vocabulary_[token] = value.get<int32_t>();
    }
    return absl::OkStatus();
  }

  absl::Status ReadVocabularyFiles() {
    vocabulary_file_ = Path("vocab.json");
    if (std::error_code error; !fs::exists(vocabulary_file_, error))
      return NotFound(
          "{}: no such file; a tokenizer is tokenizer.json, or vocab.json and merges.txt",
          vocabulary_file_);
    DENOISED_ASSIGN_OR_RETURN(const json vocabulary, ReadJsonFile(vocabulary_file_));
    DENOISED_RETURN_IF_ERROR(ReadVocabulary(vocabulary));
    const std::string file = Path("merges.txt");
    constexpr uintmax_t kMaxBytes = 64u << 20;  // as for JSON
    std::error_code error;
    if (!fs::exists(file, error)) return NotFound("{}: no such file", file);
    if (!fs::is_regular_file(file, error))
      return InvalidArgument("{}: is not a regular file; copy it again", file);
    if (const uintmax_t size = fs::file_size(file, error); error || size > kMaxBytes)
      return InvalidArgument("{}: is larger than {} bytes", file, kMaxBytes);
    std::ifstream lines(file, std::ios::binary);
    int number = 0;
    for (std::string line; std::getline(lines, line);) {
      ++number;
      if (line.ends_with('\r')) line.pop_back();
      if (line.starts_with("#version")) continue;
      const size_t space = line.find(' ');
      if (space == std::string::npos || line.find(' ', space + 1) != std::string::npos)
        return InvalidArgument("{}, line {}: expected two symbols and a space between them", file,
                               number);
      merges_.emplace_back(line.substr(0, space), line.substr(space + 1));
    }
    if (!lines.is_open() || lines.bad())
      return InvalidArgument("{}: cannot be read; check its permissions", file);
    if (number == 0) return InvalidArgument("{}: is empty; copy it again", file);
    return absl::OkStatus();
  }

  /// added_tokens.json, {"token": id}: what transformers 4 wrote for tokens beyond the vocabulary.
  absl::Status ReadAddedTokensFile() {
    if (!Has("added_tokens.json") || config_.contains("added_tokens_decoder"))
      return absl::OkStatus();
    const std::string file = Path("added_tokens.json");
    DENOISED_ASSIGN_OR_RETURN(const json tokens, ReadJsonFile(file));
    for (const auto& token : tokens.items()) {
      const bool special = special_.contains(token.key());
      DENOISED_RETURN_IF_ERROR(
          AddListed(token.value().dump(), {{"content", token.key()}, {"special", special}}, file));
    }
    return absl::OkStatus();
  }

  /// tokenizer.json. transformers takes vocabulary, merges, added tokens and the post-processor
  /// from it, and the rest from its class.
  absl::Status ReadTokenizerFile() {
    vocabulary_file_ = Path("tokenizer.json");
    DENOISED_ASSIGN_OR_RETURN(const json tokenizer, ReadJsonFile(vocabulary_file_));
    const json model = tokenizer.value("model", json());
    if (!model.is_object() || model.value("type", json("BPE")) != "BPE")
      return InvalidArgument("{}: field 'model': expected one of type \"BPE\"", vocabulary_file_);
    DENOISED_RETURN_IF_ERROR(ReadVocabulary(model.value("vocab", json())));
    const json merges = model.value("merges", json());
    if (!merges.is_array())
      return InvalidArgument("{}: field 'model.merges': expected a list of pairs of symbols",
                             vocabulary_file_);
    for (const json& merge : merges) {
      const bool pair =
          merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string();
      const std::string text = merge.is_string() ? merge.get<std::string>() : "";
      const size_t space = text.find(' ');
      if (!pair && (space == std::string::npos || text.find(' ', space + 1) != std::string::npos))
        return InvalidArgument("{}: field 'model.merges': expected two symbols, not {}",
                               vocabulary_file_,
                               merge.dump(-1, ' ', true, json::error_handler_t::replace));
      if (pair)
        merges_.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
      else
        merges_.emplace_back(text.substr(0, space), text.substr(space + 1));
    }
    if (!config_.contains("added_tokens_decoder"))
      for (const json& token : tokenizer.value("added_tokens", json::array())) {
        const json id = token.is_object() ? token.value("id", json()) : json();
        DENOISED_RETURN_IF_ERROR(AddListed(id.dump(), token, vocabulary_file_));
      }
    const json processor = tokenizer.value("post_processor", json());
    if (!processor.is_null() &&
        (!processor.is_object() || processor.value("type", json()) != "RobertaProcessing"))
      return InvalidArgument(
          "{}: field 'post_processor': only \"RobertaProcessing\", CLIP's, is supported",
          vocabulary_file_);
    return absl::OkStatus();
  }

  /// Fills specials_ in the order in which transformers adds tokens.
  absl::Status CollectSpecials() {
    std::map<std::string, bool> listed;
    for (const auto& [id, token] : listed_) {
      const auto known = vocabulary_.find(token.content);
      if (known != vocabulary_.end() && known->second != id)
        return InvalidArgument("{}: special token \"{}\" has id {} in one place and {} in another",
                               root_.string(), token.content, id, known->second);
      added_ids_[token.content] = id;
      listed[token.content] = token.normalized;
    }
    specials_ = listed;
    const auto add = [&](const Token& token) {
      const auto found = listed.find(token.content);
      specials_[token.content] = found != listed.end() ? found->second : token.normalized;
    };
    for (const char* field : kNames)
      if (named_.count(field)) add(named_[field]);
    for (const Token& token : extra_) add(token);
    return absl::OkStatus();
  }

  absl::StatusOr<int32_t> IdOf(const std::string& content) const {
    if (const auto it = vocabulary_.find(content); it != vocabulary_.end()) return it->second;
    if (const auto it = added_ids_.find(content); it != added_ids_.end()) return it->second;
    return InvalidArgument(
        "{}: special token \"{}\" is not in the vocabulary; list it with its id in "
        "added_tokens_decoder of tokenizer_config.json",
        vocabulary_file_, content);
  }

  absl::Status FillTokens(std::vector<std::string>* tokens) const {
    const auto set = [&](const std::string& token, int32_t id) -> absl::Status {
      if (tokens->size() <= static_cast<size_t>(id)) tokens->resize(id + 1);
      std::string& place = (*tokens)[id];
      if (!place.empty() && place != token)
        return InvalidArgument("{}: tokens \"{}\" and \"{}\" both have id {}", vocabulary_file_,
                               ReplaceInvalidUtf8(place), ReplaceInvalidUtf8(token), id);
      place = token;
      return absl::OkStatus();
    };
    for (const auto& [token, id] : vocabulary_) DENOISED_RETURN_IF_ERROR(set(token, id));
    for (const auto& [token, id] : added_ids_) DENOISED_RETURN_IF_ERROR(set(token, id));
    return absl::OkStatus();
  }

  static constexpr int32_t kMaxId = (1 << 20) - 1;
  static constexpr const char* kNames[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                           "pad_token", "cls_token", "mask_token"};

  fs::path root_;
  json config_;
  int max_length_ = 0;
  std::map<std::string, Token> named_;  // by field
  std::vector<Token> extra_;
  /// The tokens of added_tokens.json that are special, if it has them: those that other files name,
  /// except as objects in tokenizer_config.json, which transformers compares with the text as such.
  std::set<std::string> special_;
  std::map<int32_t, Token> listed_;  // by id
  std::string vocabulary_file_;
  BytePairEncoding::Vocabulary vocabulary_;
  BytePairEncoding::Merges merges_;
  std::map<std::string, int32_t> added_ids_;
  std::map<std::string, bool> specials_;  // content → whether it is sought in normalized text
};

absl::StatusOr<ClipTokenizer> ClipTokenizer::Load(const std::string& directory) {
  return ClipTokenizerFiles(directory).Read();
}

}  // namespace denoised
