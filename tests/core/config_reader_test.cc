// SPDX-License-Identifier: Apache-2.0
#include "engine/core/config_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace denoised {
namespace {

using ::testing::HasSubstr;

ConfigReader Reader(const std::string& text) {
  return ConfigReader(nlohmann::json::parse(text), "config.json");
}

TEST(ConfigReader, AbsentAndNullKeepDefaults) {
  ConfigReader config = Reader(R"({"a": null})");
  int a = 7;
  std::optional<int> b;
  config.Read("a", &a);
  config.Read("b", &b);
  EXPECT_EQ(a, 7);
  EXPECT_FALSE(b.has_value());
  EXPECT_TRUE(config.Finish().ok());
}

TEST(ConfigReader, ANullBoolIsFalse) {
  ConfigReader config = Reader(R"({"null": null})");
  bool null = true, absent = true;
  std::optional<bool> optional;
  config.Read("null", &null);
  config.Read("absent", &absent);
  config.Read("null", &optional);
  EXPECT_FALSE(null);
  EXPECT_TRUE(absent);
  EXPECT_EQ(optional, std::optional(false));
}

TEST(ConfigReader, ReportsEveryComplaintAtOnce) {
  ConfigReader config = Reader(
      R"({"eps": "small", "big": 99999999999, "layers": [1, "x"], "fir": true, "odd": 1, "_v": 2})");
  double eps = 1;
  int big = 0;
  std::vector<int> layers;
  config.Read("eps", &eps);
  config.Read("big", &big);
  config.Read("layers", &layers);
  config.Refuse("fir", false);
  const std::string message(config.Finish().message());
  EXPECT_THAT(message, HasSubstr("config.json: field 'eps' is \"small\": expected a number"));
  EXPECT_THAT(message, HasSubstr("'big' is 99999999999: expected an integer from -2147483648 to "
                                 "2147483647"));
  EXPECT_THAT(message, HasSubstr("'layers' is [1,\"x\"]: expected a list of integers"));
  EXPECT_THAT(message, HasSubstr("'fir' is true: not supported; only false is"));
  EXPECT_THAT(message, HasSubstr("'odd' is 1: unknown field"));
  EXPECT_THAT(message, ::testing::Not(HasSubstr("_v")));
}

TEST(ConfigReader, ARangeIncludesItsEnds) {
  ConfigReader reader(nlohmann::json{{"low", 1}, {"high", 4}, {"beyond", 5}}, "config.json");
  reader.Ignore({"low", "high", "beyond"});
  reader.CheckRange("low", 1, 1, 4);
  reader.CheckRange("high", 4, 1, 4);
  reader.CheckRange("beyond", 5, 1, 4);
  reader.CheckRange("not a number", std::nan(""), 1, 4);
  EXPECT_EQ(reader.Finish().message(),
            "config.json: field 'beyond' is 5: must be between 1 and 4\n"
            "config.json: field 'not a number': must be between 1 and 4");
}

TEST(ConfigReader, AnOptionalOfTheWrongTypeStaysUnset) {
  ConfigReader config = Reader(R"({"steps": 1000000000000, "null": null})");
  std::optional<int> steps;
  config.Read("steps", &steps);
  EXPECT_EQ(steps, std::nullopt);
  config.RefuseNull("steps");
  config.RefuseNull("absent");
  EXPECT_THAT(std::string(config.Finish().message()),
              ::testing::Not(HasSubstr("leave the field out")));
  config.RefuseNull("null");
  EXPECT_THAT(std::string(config.Finish().message()),
              HasSubstr("'null' is null: expected a value; leave the field out for its default"));
}

TEST(ConfigReader, AnIntegerIsANumber) {
  ConfigReader config = Reader(R"({"scale": 1})");
  double scale = 0;
  config.Read("scale", &scale);
  EXPECT_EQ(scale, 1.0);
  EXPECT_TRUE(config.Finish().ok());
}

/// Helm and jq write large whole numbers in float notation.
TEST(FlagText, WholeNumbersHaveNoPointAndNoExponent) {
  for (const auto& [json, text] : std::vector<std::pair<const char*, const char*>>{
           {"1e+06", "1000000"},
           {"8.0", "8"},
           {"-8.0", "-8"},
           {"-0.0", "0"},
           {"9007199254740992.0", "9007199254740992"},
           {"18446744073709551615", "18446744073709551615"},
           {"0.25", "0.25"},
           {"1e-4", "0.0001"},
           {"1e300", "1e+300"},
           {"true", "true"},
           {"\"010\"", "010"},
           {"\"\"", ""}}) {
    EXPECT_EQ(FlagText(nlohmann::json::parse(json)), text) << json;
  }
  for (const char* json : {"null", "[1]", "{}"})
    EXPECT_EQ(FlagText(nlohmann::json::parse(json)), std::nullopt) << json;
}

/// diffusers writes -Infinity where there is no limit. Nothing else that Python writes is a number.
TEST(ParseJsonObject, PythonsInfinityBelowIsNullAndOthersAreRefusedByName) {
  const auto parsed = ParseJsonObject(
      R"({"a": -Infinity, "b": [NaN, 1], "c": "-Infinity \" NaN", "d": Infinity, "e": NaN})",
      "c.json");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_TRUE((*parsed)["a"].is_null());
  EXPECT_EQ((*parsed)["c"], "-Infinity \" NaN");
  ConfigReader reader(*parsed, "c.json");
  double a = 1, d = 1;
  std::vector<double> b;
  std::optional<std::string> e;
  reader.Read("a", &a);
  reader.Read("b", &b);
  reader.Ignore({"c"});
  reader.Read("d", &d);
  reader.Read("e", &e);
  EXPECT_EQ(reader.Finish().message(),
            "c.json: field 'b' is [NaN,1]: expected a list of numbers\n"
            "c.json: field 'd' is Infinity: expected a number\n"
            "c.json: field 'e' is NaN: expected a string");
}

TEST(ParseJsonObject, RefusesWhatIsNoConfig) {
  for (const std::string& text :
       {std::string(), std::string("[1]"), std::string("{\"a\": "), std::string("{\"a\": 1} x"),
        std::string("\xff\xfe"), std::string(100000, '['), std::string("{\"a\": 1}\0", 9),
        std::string("{\"a\": 1}\0{}", 11)}) {
    const auto parsed = ParseJsonObject(text, "bad.json");
    ASSERT_FALSE(parsed.ok());
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("bad.json"));
  }
}

TEST(ParseJsonObject, NamesTheLineThatIsWrong) {
  const auto message = [](const std::string& text) {
    return std::string(ParseJsonObject(text, "run.json").status().message());
  };
  const std::string end = "; mend it or write the file again";
  EXPECT_EQ(message("{\n  \"a\": NaN,\n  \"b\": 2,\n}\n"),
            "run.json: is not valid JSON (line 4)" + end);
  EXPECT_EQ(message("{\n  \"a\": 1\n  \"b\": 2\n}\n"),
            "run.json: is not valid JSON (line 3)" + end);
  // The parser finds these at the end of their line, or of the text.
  for (const char* second : {"\"a\": \"open,", "\"a\": 1.", "\"a\": tru"})
    EXPECT_EQ(message(std::string("{\n") + second + "\n\"b\": 2\n}\n"),
              "run.json: is not valid JSON (line 2)" + end)
        << second;
  EXPECT_EQ(message("{\n\"a\": 1,\n\n"), "run.json: is not valid JSON (line 2)" + end);
  EXPECT_EQ(message("{\"a\": 1,}"), "run.json: is not valid JSON" + end);
  EXPECT_EQ(message("{\n\"a\": 1e999}"), "run.json: is not valid JSON" + end);
}

TEST(ParseJsonObject, RefusesAKeyGivenTwice) {
  for (const std::string& text :
       {std::string(R"({"steps": 1, "batch": 2, "steps": 3})"),
        std::string(R"({"a": [{"steps": 1}, {"steps": 1, "b": {}, "steps": 1}]})")}) {
    const auto parsed = ParseJsonObject(text, "run.json");
    EXPECT_EQ(parsed.status(), InvalidArgument("run.json: has \"steps\" twice; give it once"));
  }
  EXPECT_TRUE(ParseJsonObject(R"({"a": {"a": [{"a": 1}, {"a": 1}]}, "b": {"a": 1}})", "c").ok());
}

TEST(ParseJsonObject, BoundsTheDepth) {
  EXPECT_TRUE(ParseJsonObject(R"({"a": {"b": [1, 2]}})", "c.json", 3).ok());
  const auto parsed = ParseJsonObject(R"({"a": {"b": [{"d": 1, "d": 2}]}})", "c.json", 3);
  EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("c.json: is nested deeper than 3"));
}

}  // namespace
}  // namespace denoised
