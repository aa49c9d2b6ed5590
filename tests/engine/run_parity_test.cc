// SPDX-License-Identifier: Apache-2.0
// Whole sampling runs from given noise through the engine, against diffusers' pipelines. The
// goldens are made by tests/reference/make_pipeline_goldens.py.

#include <gtest/gtest.h>

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

struct RunTarget {
  const char* name;
  EngineOptions options;
  double tolerance;  // of ‖image − reference‖ / ‖reference‖
};

/// fp32: rounding of one evaluation, up to 2e-6, over ten; bf16 keeps eight bits of each
/// activation, and the error of one evaluation feeds the next.
std::vector<RunTarget> RunTargets() {
  return {{"cpu", {.device = "cpu"}, 1e-4},
          {"cuda_fp32", {.device = "cuda", .fp32 = true}, 1e-4},
          {"cuda_bf16", {.device = "cuda"}, 5e-2}};
}

class RunParity : public ::testing::TestWithParam<std::tuple<std::string, RunTarget>> {};

TEST_P(RunParity, FromTheSameNoiseToTheSameImage) {
  const auto& [name, target] = GetParam();
  if (target.options.device == "cuda") DENOISED_NEEDS_GPU();
  const fs::path directory = Goldens() / name;
  const auto run = ReadJsonFile(directory / "run.json");
  ASSERT_TRUE(run.ok()) << run.status();
  const auto tensors = Safetensors::Open(directory / "run.safetensors");
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  const Tensor noise = ToNhwc(tensors->tensors().at("noise"));
  const Tensor expected = ToNhwc(tensors->tensors().at("image"));

  auto engine = Engine::Create(target.options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const bool own_model = fs::exists(directory / "model_index.json");
  const absl::Status opened = (*engine)->Open(
      "model", own_model ? directory.string() : DENOISED_SOURCE_DIR "/models/mnist-32");
  ASSERT_TRUE(opened.ok()) << opened;

  JobSpec spec{.model = "model", .seed = 1, .count = static_cast<int>(noise.dim(0))};
  spec.initial_noise = noise;
  spec.sampler.steps = (*run)["steps"];
  spec.guidance_scale = (*run)["guidance_scale"].get<double>();
  if (const auto labels = tensors->tensors().find("class_labels");
      labels != tensors->tensors().end())
    for (const int64_t label : labels->second.span<int64_t>())
      spec.class_labels.push_back(static_cast<int>(label));
  const auto job = Submit(**engine, spec);
  const absl::Status done = job->Wait();
  ASSERT_TRUE(done.ok()) << done;

  std::vector<float> drawn;
  for (const auto& [index, image] : job->images())
    drawn.insert(drawn.end(), image.begin(), image.end());
  const double error = RelativeError(drawn, expected.span<float>());
  EXPECT_LE(error, target.tolerance);
  RecordProperty("relative_error", std::to_string(error));
  std::printf("%s on %s: relative error %.2g\n", name.c_str(), target.name, error);
}

INSTANTIATE_TEST_SUITE_P(Diffusers, RunParity,
                         ::testing::Combine(::testing::ValuesIn(GoldensWith("run.json")),
                                            ::testing::ValuesIn(RunTargets())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace denoised
