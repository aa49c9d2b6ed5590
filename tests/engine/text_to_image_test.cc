// SPDX-License-Identifier: Apache-2.0
// Text to image through the engine: whole runs against diffusers' pipelines, from the same noise
// (tests/models/latent/README.md), and what a request may ask for.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <thread>

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

struct GoldenRun {
  const char *family, *run, *sampler;
};
constexpr GoldenRun kRuns[] = {
    {"sd1", "run", "ddim"},
    {"sd1", "run", "euler"},
    {"sd2", "run", "ddim"},
    {"sd2", "run", "euler"},
    {"sdxl", "run", "ddim"},
    {"sdxl", "run", "euler"},
    {"sdxl", "run_unset", "ddim"},
    {"sdxl", "run_empty", "ddim"},
    {"lcm", "run", "lcm"},
    {"ldm", "run", "ddim"},
    {"tiny_vae", "run", "ddim"},
    {"tiny_vae", "run", "euler"},
    {"tiny_vae", "run_img2img", "ddim"},
    {"tiny_vae", "run_img2img", "euler"},
};

struct Target {
  const char* name;
  EngineOptions options;
  double tolerance;  // of ‖image − reference‖ / ‖reference‖
};
/// fp32: measured at most 1.4e-6 on the CPU. bf16 as run_parity_test.cc.
const Target kTargets[] = {
    {"cpu", {.device = "cpu"}, 1e-5},
    {"cuda_fp32", {.device = "cuda", .fp32 = true}, 1e-4},
    {"cuda_bf16", {.device = "cuda"}, 5e-2},
};

class TextToImageParity : public ::testing::TestWithParam<std::tuple<GoldenRun, Target>> {};

TEST_P(TextToImageParity, FromTheSameNoiseToTheSameImage) {
  const GoldenRun& run = std::get<0>(GetParam());
  const Target& target = std::get<1>(GetParam());
  if (target.options.device == "cuda") DENOISED_NEEDS_GPU();
  const auto goldens = ReadJsonFile(Latent(run.family) / "goldens.json");
  ASSERT_TRUE(goldens.ok()) << goldens.status();
  const nlohmann::json call = goldens->at(run.run);
  const auto tensors = Safetensors::Open(Latent(run.family) / "goldens.safetensors");
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  const auto golden = [&](const std::string& name) {
    return ToNhwc(tensors->tensors().at(fmt::format("{}.{}", run.run, name)));
  };

  auto engine = Engine::Create(target.options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const absl::Status opened = (*engine)->Open("model", Latent(run.family));
  ASSERT_TRUE(opened.ok()) << opened;

  const Tensor noise = golden("noise");
  JobSpec spec{.model = "model", .seed = 1, .count = static_cast<int>(noise.dim(0))};
  spec.initial_noise = noise;
  if (call.contains("prompt"))
    for (size_t i = 0; i < call["prompt"].size(); ++i) {
      TextPrompt& prompt = spec.prompts.emplace_back();
      prompt.text = call["prompt"][i];
      if (call.contains("negative_prompt")) prompt.negative = call["negative_prompt"][i];
    }
  const auto size = [&](const char* field, std::optional<std::array<int, 2>>* to) {
    if (call.contains(field)) *to = call[field].get<std::array<int, 2>>();
  };
  size("original_size", &spec.sizes.original_size);
  size("crops_coords_top_left", &spec.sizes.crop);
  size("target_size", &spec.sizes.target_size);
  spec.sampler.steps = call["num_inference_steps"];
  spec.sampler.sampler = SamplerFromName(run.sampler);
  if (call.contains("guidance_scale")) spec.guidance_scale = call["guidance_scale"].get<double>();
  if (call.contains("strength")) {
    spec.sampler.strength = call["strength"];
    const Tensor images = golden("image");  // twice the same, in [0, 1]
    for (float& value : images.span<float>()) value = 2 * value - 1;
    spec.init_image = images.Slice(0, 1).Reshape({images.dim(1), images.dim(2), images.dim(3)});
  }
  const auto job = Submit(**engine, spec);
  const absl::Status done = job->Wait();
  ASSERT_TRUE(done.ok()) << done;

  std::vector<float> drawn;
  for (const auto& [index, image] : job->images())
    for (const float value : image)  // as diffusers returns them
      drawn.push_back(std::clamp(value / 2 + 0.5f, 0.0f, 1.0f));
  const Tensor expected = golden(fmt::format("{}.image", run.sampler));
  const double error = RelativeError(drawn, expected.span<float>());
  EXPECT_LE(error, target.tolerance);
  RecordProperty("relative_error", fmt::format("{:.2g}", error));
}

INSTANTIATE_TEST_SUITE_P(Diffusers, TextToImageParity,
                         ::testing::Combine(::testing::ValuesIn(kRuns),
                                            ::testing::ValuesIn(kTargets)),
                         [](const auto& info) {
                           const GoldenRun& run = std::get<0>(info.param);
                           return fmt::format("{}_{}_{}_{}", run.family, run.run, run.sampler,
                                              std::get<1>(info.param).name);
                         });

/// A pipeline on the CPU.
class TextToImage : public ::testing::Test {
 protected:
  void Open(const std::string& family, EngineOptions options = {.device = "cpu"}) {
    auto engine = Engine::Create(options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    const absl::Status opened = engine_->Open("model", Latent(family));
    ASSERT_TRUE(opened.ok()) << opened;
  }
  JobSpec Spec(std::vector<std::string> prompts, uint64_t seed, int count = 1) {
    JobSpec spec{.model = "model", .seed = seed, .count = count};
    for (std::string& prompt : prompts) spec.prompts.push_back({.text = std::move(prompt)});
    spec.sampler.steps = 3;
    return spec;
  }
  std::map<int, std::vector<float>> Draw(const JobSpec& spec) {
    const auto job = Submit(*engine_, spec);
    const absl::Status done = job->Wait();
    EXPECT_TRUE(done.ok()) << done;
    return job->images();
  }
  std::vector<std::string> Violated(const JobSpec& spec) {
    std::vector<FieldViolation> violations;
    const auto job = engine_->Resolve(spec, &violations);
    EXPECT_TRUE(job.ok()) << job.status();
    std::vector<std::string> fields;
    for (const FieldViolation& violation : violations) fields.push_back(violation.field);
    return fields;
  }
  std::unique_ptr<Engine> engine_;
};

/// Prompts, sizes, guidance, samplers, previews and init images side by side: every image has the
/// bits that it has alone.
TEST_F(TextToImage, BitsDoNotDependOnCompany) {
  Open("sdxl");
  std::vector<JobSpec> specs;
  const char* const texts[] = {"a red apple", "", "thin threads in the oven", "two apples!"};
  for (int i = 0; i < 12; ++i) {
    JobSpec spec = Spec({texts[i % 4]}, 100 + i, 1 + i % 3);
    if (i % 2) spec.prompts[0].negative = texts[(i + 1) % 4];
    spec.sampler.steps = 2 + i % 3;
    spec.sampler.sampler = i % 3 == 0 ? Sampler::kEulerAncestral : Sampler::kDpmSolver;
    spec.guidance_scale = i % 4 == 0 ? 1.0 : 2.0 + i;
    if (i % 5 == 1) spec.width = 32;
    if (i % 6 == 2) spec.clip_skip = 1;
    if (i % 4 == 3) {
      const std::vector<float> grey(16 * 16 * 3, 0.1f * static_cast<float>(i));
      spec.init_image = Tensor::HostF32({16, 16, 3}, grey);
      spec.sampler.strength = 0.7;
    }
    spec.previews = i % 2 == 0;
    if (i % 5 == 1 && spec.init_image) spec.width = 0;
    specs.push_back(spec);
  }
  std::vector<std::shared_ptr<Collector>> together;
  for (const JobSpec& spec : specs) together.push_back(Submit(*engine_, spec));
  for (const auto& job : together) ASSERT_TRUE(job->Wait().ok()) << job->Wait();
  for (size_t i = 0; i < specs.size(); ++i) {
    const auto alone = Draw(specs[i]);
    ASSERT_EQ(alone.size(), static_cast<size_t>(specs[i].count));
    const auto in_company = together[i]->images();
    for (const auto& [index, image] : alone) {
      const std::vector<float>& other = in_company.at(index);
      ASSERT_EQ(image.size(), other.size());
      EXPECT_EQ(std::memcmp(image.data(), other.data(), image.size() * sizeof(float)), 0)
          << "request " << i << ", image " << index;
    }
  }
}

/// More prompts than a model has condition sets: images wait until sets are free again.
TEST_F(TextToImage, MorePromptsThanSets) {
  // 32 sets, and up to 48 prompts in flight: at each of three sizes 8 images with a negative each.
  Open("sd1", {.device = "cpu", .max_rows = 16, .max_slots = 8, .keep_evaluations = 0});
  std::vector<std::shared_ptr<Collector>> jobs;
  for (int i = 0; i < 90; ++i) {
    JobSpec spec = Spec({fmt::format("thin {}", i)}, 7);
    spec.prompts[0].negative = fmt::format("apple {}", i);
    spec.sampler.steps = 8;
    spec.width = i % 3 == 0 ? 16 : i % 3 == 1 ? 32 : 24;
    // These take the slots of others, whose prompts may be shared.
    if (i >= 60) spec.priority = Priority::kInteractive;
    if (i % 7 == 0) spec.prompts[0].negative = "apple";
    jobs.push_back(Submit(*engine_, spec));
  }
  for (const auto& job : jobs) EXPECT_TRUE(job->Wait().ok()) << job->Wait();
  // Another prompt is another image; the same prompt the same, though its set was made again.
  EXPECT_NE(jobs[0]->images().at(0), jobs[3]->images().at(0));
  JobSpec first = Spec({"thin 0"}, 7);
  first.prompts[0].negative = "apple";
  first.sampler.steps = 8;
  first.width = 16;
  EXPECT_EQ(Draw(first).at(0), jobs[0]->images().at(0));
}

/// An image may be parked and free no set, since others have its prompt: whoever needs two waits.
TEST_F(TextToImage, ParkingFreesNoSharedSet) {
  Open("sd1", {.device = "cpu", .max_rows = 16, .max_slots = 8, .keep_evaluations = 0});
  std::vector<std::shared_ptr<Collector>> jobs;
  const auto submit = [&](const std::string& prompt, int width, int count) {
    JobSpec spec = Spec({prompt}, 7, count);
    spec.prompts[0].negative = "not " + prompt;
    spec.sampler.steps = 60;
    spec.width = width;
    jobs.push_back(Submit(*engine_, spec));
  };
  for (int i = 0; i < 8; ++i) submit(fmt::format("b {}", i), 32, 1);
  for (int i = 0; i < 7; ++i) submit(fmt::format("c {}", i), 24, 1);
  submit("a", 16, 8);  // with these, all 32 sets have users
  for (const auto& job : jobs)
    while (job->progress() < 1 && !job->done()) std::this_thread::yield();
  JobSpec spec = Spec({"first"}, 8);
  spec.prompts[0].negative = "not first";
  spec.width = 16;
  spec.priority = Priority::kInteractive;
  jobs.push_back(Submit(*engine_, spec));
  for (const auto& job : jobs) EXPECT_TRUE(job->Wait().ok()) << job->Wait();
}

TEST_F(TextToImage, APromptForEachImage) {
  Open("sd1");
  const auto both = Draw(Spec({"a red apple", "thin threads"}, 5, 2));
  EXPECT_EQ(both.at(0), Draw(Spec({"a red apple"}, 5)).at(0));
  EXPECT_EQ(both.at(1), Draw(Spec({"thin threads"}, 6)).at(0));
}

TEST_F(TextToImage, PreviewsHaveTheSizeOfLatents) {
  Open("sd1");
  JobSpec spec = Spec({"a red apple"}, 5);
  spec.previews = true;
  const auto job = Submit(*engine_, spec);
  ASSERT_TRUE(job->Wait().ok());
  ASSERT_FALSE(job->preview_shapes().empty());
  for (const Shape& shape : job->preview_shapes()) EXPECT_EQ(shape, (Shape{8, 8, 3}));
}

TEST_F(TextToImage, RefusesByName) {
  Open("sd1");
  using ::testing::ElementsAre;
  EXPECT_THAT(Violated(Spec({}, 1)), ElementsAre("prompts"));
  EXPECT_THAT(Violated(Spec({"a", "b"}, 1, 3)), ElementsAre("prompts"));
  EXPECT_THAT(Violated(Spec({"a\xff"}, 1)), ElementsAre("prompts[0].text"));
  EXPECT_THAT(Violated(Spec({std::string("a\0b", 3)}, 1)), ElementsAre("prompts[0].text"));
  EXPECT_THAT(Violated(Spec({std::string(10 << 20, 'a')}, 1)), ElementsAre("prompts[0].text"));
  JobSpec spec = Spec({"a"}, 1);
  spec.prompts[0].negative = "\xff";
  spec.prompts[0].text_2 = "b";
  spec.clip_skip = 9;
  spec.class_labels = {1};
  spec.sizes.crop = {0, 0};
  EXPECT_THAT(Violated(spec), ElementsAre("class_labels", "clip_skip", "crop", "prompts[0].text_2",
                                          "prompts[0].negative"));
  EXPECT_TRUE(Violated(Spec({std::string(100000, ' ') + "\x01\x02\x03"}, 1)).empty());
}

/// What is not supported yet is refused by name, and never drawn wrongly.
TEST_F(TextToImage, RefusesModelsThatReadAnotherImage) {
  auto engine = Engine::Create({.device = "cpu"});
  ASSERT_TRUE(engine.ok()) << engine.status();
  for (const char* family : {"inpaint", "pix2pix"}) {
    const absl::Status status = (*engine)->Open(family, Latent(family));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
}

}  // namespace
}  // namespace denoised
