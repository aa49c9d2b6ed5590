// SPDX-License-Identifier: Apache-2.0
#include "engine/core/arena.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace denoised {
namespace {

constexpr size_t kUnit = Arena::kAlignment;

Tensor HostBlock(size_t bytes) { return Tensor::Host({static_cast<int64_t>(bytes)}, DType::kU8); }

uintptr_t AddressOf(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data()); }

/// Tensors that come and go as `seed` has it. Fails where two that live at once overlap, or one
/// lies outside the block or badly aligned. Returns all addresses, as offsets from `base`.
std::vector<uintptr_t> ComeAndGo(Arena& arena, uintptr_t base, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Tensor> live;
  std::vector<uintptr_t> offsets;
  for (int i = 0; i < 500; ++i) {
    if (!live.empty() && random() % 5 < 2) {
      live.erase(live.begin() + random() % live.size());
      continue;
    }
    const Tensor tensor = arena.New({1 + static_cast<int64_t>(random() % 2000)}, DType::kF32);
    const uintptr_t begin = AddressOf(tensor), end = begin + tensor.bytes();
    EXPECT_EQ((begin - base) % kUnit, 0u);
    EXPECT_GE(begin, base);
    EXPECT_LE(end, base + arena.peak());
    size_t in_use = 0;
    for (const Tensor& other : live) {
      EXPECT_TRUE(end <= AddressOf(other) || AddressOf(other) + other.bytes() <= begin)
          << "tensors that live at once overlap";
    }
    live.push_back(tensor);
    for (const Tensor& each : live) in_use += (each.bytes() + kUnit - 1) / kUnit * kUnit;
    EXPECT_EQ(arena.in_use(), in_use);
    offsets.push_back(begin - base);
  }
  return offsets;
}

TEST(Arena, MeasuredPeakSufficesAndAddressesRepeat) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    Arena measuring = Arena::Measuring(Device::kCpu);
    const uintptr_t nowhere = AddressOf(measuring.New({1}, DType::kU8));
    const auto measured = ComeAndGo(measuring, nowhere, seed);
    EXPECT_EQ(measuring.in_use(), 0u);
    const Tensor block = HostBlock(measuring.peak());
    Arena arena(block);
    EXPECT_EQ(ComeAndGo(arena, AddressOf(block), seed), measured);
    EXPECT_EQ(ComeAndGo(arena, AddressOf(block), seed), measured) << "the second time";
    EXPECT_EQ(arena.peak(), measuring.peak());
  }
}

TEST(Arena, TakesTheSmallestHoleThatFits) {
  const Tensor block = HostBlock(16 * kUnit);
  Arena arena(block);
  const auto take = [&](int64_t units) {
    return arena.New({units * static_cast<int64_t>(kUnit)}, DType::kU8);
  };
  const auto offset = [&](const Tensor& tensor) {
    return (AddressOf(tensor) - AddressOf(block)) / kUnit;
  };
  Tensor a = take(3), b = take(1), c = take(2), d = take(1);
  a = c = Tensor();  // holes of 3 at 0 and of 2 at 4, and the rest from 7 on
  c = take(2);
  EXPECT_EQ(offset(c), 4u) << "the hole of two, not that of three";
  a = take(1);
  EXPECT_EQ(offset(a), 0u) << "the hole of three, not the rest";
  EXPECT_EQ(arena.peak(), 7 * kUnit);
  a = b = c = Tensor();
  EXPECT_EQ(offset(take(6)), 0u) << "neighbouring holes are one";
  EXPECT_EQ(offset(take(7)), 7u);
  EXPECT_EQ(arena.peak(), 14 * kUnit);
}

TEST(Arena, ViewsKeepTheirMemory) {
  Arena arena(HostBlock(4096));
  Tensor view = arena.New({16, 8}, DType::kF32).Columns(2, 3);
  EXPECT_EQ(arena.in_use(), 512u);
  EXPECT_EQ(view.row_stride(), 8);
  const Tensor other = arena.New({1}, DType::kF32);
  EXPECT_GE(AddressOf(other), AddressOf(view) - 2 * sizeof(float) + 512) << "it is taken";
  view = Tensor();
  EXPECT_EQ(arena.in_use(), kUnit);
}

TEST(Arena, TensorsMayOutliveTheArena) {
  auto memory = std::make_shared<std::vector<std::byte>>(1024);
  const std::weak_ptr<const void> watched = memory;
  void* const data = memory->data();
  Tensor survivor;
  {
    Arena arena(Tensor(data, {1024}, DType::kU8, Device::kCpu, std::move(memory)));
    survivor = arena.New({4}, DType::kF32);
  }
  EXPECT_FALSE(watched.expired());
  survivor = Tensor();
  EXPECT_TRUE(watched.expired());
}

TEST(ArenaDeathTest, AByteLessThanMeasuredIsABug) {
  Arena measuring = Arena::Measuring(Device::kCpu);
  static_cast<void>(measuring.New({1000}, DType::kF32));
  Arena enough(HostBlock(measuring.peak()));
  static_cast<void>(enough.New({1000}, DType::kF32));
  Arena arena(HostBlock(measuring.peak() - 1));
  EXPECT_DEATH(static_cast<void>(arena.New({1000}, DType::kF32)), "bug in denoised");
}

}  // namespace
}  // namespace denoised
