// SPDX-License-Identifier: Apache-2.0
#include "engine/text/unicode.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace denoised {
namespace {

using ::testing::HasSubstr;

TEST(UnicodeTest, DecodesUtf8) {
  const auto points = DecodeUtf8("aé€😀");
  ASSERT_TRUE(points.ok()) << points.status();
  EXPECT_EQ(*points, U"aé€😀");
  std::string text;
  for (const char32_t point : *points) AppendUtf8(point, &text);
  EXPECT_EQ(text, "aé€😀");
}

TEST(UnicodeTest, NamesTheByteThatIsWrong) {
  for (const std::string text : {
           "ab\xff",             // no lead byte
           "ab\x80",             // a continuation without a lead
           "ab\xc3",             // cut off
           "ab\xe2\x82",         // cut off
           "ab\xc0\xaf",         // overlong
           "ab\xed\xa0\x80",     // a surrogate
           "ab\xf4\x90\x80\x80"  // beyond U+10FFFF
       }) {
    const auto points = DecodeUtf8(text);
    EXPECT_EQ(points.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(points.status().message()), HasSubstr("not UTF-8 at byte 2"));
  }
  const auto points = DecodeUtf8(std::string_view("a\0b", 3));
  EXPECT_THAT(std::string(points.status().message()), HasSubstr("NUL character at byte 1"));
}

TEST(UnicodeTest, ReplacesWhatIsNotUtf8) {
  EXPECT_EQ(ReplaceInvalidUtf8("é€"), "é€");
  EXPECT_EQ(ReplaceInvalidUtf8("\xa9 a\xe2\x82 b"), "\uFFFD a\uFFFD\uFFFD b");
}

// UAX 15: composition, exclusions, singletons, Hangul, order of marks.
TEST(UnicodeTest, Composes) {
  EXPECT_EQ(ComposeCanonically(U"plain é"), U"plain é");
  EXPECT_EQ(ComposeCanonically(U"e\u0301"), U"é");
  EXPECT_EQ(ComposeCanonically(U"\u212b"), U"\u00c5");        // the Ångström sign
  EXPECT_EQ(ComposeCanonically(U"\u0958"), U"\u0915\u093c");  // excluded from composition
  EXPECT_EQ(ComposeCanonically(U"\u1112\u1161\u11ab"), U"한");
  EXPECT_EQ(ComposeCanonically(U"가\u11a7\u11a7가\u11a8"), U"가\u11a7\u11a7각");
  EXPECT_EQ(ComposeCanonically(U"a\u0302\u0323"), U"\u1ead");        // sorted first
  EXPECT_EQ(ComposeCanonically(U"a\u0315\u0300"), U"\u00e0\u0315");  // past a mark of higher class
  EXPECT_EQ(ComposeCanonically(U"a\u0300\u0301"), U"\u00e0\u0301");  // blocked
  EXPECT_EQ(ComposeCanonically(U"\u0301\u0327"), U"\u0327\u0301");   // without a starter
}

TEST(UnicodeTest, LowersEachCodePointByItself) {
  const auto lower = [](std::u32string_view text) {
    std::u32string result;
    for (const char32_t point : text) AppendLowerCase(point, &result);
    return result;
  };
  EXPECT_EQ(lower(U"AÉЖ𐐀"), U"aéж𐐨");
  EXPECT_EQ(lower(U"ΟΣ"), U"οσ");        // not ς
  EXPECT_EQ(lower(U"İI"), U"i\u0307i");  // two code points
  EXPECT_EQ(lower(U"ẞß"), U"ßß");
}

TEST(UnicodeTest, KnowsClasses) {
  for (const char32_t letter : std::u32string_view(U"aßΣ字ªʰǅ")) EXPECT_TRUE(IsLetter(letter));
  for (const char32_t number : std::u32string_view(U"0٣½Ⅷ²")) EXPECT_TRUE(IsNumber(number));
  for (const char32_t space : std::u32string_view(U" \t\r\n\u00a0\u0085\u1680\u2009\u2028\u3000"))
    EXPECT_TRUE(IsSpace(space));
  for (const char32_t other : std::u32string_view(U"_\u0301\u200b\u180e\ufeff\u001c😀")) {
    EXPECT_FALSE(IsLetter(other));
    EXPECT_FALSE(IsNumber(other));
    EXPECT_FALSE(IsSpace(other)) << static_cast<uint32_t>(other);
  }
}

}  // namespace
}  // namespace denoised
