// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// The order in which everything is summed over samples: the parts of a chunk in an order that
/// depends on their number alone, the chunks as a balanced binary tree (backend.h).

namespace denoised::training::cuda {

/// Σ value(i) over i < kCount as a balanced tree; kCount is a power of two.
template <int kCount, typename Value>
__device__ inline auto SumOf(const Value& value) {
  if constexpr (kCount == 1) {
    return value(0);
  } else {
    return SumOf<kCount / 2>(value) +
           SumOf<kCount / 2>([&](int i) { return value(i + kCount / 2); });
  }
}

/// A stack of the sums of completed subtrees, the largest first. Like the bits of the number of
/// leaves: two subtrees of equal size are added at once.
template <typename T>
class Subtrees {
 public:
  __device__ void Add(int64_t leaf, T value) {
    for (int64_t bits = leaf; bits & 1; bits >>= 1) value = waiting_[--levels_] + value;
    waiting_[levels_++] = value;
  }
  /// Once the number of leaves is a power of two.
  __device__ T Sum() const { return waiting_[0]; }

 private:
  static constexpr int kMostLevels = 32;
  T waiting_[kMostLevels];
  int levels_ = 0;
};

/// The sum of load(chunk · splits + split), which is a T. Loads of kLeaves chunks, which divide
/// `chunks`, and of kSplits splits are in flight together; single ones would leave the memory
/// bandwidth unused.
template <int kLeaves, int kSplits, typename T, typename LoadPart>
__device__ inline T SumOfChunks(int64_t chunks, int64_t splits, const LoadPart& load) {
  const auto sum_of_leaves = [&](int64_t leaf) {
    T sums[kLeaves];
#pragma unroll
    for (int chunk = 0; chunk < kLeaves; ++chunk)
      sums[chunk] = load((leaf * kLeaves + chunk) * splits);
    for (int64_t split = 1; split < splits; split += kSplits) {
      T loaded[kSplits][kLeaves];
#pragma unroll
      for (int s = 0; s < kSplits; ++s) {
#pragma unroll
        for (int chunk = 0; chunk < kLeaves; ++chunk)
          if (split + s < splits)
            loaded[s][chunk] = load((leaf * kLeaves + chunk) * splits + split + s);
      }
#pragma unroll
      for (int s = 0; s < kSplits; ++s) {
#pragma unroll
        for (int chunk = 0; chunk < kLeaves; ++chunk)
          if (split + s < splits) sums[chunk] = sums[chunk] + loaded[s][chunk];
      }
    }
    return SumOf<kLeaves>([&](int chunk) { return sums[chunk]; });
  };
  if (chunks == kLeaves) return sum_of_leaves(0);
  Subtrees<T> subtrees;
  for (int64_t leaf = 0; leaf < chunks / kLeaves; ++leaf) subtrees.Add(leaf, sum_of_leaves(leaf));
  return subtrees.Sum();
}

}  // namespace denoised::training::cuda
