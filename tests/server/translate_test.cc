// SPDX-License-Identifier: Apache-2.0
#include "server/api/translate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "engine/images/formats.h"
#include "server/api/inference.h"
#include "server/jobs/job_request.h"
#include "server/jobs/rendering.h"

namespace denoised {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

ModelInfo Digits(int channels = 1) {
  ModelInfo model;
  model.name = "digits";
  model.state = ModelState::kReady;
  model.height = model.width = 8;
  model.max_edge = 4096;
  model.channels = model.latent_channels = channels;
  model.num_classes = 10;
  model.images = {.init = true,
                  .strength = true,
                  .mask = true,
                  .default_strength = 0.8,
                  .default_masked_strength = 1};
  return model;
}

ModelInfo ReadsText() {
  ModelInfo model = Digits();
  model.text.emplace();
  return model;
}

struct Outcome {
  Translation translation;
  std::vector<FieldViolation> violations;

  std::vector<std::string> fields() const {
    std::vector<std::string> names;
    for (const FieldViolation& violation : violations) names.push_back(violation.field);
    return names;
  }
};

Outcome Translated(const v1::GenerationParams& params, const v1::PreviewOptions* preview = nullptr,
                   const ModelInfo& model = Digits(), bool together = false) {
  Outcome outcome;
  RequestLimits limits;
  limits.max_init_pixels = limits.max_image_pixels = 4096;
  limits.max_reply_bytes = 1 << 20;
  static MemoryBudget memory(8 << 20);
  outcome.translation =
      Translate(params, preview, together, "made-id", model, limits, &memory, &outcome.violations);
  return outcome;
}

TEST(TranslateTest, TheServersLimitsHold) {
  ModelInfo model = Digits();
  model.default_steps = 30;
  model.max_steps = 999;
  const auto refused = [&](const RequestLimits& limits,
                           const std::function<void(v1::GenerationParams*)>& change) {
    v1::GenerationParams params;
    params.set_steps(10);
    change(&params);
    MemoryBudget memory(1 << 20);
    std::vector<FieldViolation> violations;
    Translate(params, nullptr, false, "id", model, limits, &memory, &violations);
    return violations.empty() ? "accepted" : violations[0].field + " " + violations[0].description;
  };
  using Params = v1::GenerationParams*;
  EXPECT_EQ(refused({.max_count = 3}, [](Params p) { p->set_count(3); }), "accepted");
  EXPECT_EQ(refused({.max_count = 3}, [](Params p) { p->set_count(4); }),
            "params.count is 4; use 1 to 3");
  EXPECT_EQ(refused({.max_steps = 20}, [](Params p) { p->set_steps(20); }), "accepted");
  EXPECT_EQ(refused({.max_steps = 20}, [](Params p) { p->set_steps(21); }),
            "params.steps is 21; use 1 to 20");
  EXPECT_EQ(refused({.max_steps = 2000}, [](Params p) { p->set_steps(2001); }),
            "params.steps is 2001; use 1 to 999")
      << "as GetModel says";
  EXPECT_EQ(refused({.max_steps = 20}, [](Params p) { p->clear_steps(); }),
            "params.steps is not set, and the model's own is 30; use 1 to 20");
  EXPECT_EQ(refused({.max_image_pixels = 63}, [](Params) {}),
            "params.height asks for 8×8 pixels; use at most 63 in all");
  EXPECT_EQ(refused({.max_image_pixels = 64}, [](Params) {}), "accepted");
  EXPECT_EQ(refused({.max_image_pixels = 63}, [](Params p) { p->set_height(4097); }), "accepted")
      << "the engine names the edge";
  EXPECT_EQ(refused({.max_tensor_bytes = 3 * 256}, [](Params p) { p->set_count(3); }), "accepted");
  EXPECT_EQ(refused({.max_tensor_bytes = 3 * 256 - 1}, [](Params p) { p->set_count(3); }),
            "params.count asks for 3 images of 256 bytes each as float32; together they may have "
            "767; use 1 to 2 of "
            "this size");
  EXPECT_EQ(refused({.max_tensor_bytes = 255}, [](Params p) { p->set_count(1); }),
            "params.count asks for 1 images of 256 bytes each as float32; together they may have "
            "255; use a "
            "smaller size");
}

TEST(TranslateTest, AnUploadIsMeasuredBeforeItIsUnpacked) {
  const auto picture = EncodeFile(Tensor::Host({64, 64, 1}, DType::kF32), FileFormat::kPng, 90, {});
  ASSERT_TRUE(picture.ok());
  v1::GenerationParams params;
  // The header alone: whoever began to unpack it would call it damaged.
  params.mutable_init_image()->set_encoded(picture->substr(0, 60));
  std::vector<FieldViolation> violations;
  MemoryBudget little(4096);
  Translate(params, nullptr, false, "id", Digits(), {}, &little, &violations);
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].field, "params.init_image.encoded");
  EXPECT_THAT(violations[0].description, HasSubstr("there are 4096 for all requests"));

  params.mutable_init_image()->set_encoded(*picture);
  MemoryBudget memory(1 << 20);
  MemoryBudget::Lease others;
  ASSERT_TRUE(memory.Reserve((1 << 20) - 4096, &others).ok());
  violations.clear();
  EXPECT_TRUE(absl::IsResourceExhausted(
      Translate(params, nullptr, false, "id", Digits(), {}, &memory, &violations).memory_status));
  EXPECT_TRUE(violations.empty()) << violations[0].description;
  others = {};
  const Translation translation =
      Translate(params, nullptr, false, "id", Digits(), {}, &memory, &violations);
  EXPECT_TRUE(translation.memory_status.ok());
  // At least the samples and the floats.
  EXPECT_GT(memory.reserved(), 64 * 64 * 5);
}

v1::Tensor Floats(std::vector<int64_t> shape, const std::vector<float>& values) {
  v1::Tensor tensor;
  tensor.set_data_type(v1::DATA_TYPE_FLOAT32);
  tensor.mutable_shape()->Add(shape.begin(), shape.end());
  tensor.set_data(values.data(), values.size() * 4);
  return tensor;
}

TEST(TranslateTest, NothingAskedIsDefaults) {
  const Outcome outcome = Translated({});
  EXPECT_TRUE(outcome.violations.empty());
  const JobSpec& spec = outcome.translation.spec;
  EXPECT_EQ(spec.model, "digits");
  EXPECT_EQ(spec.request_id, "made-id");
  EXPECT_FALSE(spec.seed || spec.guidance_scale || spec.sampler.sampler || spec.sampler.eta);
  EXPECT_EQ(spec.count, 1);
  EXPECT_EQ(spec.sampler.steps, 0);
  EXPECT_FALSE(spec.previews || spec.initial_noise || spec.init_image);
  EXPECT_EQ(outcome.translation.image.format, v1::IMAGE_FORMAT_PNG);
  EXPECT_TRUE(outcome.translation.image.metadata);
}

TEST(TranslateTest, EveryFieldArrives) {
  v1::GenerationParams params;
  params.set_request_id("mine 1");
  params.set_seed(0);
  params.add_seeds(8);
  params.add_seeds(5);
  params.set_count(2);
  params.add_conditions()->set_class_label(3);
  params.set_guidance_scale(2.5);
  params.set_steps(18);
  params.set_sampler(v1::SAMPLER_HEUN);
  params.set_noise_schedule(v1::NOISE_SCHEDULE_BETA);
  params.set_eta(0.5);
  params.set_s_churn(40);
  params.set_s_tmin(0.05);
  params.set_s_tmax(kInfinity);
  params.set_s_noise(1.003);
  params.set_solver_order(3);
  params.set_width(4);
  params.set_height(16);
  params.set_priority(v1::PRIORITY_BATCH);
  params.mutable_output()->set_format(v1::IMAGE_FORMAT_WEBP);
  params.mutable_output()->set_quality(1);
  params.mutable_output()->set_embed_metadata(false);
  v1::PreviewOptions preview;
  preview.set_kind(v1::PREVIEW_KIND_NOISY_STATE);
  preview.set_every_evaluations(3);
  preview.set_max_edge(2);
  preview.set_format(v1::IMAGE_FORMAT_PNG);
  const Outcome outcome = Translated(params, &preview);
  EXPECT_THAT(outcome.fields(), ElementsAre());
  const JobSpec& spec = outcome.translation.spec;
  EXPECT_EQ(spec.request_id, "mine 1");
  EXPECT_EQ(spec.seed, 0u);
  EXPECT_THAT(spec.seeds, ElementsAre(8, 5));
  EXPECT_EQ(spec.count, 2);
  EXPECT_THAT(spec.class_labels, ElementsAre(3));
  EXPECT_EQ(spec.guidance_scale, 2.5);
  EXPECT_EQ(spec.sampler.steps, 18);
  EXPECT_EQ(spec.sampler.sampler, Sampler::kHeun);
  EXPECT_EQ(spec.sampler.schedule, NoiseSchedule::kBeta);
  EXPECT_EQ(spec.sampler.eta, 0.5);
  EXPECT_EQ(spec.sampler.s_churn, 40);
  EXPECT_EQ(spec.sampler.s_tmin, 0.05);
  EXPECT_EQ(spec.sampler.s_tmax, kInfinity);
  EXPECT_EQ(spec.sampler.s_noise, 1.003);
  EXPECT_EQ(spec.sampler.solver_order, 3);
  EXPECT_EQ(spec.width, 4);
  EXPECT_EQ(spec.height, 16);
  EXPECT_EQ(spec.priority, Priority::kBatch);
  EXPECT_EQ(outcome.translation.image.format, v1::IMAGE_FORMAT_WEBP);
  EXPECT_EQ(outcome.translation.image.quality, 1);
  EXPECT_FALSE(outcome.translation.image.metadata);
  EXPECT_TRUE(spec.previews);
  EXPECT_EQ(spec.preview_kind, PreviewKind::kNoisyState);
  EXPECT_EQ(spec.preview_every, 3);
  EXPECT_EQ(outcome.translation.preview.max_edge, 2);
  EXPECT_EQ(outcome.translation.preview.format, v1::IMAGE_FORMAT_PNG);
}

struct BadField {
  const char* field;
  std::function<void(v1::GenerationParams*, v1::PreviewOptions*)> set;
};

/// It decides which queue a request is checked in, before it is read.
TEST(TranslateTest, PromptsAndWhatIsReadOfThem) {
  v1::GenerationParams params;
  v1::Condition& condition = *params.add_conditions();
  condition.set_text("a red apple");
  condition.set_negative_text("");
  params.mutable_text_options()->set_clip_skip(1);
  params.mutable_text_options()->set_max_chunks(2);
  Outcome outcome = Translated(params, nullptr, ReadsText());
  EXPECT_THAT(outcome.fields(), ElementsAre());
  const JobSpec& spec = outcome.translation.spec;
  ASSERT_EQ(spec.prompts.size(), 1u);
  EXPECT_EQ(spec.prompts[0].text, "a red apple");
  EXPECT_EQ(spec.prompts[0].negative, "");
  EXPECT_FALSE(spec.prompts[0].text_2.has_value());
  EXPECT_EQ(spec.clip_skip, 1);
  EXPECT_EQ(spec.max_chunks, 2);

  EffectiveJob job{.spec = spec};
  job.spec.model = "m@1";
  PromptRead& part = job.prompts_read.emplace_back();
  part.text = {75, "the end"};
  part.negative = {3, "no"};
  part.text_2 = {2, "two"};
  const v1::TextRead told = RunOf(job).texts(0);
  EXPECT_EQ(told.tokens(), 75);
  EXPECT_EQ(told.cut_off(), "the end");
  EXPECT_EQ(told.negative_cut_off(), "no");
  EXPECT_EQ(told.cut_off_2(), "two");
  EXPECT_EQ(told.negative_cut_off_2(), "");
  EXPECT_EQ(RunOf(job).model_version(), "1");
  const v1::GenerationParams effective = ToProto(job, {});
  EXPECT_EQ(effective.text_options().max_chunks(), 2);
  EXPECT_TRUE(effective.conditions(0).has_negative_text());
  EXPECT_FALSE(effective.conditions(0).has_text_2());

  params.mutable_text_options()->set_max_chunks(0);
  EXPECT_THAT(Translated(params, nullptr, ReadsText()).fields(),
              ElementsAre("params.text_options.max_chunks"));
  condition.clear_text();
  condition.set_negative_text("blur");
  EXPECT_THAT(Translated(params, nullptr, ReadsText()).fields(),
              ElementsAre("params.conditions[0].text", "params.text_options.max_chunks"));
}

TEST(TranslateTest, AGuidanceScaleBelowOneIsTold) {
  EffectiveJob job;
  job.spec.model = "lcm@1";
  job.spec.guidance_scale = 0.5;  // the engine leaves it only where it means something
  EXPECT_EQ(ToProto(job, {}).guidance_scale(), 0.5);
  const TextEntries texts = Metadata(job, ImageResult());
  EXPECT_THAT(texts, testing::Contains(TextEntries::value_type("guidance_scale", "0.5")));
}

TEST(TranslateTest, WhatAModelIsToldOfSizes) {
  v1::GenerationParams params;
  v1::SizeConditions& sizes = *params.mutable_size_conditions();
  sizes.mutable_original_size()->set_height(512);
  sizes.mutable_original_size()->set_width(768);
  sizes.mutable_crop()->set_left(16);
  const SizeConditions read = Translated(params).translation.spec.sizes;
  EXPECT_EQ(read.original_size, (std::array{512, 768}));
  EXPECT_EQ(read.crop, (std::array{0, 16}));
  EXPECT_FALSE(read.target_size.has_value());
}

/// A request with as many fields as possible draws the same when its reply's parameters are sent.
TEST(TranslateTest, EffectiveParametersCanBeSentAgain) {
  v1::GenerationParams params;
  params.set_request_id("mine");
  params.set_seed(41);
  params.set_count(2);
  for (const char* text : {"an apple", "a pear"}) {
    v1::Condition& condition = *params.add_conditions();
    condition.set_text(text);
    condition.set_negative_text("");
    condition.set_text_2("x");
    condition.set_negative_text_2("y");
  }
  params.mutable_text_options()->set_clip_skip(1);
  params.mutable_text_options()->set_max_chunks(2);
  params.mutable_size_conditions()->mutable_original_size()->set_height(5);
  params.mutable_size_conditions()->mutable_original_size()->set_width(6);
  params.mutable_size_conditions()->mutable_crop()->set_top(7);
  params.mutable_size_conditions()->mutable_crop()->set_left(0);
  params.mutable_size_conditions()->mutable_target_size()->set_height(8);
  params.mutable_size_conditions()->mutable_target_size()->set_width(9);
  params.set_guidance_scale(2.5);
  params.set_image_guidance_scale(1.5);
  params.set_guidance_rescale(0.5);
  params.set_guidance_start(0.25);
  params.set_guidance_stop(0.75);
  params.set_steps(18);
  params.set_sampler(v1::SAMPLER_HEUN);
  params.set_noise_schedule(v1::NOISE_SCHEDULE_BETA);
  params.set_eta(0.5);
  params.set_s_churn(40);
  params.set_s_tmin(0.05);
  params.set_s_tmax(kInfinity);
  params.set_s_noise(1.003);
  params.set_solver_order(3);
  params.set_width(4);
  params.set_height(16);
  params.set_priority(v1::PRIORITY_BATCH);
  params.mutable_output()->set_format(v1::IMAGE_FORMAT_JPEG);
  params.mutable_output()->set_quality(7);
  params.mutable_output()->set_embed_metadata(false);
  const Outcome outcome = Translated(params, nullptr, ReadsText());
  ASSERT_THAT(outcome.fields(), ElementsAre());
  EffectiveJob job{.spec = outcome.translation.spec};
  job.spec.model = "m@1";
  params.set_model("m");
  const v1::GenerationParams effective = ToProto(job, outcome.translation.image);
  EXPECT_EQ(effective.DebugString(), params.DebugString());
  // All fields but these are above, so a new one cannot be forgotten. Uploads have no bytes, and
  // the rest is set by who answers.
  std::set<std::string> missing;
  const auto* descriptor = v1::GenerationParams::descriptor();
  std::vector<const google::protobuf::FieldDescriptor*> set;
  effective.GetReflection()->ListFields(effective, &set);
  for (int i = 0; i < descriptor->field_count(); ++i) {
    if (std::find(set.begin(), set.end(), descriptor->field(i)) == set.end())
      missing.insert(descriptor->field(i)->name());
  }
  EXPECT_THAT(missing, ElementsAre("disconnect_policy", "include_timings", "init_image",
                                   "initial_noise", "mask", "seeds"));
}

/// Uploads are told of without their bytes, so that sending them again is an error and not another
/// picture.
TEST(TranslateTest, EffectiveUploadsMustBeSentAgain) {
  EffectiveJob job;
  job.spec.model = "m@1";
  job.spec.init_image = Tensor::Host({8, 8, 1}, DType::kF32);
  job.spec.mask = Tensor::Host({8, 8}, DType::kF32);
  job.spec.initial_noise = Tensor::Host({1, 8, 8, 1}, DType::kF32);
  job.spec.sampler.strength = 0.5;
  const v1::GenerationParams effective = ToProto(job, {});
  EXPECT_EQ(effective.init_image().strength(), 0.5);
  EXPECT_TRUE(effective.has_mask());
  EXPECT_THAT(effective.initial_noise().shape(), ElementsAre(1, 8, 8, 1));
  v1::GenerationParams again = effective;
  again.clear_width();
  again.clear_height();
  again.clear_steps();
  EXPECT_THAT(Translated(again).fields(),
              ElementsAre("params.init_image", "params.initial_noise.data"));
}

TEST(TranslateTest, PreviewsNameTheirDecoder) {
  v1::PreviewOptions preview;
  const auto read = [&] { return Translated({}, &preview).translation.spec.preview_decoder; };
  EXPECT_EQ(read(), PreviewDecoder::kDefault);
  preview.set_decoder(v1::PREVIEW_DECODER_LINEAR);
  EXPECT_EQ(read(), PreviewDecoder::kLinear);
  preview.set_decoder(v1::PREVIEW_DECODER_TINY);
  EXPECT_EQ(read(), PreviewDecoder::kTiny);
  preview.set_decoder(static_cast<v1::PreviewDecoder>(9));
  EXPECT_THAT(Translated({}, &preview).fields(), ElementsAre("preview.decoder"));
}

TEST(TranslateTest, PriorityOfAnInferenceRequest) {
  inference::ModelInferRequest request;
  EXPECT_EQ(ReadPriority(request), Priority::kNormal);
  inference::InferParameter& asked = (*request.mutable_parameters())["priority"];
  asked.set_int64_param(1);
  EXPECT_EQ(ReadPriority(request), Priority::kInteractive);
  asked.set_uint64_param(3);
  EXPECT_EQ(ReadPriority(request), Priority::kBatch);
  for (const int64_t unknown : {int64_t{0}, int64_t{-1}, int64_t{4}, int64_t{1} << 40}) {
    asked.set_int64_param(unknown);
    EXPECT_EQ(ReadPriority(request), Priority::kNormal) << unknown;
  }
  asked.set_string_param("1");
  EXPECT_EQ(ReadPriority(request), Priority::kNormal);
}

TEST(TranslateTest, EachBadFieldIsNamedAlone) {
  using P = v1::GenerationParams*;
  using V = v1::PreviewOptions*;
  const BadField cases[] = {
      {"params.request_id", [](P p, V) { p->set_request_id("a\nb"); }},
      {"params.request_id", [](P p, V) { p->set_request_id(std::string(129, 'a')); }},
      {"params.request_id", [](P p, V) { p->set_request_id("ü"); }},
      {"params.count", [](P p, V) { p->set_count(0); }},
      {"params.count", [](P p, V) { p->set_count(-1); }},
      {"params.conditions[0]", [](P p, V) { p->add_conditions(); }},
      {"params.conditions[1]",
       [](P p, V) {
         p->add_conditions()->set_class_label(1);
         p->add_conditions()->set_text("a one");
       }},
      {"params.conditions[0].text", [](P p, V) { p->add_conditions()->set_text_2("a one"); }},
      {"params.conditions[1].class_vector[0]",
       [](P p, V) {
         p->add_conditions()->add_class_vector(0);
         p->add_conditions()->add_class_vector(kNan);
       }},
      {"params.guidance_scale", [](P p, V) { p->set_guidance_scale(kNan); }},
      {"params.guidance_scale", [](P p, V) { p->set_guidance_scale(-0.1); }},
      {"params.guidance_scale", [](P p, V) { p->set_guidance_scale(kInfinity); }},
      {"params.steps", [](P p, V) { p->set_steps(0); }},
      {"params.steps", [](P p, V) { p->set_steps(std::numeric_limits<int32_t>::min()); }},
      {"params.sampler", [](P p, V) { p->set_sampler(static_cast<v1::Sampler>(99)); }},
      {"params.sampler", [](P p, V) { p->set_sampler(static_cast<v1::Sampler>(-1)); }},
      {"params.noise_schedule",
       [](P p, V) { p->set_noise_schedule(static_cast<v1::NoiseSchedule>(99)); }},
      {"params.priority", [](P p, V) { p->set_priority(static_cast<v1::Priority>(4)); }},
      {"params.disconnect_policy",
       [](P p, V) { p->set_disconnect_policy(static_cast<v1::DisconnectPolicy>(-1)); }},
      {"params.eta", [](P p, V) { p->set_eta(1.01); }},
      {"params.eta", [](P p, V) { p->set_eta(kNan); }},
      {"params.s_churn", [](P p, V) { p->set_s_churn(-1); }},
      {"params.s_churn", [](P p, V) { p->set_s_churn(kInfinity); }},
      {"params.s_tmin", [](P p, V) { p->set_s_tmin(kInfinity); }},
      {"params.s_tmax", [](P p, V) { p->set_s_tmax(kNan); }},
      {"params.s_noise", [](P p, V) { p->set_s_noise(0); }},
      {"params.solver_order", [](P p, V) { p->set_solver_order(4); }},
      {"params.width", [](P p, V) { p->set_width(0); }},
      {"params.width", [](P p, V) { p->set_width(4096); }},
      {"params.height", [](P p, V) { p->set_height(-8); }},
      {"params.height", [](P p, V) { p->set_height(4096); }},
      {"params.output.format",
       [](P p, V) { p->mutable_output()->set_format(static_cast<v1::ImageFormat>(77)); }},
      {"params.output.quality", [](P p, V) { p->mutable_output()->set_quality(0); }},
      {"params.output.quality", [](P p, V) { p->mutable_output()->set_quality(101); }},
      {"params.initial_noise.shape", [](P p, V) { p->mutable_initial_noise(); }},
      {"params.initial_noise.shape",
       [](P p, V) {
         *p->mutable_initial_noise() = Floats({8, 8, 3}, {});
       }},
      {"params.initial_noise.data",
       [](P p, V) {
         *p->mutable_initial_noise() = Floats({8, 8, 1}, {1, 2, 3});
       }},
      {"params.initial_noise.data",
       [](P p, V) {
         std::vector<float> noise(64, 0.0f);
         noise[63] = std::numeric_limits<float>::infinity();
         *p->mutable_initial_noise() = Floats({8, 8, 1}, noise);
       }},
      {"params.initial_noise.data_type",
       [](P p, V) {
         *p->mutable_initial_noise() = Floats({8, 8, 1}, std::vector<float>(64));
         p->mutable_initial_noise()->set_data_type(v1::DATA_TYPE_UINT8);
       }},
      {"params.init_image", [](P p, V) { p->mutable_init_image(); }},
      {"params.image_guidance_scale", [](P p, V) { p->set_image_guidance_scale(0.5); }},
      {"params.guidance_rescale", [](P p, V) { p->set_guidance_rescale(kNan); }},
      {"params.guidance_start", [](P p, V) { p->set_guidance_start(-0.1); }},
      {"params.guidance_stop", [](P p, V) { p->set_guidance_stop(1.1); }},
      {"params.mask", [](P p, V) { p->mutable_mask()->set_encoded("without an init image"); }},
      {"params.mask",
       [](P p, V) {
         *p->mutable_init_image()->mutable_tensor() = Floats({1, 1, 1}, {0});
         p->mutable_mask();
       }},
      {"params.mask.encoded",
       [](P p, V) {
         *p->mutable_init_image()->mutable_tensor() = Floats({1, 1, 1}, {0});
         p->mutable_mask()->set_encoded("not a picture");
       }},
      {"params.mask.transparency",
       [](P p, V) {
         *p->mutable_init_image()->mutable_tensor() = Floats({1, 1, 1}, {0});
         p->mutable_mask()->set_transparency(
             EncodeFile(Tensor::HostF32({1, 1, 1}, std::vector<float>{1}), FileFormat::kPng, 0, {})
                 .value());
       }},
      {"params.mask.tensor",
       [](P p, V) {
         *p->mutable_init_image()->mutable_tensor() = Floats({1, 1, 1}, {0});
         *p->mutable_mask()->mutable_tensor() = Floats({1, 2}, {0, 0});
       }},
      {"params.mask.tensor.shape",
       [](P p, V) {
         *p->mutable_init_image()->mutable_tensor() = Floats({1, 1, 1}, {0});
         *p->mutable_mask()->mutable_tensor() = Floats({1, 1, 3}, {0, 0, 0});
       }},
      {"params.mask.tensor.shape",
       [](P p, V) {
         *p->mutable_init_image()->mutable_tensor() = Floats({1, 1, 1}, {0});
         *p->mutable_mask()->mutable_tensor() = Floats({1LL << 32, 1LL << 32}, {});
       }},
      {"params.mask.tensor.data",
       [](P p, V) {
         *p->mutable_init_image()->mutable_tensor() = Floats({1, 1, 1}, {0});
         *p->mutable_mask()->mutable_tensor() = Floats({1, 1}, {1.5f});
       }},
      {"params.init_image.encoded",
       [](P p, V) { p->mutable_init_image()->set_encoded("not a picture"); }},
      {"params.init_image.tensor.shape",
       [](P p, V) {
         *p->mutable_init_image()->mutable_tensor() = Floats({8, 8}, {});
       }},
      {"params.init_image.tensor.shape",
       [](P p, V) {
         // The product of the extents wraps around to 0 in 64 bits.
         *p->mutable_init_image()->mutable_tensor() = Floats({1LL << 32, 1LL << 32, 1}, {});
       }},
      {"params.init_image.tensor.shape",
       [](P p, V) {
         *p->mutable_init_image()->mutable_tensor() = Floats({-8, -8, 1}, {});
       }},
      {"params.init_image.tensor.data",
       [](P p, V) {
         *p->mutable_init_image()->mutable_tensor() = Floats({8, 8, 1}, {0});
       }},
      {"params.init_image.strength",
       [](P p, V) {
         *p->mutable_init_image()->mutable_tensor() = Floats({1, 1, 1}, {0});
         p->mutable_init_image()->set_strength(0);
       }},
      {"params.init_image.strength",
       [](P p, V) {
         *p->mutable_init_image()->mutable_tensor() = Floats({1, 1, 1}, {0});
         p->mutable_init_image()->set_strength(kNan);
       }},
      {"preview.kind", [](P, V v) { v->set_kind(static_cast<v1::PreviewKind>(9)); }},
      {"preview.every_evaluations", [](P, V v) { v->set_every_evaluations(0); }},
      {"preview.max_edge", [](P, V v) { v->set_max_edge(-1); }},
      {"preview.format", [](P, V v) { v->set_format(static_cast<v1::ImageFormat>(9)); }},
  };
  const ModelInfo model = ReadsText();  // else every text is refused
  for (const BadField& bad : cases) {
    v1::GenerationParams params;
    v1::PreviewOptions preview;
    bad.set(&params, &preview);
    const Outcome outcome = Translated(params, &preview, model);
    EXPECT_THAT(outcome.fields(), ElementsAre(bad.field)) << params.ShortDebugString();
    for (const FieldViolation& violation : outcome.violations) {
      EXPECT_FALSE(violation.description.empty());
    }
  }
}

TEST(TranslateTest, LimitsOfChurnAreReadable) {
  v1::GenerationParams params;
  params.set_s_churn(-1);
  params.set_s_tmin(-1);
  params.set_s_tmax(-1);
  params.set_s_noise(-1);
  std::vector<std::string> said;
  for (const FieldViolation& violation : Translated(params).violations)
    said.push_back(violation.description);
  EXPECT_THAT(said, ElementsAre("is -1; use 0 to 1e+38", "is -1; use 0 to 1e+38",
                                "is -1; use 0 to inf", "is -1; use 1e-38 to 1e+38"));
}

TEST(TranslateTest, AllViolationsAtOnce) {
  v1::GenerationParams params;
  params.set_count(-1);
  params.set_steps(0);
  params.set_eta(kNan);
  params.mutable_output()->set_quality(1000);
  EXPECT_THAT(Translated(params).fields(),
              ElementsAre("params.count", "params.steps", "params.eta", "params.output.quality"));
}

TEST(TranslateTest, SamplesOfTensorsHaveARange) {
  const auto noise = [](float value) {
    v1::GenerationParams params;
    std::vector<float> values(64, 0.0f);
    values[63] = value;
    *params.mutable_initial_noise() = Floats({8, 8, 1}, values);
    return params;
  };
  const auto image = [](float value) {
    v1::GenerationParams params;
    *params.mutable_init_image()->mutable_tensor() = Floats({1, 2, 1}, {0, value});
    return params;
  };
  const auto said = [](const v1::GenerationParams& params) {
    const auto violations = Translated(params).violations;
    return violations.empty() ? "accepted" : violations[0].field + " " + violations[0].description;
  };
  EXPECT_EQ(said(noise(1e37f)),
            "params.initial_noise.data holds 1e+37 at element 63; use -10000 to 10000");
  EXPECT_EQ(said(noise(-10001)),
            "params.initial_noise.data holds -10001 at element 63; use -10000 to 10000");
  EXPECT_EQ(said(noise(static_cast<float>(kNan))),
            "params.initial_noise.data holds nan at element 63; use -10000 to 10000");
  EXPECT_EQ(said(noise(10000)), "accepted");
  EXPECT_EQ(said(image(-3e38f)),
            "params.init_image.tensor.data holds -3e+38 at element 1; use -10000 to 10000");
  EXPECT_EQ(said(image(-10000)), "accepted");
  v1::GenerationParams mask = image(0);
  *mask.mutable_mask()->mutable_tensor() = Floats({1, 2}, {0, 1e37f});
  EXPECT_EQ(said(mask), "params.mask.tensor.data holds 1e+37 at element 1; use 0 to 1");
}

TEST(TranslateTest, TextForAModelThatReadsNoneIsNamed) {
  const auto said = [](ClassCondition condition, const v1::GenerationParams& params) {
    ModelInfo model = Digits();
    model.condition = condition;
    std::string all;
    for (const auto& violation : Translated(params, nullptr, model).violations)
      all += violation.field + " " + violation.description;
    return all;
  };
  v1::GenerationParams params;
  params.add_conditions()->set_text("a seven");
  params.add_conditions()->set_text("an eight");
  EXPECT_EQ(said(ClassCondition::kLabel, params),
            "params.conditions[0].text is not for model 'digits', which reads no text; use "
            "class_label");
  EXPECT_EQ(said(ClassCondition::kVector, params),
            "params.conditions[0].text is not for model 'digits', which reads no text; use "
            "class_vector");
  EXPECT_EQ(said(ClassCondition::kNone, params),
            "params.conditions[0].text is not for model 'digits', which reads no text; leave "
            "conditions out");
  params.mutable_conditions(0)->set_class_label(7);
  params.mutable_conditions(1)->set_class_label(8);
  EXPECT_EQ(said(ClassCondition::kLabel, params),
            "params.conditions[0].text is not for model 'digits', which reads no text; leave it "
            "out");
  params.clear_conditions();
  params.add_conditions()->set_negative_text("a blur");
  EXPECT_EQ(said(ClassCondition::kLabel, params),
            "params.conditions[0].negative_text is not for model 'digits', which reads no text; "
            "use class_label");
}

TEST(TranslateTest, NoiseComesWithAndWithoutCount) {
  std::vector<float> noise(64);
  for (int i = 0; i < 64; ++i) noise[i] = static_cast<float>(i);
  v1::GenerationParams params;
  for (const auto& shape : {std::vector<int64_t>{8, 8, 1}, {1, 8, 8, 1}}) {
    *params.mutable_initial_noise() = Floats(shape, noise);
    const Outcome outcome = Translated(params);
    ASSERT_TRUE(outcome.violations.empty()) << outcome.violations[0].description;
    ASSERT_EQ(outcome.translation.spec.initial_noise.shape(), (Shape{1, 8, 8, 1}));
    EXPECT_EQ(outcome.translation.spec.initial_noise.ToFloats(), noise);
  }
  params.set_count(2);
  EXPECT_THAT(Translated(params).fields(), ElementsAre("params.initial_noise.shape"));
}

TEST(TranslateTest, AMaskIsScaledWithItsImage) {
  v1::GenerationParams params;
  *params.mutable_init_image()->mutable_tensor() = Floats({2, 2, 1}, {0, 0, 0, 0});
  *params.mutable_mask()->mutable_tensor() = Floats({2, 2}, {1, 0, 0.25f, 0.5f});
  Outcome outcome = Translated(params);
  ASSERT_THAT(outcome.fields(), ElementsAre());
  // At strength 1, which is its default with a mask, the picture is still needed.
  EXPECT_EQ(outcome.translation.spec.sampler.strength, 1);
  EXPECT_TRUE(outcome.translation.spec.init_image);
  const Tensor mask = outcome.translation.spec.mask;
  ASSERT_EQ(mask.shape(), (Shape{8, 8}));
  for (int y = 0; y < 8; ++y)
    for (int x = 0; x < 8; ++x)
      EXPECT_EQ(mask.as<float>()[y * 8 + x], y < 4 ? (x < 4 ? 1 : 0) : (x < 4 ? 0.25f : 0.5f));
  // The same as bytes, and as a file of another strength.
  v1::Tensor& bytes = *params.mutable_mask()->mutable_tensor();
  bytes.set_data_type(v1::DATA_TYPE_UINT8);
  bytes.set_data(std::string("\xff\x00\x00\xff", 4));
  params.mutable_init_image()->set_strength(0.5);
  outcome = Translated(params);
  ASSERT_THAT(outcome.fields(), ElementsAre());
  EXPECT_EQ(outcome.translation.spec.sampler.strength, 0.5);
  EXPECT_EQ(outcome.translation.spec.mask.as<float>()[0], 1);
  EXPECT_EQ(outcome.translation.spec.mask.as<float>()[63], 1);
  EXPECT_EQ(outcome.translation.spec.mask.as<float>()[7], 0);
  const Tensor white = Tensor::HostF32({2, 2, 3}, std::vector<float>(12, 1));
  params.mutable_mask()->set_encoded(EncodeFile(white, FileFormat::kPng, 0, {}).value());
  outcome = Translated(params);
  ASSERT_THAT(outcome.fields(), ElementsAre());
  EXPECT_NEAR(outcome.translation.spec.mask.as<float>()[5], 1, 1e-5);
}

TEST(TranslateTest, AnInitImageIsScaledWithLanczos) {
  v1::GenerationParams params;
  params.set_width(8);
  params.set_height(8);
  *params.mutable_init_image()->mutable_tensor() = Floats({2, 4, 1}, {0, 0, 1, 1, 0, 0, 1, 1});
  const Outcome outcome = Translated(params);
  ASSERT_THAT(outcome.fields(), ElementsAre());
  const float picture[] = {0, 0, 1, 1, 0, 0, 1, 1};
  const Tensor expected = Resize(Tensor::HostF32({2, 4, 1}, picture), 8, 8, ResizeFilter::kLanczos);
  const Tensor& image = outcome.translation.spec.init_image;
  ASSERT_EQ(image.shape(), expected.shape());
  for (int64_t i = 0; i < image.elements(); ++i)
    EXPECT_EQ(image.as<float>()[i], expected.as<float>()[i]) << i;
  EXPECT_LT(image.as<float>()[1], -0.01);  // it overshoots
}

/// As in diffusers, which converts the mask to RGB. An init image is shown over white.
TEST(TranslateTest, AMasksAlphaChannelIsIgnored) {
  // A PNG of two black pixels, the left one transparent.
  const std::string file = absl::HexStringToBytes(
      "89504e470d0a1a0a0000000d49484452000000020000000108040000005e2bb7010000000d49444154789c63"
      "606060f80f00010401005fe5c34b0000000049454e44ae426082");
  v1::GenerationParams params;
  params.mutable_init_image()->set_encoded(file);
  params.mutable_mask()->set_encoded(file);
  const Outcome outcome = Translated(params);
  ASSERT_THAT(outcome.fields(), ElementsAre());
  EXPECT_THAT(outcome.translation.spec.mask.span<float>(), Each(0));
  EXPECT_NEAR(outcome.translation.spec.init_image.as<float>()[0], 1, 1e-5);
  EXPECT_NEAR(outcome.translation.spec.init_image.as<float>()[7], -1, 1e-5);
}

TEST(TranslateTest, AnInitImageAndItsMaskAreTurnedAsTheirExifSays) {
  // A PNG of two pixels, the left one transparent, with the orientation 6: it is to be at the top.
  const std::string file = absl::HexStringToBytes(
      "89504e470d0a1a0a0000000d49484452000000020000000108040000005e2bb7010000001a655849664d4d00"
      "2a00000008000101120003000000010006000000000000d6674b690000000d49444154789c6338c0d0f01f00"
      "0504024025de98440000000049454e44ae426082");
  v1::GenerationParams params;
  params.mutable_init_image()->set_encoded(file);
  params.mutable_mask()->set_transparency(file);
  const Outcome outcome = Translated(params);
  ASSERT_THAT(outcome.fields(), ElementsAre());
  const JobSpec& spec = outcome.translation.spec;
  for (int x = 0; x < 8; ++x) {
    EXPECT_NEAR(spec.init_image.as<float>()[x], 1, 1e-5);
    EXPECT_LT(spec.init_image.as<float>()[7 * 8 + x], 0.1);
    EXPECT_EQ(spec.mask.as<float>()[3 * 8 + x], 1);
    EXPECT_EQ(spec.mask.as<float>()[4 * 8 + x], 0);
  }
}

TEST(TranslateTest, AModelThatStartsFromNoiseHasNoStrength) {
  ModelInfo model = Digits();
  model.images = {.init = true, .required = true, .guidance = true};
  v1::GenerationParams params;
  *params.mutable_init_image()->mutable_tensor() = Floats({1, 1, 1}, {0});
  const Outcome outcome = Translated(params, nullptr, model);
  ASSERT_THAT(outcome.fields(), ElementsAre());
  EXPECT_EQ(outcome.translation.spec.sampler.strength, 1);
  EXPECT_TRUE(outcome.translation.spec.init_image);
}

TEST(TranslateTest, InitImageNeedsAnEncoderAtAnyStrength) {
  ModelInfo model = Digits();
  model.images = {};
  v1::GenerationParams params;
  v1::Tensor& bytes = *params.mutable_init_image()->mutable_tensor();
  bytes.set_data_type(v1::DATA_TYPE_UINT8);
  for (const int extent : {2, 2, 1}) bytes.add_shape(extent);
  bytes.set_data(std::string(4, '\0'));
  EXPECT_THAT(Translated(params, nullptr, model).fields(), ElementsAre("params.init_image"));
}

TEST(TranslateTest, InitImageIsScaledAndConverted) {
  v1::GenerationParams params;
  Tensor white = Tensor::Host({20, 10, 3}, DType::kF32);
  for (float& value : white.span<float>()) value = 1;
  params.mutable_init_image()->set_encoded(EncodeFile(white, FileFormat::kPng, 0, {}).value());
  params.set_width(8);
  params.set_height(8);
  Outcome outcome = Translated(params);
  ASSERT_TRUE(outcome.violations.empty()) << outcome.violations[0].description;
  EXPECT_EQ(outcome.translation.spec.init_image.shape(), (Shape{8, 8, 1}));
  EXPECT_NEAR(outcome.translation.spec.init_image.as<float>()[5], 1, 1e-5);
  EXPECT_EQ(outcome.translation.spec.sampler.strength, 0.8);

  v1::Tensor& bytes = *params.mutable_init_image()->mutable_tensor();
  bytes.set_data_type(v1::DATA_TYPE_UINT8);
  for (const int extent : {2, 2, 1}) bytes.add_shape(extent);
  bytes.set_data(std::string("\x00\x00\x00\x00", 4));
  params.mutable_init_image()->set_strength(0.5);
  outcome = Translated(params);
  ASSERT_TRUE(outcome.violations.empty()) << outcome.violations[0].description;
  EXPECT_NEAR(outcome.translation.spec.init_image.as<float>()[0], -1, 1e-6);
  EXPECT_EQ(outcome.translation.spec.sampler.strength, 0.5);

  params.mutable_init_image()->set_strength(1);  // nothing of the picture is left
  outcome = Translated(params);
  EXPECT_FALSE(outcome.translation.spec.init_image);
}

TEST(TranslateTest, AnInitImageSaysHowLargeTheImagesAre) {
  ModelInfo model = Digits();
  model.size_multiple = 4;
  model.max_edge = 40;
  using Params = v1::GenerationParams*;
  const auto picture = [](int height, int width) {
    v1::Tensor tensor;
    tensor.set_data_type(v1::DATA_TYPE_UINT8);
    for (const int extent : {height, width, 1}) tensor.add_shape(extent);
    tensor.set_data(std::string(static_cast<size_t>(height * width), '\x40'));
    return tensor;
  };
  // "HEIGHTxWIDTH" of the picture that is drawn from, or what is wrong.
  const auto drawn = [&](int height, int width, const std::function<void(Params)>& change) {
    v1::GenerationParams params;
    *params.mutable_init_image()->mutable_tensor() = picture(height, width);
    change(&params);
    const Outcome outcome = Translated(params, nullptr, model);
    if (!outcome.violations.empty())
      return outcome.violations[0].field + " " + outcome.violations[0].description;
    const JobSpec& spec = outcome.translation.spec;
    if (!spec.init_image) return fmt::format("{}x{} from noise", spec.height, spec.width);
    const Shape& shape = spec.init_image.shape();
    if (spec.width > 0) {
      EXPECT_EQ(shape, (Shape{spec.height, spec.width, 1}));
    }
    return fmt::format("{}x{}", shape[0], shape[1]);
  };
  const auto nothing = [](Params) {};
  EXPECT_EQ(drawn(19, 31, nothing), "16x28");
  EXPECT_EQ(drawn(3, 31, nothing), "4x28") << "no edge is 0";
  EXPECT_EQ(drawn(40, 40, nothing), "40x40");
  EXPECT_EQ(drawn(20, 20, [](Params p) { p->mutable_init_image()->set_strength(1); }),
            "20x20 from noise");
  // One edge is given: the other keeps the proportions.
  EXPECT_EQ(drawn(20, 30, [](Params p) { p->set_width(12); }), "8x12");
  EXPECT_EQ(drawn(20, 30, [](Params p) { p->set_height(12); }), "12x16");
  EXPECT_EQ(drawn(20, 30, [](Params p) { p->set_height(12), p->set_width(40); }), "12x40");
  // A larger picture is scaled down.
  EXPECT_EQ(drawn(20, 44, nothing), "16x40");
  EXPECT_EQ(drawn(88, 40, nothing), "40x16");
  EXPECT_EQ(drawn(20, 30, [](Params p) { p->set_height(32); }),
            "params.width is not set, and the proportions of init_image make it 48; give it: a "
            "multiple of 4 up to 40, and at most 4096 pixels in all");
  EXPECT_EQ(drawn(20, 30, [](Params p) { p->set_height(0); }),
            "params.height is 0; use at least 1");
  // The engine names the edge that is given and too large.
  EXPECT_EQ(drawn(20, 30, [](Params p) { p->set_height(1 << 30); }), "1073741824x0 from noise");
  model.max_edge = 4096;
  EXPECT_EQ(drawn(2, 2, [](Params p) { p->set_width(80); }).substr(0, 24),
            "params.height is not set");
  // With a mask it is the model's own, as in diffusers' pipelines for inpainting.
  EXPECT_EQ(
      drawn(20, 30, [&](Params p) { *p->mutable_mask()->mutable_tensor() = picture(20, 30); }),
      "8x8");
  // Noise is of that size, too; of a picture that was refused none is asked for.
  const auto noise = [](Params p) {
    *p->mutable_initial_noise() = Floats({1, 8, 12, 1}, std::vector<float>(96));
  };
  EXPECT_EQ(drawn(8, 12, noise), "8x12");
  EXPECT_THAT(drawn(12, 8, noise), HasSubstr("params.initial_noise.shape is [1, 8, 12, 1]; use"));
  v1::GenerationParams params;
  noise(&params);
  params.mutable_init_image()->set_encoded("GIF89a");
  EXPECT_THAT(Translated(params, nullptr, model).fields(),
              ElementsAre("params.init_image.encoded"));
}

TEST(TranslateTest, PicturesNeedOneOrThreeChannels) {
  const ModelInfo latent = Digits(4);
  EXPECT_EQ(Translated({}, nullptr, latent).translation.image.format, v1::IMAGE_FORMAT_RAW_FLOAT32);
  v1::GenerationParams params;
  params.mutable_output()->set_format(v1::IMAGE_FORMAT_JPEG);
  params.mutable_init_image()->set_encoded("x");
  EXPECT_THAT(Translated(params, nullptr, latent).fields(),
              ElementsAre("params.init_image.encoded", "params.output.format"));
}

TEST(TranslateTest, RepliesAreBounded) {
  v1::GenerationParams params;
  params.set_count(1'000'000);
  const Outcome together = Translated(params, nullptr, Digits(), true);
  EXPECT_THAT(together.fields(), ElementsAre("params.count"));
  EXPECT_THAT(together.violations[0].description, HasSubstr("use StreamGenerate"));
  EXPECT_TRUE(Translated(params, nullptr, Digits(), false).violations.empty());
}

TEST(TranslateTest, EngineFieldsHavePathsInTheProto) {
  EXPECT_EQ(ProtoField("class_labels[2]"), "params.conditions[2].class_label");
  EXPECT_EQ(ProtoField("class_labels"), "params.conditions");
  EXPECT_EQ(ProtoField("class_values"), "params.conditions[0].class_vector");
  EXPECT_EQ(ProtoField("prompts"), "params.conditions");
  EXPECT_EQ(ProtoField("prompts[1].text_2"), "params.conditions[1].text_2");
  EXPECT_EQ(ProtoField("prompts[1].negative"), "params.conditions[1].negative_text");
  EXPECT_EQ(ProtoField("prompts[0].negative_2"), "params.conditions[0].negative_text_2");
  EXPECT_EQ(ProtoField("crop"), "params.size_conditions.crop");
  EXPECT_EQ(ProtoField("schedule"), "params.noise_schedule");
  EXPECT_EQ(ProtoField("sampler.eta"), "params.eta");
  EXPECT_EQ(ProtoField("sampler"), "params.sampler");
  EXPECT_EQ(ProtoField("strength"), "params.init_image.strength");
  EXPECT_EQ(ProtoField("preview_every"), "preview.every_evaluations");
  EXPECT_EQ(ProtoField("steps"), "params.steps");
}

/// Every path that ProtoField can make must exist, or clients cannot find the field.
TEST(TranslateTest, PathsExist) {
  for (const char* field : {"seed",
                            "count",
                            "class_labels",
                            "class_labels[2]",
                            "class_values",
                            "prompts",
                            "prompts[0].negative",
                            "prompts[0].negative_2",
                            "original_size",
                            "crop",
                            "target_size",
                            "guidance_scale",
                            "sampler",
                            "schedule",
                            "steps",
                            "eta",
                            "s_churn",
                            "s_tmin",
                            "s_tmax",
                            "s_noise",
                            "solver_order",
                            "strength",
                            "height",
                            "width",
                            "preview_kind",
                            "preview_every",
                            "initial_noise",
                            "init_image",
                            "model",
                            "request_id",
                            "mask",
                            "image_guidance_scale",
                            "guidance_rescale",
                            "guidance_start",
                            "guidance_stop",
                            "clip_skip",
                            "max_chunks",
                            "preview_decoder"}) {
    const google::protobuf::Descriptor* message = v1::StreamGenerateRequest::descriptor();
    std::string path = ProtoField(field);
    while (!path.empty()) {
      const size_t dot = path.find('.');
      ASSERT_NE(message, nullptr) << path;
      const auto* part = message->FindFieldByName(path.substr(0, std::min(dot, path.find('['))));
      ASSERT_NE(part, nullptr) << field << ": " << path;
      message = part->message_type();
      path = dot == std::string::npos ? "" : path.substr(dot + 1);
    }
  }
}

// Partners are found by name, so nothing but this test misses one.
TEST(TranslateTest, SamplersAndNoiseSchedulesAreTheSameOnTheWireAndInTheEngine) {
  const auto back = [](const JobSpec& spec) { return ToProto({.spec = spec}, {}); };
  for (int value = v1::Sampler_MIN + 1; value <= v1::Sampler_MAX; ++value) {
    v1::GenerationParams params;
    params.set_sampler(static_cast<v1::Sampler>(value));
    const Outcome outcome = Translated(params);
    const std::string& name = v1::Sampler_Name(params.sampler());
    ASSERT_TRUE(outcome.violations.empty()) << name;
    const Sampler ours = *outcome.translation.spec.sampler.sampler;
    EXPECT_EQ("SAMPLER_" + absl::AsciiStrToUpper(std::string(Name(ours))), name);
    EXPECT_EQ(back(outcome.translation.spec).sampler(), value) << name;
  }
  for (int value = v1::NoiseSchedule_MIN + 1; value <= v1::NoiseSchedule_MAX; ++value) {
    v1::GenerationParams params;
    params.set_noise_schedule(static_cast<v1::NoiseSchedule>(value));
    const Outcome outcome = Translated(params);
    const std::string& name = v1::NoiseSchedule_Name(params.noise_schedule());
    ASSERT_TRUE(outcome.violations.empty()) << name;
    const NoiseSchedule ours = *outcome.translation.spec.sampler.schedule;
    EXPECT_EQ("NOISE_SCHEDULE_" + absl::AsciiStrToUpper(std::string(Name(ours))), name);
    EXPECT_EQ(back(outcome.translation.spec).noise_schedule(), value) << name;
  }
  JobSpec spec;
  for (const Sampler sampler : AllSamplers()) {
    spec.sampler.sampler = sampler;
    EXPECT_NE(back(spec).sampler(), v1::SAMPLER_UNSPECIFIED) << Name(sampler);
  }
  for (const NoiseSchedule schedule : AllNoiseSchedules()) {
    spec.sampler.schedule = schedule;
    EXPECT_NE(back(spec).noise_schedule(), v1::NOISE_SCHEDULE_UNSPECIFIED) << Name(schedule);
  }
}

TEST(RenderTest, FilesAndTensors) {
  const float values[] = {-1, 1, 2, 0};
  const ImageResult result{2, 7, 3, Tensor::HostF32({2, 2, 1}, values)};
  Rendering rendering;
  auto image = Render(result, rendering, {{"seed", "7"}});
  ASSERT_TRUE(image.ok());
  EXPECT_EQ(image->index(), 2);
  EXPECT_EQ(image->seed(), 7u);
  EXPECT_EQ(image->class_label(), 3);
  EXPECT_EQ(image->mime_type(), "image/png");
  EXPECT_EQ(DecodeFile(image->encoded(), 4)->samples, (std::vector<uint8_t>{0, 255, 255, 128}));

  rendering.format = v1::IMAGE_FORMAT_RAW_FLOAT32;
  image = Render(result, rendering, {});
  EXPECT_EQ(image->mime_type(), "application/octet-stream");
  EXPECT_EQ(image->tensor().data(), std::string(reinterpret_cast<const char*>(values), 16));

  rendering.format = v1::IMAGE_FORMAT_RAW_UINT8;
  rendering.max_edge = 1;
  image = Render(result, rendering, {});
  EXPECT_THAT(image->tensor().shape(), ElementsAre(1, 1, 1));
  EXPECT_EQ(image->tensor().data().size(), 1u);
}

/// Whoever has the file can send its request again.
TEST(RenderTest, MetadataIsTheWholeRequest) {
  EffectiveJob job;
  job.steps = 4;  // that are run: the request has an init image
  job.spec.guidance_scale = 10.0 / 3;
  job.spec.sampler.steps = 10;
  job.spec.sampler.strength = 0.4;
  job.spec.sampler.s_churn = 1.0 / 3;
  job.spec.sampler.s_tmin = 0.05;
  job.spec.sampler.s_tmax = 50;
  job.spec.sampler.s_noise = 1.003;
  job.spec.sizes.original_size = {768, 1024};
  job.spec.sizes.crop = {3, 1};
  const TextEntries texts = Metadata(job, {});
  for (const auto& [name, value] :
       {std::pair{"steps", "10"}, std::pair{"strength", "0.4"},
        std::pair{"guidance_scale", "3.3333333333333335"},
        std::pair{"s_churn", "0.3333333333333333"}, std::pair{"s_tmin", "0.05"},
        std::pair{"s_tmax", "50"}, std::pair{"s_noise", "1.003"},
        std::pair{"original_size", "(768, 1024)"}, std::pair{"crops_coords_top_left", "(3, 1)"}}) {
    const auto found = std::find_if(texts.begin(), texts.end(),
                                    [name = name](const auto& text) { return text.first == name; });
    ASSERT_NE(found, texts.end()) << name;
    EXPECT_EQ(found->second, value) << name;
  }
}

/// LCM reads guidance_scale as an input: it has no second row that some steps could leave out.
TEST(ModelTest, GuidanceAsAnInputHasNoInterval) {
  ModelInfo info = Digits();
  const auto capabilities = [&info] {
    return ToProto({.info = std::make_shared<const ModelInfo>(info)}, "", RequestLimits{})
        .capabilities();
  };
  info.guidance = true, info.guidance_input = false;
  EXPECT_TRUE(capabilities().guidance());
  EXPECT_TRUE(capabilities().guidance_interval());
  info.guidance = false, info.guidance_input = true;
  EXPECT_TRUE(capabilities().guidance());
  EXPECT_FALSE(capabilities().guidance_interval());
}

}  // namespace
}  // namespace denoised
