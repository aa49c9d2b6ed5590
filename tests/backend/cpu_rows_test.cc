// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "engine/backend/backend.h"
#include "engine/backend/cpu/row_parts.h"

namespace denoised {
namespace {

using cpu::PartsOf;
using cpu::RowPart;
using cpu::SplitRows;

TEST(RowParts, EveryRowOnceAndEveryThreadAsMany) {
  for (int workers : {1, 2, 3, 5, 16, 64}) {
    for (int rows = 1; rows <= 200; ++rows) {
      SCOPED_TRACE(fmt::format("{} rows on {} threads", rows, workers));
      const RowSplit split = SplitRows(rows, workers);
      ASSERT_LE(split.apart, rows);
      int next = 0, largest = 0;
      for (const RowPart& part : PartsOf(split)) {
        ASSERT_EQ(part.begin, next);
        ASSERT_GT(part.count, 0);
        next += part.count;
        largest = std::max(largest, part.count);
      }
      EXPECT_EQ(next, split.apart);
      EXPECT_EQ(largest, split.part);
      EXPECT_LE(largest, 4);
      // At most one row for each thread is left over, or a few threads have one row less.
      EXPECT_LE(4 * (rows - split.apart), 3 * workers);
      if (split.apart % workers != 0) {
        EXPECT_EQ(split.apart, rows);
        EXPECT_GT(4 * (rows % workers), 3 * workers);
      }
    }
  }
}

TEST(RowParts, Examples) {
  EXPECT_EQ(SplitRows(1, 2).apart, 0) << "one row is split over both threads";
  EXPECT_EQ(SplitRows(3, 2).apart, 2);
  EXPECT_EQ(SplitRows(12, 16).apart, 0);
  EXPECT_EQ(SplitRows(15, 16).apart, 15);
  EXPECT_EQ(PartsOf(SplitRows(2, 2)), (std::vector<RowPart>{{0, 1}, {1, 1}}));
  EXPECT_EQ(PartsOf(SplitRows(10, 2)), (std::vector<RowPart>{{0, 3}, {3, 3}, {6, 2}, {8, 2}}));
  EXPECT_EQ(PartsOf(SplitRows(16, 2)), (std::vector<RowPart>{{0, 4}, {4, 4}, {8, 4}, {12, 4}}));
  EXPECT_EQ(PartsOf(SplitRows(2, 1)), (std::vector<RowPart>{{0, 1}, {1, 1}}));
}

class CpuRowsTest : public testing::Test {
 protected:
  static Tensor Numbers(const Shape& shape, int seed) {
    Tensor tensor = Tensor::Host(shape, DType::kF32);
    for (int64_t i = 0; i < tensor.elements(); ++i)
      tensor.as<float>()[i] = 0.01f * static_cast<float>((i * 7919 + 31 * seed) % 199 - 99);
    return tensor;
  }

  const std::unique_ptr<Backend> backend_ = OpenBackend({.device = "cpu"}).value();
};

/// One op of each kind that packs weights, prepares primitives or needs scratch.
struct Network {
  std::unique_ptr<PackedConv2d> conv, half;
  std::unique_ptr<PackedLinear> tokens, vectors;
  Tensor gamma, beta;
};

// Rows have the same bits whether threads compute parts of them or all threads compute them
// together. Each attempt packs new weights, so that threads also prepare the primitives at the same
// time. A row of the 3×3 convolution has twelve bands, of two lines each (conv2d.cc: 8 million
// flops).
TEST_F(CpuRowsTest, PartsHaveTheBitsOfRowsTogether) {
  if (backend_->SplitRows(1).apart == 1) GTEST_SKIP() << "needs two threads";
  constexpr int kRows = 5, kEdge = 24, kChannels = 96;
  const auto pack = [&] {
    Network network;
    network.conv =
        backend_
            ->PackConv2d(Numbers({kChannels, kChannels, 3, 3}, 1), Numbers({kChannels}, 2), false)
            .value();
    network.half =
        backend_->PackConv2d(Numbers({kChannels, kChannels, 1, 1}, 3), Tensor(), false).value();
    network.tokens = backend_->PackLinear({Numbers({3 * kChannels, kChannels}, 4)}, {}).value();
    network.vectors = backend_->PackLinear({Numbers({kChannels, kChannels}, 5)}, {}).value();
    network.gamma = Numbers({kChannels}, 6);
    network.beta = Numbers({kChannels}, 7);
    return network;
  };
  const Tensor x = Numbers({kRows, kEdge, kEdge, kChannels}, 8);
  const Tensor time = Numbers({kRows, kChannels}, 9);
  const auto run = [&](const Network& network, int begin, int count, const Tensor& to) {
    const Shape image{count, kEdge, kEdge, kChannels};
    const Tensor source = x.Slice(begin, count),
                 add = Tensor::Host({count, kChannels}, DType::kF32);
    const Tensor convolved = Tensor::Host(image, DType::kF32);
    const Tensor normed = Tensor::Host(image, DType::kF32);
    const Tensor qkv = Tensor::Host({count, kEdge * kEdge, 3 * kChannels}, DType::kF32);
    backend_->Linear({.x = time.Slice(begin, count), .weight = network.vectors.get(), .out = add});
    backend_->Conv2d(
        {.x = source,
         .weight = network.conv.get(),
         .pad_top = 1,
         .pad_left = 1,
         .pad_bottom = 1,
         .pad_right = 1,
         .epilogue = {.add = add, .shortcut = {.x = source, .weight = network.half.get()}},
         .out = convolved});
    backend_->GroupNorm({.x = convolved,
                         .norm = {.gamma = network.gamma,
                                  .beta = network.beta,
                                  .groups = 8,
                                  .activation = Activation::kSilu},
                         .out = normed});
    backend_->Linear({.x = normed.Reshape({count, kEdge * kEdge, kChannels}),
                      .weight = network.tokens.get(),
                      .out = qkv});
    backend_->Attention({.q = qkv.Columns(0, kChannels),
                         .k = qkv.Columns(kChannels, kChannels),
                         .v = qkv.Columns(2 * kChannels, kChannels),
                         .heads = 2,
                         .scale = 0.25f,
                         .out = to.Slice(begin, count)});
  };
  const Shape out{kRows, kEdge * kEdge, kChannels};
  const Tensor together = Tensor::Host(out, DType::kF32);
  run(pack(), 0, kRows, together);
  for (int attempt = 0; attempt < 5; ++attempt) {
    const Network network = pack();
    const Tensor parts = Tensor::Host(out, DType::kF32);
    RowSplit split = backend_->SplitRows(kRows);
    split.apart = kRows;
    backend_->ForEachPart(split,
                          [&](int begin, int count, int) { run(network, begin, count, parts); });
    ASSERT_TRUE(backend_->status().ok()) << backend_->status();
    ASSERT_EQ(std::memcmp(parts.data(), together.data(), parts.bytes()), 0) << attempt;
  }
}

// A unit that is alone runs outside the team of threads, and has the bits of the same unit within
// it.
TEST_F(CpuRowsTest, OneRowOfOneBandHasTheBitsOfManyRows) {
  if (backend_->SplitRows(1).apart == 1) GTEST_SKIP() << "needs two threads";
  constexpr int kRows = 4, kEdge = 6;
  for (const int channels : {8, 64, 100}) {
    for (const int kernel : {1, 3}) {
      const auto conv =
          backend_->PackConv2d(Numbers({channels, channels, kernel, kernel}, 1), Tensor(), false)
              .value();
      const Shape shape{kRows, kEdge, kEdge, channels};
      const Tensor x = Numbers(shape, 2);
      const Tensor together = Tensor::Host(shape, DType::kF32),
                   alone = Tensor::Host(shape, DType::kF32);
      const auto run = [&](int begin, int count, const Tensor& to) {
        const int pad = kernel / 2;
        backend_->Conv2d({.x = x.Slice(begin, count),
                          .weight = conv.get(),
                          .pad_top = pad,
                          .pad_left = pad,
                          .pad_bottom = pad,
                          .pad_right = pad,
                          .out = to.Slice(begin, count)});
      };
      run(0, kRows, together);
      for (int row = 0; row < kRows; ++row) run(row, 1, alone);
      ASSERT_TRUE(backend_->status().ok()) << backend_->status();
      EXPECT_EQ(std::memcmp(alone.data(), together.data(), alone.bytes()), 0)
          << channels << " channels, " << kernel << "×" << kernel;
    }
  }
}

// A thread that other programs hold up delays the end of the evaluation, but no op of another part.
TEST_F(CpuRowsTest, AThreadThatIsHeldUpHoldsUpNoOtherPart) {
  constexpr int kRows = 16;
  const RowSplit split = backend_->SplitRows(kRows);
  if (split.workers < 2) GTEST_SKIP() << "needs two threads";
  const int parts = static_cast<int>(PartsOf(split).size());
  const Tensor x = Numbers({kRows, 16, 16, 32}, 1);
  std::atomic<int> done = 0;
  std::atomic<bool> in_time = true;
  backend_->ForEachPart(split, [&](int begin, int count, int) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (begin == 0 && done < parts - 1 && in_time) {
      in_time = std::chrono::steady_clock::now() < deadline;
      std::this_thread::yield();
    }
    const Tensor rows = x.Slice(begin, count);
    for (int op = 0; op < 10; ++op) backend_->Add(rows, 0.5f, rows, 0, Activation::kSilu, rows);
    ++done;
  });
  EXPECT_TRUE(in_time) << done << " of " << parts - 1 << " other parts were done";
  EXPECT_EQ(done, parts);
}

}  // namespace
}  // namespace denoised
