// SPDX-License-Identifier: Apache-2.0
#include "engine/nn/resnet.h"

#include <gmock/gmock.h>

#include "engine/backend/counting.h"

namespace denoised::nn {
namespace {

/// Notes for each convolution whether it may apply the norm behind it.
class NormsBehind final : public CountingBackend {
 public:
  NormsBehind() : CountingBackend(Device::kCuda, DType::kBF16) {}
  void Conv2d(const Conv2dArgs& args) override {
    CountingBackend::Conv2d(args);
    noted.push_back(args.epilogue.norm != nullptr);
  }
  std::vector<bool> noted;
};

// A norm that a convolution applies is rounded to bf16, one before a layer in e4m3 to e4m3 alone;
// and whether a convolution can apply it depends on the batch.
TEST(Resnet, ANormBeforeALayerInE4m3IsNotTheConvolutionsBeforeIt) {
  for (const float scale : {0.0f, 1.0f}) {
    NormsBehind backend;
    const Weights weights = Weights::Synthetic(1);
    weights.SetInputScales(
        std::map<std::string, float>{{"block.conv1", 0.0f}, {"block.conv2", scale}});
    const auto block =
        ResnetBlock::Load(backend, weights / "block", {.in_channels = 64, .out_channels = 64});
    ASSERT_TRUE(block.ok()) << block.status();
    Arena arena = Arena::Measuring(Device::kCuda);
    Context context{backend, arena, {}};
    (*block)(context, context.New({1, 8, 8, 64}), Tensor(), Tensor());
    EXPECT_THAT(backend.noted, testing::ElementsAre(scale == 0, false)) << scale;
  }
}

}  // namespace
}  // namespace denoised::nn
