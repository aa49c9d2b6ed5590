// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/log.h"

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

}  // namespace
}  // namespace denoised::log
