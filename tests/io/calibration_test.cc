// SPDX-License-Identifier: Apache-2.0
#include "engine/io/calibration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/io/temporary_directory.h"

namespace denoised {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kWeights[] = "9f86d081884c7d65";
const Calibration kCalibration = {.weights = kWeights,
                                  .input_scales = {{"conv1", 0.03125f}, {"conv2", 0}}};

std::string Error(const char* text) {
  return std::string(Calibration::Parse(nlohmann::json::parse(text), "a.json").status().message());
}

TEST(Calibration, IsReadAsItWasWritten) {
  const nlohmann::json json = kCalibration.ToJson();
  EXPECT_TRUE(json["input_scales"]["conv2"].is_null());
  const auto read = Calibration::Parse(json, "a.json");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->weights, kWeights);
  EXPECT_EQ(read->input_scales, kCalibration.input_scales);
}

TEST(Calibration, ErrorsNameTheField) {
  EXPECT_THAT(Error(R"({"format": 2, "weights": "a", "input_scales": {}})"), HasSubstr("'format'"));
  EXPECT_THAT(Error(R"({"format": 1, "input_scales": {}})"), HasSubstr("'weights'"));
  EXPECT_THAT(Error(R"({"format": 1, "weights": "a"})"), HasSubstr("'input_scales'"));
  for (const char* scale : {"0.3", "0", "-0.5", "\"a\"", "true", "1e300"})
    EXPECT_THAT(Error((R"({"format": 1, "weights": "a", "input_scales": {"conv1": )" +
                       std::string(scale) + "}}")
                          .c_str()),
                AllOf(HasSubstr("'conv1'"), HasSubstr("power of two")))
        << scale;
}

TEST(Calibration, IsFoundInTheDirectoryAndThenBesideTheModel) {
  TemporaryDirectory model, directory;
  const auto find = [&](const std::string& where) {
    return Calibration::Find(model.path(), where, kWeights);
  };
  EXPECT_EQ(find("").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(find(directory.path()).status().message()),
              AllOf(HasSubstr("fp8.json"), HasSubstr(kWeights), HasSubstr("denoised --calibrate")));

  Calibration other = kCalibration;
  other.input_scales["conv1"] = 2;
  model.Write("fp8.json", other.ToJson().dump());
  EXPECT_EQ(find("")->input_scales.at("conv1"), 2);
  EXPECT_EQ(find(directory.path())->input_scales.at("conv1"), 2);
  directory.Write(std::string(kWeights) + ".json", kCalibration.ToJson().dump());
  EXPECT_EQ(find(directory.path())->input_scales.at("conv1"), 0.03125f);

  other.weights = "0000000000000000";
  model.Write("fp8.json", other.ToJson().dump());
  const auto stale = find("");
  EXPECT_EQ(stale.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(stale.status().message()),
              AllOf(HasSubstr("fp8.json"), HasSubstr("0000000000000000"), HasSubstr(kWeights)));
}

}  // namespace
}  // namespace denoised
