// SPDX-License-Identifier: Apache-2.0
// Stable Diffusion 1.5 at its published size, with random weights.

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "tests/engine/submit.h"
#include "tests/io/temporary_directory.h"
#include "tests/needs_gpu.h"
#include "tests/synthetic_directory.h"

namespace denoised {
namespace {

/// Requests of two sizes, one no multiple of 64; with and without guidance, of several samplers,
/// and one from an image.
std::vector<JobSpec> Requests() {
  std::vector<JobSpec> specs;
  for (int i = 0; i < 8; ++i) {
    JobSpec spec{.model = "model", .seed = static_cast<uint64_t>(i), .count = 1 + i % 2};
    spec.prompts.push_back({.text = i % 3 ? "a red apple" : "thin threads in the oven"});
    if (i % 4 == 1) spec.prompts[0].negative = "blurry";
    spec.height = i % 4 == 3 ? 456 : 512;
    spec.width = i % 4 == 3 ? 520 : 512;
    spec.guidance_scale = i % 3 == 2 ? 1.0 : 2.0 + i;
    spec.sampler.steps = 3 + i % 3;
    spec.sampler.sampler = i % 2 ? Sampler::kEulerAncestral : Sampler::kDpmSolver;
    if (i == 5) {
      spec.init_image = Tensor::Host({512, 512, 3}, DType::kF32);
      for (size_t at = 0; float& value : spec.init_image.span<float>())
        value = 0.01f * static_cast<float>(at++ % 97);
      spec.sampler.strength = 0.7;
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

TEST(RealPipelineOnAGpu, BitsDoNotDependOnCompany) {
  DENOISED_NEEDS_GPU();
  const TemporaryDirectory directory;
  auto source = ModelDirectory::Read(DENOISED_SOURCE_DIR "/tests/models/pipelines/sd15");
  ASSERT_TRUE(source.ok()) << source.status();
  const absl::Status written = WriteSynthetic(*std::move(source), directory.path(), DType::kF16);
  ASSERT_TRUE(written.ok()) << written;

  EngineOptions options{.device = "cuda", .max_rows = 8, .max_slots = 6, .watchdog_seconds = 600};
  std::unique_ptr<Engine> engine;
  const auto open = [&] {
    engine.reset();
    auto created = Engine::Create(options);
    ASSERT_TRUE(created.ok()) << created.status();
    engine = *std::move(created);
    const absl::Status opened = engine->Open("model", directory.path());
    ASSERT_TRUE(opened.ok()) << opened;
  };
  const auto evaluations = [&] { return engine->Stats()[0].evaluations; };

  open();
  const std::vector<JobSpec> specs = Requests();
  JobSpec neighbour = specs[0];
  neighbour.seed = 1000;
  neighbour.sampler.steps = 900;
  JobId id;
  const auto cancelled = Submit(*engine, neighbour, &id);
  while (cancelled->progress() < 1 && !cancelled->done()) std::this_thread::yield();
  std::vector<std::shared_ptr<Collector>> together;
  for (const JobSpec& spec : specs) together.push_back(Submit(*engine, spec));
  while (together[0]->progress() < 2 && !together[0]->done()) std::this_thread::yield();
  engine->Cancel(id);
  for (const auto& job : together) ASSERT_TRUE(job->Wait().ok()) << job->Wait();
  EXPECT_TRUE(absl::IsCancelled(cancelled->Wait())) << cancelled->Wait();
  const uint64_t in_company = evaluations();

  options.autotune = false;  // other kernels, and no prompt of before
  open();
  for (size_t i = 0; i < specs.size(); ++i) {
    const auto alone = Submit(*engine, specs[i]);
    ASSERT_TRUE(alone->Wait().ok()) << alone->Wait();
    const std::map<int, std::vector<float>> images = alone->images(),
                                            others = together[i]->images();
    ASSERT_EQ(images.size(), static_cast<size_t>(specs[i].count));
    for (const auto& [index, image] : images) {
      const std::vector<float>& other = others.at(index);
      ASSERT_EQ(image.size(), other.size());
      EXPECT_EQ(std::memcmp(image.data(), other.data(), image.size() * sizeof(float)), 0)
          << "request " << i << ", image " << index;
    }
  }
  // Though the neighbour needed some for itself.
  EXPECT_LT(in_company, evaluations()) << "none shared an evaluation";
}

}  // namespace
}  // namespace denoised
