// SPDX-License-Identifier: Apache-2.0
#include "engine/io/weights.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "tests/io/temporary_directory.h"

namespace denoised {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class WeightsTest : public ::testing::Test {
 protected:
  /// Tensors of a tiny model: two floats and an integer buffer.
  Weights Open() {
    const float ones[] = {1, 1, 1, 1, 1, 1};
    const std::map<std::string, Tensor> tensors = {
        {"down_blocks.0.resnets.1.conv1.weight", Tensor::HostF32({3, 2}, ones)},
        {"down_blocks.0.resnets.1.conv1.bias", Tensor::HostF32({3}, {ones, 3})},
        {"position_ids", Tensor::Host({2}, DType::kI64)}};
    const std::string path = directory_ / "unet.safetensors";
    EXPECT_TRUE(WriteSafetensors(path, tensors, {}).ok());
    auto opened = Safetensors::Open(path);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return Weights(*std::move(opened), path);
  }
  TemporaryDirectory directory_;
};

TEST_F(WeightsTest, PrefixesMirrorCheckpointNames) {
  const Weights root = Open();
  const Weights conv = root / "down_blocks" / 0 / "resnets" / 1 / "conv1";
  EXPECT_EQ(conv.prefix(), "down_blocks.0.resnets.1.conv1");
  EXPECT_EQ(root.prefix(), "");
  EXPECT_TRUE(conv.Has("weight"));
  EXPECT_FALSE(conv.Has("gamma"));
  const auto weight = conv.Get("weight", {3, 2});
  ASSERT_TRUE(weight.ok()) << weight.status();
  EXPECT_EQ(weight->ToFloats().size(), 6u);
}

/// Those of diffusers' AttentionBlock, before 0.18.
TEST_F(WeightsTest, OldNamesOfAttentionStandForNewOnes) {
  const auto open = [&](const std::vector<std::string>& names) {
    std::map<std::string, Tensor> tensors;
    float value = 0;
    for (const std::string& name : names) {
      ++value;
      tensors[name] = Tensor::HostF32({1}, {&value, 1});
    }
    const std::string path = directory_ / "attention.safetensors";
    EXPECT_TRUE(WriteSafetensors(path, tensors, {}).ok());
    return Weights(*Safetensors::Open(path), path);
  };
  const auto value_of = [](const Weights& weights, const std::string& name) {
    const auto tensor = weights.Get(name, {1});
    return tensor.ok() ? tensor->ToFloats()[0] : -1;
  };
  const Weights old = open({"mid.0.query.weight", "mid.0.key.bias", "mid.0.value.weight",
                            "mid.0.proj_attn.bias", "my_query.weight"});
  EXPECT_TRUE((old / "mid" / 0 / "to_q").Has("weight"));
  EXPECT_EQ(value_of(old / "mid" / 0 / "to_q", "weight"), 1);
  EXPECT_EQ(value_of(old, "mid.0.to_k.bias"), 2);
  EXPECT_EQ(value_of(old / "mid" / 0, "to_v.weight"), 3);
  EXPECT_EQ(value_of(old, "mid.0.to_out.0.bias"), 4);
  EXPECT_FALSE(old.Has("mid.0.to_q.bias"));
  EXPECT_FALSE(old.Has("my_to_q.weight"));
  EXPECT_THAT(std::string(old.CheckAllUsed().message()),
              AllOf(HasSubstr("my_query"), Not(HasSubstr("mid.0"))));
  const Weights both = open({"query.weight", "to_q.weight"});
  EXPECT_EQ(value_of(both, "to_q.weight"), 2);
  EXPECT_FALSE(both.CheckAllUsed().ok());
}

TEST_F(WeightsTest, FingerprintsDifferByNameShapeAndValue) {
  const auto of = [&](const std::string& name, const Shape& shape, float last) {
    const float values[] = {1, 2, last};
    const std::string path = directory_ / "one.safetensors";
    EXPECT_TRUE(WriteSafetensors(path, {{name, Tensor::HostF32(shape, values)}}, {}).ok());
    return Weights(*Safetensors::Open(path), path).Fingerprint();
  };
  const std::string known = of("a", {3}, 3);
  EXPECT_EQ(known.size(), 16u);
  EXPECT_EQ(of("a", {3}, 3), known);
  EXPECT_NE(of("b", {3}, 3), known);
  EXPECT_NE(of("a", {3, 1}, 3), known);
  EXPECT_NE(of("a", {3}, 4), known);
}

/// How many of the tensor's whole pages are in memory, and how many it has.
std::pair<size_t, size_t> PagesInMemory(const Tensor& tensor) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)),
             data = reinterpret_cast<uintptr_t>(tensor.data()),
             begin = (data + page - 1) / page * page, end = (data + tensor.bytes()) / page * page;
  std::vector<unsigned char> pages((end - begin) / page);
  EXPECT_EQ(mincore(reinterpret_cast<void*>(begin), end - begin, pages.data()), 0);
  const auto there = std::count_if(pages.begin(), pages.end(), [](auto in) { return in & 1; });
  return {there, pages.size()};
}

/// So whoever packs a tensor waits for the device alone.
TEST_F(WeightsTest, ATensorIsReadFromTheDiskBetweenItsCallsOfProgress) {
  constexpr int64_t kCount = 4 << 20;
  const std::string path = directory_ / "large.safetensors";
  const std::vector<float> ones(kCount, 1.0f);
  ASSERT_TRUE(WriteSafetensors(path, {{"a", Tensor::HostF32({kCount}, ones)}}, {}).ok());
  const auto tensors = Safetensors::Open(path);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  const Tensor tensor = tensors->tensors().at("a");
  const int file = open(path.c_str(), O_RDONLY);
  posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);  // which some file systems cannot
  close(file);
  const bool dropped = PagesInMemory(tensor).first == 0;
  std::vector<LoadPart> parts;
  const Weights weights(*tensors, path);
  weights.SetProgress([&](LoadPart next) {
    parts.push_back(next);
    const auto [there, all] = PagesInMemory(tensor);
    if (next == LoadPart::kDevice) {
      EXPECT_EQ(there, all);
    } else if (dropped) {
      EXPECT_EQ(there, 0u);
    }
  });
  EXPECT_FALSE(weights.Get("b", {1}).ok());
  EXPECT_THAT(parts, ElementsAre());
  ASSERT_TRUE(weights.Get("a", {kCount}).ok());
  EXPECT_THAT(parts, ElementsAre(LoadPart::kFiles, LoadPart::kDevice));
  weights.Fingerprint();
  EXPECT_THAT(parts, ElementsAre(LoadPart::kFiles, LoadPart::kDevice, LoadPart::kFiles));
}

TEST_F(WeightsTest, InputScales) {
  const Weights root = Open();
  const Weights conv = root / "down_blocks" / 0 / "resnets" / 1 / "conv1";
  EXPECT_FALSE(conv.MayHaveInputScales());
  root.SetInputScales(std::nullopt);
  EXPECT_TRUE(conv.MayHaveInputScales());
  EXPECT_EQ(conv.InputScale().value(), 0);
  root.SetInputScales(std::map<std::string, float>{{conv.prefix(), 0.5f}, {"conv_out", 2.0f}});
  EXPECT_EQ(conv.InputScale().value(), 0.5f);
  const auto missing = (root / "conv_in").InputScale();
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()),
              AllOf(HasSubstr("'conv_in'"), HasSubstr("calibrate")));
  // A scale that no layer asked for.
  for (const char* name : {"weight", "bias"}) conv.Ignore(name);
  root.Ignore("position_ids");
  EXPECT_THAT(std::string(root.CheckAllUsed().message()), HasSubstr("the scale of conv_out"));
  ASSERT_TRUE((root / "conv_out").InputScale().ok());
  EXPECT_TRUE(root.CheckAllUsed().ok()) << root.CheckAllUsed();
  // Calibrations of earlier versions have the names of the file.
  root.SetInputScales(std::map<std::string, float>{
      {"mid.query", 0.25f}, {"mid.proj_attn", 4.0f}, {"to.query", 1.0f}, {"to.to_q", 3.0f}});
  EXPECT_EQ((root / "mid" / "to_q").InputScale().value(), 0.25f);
  EXPECT_EQ((root / "mid" / "to_out" / 0).InputScale().value(), 4.0f);
  EXPECT_EQ((root / "to" / "to_q").InputScale().value(), 3.0f);
  EXPECT_THAT(std::string(root.CheckAllUsed().message()),
              AllOf(HasSubstr("the scale of to.query"), Not(HasSubstr("mid"))));
}

TEST_F(WeightsTest, MissingTensorNamesTheClosest) {
  const auto missing = (Open() / "down_blocks" / 1 / "resnets" / 1).Get("conv1.weight", {3, 2});
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  const std::string message(missing.status().message());
  EXPECT_THAT(message,
              AllOf(HasSubstr("unet.safetensors"),
                    HasSubstr("no tensor 'down_blocks.1.resnets.1.conv1.weight'"),
                    HasSubstr("closest there are: 'down_blocks.0.resnets.1.conv1.weight'")));
}

TEST_F(WeightsTest, WrongShapeNamesBoth) {
  const Weights conv = Open() / "down_blocks.0.resnets.1.conv1";
  const absl::Status status = conv.Get("weight", {2, 3}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("conv1.weight"), HasSubstr("[3, 2]"), HasSubstr("[2, 3]")));
}

TEST_F(WeightsTest, IntegersAreNoWeights) {
  const auto ids = Open().Get("position_ids", {2});
  EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(ids.status().message()), HasSubstr("is I64"));
}

TEST_F(WeightsTest, ReportsWhatNobodyRead) {
  const Weights root = Open();
  const Weights conv = root / "down_blocks.0.resnets.1.conv1";
  ASSERT_TRUE(conv.Get("weight", {3, 2}).ok());
  EXPECT_THAT(std::string(root.CheckAllUsed().message()),
              AllOf(HasSubstr("2 tensors"), HasSubstr("conv1.bias"), HasSubstr("position_ids"),
                    Not(HasSubstr("conv1.weight"))));
  // A look or a failed read is no use.
  EXPECT_TRUE(conv.Has("bias"));
  EXPECT_FALSE(conv.Get("bias", {4}).ok());
  EXPECT_THAT(std::string(root.CheckAllUsed().message()), HasSubstr("conv1.bias"));
}

TEST_F(WeightsTest, WhatHasNoEffectIsNotReported) {
  const Weights root = Open();
  (root / "down_blocks" / 0 / "resnets" / 1 / "conv1").Ignore("weight");
  root.Ignore("position_ids");
  root.Ignore("absent");
  const absl::Status status = root.CheckAllUsed();
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("1 tensors"), HasSubstr("conv1.bias"), Not(HasSubstr("weight,"))));
}

TEST(Weights, SyntheticOnesAreWrittenAsTheyWere) {
  TemporaryDirectory directory;
  const std::string path = directory / "w.safetensors";
  const Weights synthetic = Weights::Synthetic(1);
  const Tensor weight = (synthetic / "conv").Get("weight", {4, 3, 3, 3}).value();
  const Tensor bias = (synthetic / "conv").Get("bias", {4}).value();
  EXPECT_EQ(synthetic.parameters(), 112);
  ASSERT_TRUE(synthetic.WriteSynthetic(path).ok());
  auto opened = Safetensors::Open(path);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const Weights written(*std::move(opened), path);
  EXPECT_EQ(written.parameters(), 112);
  EXPECT_EQ((written / "conv").Get("weight", {4, 3, 3, 3})->ToFloats(), weight.ToFloats());
  EXPECT_EQ((written / "conv").Get("bias", {4})->ToFloats(), bias.ToFloats());
  EXPECT_TRUE(written.CheckAllUsed().ok());
}

TEST(Weights, ThoseToWriteAreDrawnAsTheyAreWritten) {
  TemporaryDirectory directory;
  const std::string path = directory / "w.safetensors";
  const Shape large{3, 600000}, small{7};  // the first has several pieces
  const Weights drawn = Weights::Synthetic(1), to_write = Weights::SyntheticToWrite(1);
  const Tensor zeros = to_write.Get("large", large).value();
  EXPECT_EQ(zeros.ToFloats(), std::vector<float>(large.elements()));
  ASSERT_TRUE(to_write.Get("small", small).ok());
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    ASSERT_TRUE(to_write.WriteSynthetic(path, dtype, /*threads=*/3).ok());
    auto opened = Safetensors::Open(path);
    ASSERT_TRUE(opened.ok()) << opened.status();
    for (const auto& [name, shape] : {std::pair("large", large), std::pair("small", small)}) {
      const Tensor& written = opened->tensors().at(name);
      EXPECT_EQ(written.dtype(), dtype);
      std::vector<float> expected = drawn.Get(name, shape)->ToFloats();
      for (float& value : expected) {
        if (dtype == DType::kF16) value = HalfToFloat(FloatToHalf(value));
        if (dtype == DType::kBF16) value = BFloat16ToFloat(FloatToBFloat16(value));
      }
      EXPECT_EQ(written.ToFloats(), expected) << name << " " << Name(dtype);
    }
  }
}

TEST(Weights, AllUsedIsOk) {
  TemporaryDirectory directory;
  const float one[] = {1};
  const std::string path = directory / "w.safetensors";
  ASSERT_TRUE(WriteSafetensors(path, {{"w", Tensor::HostF32({1}, one)}}, {}).ok());
  auto opened = Safetensors::Open(path);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const Weights weights(*std::move(opened), path);
  ASSERT_TRUE(weights.Get("w", {1}).ok());
  EXPECT_TRUE(weights.CheckAllUsed().ok());
}

}  // namespace
}  // namespace denoised
