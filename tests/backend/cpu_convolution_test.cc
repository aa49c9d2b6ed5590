// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstring>

#include "engine/backend/backend.h"
#include "engine/backend/cpu/ops.h"

namespace denoised {
namespace {

Tensor Numbers(const Shape& shape) {
  Tensor tensor = Tensor::Host(shape, DType::kF32);
  for (int64_t i = 0; i < tensor.elements(); ++i)
    tensor.as<float>()[i] = 0.01f * static_cast<float>((i * 7919) % 199 - 99);
  return tensor;
}

// A server runs for a long time, and clients may ask for any number of image sizes.
TEST(CpuConvolution, SizesLeaveNoMemoryBehindAndNoOtherBits) {
  const auto backend = OpenBackend({.device = "cpu"});
  ASSERT_TRUE(backend.ok()) << backend.status();
  const auto packed = (*backend)->PackConv2d(Numbers({24, 16, 3, 3}), Numbers({24}), false);
  ASSERT_TRUE(packed.ok()) << packed.status();
  const cpu::Convolution& convolution = *static_cast<const cpu::CpuConv2d&>(**packed).convolution;
  const auto draw = [&](int64_t edge) {
    Tensor out = Tensor::Host({1, edge, edge, 24}, DType::kF32);
    (*backend)->Conv2d({.x = Numbers({1, edge, edge, 16}),
                        .weight = packed->get(),
                        .stride = 1,
                        .pad_top = 1,
                        .pad_left = 1,
                        .pad_bottom = 1,
                        .pad_right = 1,
                        .out = out});
    return out.ToFloats();
  };
  const std::vector<float> first = draw(40), tiny = draw(3);
  size_t most = 0;
  for (int64_t edge = 1; edge <= 100; ++edge) {
    draw(edge);
    most = std::max(most, convolution.geometries());
  }
  EXPECT_GT(most, 32u) << "otherwise the limit was not reached";
  EXPECT_LE(most, 32u + 4) << "the last call may exceed the limit by its own geometries";
  EXPECT_LE(convolution.layouts(), convolution.geometries());
  EXPECT_EQ(draw(40), first) << "prepared anew, it computes the same";
  EXPECT_EQ(draw(3), tiny);
}

}  // namespace
}  // namespace denoised
