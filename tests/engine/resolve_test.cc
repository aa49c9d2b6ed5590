// SPDX-License-Identifier: Apache-2.0
#include "engine/resolve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace denoised {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

ModelInfo Digits() {
  auto scheduler = SchedulerConfig::Parse(
      nlohmann::json::parse(R"({"_class_name": "EDMEulerScheduler"})"), "scheduler_config.json");
  EXPECT_TRUE(scheduler.ok()) << scheduler.status();
  ModelInfo model{.name = "digits", .state = ModelState::kReady};
  model.height = model.width = 32;
  model.size_multiple = 4;
  model.max_edge = 128;
  model.channels = model.latent_channels = 1;
  model.condition = ClassCondition::kLabel;
  model.num_classes = 10;
  model.guidance = true;
  model.default_sampler = scheduler->default_sampler();
  model.default_schedule = scheduler->default_schedule();
  model.default_steps = 18;
  model.default_guidance_scale = 1.5;
  model.max_evaluations = 2000;
  model.max_count = 64;
  model.images = {.init = true,
                  .strength = true,
                  .mask = true,
                  .default_strength = 0.8,
                  .default_masked_strength = 1};
  model.scheduler = std::make_shared<const SchedulerConfig>(*scheduler);
  return model;
}

std::vector<std::string> Violated(const ModelInfo& model, const JobSpec& spec) {
  EffectiveJob job;
  std::vector<FieldViolation> violations;
  ResolveJob(model, spec, &job, &violations);
  std::vector<std::string> fields;
  for (const FieldViolation& violation : violations) {
    EXPECT_FALSE(violation.description.empty());
    fields.push_back(violation.field);
  }
  return fields;
}

TEST(Resolve, AScaleBelowOneIsNoneUnlessTheModelReadsIt) {
  const auto resolved = [](const ModelInfo& model, double scale) {
    EffectiveJob job;
    std::vector<FieldViolation> violations;
    ResolveJob(model, {.model = "digits", .guidance_scale = scale}, &job, &violations);
    EXPECT_EQ(job.guided, scale > 1 && model.guidance);
    return *job.spec.guidance_scale;
  };
  ModelInfo model = Digits();
  EXPECT_EQ(resolved(model, 0.4), 1);
  EXPECT_EQ(resolved(model, 1.4), 1.4);
  model.guidance = false;
  model.guidance_input = true;
  for (const double scale : {0.0, 0.4, 1.0, 8.5}) EXPECT_EQ(resolved(model, scale), scale);
  EXPECT_EQ(resolved(model, -1), 1) << "is refused";
}

TEST(Resolve, AnIntervalOfGuidanceThatIsEmptyHasARemedy) {
  JobSpec spec{.model = "digits", .guidance_scale = 2};
  spec.guidance_start = spec.guidance_stop = 0.5;
  EffectiveJob job;
  std::vector<FieldViolation> violations;
  ResolveJob(Digits(), spec, &job, &violations);
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].field, "guidance_start");
  EXPECT_THAT(violations[0].description,
              testing::HasSubstr("leave out both and use guidance_scale 1"));
}

TEST(Resolve, WithoutGuidanceItsOptionsAreRefused) {
  ModelInfo model = Digits();
  model.guidance_rescale = true;
  model.images.guidance = true;
  model.images.default_guidance_scale = 1.5;
  JobSpec spec{.model = "digits", .guidance_scale = 1};
  EXPECT_THAT(Violated(model, spec), ElementsAre());
  spec.guidance_rescale = 0.7;
  spec.image_guidance_scale = 2;
  spec.guidance_start = 0.2;
  spec.guidance_stop = 0.8;
  EXPECT_THAT(Violated(model, spec), ElementsAre("guidance_rescale", "image_guidance_scale",
                                                 "guidance_start", "guidance_stop"));
  spec.guidance_scale = 2;
  EXPECT_THAT(Violated(model, spec), ElementsAre());
  spec.guidance_scale.reset();  // the model's own
  EXPECT_THAT(Violated(model, spec), ElementsAre());
  model.default_guidance_scale = 1;
  EXPECT_EQ(Violated(model, spec).size(), 4u);

  // What does nothing anyway may be said.
  spec = {.model = "digits", .guidance_scale = 1};
  spec.guidance_rescale = 0;
  spec.image_guidance_scale = 1;
  spec.guidance_start = 0;
  spec.guidance_stop = 1;
  EXPECT_THAT(Violated(model, spec), ElementsAre());

  model = Digits();
  model.guidance = false;
  spec = {.model = "digits", .guidance_scale = 1};
  spec.guidance_stop = 0.8;
  EffectiveJob job;
  std::vector<FieldViolation> violations;
  ResolveJob(model, spec, &job, &violations);
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].description, "is 0.8, but model 'digits' does not take it; leave it out");
  ResolveJob(Digits(), spec, &job, &violations);
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].description,
            "is 0.8, but has no effect without guidance; use a guidance_scale above 1, or leave it "
            "out");
}

TEST(Resolve, FillsInEveryDefault) {
  EffectiveJob job;
  std::vector<FieldViolation> violations;
  ResolveJob(Digits(), {.model = "digits", .count = 3}, &job, &violations);
  ASSERT_TRUE(violations.empty()) << violations[0].field << violations[0].description;
  EXPECT_TRUE(job.spec.seed.has_value());
  EXPECT_EQ(job.spec.class_labels.size(), 3u);
  for (const int label : job.spec.class_labels) {
    EXPECT_GE(label, 0);
    EXPECT_LT(label, 10);
  }
  EXPECT_EQ(job.steps, 18);
  EXPECT_EQ(job.evaluations, 18);
  EXPECT_EQ(*job.spec.guidance_scale, 1.5);
  EXPECT_EQ(job.spec.width, 32);
  EXPECT_EQ(*job.spec.sampler.sampler, Sampler::kEdmEuler);
  ASSERT_NE(job.plan, nullptr);
}

TEST(Resolve, TellsTheScheduleThatIsRun) {
  ModelInfo model = Digits();
  const auto karras = SchedulerConfig::Parse(
      {{"_class_name", "EulerDiscreteScheduler"}, {"use_karras_sigmas", true}},
      "scheduler_config.json");
  ASSERT_TRUE(karras.ok()) << karras.status();
  model.scheduler = std::make_shared<const SchedulerConfig>(*karras);
  model.default_sampler = karras->default_sampler();
  model.default_schedule = karras->default_schedule();
  EffectiveJob job;
  std::vector<FieldViolation> violations;
  JobSpec spec{.model = "digits"};
  ResolveJob(model, spec, &job, &violations);
  ASSERT_TRUE(violations.empty()) << violations[0].description;
  EXPECT_EQ(job.spec.sampler.schedule, NoiseSchedule::kKarras);
  EXPECT_EQ(job.spec.sampler.s_noise, 1);
  spec.sampler.sampler = Sampler::kDdim;  // has no spacing but its own
  ResolveJob(model, spec, &job, &violations);
  ASSERT_TRUE(violations.empty()) << violations[0].description;
  EXPECT_EQ(job.spec.sampler.schedule, NoiseSchedule::kNative);
}

TEST(Resolve, TheSeedDecidesTheRandomClass) {
  EffectiveJob first, second, shifted;
  std::vector<FieldViolation> violations;
  ResolveJob(Digits(), {.model = "digits", .seed = 7, .count = 8}, &first, &violations);
  ResolveJob(Digits(), {.model = "digits", .seed = 7, .count = 8}, &second, &violations);
  EXPECT_EQ(first.spec.class_labels, second.spec.class_labels);
  // Image i is what seed + i draws alone, its class included.
  ResolveJob(Digits(), {.model = "digits", .seed = 10}, &shifted, &violations);
  EXPECT_EQ(shifted.spec.class_labels[0], first.spec.class_labels[3]);
}

TEST(Resolve, EachImageMayHaveASeedOfItsOwn) {
  EffectiveJob many, alone;
  std::vector<FieldViolation> violations;
  ResolveJob(Digits(), {.model = "digits", .seeds = {90, 7, 90}, .count = 3}, &many, &violations);
  ASSERT_TRUE(violations.empty()) << violations[0].description;
  EXPECT_EQ(many.spec.seed, 90u);
  EXPECT_EQ(many.spec.SeedOf(1), 7u);
  ResolveJob(Digits(), {.model = "digits", .seed = 7}, &alone, &violations);
  EXPECT_EQ(many.spec.class_labels[1], alone.spec.class_labels[0]);
  EXPECT_EQ(many.spec.class_labels[2], many.spec.class_labels[0]);

  EXPECT_THAT(Violated(Digits(), {.model = "digits", .seeds = {1, 2}, .count = 3}),
              ElementsAre("seeds"));
  EXPECT_THAT(Violated(Digits(), {.model = "digits", .seed = 9, .seeds = {1}}),
              ElementsAre("seeds"));
}

TEST(Resolve, SeedWrapsAround) {
  EffectiveJob job;
  std::vector<FieldViolation> violations;
  ResolveJob(Digits(), {.model = "digits", .seed = ~uint64_t{0}, .count = 2}, &job, &violations);
  EXPECT_TRUE(violations.empty());
}

TEST(Resolve, NamesEveryViolationAtOnce) {
  JobSpec spec{.model = "digits", .count = 2, .class_labels = {3, 11}, .guidance_scale = -1.0};
  spec.width = 30;
  spec.height = 4096;
  spec.class_values = {1.0f};
  spec.sampler.steps = -4;
  spec.sampler.strength = 0.5;
  spec.previews = true;
  spec.preview_every = 0;
  EXPECT_THAT(Violated(Digits(), spec),
              ElementsAre("width", "height", "class_values", "class_labels[1]", "guidance_scale",
                          "preview_every", "strength", "steps"));
}

TEST(Resolve, RefusesNumbersThatAreNone) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THAT(Violated(Digits(), {.model = "digits", .guidance_scale = nan}),
              ElementsAre("guidance_scale"));
  EXPECT_THAT(Violated(Digits(), {.model = "digits", .guidance_scale = infinity}),
              ElementsAre("guidance_scale"));
  for (const double bad : {nan, infinity, -1.0}) {
    JobSpec spec{.model = "digits"};
    spec.sampler.s_churn = bad;
    EXPECT_THAT(Violated(Digits(), spec), ElementsAre("s_churn")) << bad;
  }
  JobSpec noise{.model = "digits"};
  noise.initial_noise = Tensor::HostF32({1, 32, 32, 1}, std::vector<float>(1024, NAN));
  EXPECT_THAT(Violated(Digits(), noise), ElementsAre("initial_noise"));
}

TEST(Resolve, CountBoundsWhatIsAllocated) {
  for (const int count : {0, -1, 65, std::numeric_limits<int>::max()})
    EXPECT_THAT(Violated(Digits(), {.model = "digits", .count = count}), ElementsAre("count"));
}

TEST(Resolve, ACountThatIsRefusedIsTheOnlyComplaint) {
  EXPECT_THAT(Violated(Digits(),
                       {.model = "digits", .count = 500, .class_labels = std::vector<int>(500, 7)}),
              ElementsAre("count"));
  EXPECT_THAT(
      Violated(Digits(), {.model = "digits", .seeds = std::vector<uint64_t>(500, 1), .count = 500}),
      ElementsAre("count"));
  JobSpec noise{.model = "digits", .count = 65};
  noise.initial_noise = Tensor::HostF32({65, 32, 32, 1}, std::vector<float>(65 * 1024, 0.5f));
  EXPECT_THAT(Violated(Digits(), noise), ElementsAre("count"));
}

TEST(Resolve, LabelsAreOneForAllOrOneForEach) {
  EffectiveJob job;
  std::vector<FieldViolation> violations;
  ResolveJob(Digits(), {.model = "digits", .count = 3, .class_labels = {7}}, &job, &violations);
  EXPECT_THAT(job.spec.class_labels, ElementsAre(7, 7, 7));
  EXPECT_THAT(Violated(Digits(), {.model = "digits", .count = 3, .class_labels = {1, 2}}),
              ElementsAre("class_labels"));
}

TEST(Resolve, ShapesMustMatch) {
  JobSpec spec{.model = "digits", .count = 2};
  spec.initial_noise = Tensor::HostF32({32, 32, 1}, std::vector<float>(1024, 0.5f));
  EXPECT_THAT(Violated(Digits(), spec), ElementsAre("initial_noise"));
  spec.count = 1;
  EXPECT_TRUE(Violated(Digits(), spec).empty());
  spec.init_image = Tensor::HostF32({32, 32, 3}, std::vector<float>(3072, 0.5f));
  spec.sampler.strength = 0.5;
  EXPECT_THAT(Violated(Digits(), spec), ElementsAre("init_image"));
}

TEST(Resolve, ImagesMustBeF32InHostMemory) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kU8}) {
    JobSpec spec{.model = "digits"};
    spec.sampler.strength = 0.5;
    spec.init_image = Tensor::Host({32, 32, 1}, dtype);
    spec.initial_noise = Tensor::Host({1, 32, 32, 1}, dtype);
    EXPECT_THAT(Violated(Digits(), spec), ElementsAre("init_image", "initial_noise"));
  }
  const Tensor wide = Tensor::HostF32({32, 32, 3}, std::vector<float>(3072, 0.5f));
  JobSpec columns{.model = "digits", .init_image = wide.Columns(1, 1)};
  columns.sampler.strength = 0.5;
  EXPECT_THAT(Violated(Digits(), columns), ElementsAre("init_image"));
  JobSpec on_device{.model = "digits"};
  on_device.initial_noise =
      Tensor(wide.data(), {1, 32, 32, 1}, DType::kF32, Device::kCuda, nullptr);
  EXPECT_THAT(Violated(Digits(), on_device), ElementsAre("initial_noise"));
}

TEST(Resolve, UnconditionalModelsTakeNoClassAndNoGuidance) {
  ModelInfo model = Digits();
  model.condition = ClassCondition::kNone;
  model.guidance = false;
  model.default_guidance_scale = 1;
  EXPECT_TRUE(Violated(model, {.model = "digits"}).empty());
  EXPECT_THAT(Violated(model, {.model = "digits", .class_labels = {1}, .guidance_scale = 2.0}),
              ElementsAre("class_labels[0]", "guidance_scale"));
}

TEST(Resolve, ModelsWithoutTextRefuseItsOptions) {
  JobSpec spec{.model = "digits"};
  spec.clip_skip = spec.max_chunks = 1;
  spec.sizes.original_size = {512, 512};
  spec.sizes.crop = {0, 0};
  spec.sizes.target_size = {0, 0};  // one violation, since no other value would do
  EXPECT_THAT(Violated(Digits(), spec),
              ElementsAre("clip_skip", "max_chunks", "original_size", "crop", "target_size"));
}

TEST(Resolve, ClassVectorsAreRepeated) {
  ModelInfo model = Digits();
  model.condition = ClassCondition::kVector;
  model.class_vector_size = 2;
  EffectiveJob job;
  std::vector<FieldViolation> violations;
  ResolveJob(model, {.model = "digits", .count = 2, .class_values = {1, 2}}, &job, &violations);
  EXPECT_THAT(job.spec.class_values, ElementsAre(1, 2, 1, 2));
  EXPECT_THAT(Violated(model, {.model = "digits", .count = 2, .class_values = {1, 2, 3}}),
              ElementsAre("class_values"));
  EXPECT_THAT(Violated(model, {.model = "digits", .count = 65, .class_values = {1, 2, 3, 4}}),
              ElementsAre("count"));
}

TEST(Resolve, AFourierEmbeddingTakesTheLogarithmOfAClass) {
  ModelInfo model = Digits();
  model.condition = ClassCondition::kValue;
  model.class_vector_size = 1;
  const JobSpec zero{.model = "digits", .class_values = {0}};
  EXPECT_THAT(Violated(model, zero), ElementsAre());
  model.logarithmic_time = true;
  EXPECT_THAT(Violated(model, zero), Contains("class_values"));
  EXPECT_THAT(Violated(model, {.model = "digits", .class_values = {0.5f}}),
              Not(Contains("class_values")));
}

}  // namespace
}  // namespace denoised
