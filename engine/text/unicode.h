// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "engine/core/status.h"

/// Character classes and mappings for tokenizers, from the tables of utf8proc (Unicode 15.0 in
/// Debian 12). Code points of later versions belong to no class and are not changed. Every function
/// takes linear time in the length of its text, except that runs of combining marks are sorted.

namespace denoised {

/// InvalidArgument names the first byte that is not UTF-8 (surrogates and overlong forms are not),
/// or the first NUL.
absl::StatusOr<std::u32string> DecodeUtf8(std::string_view text);

/// `point` must be a Unicode scalar value.
void AppendUtf8(char32_t point, std::string* text);

/// Text of any bytes as valid UTF-8: U+FFFD stands for each byte that is not part of a character.
std::string ReplaceInvalidUtf8(std::string_view bytes);

/// Normalization Form C (Unicode Standard Annex 15).
std::u32string ComposeCanonically(std::u32string_view text);

/// Appends the lower case of one code point, whatever its neighbours: Σ becomes σ at the end of a
/// word too. İ becomes two code points.
void AppendLowerCase(char32_t point, std::u32string* text);

bool IsLetter(char32_t point);  // general category L
bool IsNumber(char32_t point);  // general category N
bool IsSpace(char32_t point);   // property White_Space

}  // namespace denoised
