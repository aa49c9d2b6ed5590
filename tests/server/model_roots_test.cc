// SPDX-License-Identifier: Apache-2.0
#include "server/models/model_roots.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/io/temporary_directory.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class ModelRootsTest : public ::testing::Test {
 protected:
  std::string Dir(const std::string& name) const {
    fs::create_directories(root_ / name);
    return root_ / name;
  }
  const TemporaryDirectory root_;
};

TEST_F(ModelRootsTest, ByDefaultTheDirectoriesThatTheModelsReallyLieIn) {
  Dir("data/v7");
  Dir("data/v8");
  Dir("links/other");
  fs::create_directory_symlink(root_ / "data/v7", root_ / "links/current");
  const auto roots = *ModelRoots::Make({}, {{"m", root_ / "links/current"}, {"gone", "/absent"}});
  EXPECT_EQ(*roots.Resolve(root_ / "data/v8"), root_ / "data/v8");
  EXPECT_EQ(*roots.Resolve(root_ / "links/current"), root_ / "data/v7");
  EXPECT_FALSE(roots.Resolve(root_ / "links/other").ok());
  EXPECT_FALSE(roots.Resolve(root_.path()).ok());
}

TEST_F(ModelRootsTest, TheDirectoryOfAllModelsIsARootIfTheyAreLinks) {
  Dir("data/v7");
  Dir("links/added");
  fs::create_directory_symlink(root_ / "data/v7", root_ / "links/current");
  const std::vector<ModelSource> models = {{"current", root_ / "links/current"}};
  const auto roots = *ModelRoots::Make({}, models, root_ / "links");
  EXPECT_EQ(*roots.Resolve(root_ / "links/current"), root_ / "data/v7");
  EXPECT_EQ(*roots.Resolve(root_ / "links/added"), root_ / "links/added");
  EXPECT_FALSE(roots.Resolve(root_.path()).ok());
  const auto given = *ModelRoots::Make({root_ / "data"}, models, root_ / "links");
  EXPECT_FALSE(given.Resolve(root_ / "links/added").ok()) << "--model-roots says which";
}

TEST_F(ModelRootsTest, AModelInTheRootOfTheFileSystemMakesItselfARootAlone) {
  const auto roots = *ModelRoots::Make({}, {{"m", "/tmp"}});
  EXPECT_TRUE(roots.Resolve("/tmp").ok());
  EXPECT_TRUE(roots.Resolve(root_.path()).ok());
  EXPECT_FALSE(roots.Resolve("/etc").ok());
  EXPECT_FALSE(roots.Resolve("/").ok());
}

TEST_F(ModelRootsTest, WhatIsElsewhereAndWhatIsNotThereReadTheSame) {
  const auto roots = *ModelRoots::Make({Dir("models")}, {{"m", "/tmp"}});
  Dir("models-private");
  const auto reason = [&](const std::string& directory) {
    const std::string message(roots.Resolve(directory).status().message());
    return message.substr(message.find("\" is not"));
  };
  const std::string absent = reason(root_ / "models/absent");
  EXPECT_THAT(absent, HasSubstr(root_ / "models"));
  for (const std::string& directory :
       {std::string("/etc"), std::string("/no/such/place"), std::string("/etc/passwd"),
        root_ / "models-private", root_ / "models/..", root_.Write("models/file", ""),
        std::string(""), std::string("\0/etc", 5), root_ / "models" + std::string("\0x", 2)}) {
    EXPECT_EQ(reason(directory), absent) << directory;
  }
  EXPECT_EQ(ModelRoots().Resolve(root_ / "models").status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(ModelRootsTest, FindsAModelByItsName) {
  root_.Write("a/cats/config.json", "{}");
  root_.Write("b/cats/config.json", "{}");
  root_.Write("b/dogs/model_index.json", "{}");
  Dir("b/empty");
  const auto roots = *ModelRoots::Make({root_ / "a", root_ / "b"}, {});
  EXPECT_EQ(*roots.Find("cats"), root_ / "a/cats") << "the first root wins";
  EXPECT_EQ(*roots.Find("dogs"), root_ / "b/dogs");
  EXPECT_EQ(roots.Find("empty").status().code(), absl::StatusCode::kNotFound);
  root_.Write("config.json", "{}");
  EXPECT_FALSE(roots.Find("..").ok());
}

}  // namespace
}  // namespace denoised
