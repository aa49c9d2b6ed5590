// SPDX-License-Identifier: Apache-2.0
#include "engine/io/model_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/io/temporary_directory.h"

namespace denoised {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr char kIndex[] =
    R"({"_class_name":"DDPMPipeline","_diffusers_version":"0.31.0",
        "unet":["diffusers","UNet2DModel"],"scheduler":["diffusers","DDIMScheduler"],
        "id2label":{"0":"zero","1":"one","2":"two"},
        "_denoised":{"null_class":3,"default_steps":18,"default_guidance_scale":1.5}})";
constexpr char kUNet[] = R"({"_class_name":"UNet2DModel","sample_size":32})";
constexpr char kScheduler[] = R"({"_class_name":"DDPMScheduler","num_train_timesteps":1000})";

class ModelDirectoryTest : public ::testing::Test {
 protected:
  absl::StatusOr<ModelDirectory> Read() { return ModelDirectory::Read(directory_.path()); }
  std::string Error() { return std::string(Read().status().message()); }
  void WriteWeights(const std::string& name) {
    const float one[] = {1};
    ASSERT_TRUE(WriteSafetensors(directory_ / name, {{"w", Tensor::HostF32({1}, one)}}, {}).ok());
  }
  TemporaryDirectory directory_;
};

TEST_F(ModelDirectoryTest, ReadsPipelines) {
  directory_.Write("model_index.json", kIndex);
  directory_.Write("unet/config.json", kUNet);
  directory_.Write("scheduler/scheduler_config.json", kScheduler);
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->root, directory_.path());
  EXPECT_EQ(model->unet().config["sample_size"], 32);
  EXPECT_EQ(model->unet().config_file, directory_ / "unet/config.json");
  ASSERT_TRUE(model->scheduler_config);
  // The index decides the class.
  EXPECT_EQ((*model->scheduler_config)["_class_name"], "DDIMScheduler");
  EXPECT_EQ(model->scheduler_config_file, directory_ / "scheduler/scheduler_config.json");
  EXPECT_THAT(model->labels, ElementsAre(Pair(0, "zero"), Pair(1, "one"), Pair(2, "two")));
  EXPECT_EQ(model->null_class, 3);
  EXPECT_EQ(model->default_steps, 18);
  EXPECT_EQ(model->default_guidance_scale, 1.5);

  EXPECT_EQ(model->unet().OpenWeights().status().code(), absl::StatusCode::kNotFound);
  WriteWeights("unet/diffusion_pytorch_model.safetensors");
  const auto weights = model->unet().OpenWeights();
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_TRUE(weights->Has("w"));
}

TEST_F(ModelDirectoryTest, ReadsThePrecision) {
  const auto read = [&](const std::string& value) {
    directory_.Write(
        "model_index.json",
        R"({"unet":["diffusers","UNet2DModel"],"_denoised":{"precision":)" + value + "}}");
    directory_.Write("unet/config.json", kUNet);
    directory_.Write("unet/scheduler_config.json", kScheduler);
    directory_.Write("scheduler/scheduler_config.json", kScheduler);
    return Read();
  };
  EXPECT_EQ(read("\"fp8\"")->precision, Precision::kFp8);
  EXPECT_EQ(read("\"default\"")->precision, Precision::kDefault);
  EXPECT_EQ(read("null")->precision, Precision::kDefault);
  EXPECT_EQ(read("\"int4\"").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Error(), AllOf(HasSubstr("_denoised"), HasSubstr("'precision'"), HasSubstr("int4"),
                             HasSubstr("\"default\" or \"fp8\"")));
}

TEST_F(ModelDirectoryTest, ReadsPipelinesWithoutSubfolders) {
  directory_.Write("model_index.json", kIndex);
  directory_.Write("config.json", kUNet);
  directory_.Write("scheduler_config.json", kScheduler);
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->unet().config_file, directory_ / "config.json");
  EXPECT_TRUE(model->scheduler_config);
}

TEST_F(ModelDirectoryTest, ReadsSingleModels) {
  directory_.Write("config.json", kUNet);
  WriteWeights("model.safetensors");
  auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_TRUE(model->index.is_null());
  EXPECT_FALSE(model->scheduler_config);
  EXPECT_TRUE(model->labels.empty());
  EXPECT_EQ(model->null_class, -1);
  EXPECT_EQ(model->default_steps, 0);
  EXPECT_FALSE(model->default_guidance_scale);
  EXPECT_TRUE(model->unet().OpenWeights().ok());

  directory_.Write("scheduler_config.json", kScheduler);
  model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_TRUE(model->scheduler_config);
  EXPECT_EQ((*model->scheduler_config)["_class_name"], "DDPMScheduler");
}

TEST_F(ModelDirectoryTest, SaysWhatIsMissing) {
  EXPECT_EQ(ModelDirectory::Read(directory_ / "none").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Read().status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Error(), AllOf(HasSubstr("model_index.json"), HasSubstr("config.json")));
  directory_.Write("model_index.json", kIndex);
  EXPECT_EQ(Read().status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Error(), HasSubstr("unet/config.json: no such file"));
  directory_.Write("unet/config.json", kUNet);
  EXPECT_EQ(Read().status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Error(), HasSubstr("scheduler/scheduler_config.json: no such file"));
}

TEST_F(ModelDirectoryTest, LooksForAnEncodersWeightsUnderTransformersNames) {
  directory_.Write("model_index.json", R"({"unet":["diffusers","UNet2DConditionModel"],
      "text_encoder":["transformers","CLIPTextModel"],
      "tokenizer":["transformers","CLIPTokenizer"]})");
  directory_.Write("unet/config.json", kUNet);
  directory_.Write("text_encoder/config.json", R"({"model_type": "clip_text_model"})");
  EXPECT_THAT(Error(), HasSubstr("tokenizer/tokenizer_config.json: no such file"));
  directory_.Write("tokenizer/tokenizer_config.json", "{}");
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(std::string(model->components.at("text_encoder").OpenWeights().status().message()),
              HasSubstr("looked for model.safetensors"));
}

TEST_F(ModelDirectoryTest, ReadsEveryComponent) {
  directory_.Write("model_index.json", R"({"_class_name":"StableDiffusionPipeline",
      "unet":["diffusers","UNet2DConditionModel"],"vae":["diffusers","AutoencoderKL"],
      "tokenizer":["transformers","CLIPTokenizer"],"safety_checker":["x","SafetyChecker"],
      "image_encoder":[null,null]})");
  for (const char* part : {"unet", "vae"})
    directory_.Write(std::string(part) + "/config.json", R"({"act_fn":"silu"})");
  directory_.Write("tokenizer/tokenizer_config.json", "{}");
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->pipeline_class, "StableDiffusionPipeline");
  ASSERT_EQ(model->components.size(), 3u);  // without those that draw nothing
  EXPECT_EQ(model->unet().class_name, "UNet2DConditionModel");
  EXPECT_EQ(model->components.at("vae").config["act_fn"], "silu");
  EXPECT_EQ(model->components.at("tokenizer").directory, directory_ / "tokenizer");
}

/// Whether another scheduler has a part in drawing is not for this room to say.
TEST_F(ModelDirectoryTest, ASchedulerHasAFileOfItsOwnName) {
  directory_.Write("model_index.json",
                   R"({"unet":["diffusers","UNet2DConditionModel"],
                       "low_res_scheduler":["diffusers","DDPMScheduler"]})");
  directory_.Write("unet/config.json", kUNet);
  directory_.Write("low_res_scheduler/scheduler_config.json", kScheduler);
  const auto model = Read();
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->components.at("low_res_scheduler").class_name, "DDPMScheduler");
}

TEST_F(ModelDirectoryTest, NeedsAClass) {
  directory_.Write("config.json", R"({"model_type":"bert"})");
  EXPECT_THAT(Error(), HasSubstr("field '_class_name' is null"));
}

struct IndexCase {
  const char* name;
  const char* index;
  const char* message;
};

class RefusedIndex : public ::testing::TestWithParam<IndexCase> {};

TEST_P(RefusedIndex, NamesFileAndField) {
  ModelDirectory model;
  const absl::Status status =
      model.ParseIndex(nlohmann::json::parse(GetParam().index), "model_index.json");
  ASSERT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("model_index.json"), HasSubstr(GetParam().message)));
}

#define UNET R"("unet":["diffusers","UNet2DModel"])"
const IndexCase kRefused[] = {
    {"NoUNet", R"({"_class_name":"DiTPipeline"})", "field 'unet': missing"},
    {"UNetNotAPair", R"({"unet":"UNet2DModel"})", "field 'unet'"},
    {"SchedulerNotAPair", "{" UNET R"(,"scheduler":7})", "field 'scheduler'"},
    {"LabelsNotAnObject", "{" UNET R"(,"id2label":["zero"]})", "id2label"},
    {"LabelKeyNotANumber", "{" UNET R"(,"id2label":{"zero":"0"}})", "id2label"},
    {"LabelKeyPadded", "{" UNET R"(,"id2label":{"00":"zero"}})", "id2label"},
    {"LabelKeyHuge", "{" UNET R"(,"id2label":{"99999999999":"zero"}})", "id2label"},
    {"LabelNotAText", "{" UNET R"(,"id2label":{"0":0}})", "id2label"},
    {"LabelGap", "{" UNET R"(,"id2label":{"0":"zero","2":"two"}})", "highest class is 2"},
    {"ForceZerosNotABool", "{" UNET R"(,"force_zeros_for_empty_prompt":"no"})",
     "'force_zeros_for_empty_prompt' is \"no\": expected true or false"},
    {"DenoisedNotAnObject", "{" UNET R"(,"_denoised":[]})", "_denoised"},
    {"UnknownDefault", "{" UNET R"(,"_denoised":{"steps":3}})", "field 'steps'"},
    {"NullClassTooLow", "{" UNET R"(,"_denoised":{"null_class":-2}})", "'null_class' is -2"},
    {"NullClassNotANumber", "{" UNET R"(,"_denoised":{"null_class":"ten"}})", "null_class"},
    {"StepsZero", "{" UNET R"(,"_denoised":{"default_steps":0}})", "default_steps"},
    {"StepsNegative", "{" UNET R"(,"_denoised":{"default_steps":-1}})", "default_steps"},
    {"GuidanceNegative", "{" UNET R"(,"_denoised":{"default_guidance_scale":-1}})",
     "default_guidance_scale"},
    {"GuidanceTooHigh", "{" UNET R"(,"_denoised":{"default_guidance_scale":100.5}})",
     "_denoised: field 'default_guidance_scale' is 100.5: expected a number from 0 to 100"},
};
#undef UNET

INSTANTIATE_TEST_SUITE_P(All, RefusedIndex, ::testing::ValuesIn(kRefused),
                         [](const auto& info) { return info.param.name; });

TEST(ModelIndex, ComponentsLeftOutAreFine) {
  ModelDirectory model;
  const absl::Status status = model.ParseIndex(
      nlohmann::json::parse(
          R"({"unet":["diffusers","UNet2DModel"],"vqvae":[null,null],"requires_safety_checker":false})"),
      "model_index.json");
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ModelIndex, ReportsAllComplaintsAtOnce) {
  ModelDirectory model;
  const absl::Status status = model.ParseIndex(
      nlohmann::json::parse(R"({"scheduler":7,"id2label":3})"), "model_index.json");
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("'unet'"), HasSubstr("'id2label'"), HasSubstr("'scheduler'")));
}

}  // namespace
}  // namespace denoised
