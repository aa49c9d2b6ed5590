// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/tuning_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/io/temporary_directory.h"

namespace denoised {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TuningFileTest : public testing::Test {
 protected:
  /// Of the folder "cache/denoised", which is not there at first.
  TuningFile File(const std::string& device = "H200, 132 SMs", const std::string& kernels = "1f") {
    return TuningFile(directory_ / "cache/denoised/H200.json", device, kernels);
  }
  TunedChoices Read(const TuningFile& file) {
    const auto choices = file.Read();
    EXPECT_TRUE(choices.ok()) << choices.status();
    return choices.value_or(TunedChoices());
  }

  TemporaryDirectory directory_;
};

TEST_F(TuningFileTest, GivesBackWhatWasAdded) {
  EXPECT_THAT(Read(File()), IsEmpty());
  ASSERT_TRUE(File().Add({{"a layer", "64x64"}, {"another \"layer\"", "128x128"}}).ok());
  EXPECT_EQ(Read(File()), (TunedChoices{{"a layer", "64x64"}, {"another \"layer\"", "128x128"}}));
  ASSERT_TRUE(File().Add({{"a layer", "128x192"}, {"a third", "64x64"}}).ok());
  EXPECT_EQ(Read(File()),
            (TunedChoices{
                {"a layer", "128x192"}, {"another \"layer\"", "128x128"}, {"a third", "64x64"}}));
  for (const auto& left :
       std::filesystem::directory_iterator(std::filesystem::path(File().path()).parent_path())) {
    EXPECT_EQ(left.path().filename(), "H200.json");
    EXPECT_EQ(left.status().permissions() & std::filesystem::perms::all,
              std::filesystem::perms(0644))
        << "other users' servers may read it";
  }
}

TEST_F(TuningFileTest, IsOfOneDeviceAndOneBuild) {
  ASSERT_TRUE(File().Add({{"a layer", "64x64"}}).ok());
  EXPECT_THAT(Read(File("H200, 66 SMs")), IsEmpty());
  EXPECT_THAT(Read(File("H200, 132 SMs", "2e")), IsEmpty());
  ASSERT_TRUE(File("H200, 132 SMs", "2e").Add({{"another", "128x32"}}).ok());
  EXPECT_EQ(Read(File("H200, 132 SMs", "2e")), (TunedChoices{{"another", "128x32"}}));
  EXPECT_THAT(Read(File()), IsEmpty());
}

TEST_F(TuningFileTest, OtherVersionsAreMeasuredAnew) {
  for (const char* version : {"", "\"version\": 1, ", "\"version\": 3, "}) {
    directory_.Write("cache/denoised/H200.json",
                     std::string("{") + version +
                         "\"device\": \"H200, 132 SMs\", "
                         "\"kernels\": \"1f\", \"choices\": {\"a layer\": \"patch128\"}}");
    EXPECT_THAT(Read(File()), IsEmpty()) << version;
    ASSERT_TRUE(File().Add({{"another", "64x64"}}).ok());
    EXPECT_EQ(Read(File()), (TunedChoices{{"another", "64x64"}})) << version;
  }
}

TEST_F(TuningFileTest, WhatIsGarbledIsNamedAndReplaced) {
  for (const char* text : {"", "{", "[1]", "{\"version\": 2, \"device\": 1}",
                           "{\"version\": \"two\"}", "{\"version\": 2.5}", "{\"version\": []}",
                           "{\"version\": 2, \"device\": \"H200, 132 SMs\", \"kernels\": \"1f\"}",
                           "{\"version\": 2, \"device\": \"H200, 132 SMs\", \"kernels\": \"1f\", "
                           "\"choices\": [\"64x64\"]}",
                           "{\"version\": 2, \"device\": \"H200, 132 SMs\", \"kernels\": \"1f\", "
                           "\"choices\": {\"a layer\": 64}}",
                           "{\"version\": 2, \"device\": \"H200, 132 SMs\", \"kernels\": \"1f\", "
                           "\"choices\": {}, \"wags\": {}}"}) {
    directory_.Write("cache/denoised/H200.json", text);
    const auto choices = File().Read();
    ASSERT_FALSE(choices.ok()) << text;
    EXPECT_EQ(choices.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(choices.status().message()), HasSubstr("cache/denoised/H200.json"))
        << text;
    EXPECT_THAT(std::string(choices.status().message()), HasSubstr("measured again")) << text;
    ASSERT_TRUE(File().Add({{"a layer", "64x64"}}).ok());
    EXPECT_EQ(Read(File()), (TunedChoices{{"a layer", "64x64"}})) << text;
  }
}

TEST_F(TuningFileTest, SaysWhyItCannotBeWritten) {
  directory_.Write("cache", "a file where the directory should be");
  const absl::Status status = File().Add({{"a layer", "64x64"}});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cache/denoised/H200.json"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("Not a directory"));
}

}  // namespace
}  // namespace denoised
