// SPDX-License-Identifier: Apache-2.0
// Text to image through the engine: whole runs against diffusers' pipelines, from the same noise
// (tests/models/latent/README.md), and what a request may ask for.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "engine/core/config_reader.h"
#include "engine/engine.h"
#include "engine/io/safetensors.h"
#include "tests/engine/submit.h"
#include "tests/models/golden.h"
#include "tests/needs_gpu.h"

namespace denoised {
namespace {

namespace fs = std::filesystem;

fs::path Latent(const std::string& family) {
  return fs::path(DENOISED_SOURCE_DIR "/tests/models/latent") / family;
}

struct Target {
  const char* name;
  EngineOptions options;
  double tolerance;  // of ‖image − reference‖ / ‖reference‖
};

class TextToImageParity
    : public ::testing::TestWithParam<std::tuple<const char*, const char*, Target>> {};

TEST_P(TextToImageParity, FromTheSameNoiseToTheSameImage) {
  const auto& [family, sampler, target] = GetParam();
  if (target.options.device == "cuda") DENOISED_NEEDS_GPU();
  const auto goldens = ReadJsonFile(Latent(family) / "goldens.json");
  ASSERT_TRUE(goldens.ok()) << goldens.status();
  const auto& run = goldens->at("run");
  const auto tensors = Safetensors::Open(Latent(family) / "goldens.safetensors");
  ASSERT_TRUE(tensors.ok()) << tensors.status();

  auto engine = Engine::Create(target.options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const absl::Status opened = (*engine)->Open("model", Latent(family));
  ASSERT_TRUE(opened.ok()) << opened;

  const Tensor noise = ToNhwc(tensors->tensors().at("run.noise"));
  JobSpec spec{.model = "model", .seed = 1, .count = static_cast<int>(noise.dim(0))};
  spec.initial_noise = noise;
  for (size_t i = 0; i < run["prompts"].size(); ++i)
    spec.prompts.push_back(
        {.text = run["prompts"][i], .negative = run["negative_prompts"][i].get<std::string>()});
  if (goldens->contains("sizes")) {
    const auto& sizes = goldens->at("sizes");
    spec.sizes = {.original_size = sizes["original_size"].get<std::array<int, 2>>(),
                  .crop = sizes["crops_coords_top_left"].get<std::array<int, 2>>(),
                  .target_size = sizes["target_size"].get<std::array<int, 2>>()};
  }
  spec.sampler.steps = run["steps"];
  spec.sampler.sampler = std::string(sampler) == "ddim" ? Sampler::kDdim : Sampler::kEuler;
  spec.guidance_scale = run["guidance_scale"].get<double>();
  const auto job = Submit(**engine, spec);
  const absl::Status done = job->Wait();
  ASSERT_TRUE(done.ok()) << done;

  std::vector<float> drawn;
  for (const auto& [index, image] : job->images())
    for (const float value : image)  // as diffusers returns them
      drawn.push_back(std::clamp(value / 2 + 0.5f, 0.0f, 1.0f));
  const Tensor expected = ToNhwc(tensors->tensors().at(fmt::format("run.{}.image", sampler)));
  const double error = RelativeError(drawn, expected.span<float>());
  EXPECT_LE(error, target.tolerance);
  RecordProperty("relative_error", std::to_string(error));
}

const Target kTargets[] = {
    {"cpu", {.device = "cpu"}, 1e-4},
    {"cuda_fp32", {.device = "cuda", .fp32 = true}, 1e-4},
    {"cuda_bf16", {.device = "cuda"}, 5e-2},
};

INSTANTIATE_TEST_SUITE_P(Diffusers, TextToImageParity,
                         ::testing::Combine(::testing::Values("sd1", "sd2", "sdxl"),
                                            ::testing::Values("ddim", "euler"),
                                            ::testing::ValuesIn(kTargets)),
                         [](const auto& info) {
                           return fmt::format("{}_{}_{}", std::get<0>(info.param),
                                              std::get<1>(info.param),
                                              std::get<2>(info.param).name);
                         });

}  // namespace
}  // namespace denoised
