// SPDX-License-Identifier: Apache-2.0
// The files of published pipelines but for their weights: tests/models/pipelines. The models are
// loaded at their sizes by tests/models.

#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "engine/models/registry.h"
#include "engine/pipelines/pipeline.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;

struct Published {
  Sampler sampler;
  double guidance_scale;
  int steps;
  std::vector<int> steps_taken;  // that people draw in
};

const std::map<std::string, Published> kPublished = {
    {"sd15", {Sampler::kPndm, 7.5, 50, {25, 50}}},
    {"sd21", {Sampler::kDdim, 7.5, 50, {25, 50}}},
    {"sd-turbo", {Sampler::kEuler, 7.5, 50, {1, 4}}},
    {"sdxl", {Sampler::kEuler, 5, 50, {30, 50}}},
    {"sdxl-lcm", {Sampler::kLcm, 5, 50, {1, 4, 8}}},
    {"sdxl-turbo", {Sampler::kEulerAncestral, 5, 50, {1, 4}}},
};

TEST(PublishedPipelines, AreReadWithTheirDefaults) {
  int found = 0;
  for (const auto& entry : fs::directory_iterator(DENOISED_SOURCE_DIR "/tests/models/pipelines")) {
    const std::string name = entry.path().filename();
    SCOPED_TRACE(name);
    ASSERT_TRUE(kPublished.contains(name)) << "add it to the list";
    ++found;
    const Published& published = kPublished.at(name);
    const auto files = PipelineFiles::Read(entry.path());
    ASSERT_TRUE(files.ok()) << files.status();
    EXPECT_EQ(files->scheduler.default_sampler(), published.sampler);
    EXPECT_EQ(files->defaults.guidance_scale, published.guidance_scale);
    EXPECT_EQ(files->defaults.steps, published.steps);
    EXPECT_TRUE(FindDenoiser(files->directory).ok());
    EXPECT_TRUE(FindCodec(files->directory, "vae").ok());
    EXPECT_TRUE(FindTextEncoder(files->directory, "text_encoder").ok());
    EXPECT_EQ(files->directory.components.contains("text_encoder_2"), name.starts_with("sdxl"));
    for (const int steps : published.steps_taken) {
      std::vector<ParamViolation> violations;
      const auto plan = files->scheduler.Compile({.steps = steps}, &violations);
      ASSERT_TRUE(plan.ok()) << plan.status();
      EXPECT_TRUE(violations.empty()) << violations[0].description;
      EXPECT_EQ(plan->steps, steps);
    }
  }
  EXPECT_EQ(found, static_cast<int>(kPublished.size()));
}

}  // namespace
}  // namespace denoised
