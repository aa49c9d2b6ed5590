// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/log.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace denoised::log {
namespace {

TEST(LogTest, TextIsOneLineOfWords) {
  EXPECT_EQ(Render(Format::kText, "T", Level::kInfo, "request",
                   {{"code", "OK"}, {"seconds", 0.25}, {"id", "a b\n\"c"}, {"empty", ""}}),
            "T info    request code=OK seconds=0.25 id=\"a b\\n\\\"c\" empty=\"\"");
}

TEST(LogTest, JsonIsOneObject) {
  const std::string line = Render(Format::kJson, "T", Level::kError, "bad \"thing\"\n",
                                  {{"id", "\xff\x01"}, {"count", 3}});
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const auto json = nlohmann::json::parse(line);
  EXPECT_EQ(json["time"], "T");
  EXPECT_EQ(json["level"], "error");
  EXPECT_EQ(json["message"], "bad \"thing\"\n");
  EXPECT_NE(line.find("\"count\":3}"), std::string::npos);
}

/// U+009B begins an escape sequence in a terminal, as ESC does; others move or hide text.
TEST(LogTest, CharactersThatControlATerminalAreEscaped) {
  const std::pair<const char*, const char*> cases[] = {{"\x1b[31m", "\\u001b[31m"},
                                                       {"\x7f", "\\u007f"},
                                                       {"\xc2\x80", "\\u0080"},
                                                       {"\xc2\x9b[2J", "\\u009b[2J"},
                                                       {"\xc2\x9f", "\\u009f"},
                                                       {"\xd8\x9c", "\\u061c"},
                                                       {"\xe2\x80\x8e", "\\u200e"},
                                                       {"\xe2\x80\xa8", "\\u2028"},
                                                       {"\xe2\x80\xa9", "\\u2029"},
                                                       {"\xe2\x80\xae"
                                                        "a",
                                                        "\\u202ea"},
                                                       {"\xe2\x81\xa6", "\\u2066"},
                                                       {"\xe2\x81\xa9", "\\u2069"}};
  for (const auto& [value, escaped] : cases) {
    EXPECT_EQ(Render(Format::kText, "T", Level::kInfo, "m", {{"alias", value}}),
              fmt::format("T info    m alias=\"{}\"", escaped));
    const std::string line = Render(Format::kJson, "T", Level::kInfo, value, {{"alias", value}});
    EXPECT_EQ(line, fmt::format(R"({{"time":"T","level":"info","message":"{0}","alias":"{0}"}})",
                                escaped));
    EXPECT_EQ(nlohmann::json::parse(line)["alias"], value) << "the same text";
  }
}

TEST(LogTest, OtherTextsAreAsTheyWere) {
  // U+00A0, ä, U+2030, 猫 and an emoji of four bytes.
  for (const char* value :
       {"\xc2\xa0", "\xc3\xa4", "\xe2\x80\xb0", "\xe7\x8c\xab", "\xf0\x9f\x98\x80"}) {
    EXPECT_EQ(Render(Format::kText, "T", Level::kInfo, "m", {{"alias", value}}),
              fmt::format("T info    m alias={}", value));
  }
  // A byte that is no UTF-8 is a control character to some terminals.
  EXPECT_EQ(Render(Format::kText, "T", Level::kInfo, "m", {{"alias", "a\x9b"}}),
            "T info    m alias=\"a\xef\xbf\xbd\"");
}

}  // namespace
}  // namespace denoised::log
