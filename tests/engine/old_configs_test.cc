// SPDX-License-Identifier: Apache-2.0
// Configs of 2022 against what diffusers' constructors make of them; the list is made by
// tests/reference/make_latent_goldens.py.
#include "engine/pipelines/old_configs.h"

#include <gtest/gtest.h>

#include "engine/core/config_reader.h"

namespace denoised {
namespace {

nlohmann::json CorrectionsOf(const char* list) {
  const auto goldens =
      ReadJsonFile(DENOISED_SOURCE_DIR "/tests/models/latent/sd1_old/goldens.json");
  EXPECT_TRUE(goldens.ok()) << goldens.status();
  return goldens->at(list);
}

/// What is not among the changes stays as it is, and absent fields stay absent.
nlohmann::json Expected(const nlohmann::json& correction) {
  nlohmann::json expected = correction["config"];
  expected.update(correction["changed"]);
  return expected;
}

TEST(OldConfigs, SchedulersAreReadAsByDiffusers) {
  int changed = 0;
  for (const nlohmann::json& correction : CorrectionsOf("corrections")) {
    ModelDirectory directory;
    directory.pipeline_class = correction["pipeline"];
    directory.scheduler_config = correction["config"];
    CorrectOldConfigs(&directory);
    EXPECT_EQ(*directory.scheduler_config, Expected(correction)) << correction;
    changed += !correction["changed"].empty();
  }
  EXPECT_GT(changed, 60);
}

TEST(OldConfigs, SizesAreReadAsByDiffusers) {
  int changed = 0;
  for (const nlohmann::json& correction : CorrectionsOf("unet_corrections")) {
    ModelDirectory directory;
    directory.pipeline_class = correction["pipeline"];
    directory.components["unet"].config = correction["config"];
    CorrectOldConfigs(&directory);
    EXPECT_EQ(directory.components["unet"].config, Expected(correction)) << correction;
    changed += !correction["changed"].empty();
  }
  EXPECT_EQ(changed, 4);
}

/// The parts' own readers refuse these, and name the field.
TEST(OldConfigs, WhatHasAnotherTypeStays) {
  const nlohmann::json wrong[] = {
      {{"_class_name", 7}, {"steps_offset", "0"}, {"clip_sample", 1}},
      nlohmann::json::array({1, 2}),
      "text",
      {{"_class_name", "DDIMScheduler"}, {"steps_offset", true}, {"clip_sample", "true"}}};
  for (const nlohmann::json& config : wrong) {
    ModelDirectory directory;
    directory.pipeline_class = "StableDiffusionPipeline";
    directory.scheduler_config = config;
    directory.components["unet"].config = config;
    CorrectOldConfigs(&directory);
    EXPECT_EQ(*directory.scheduler_config, config);
    EXPECT_EQ(directory.components["unet"].config, config);
  }
  for (const nlohmann::json& version : nlohmann::json::array({"", "0", "0.", "x.1", "0.x", 0.8})) {
    ModelDirectory directory;
    directory.pipeline_class = "StableDiffusionPipeline";
    const nlohmann::json config = {{"_diffusers_version", version}, {"sample_size", 32}};
    directory.components["unet"].config = config;
    CorrectOldConfigs(&directory);
    EXPECT_EQ(directory.components["unet"].config, config) << version;
  }
}

}  // namespace
}  // namespace denoised
