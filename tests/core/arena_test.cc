#include "engine/core/arena.h"

#include <gtest/gtest.h>

#include <vector>

namespace denoised {
namespace {

Tensor HostBlock(size_t bytes) { return Tensor::Host({static_cast<int64_t>(bytes)}, DType::kU8); }

// A sequence with overlap, holes and reuse, as a model's forward pass makes it.
std::vector<void*> Exercise(Arena& arena) {
  std::vector<void*> addresses;
  Tensor a = arena.New({1000}, DType::kF32);
  Tensor b = arena.New({3, 5}, DType::kBF16);
  addresses = {a.data(), b.data()};
  a = Tensor();
  Tensor c = arena.New({100}, DType::kF32);
  Tensor d = arena.New({900}, DType::kF32);
  addresses.push_back(c.data());
  addresses.push_back(d.data());
  return addresses;
}

TEST(Arena, MeasuredPeakSufficesAndAddressesRepeat) {
  Arena measuring = Arena::Measuring(Device::kCpu);
  Exercise(measuring);
  EXPECT_EQ(measuring.in_use(), 0u);
  Arena arena(HostBlock(measuring.peak()));
  const auto first = Exercise(arena);
  EXPECT_EQ(first, Exercise(arena));
  EXPECT_EQ(arena.peak(), measuring.peak());
  EXPECT_EQ(first[0], first[2]) << "freed memory is reused by the next fitting tensor";
}

TEST(Arena, ViewsKeepTheirMemory) {
  Arena arena(HostBlock(4096));
  Tensor view = arena.New({16, 8}, DType::kF32).Columns(2, 3);
  EXPECT_EQ(arena.in_use(), 512u);
  EXPECT_EQ(view.row_stride(), 8);
  view = Tensor();
  EXPECT_EQ(arena.in_use(), 0u);
}

TEST(Arena, TensorsMayOutliveTheArena) {
  Tensor survivor;
  {
    Arena arena(HostBlock(1024));
    survivor = arena.New({4}, DType::kF32);
  }
  survivor.as<float>()[3] = 1.0f;
}

TEST(ArenaDeathTest, TooSmallIsABug) {
  Arena arena(HostBlock(256));
  EXPECT_DEATH(arena.New({1000}, DType::kF32), "bug in denoised");
}

}  // namespace
}  // namespace denoised
