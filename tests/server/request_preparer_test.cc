// SPDX-License-Identifier: Apache-2.0
#include "server/api/request_preparer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

namespace denoised {
namespace {

using ::testing::ElementsAre;

CatalogModel Model(std::string name, bool text, ClassCondition condition,
                   ModelState state = ModelState::kReady, bool current = true) {
  ModelInfo info;
  info.state = state;
  info.condition = condition;
  if (text) info.text.emplace();
  return {.name = std::move(name),
          .version = "1",
          .current = current,
          .info = std::make_shared<const ModelInfo>(std::move(info))};
}

v1::GenerationParams Prompt() {
  v1::GenerationParams params;
  params.add_conditions()->set_text("a red apple");
  return params;
}

v1::GenerationParams Label() {
  v1::GenerationParams params;
  params.add_conditions()->set_class_label(3);
  return params;
}

TEST(ModelNameForTest, TheOnlyModelThatTakesTheCondition) {
  const std::vector<CatalogModel> models = {Model("emoji", true, ClassCondition::kNone),
                                            Model("digits", false, ClassCondition::kLabel)};
  EXPECT_EQ(ModelNameFor(Prompt(), models), "emoji");
  EXPECT_EQ(ModelNameFor(Label(), models), "digits");
  EXPECT_EQ(ModelNameFor({}, models), "");
  EXPECT_EQ(ModelNameFor({}, {models[1]}), "digits");
}

TEST(ModelNameForTest, NoneOfTwoThatTakeIt) {
  EXPECT_EQ(ModelNameFor(Prompt(), {Model("emoji", true, ClassCondition::kNone),
                                    Model("sdxl", true, ClassCondition::kNone)}),
            "");
}

TEST(ModelNameForTest, AnotherVersionIsNoOtherModel) {
  EXPECT_EQ(ModelNameFor(Prompt(),
                         {Model("emoji", true, ClassCondition::kNone),
                          Model("emoji", true, ClassCondition::kNone, ModelState::kReady, false)}),
            "emoji");
}

TEST(ModelNameForTest, WhatAModelThatLoadsWillTakeIsNotKnown) {
  EXPECT_EQ(
      ModelNameFor(Prompt(), {Model("emoji", true, ClassCondition::kNone),
                              Model("late", false, ClassCondition::kNone, ModelState::kLoading)}),
      "");
}

/// The fields that the caller is told, of those that the server and the engine complain about.
std::vector<std::string> Told(std::vector<FieldViolation> server,
                              const std::vector<FieldViolation>& engine,
                              const v1::GenerationParams& params = {}, const JobSpec& spec = {}) {
  MergeViolations(engine, params, spec, &server);
  std::vector<std::string> fields;
  for (const FieldViolation& violation : server) fields.push_back(violation.field);
  return fields;
}

TEST(MergeViolationsTest, WhatWasRefusedIsNotMissing) {
  EXPECT_THAT(Told({{"params.mask.tensor.data", "holds 2"}}, {{"mask", "is missing"}}),
              ElementsAre("params.mask.tensor.data"));
  EXPECT_THAT(Told({{"params.conditions[0]", "is empty"}}, {{"prompts", "is missing"}}),
              ElementsAre("params.conditions[0]"));
  EXPECT_THAT(Told({{"params.conditions[1].class_vector[2]", "is nan"}},
                   {{"class_values", "has 6 numbers"}}),
              ElementsAre("params.conditions[1].class_vector[2]"));
  EXPECT_THAT(Told({{"params.width", "is 0"}}, {{"width", "is 0"}, {"width_of", "is 0"}}),
              ElementsAre("params.width", "params.width_of"));
  EXPECT_THAT(Told({}, {{"mask", "is missing"}, {"mask", "is of no use"}}),
              ElementsAre("params.mask"));
  EXPECT_THAT(Told({{"params.conditions[0]", "is empty"}}, {{"class_labels[1]", "is -1"}}),
              ElementsAre("params.conditions[0]", "params.conditions[1].class_label"));
}

TEST(MergeViolationsTest, AnUploadThatWasLeftOutForAnotherReasonIsNotMissing) {
  const std::vector<FieldViolation> missing = {{"init_image", "is missing"},
                                               {"mask", "is missing"}};
  v1::GenerationParams params;
  EXPECT_THAT(Told({{"params.steps", "is 0"}}, missing, params),
              ElementsAre("params.steps", "params.init_image", "params.mask"));
  params.mutable_mask();
  EXPECT_THAT(Told({{"params.steps", "is 0"}}, missing, params),
              ElementsAre("params.steps", "params.init_image"));
  params.mutable_init_image();
  EXPECT_THAT(Told({}, missing, params), ElementsAre());
  JobSpec spec;
  spec.mask = Tensor::Host({1, 1}, DType::kF32);
  EXPECT_THAT(Told({}, {{"mask", "is set, but the model takes none"}}, params, spec),
              ElementsAre("params.mask"));
}

}  // namespace
}  // namespace denoised
