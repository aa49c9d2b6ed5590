// SPDX-License-Identifier: Apache-2.0
#include "server/api/request_preparer.h"

#include <gtest/gtest.h>

#include <memory>

namespace denoised {
namespace {

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

}  // namespace
}  // namespace denoised
