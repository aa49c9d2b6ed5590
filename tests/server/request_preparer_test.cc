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

/// The model for `params` without a name; "" if there is none.
std::string Only(const v1::GenerationParams& params, const std::vector<CatalogModel>& models) {
  const auto only = OnlyModel(models, [&](const ModelInfo& info) { return Takes(info, params); });
  return only ? only->name : "";
}

/// A model that Load adds.
CatalogModel Added(std::string name) {
  CatalogModel model = Model(std::move(name), false, ClassCondition::kNone, ModelState::kLoading);
  model.added = true;
  return model;
}

TEST(OnlyModelTest, TheOnlyModelThatTakesTheCondition) {
  const std::vector<CatalogModel> models = {Model("emoji", true, ClassCondition::kNone),
                                            Model("digits", false, ClassCondition::kLabel)};
  EXPECT_EQ(Only(Prompt(), models), "emoji");
  EXPECT_EQ(Only(Label(), models), "digits");
  EXPECT_EQ(Only({}, models), "");
  EXPECT_EQ(Only({}, {models[1]}), "digits");
  EXPECT_EQ(Only({}, {}), "");
  EXPECT_FALSE(OnlyModel(models, nullptr).has_value());
}

TEST(OnlyModelTest, NoneOfTwoThatTakeIt) {
  EXPECT_EQ(Only(Prompt(), {Model("emoji", true, ClassCondition::kNone),
                            Model("sdxl", true, ClassCondition::kNone)}),
            "");
}

TEST(OnlyModelTest, AnotherVersionIsNoOtherModel) {
  EXPECT_EQ(
      Only(Prompt(), {Model("emoji", true, ClassCondition::kNone),
                      Model("emoji", true, ClassCondition::kNone, ModelState::kReady, false)}),
      "emoji");
}

TEST(OnlyModelTest, WhatAModelThatLoadsWillTakeIsNotKnown) {
  const CatalogModel emoji = Model("emoji", true, ClassCondition::kNone);
  const CatalogModel late = Model("late", false, ClassCondition::kNone, ModelState::kLoading);
  EXPECT_EQ(Only(Prompt(), {emoji, late}), "late") << "to be refused until it is known";
  EXPECT_EQ(Only(Prompt(), {late, emoji}), "late");
  EXPECT_EQ(Only(Prompt(), {emoji, late, Model("sdxl", true, ClassCondition::kNone)}), "")
      << "whatever it takes";
  EXPECT_FALSE(OnlyModel({emoji, late}, nullptr).has_value());
}

TEST(OnlyModelTest, AModelThatIsAddedCountsWhenItIsReady) {
  const CatalogModel digits = Model("digits", false, ClassCondition::kLabel);
  EXPECT_EQ(Only(Label(), {digits, Added("late")}), "digits");
  EXPECT_EQ(Only(Prompt(), {digits, Added("late")}), "digits") << "which says why it takes none";
  EXPECT_EQ(Only({}, {Added("late")}), "late") << "to be refused until it is ready";
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
