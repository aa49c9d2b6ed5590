// SPDX-License-Identifier: Apache-2.0
#include "engine/text/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <iterator>
#include <vector>

namespace denoised {
namespace {

utf8proc_category_t Category(char32_t point) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(point));
}

int CombiningClass(utf8proc_int32_t point) { return utf8proc_get_property(point)->combining_class; }

/// Decodes one character; returns its bytes, or a value below 1 if there is none.
utf8proc_ssize_t DecodeOne(std::string_view text, utf8proc_int32_t* point) {
  return utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                          static_cast<utf8proc_ssize_t>(text.size()), point);
}

}  // namespace

absl::StatusOr<std::u32string> DecodeUtf8(std::string_view text) {
  std::u32string points;
  points.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    utf8proc_int32_t point = 0;
    const utf8proc_ssize_t bytes = DecodeOne(text.substr(i), &point);
    if (bytes < 1) return InvalidArgument("text is not UTF-8 at byte {}; encode it as UTF-8", i);
    if (point == 0) return InvalidArgument("text has a NUL character at byte {}; leave it out", i);
    points.push_back(static_cast<char32_t>(point));
    i += static_cast<size_t>(bytes);
  }
  return points;
}

void AppendUtf8(char32_t point, std::string* text) {
  utf8proc_uint8_t bytes[4];
  const utf8proc_ssize_t count = utf8proc_encode_char(static_cast<utf8proc_int32_t>(point), bytes);
  text->append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(count));
}

std::string ReplaceInvalidUtf8(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  while (!bytes.empty()) {
    utf8proc_int32_t point = 0;
    const utf8proc_ssize_t count = DecodeOne(bytes, &point);
    if (count < 1) {
      AppendUtf8(U'\uFFFD', &text);
      bytes.remove_prefix(1);
    } else {
      text.append(bytes.substr(0, static_cast<size_t>(count)));
      bytes.remove_prefix(static_cast<size_t>(count));
    }
  }
  return text;
}

std::u32string ComposeCanonically(std::u32string_view text) {
  // No character below U+0300 combines with the one before it.
  if (std::all_of(text.begin(), text.end(), [](char32_t point) { return point < 0x300; }))
    return std::u32string(text);

  constexpr auto kOptions = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  std::vector<utf8proc_int32_t> points;
  points.reserve(text.size());
  for (const char32_t point : text) {
    utf8proc_int32_t parts[8];  // four is the longest canonical decomposition
    int boundary = 0;
    const utf8proc_ssize_t count = utf8proc_decompose_char(
        static_cast<utf8proc_int32_t>(point), parts, std::ssize(parts), kOptions, &boundary);
    DENOISED_CHECK(count >= 0 && count <= std::ssize(parts), "U+{:04X} has {} parts",
                   static_cast<uint32_t>(point), count);
    points.insert(points.end(), parts, parts + count);
  }
  // utf8proc_decompose sorts marks too, but in quadratic time.
  for (auto begin = points.begin(); begin != points.end();) {
    const auto is_starter = [](utf8proc_int32_t point) { return CombiningClass(point) == 0; };
    begin = std::find_if_not(begin, points.end(), is_starter);
    const auto end = std::find_if(begin, points.end(), is_starter);
    std::stable_sort(begin, end, [](utf8proc_int32_t a, utf8proc_int32_t b) {
      return CombiningClass(a) < CombiningClass(b);
    });
    begin = end;
  }
  // utf8proc takes U+11A7 for a final consonant of Hangul and drops it. It combines with nothing.
  constexpr utf8proc_int32_t kNoFinal = 0x11A7;
  std::u32string composed;
  for (auto begin = points.begin(); begin != points.end();) {
    const auto end = std::find(begin + (*begin == kNoFinal), points.end(), kNoFinal);
    const utf8proc_ssize_t count = utf8proc_normalize_utf32(&*begin, end - begin, kOptions);
    DENOISED_CHECK(count >= 0, "utf8proc: {}", count);
    composed.append(begin, begin + count);
    begin = end;
  }
  return composed;
}

void AppendLowerCase(char32_t point, std::u32string* text) {
  if (point == U'\u0130') {
    *text += U"i\u0307";
    return;
  }
  text->push_back(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(point))));
}

bool IsLetter(char32_t point) {
  const utf8proc_category_t category = Category(point);
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}

bool IsNumber(char32_t point) {
  const utf8proc_category_t category = Category(point);
  return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
}

bool IsSpace(char32_t point) {
  const utf8proc_category_t category = Category(point);
  return (category >= UTF8PROC_CATEGORY_ZS && category <= UTF8PROC_CATEGORY_ZP) ||
         (point >= U'\t' && point <= U'\r') || point == U'\u0085';
}

}  // namespace denoised
