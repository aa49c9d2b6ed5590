// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <numeric>

#include "engine/backend/cuda/e4m3.cuh"
#include "engine/backend/cuda/group_norm.h"

/// Shared by the one-pass group norms, so that they give the same bits: how the sums of an image
/// are computed and added. group_norm.cu also uses the functions that apply them.
///
/// Sums. Tensor cores add: for the eight rows of X = {x₀ … x₁₅} of a warp, mma computes X·Xᵀ, whose
/// diagonal is the sums of squares, and 1·Xᵀ. Products of bf16 are exact in fp32, and so are the
/// sums of a leaf if the mean is large relative to the deviation. The variance is a difference of
/// two sums, which loses digits in that case: for 32 thousand elements its relative error is at
/// most 1e-5 if the mean is 10 deviations, 1e-3 for 100, and 4e-3 for 256 (simulated; bf16 itself
/// rounds to 4e-3, so larger ratios do not occur). Subtracting a pivot element in bf16 first would
/// cost 1e-3 wherever elements differ by more than a factor of two, that is, in all other cases.
///
/// Order. Eight pixels of a group are a leaf, and the sums of leaves are added as a binary tree
/// over the image. A CTA has an aligned power of two of them. So the bits do not depend on how an
/// image is divided, and the division may depend on the batch.

namespace denoised::cuda {

constexpr int kVector = 8;  // channels in 16 bytes
constexpr int kWords = kVector / 2;
constexpr int kQuad = 4;         // lanes that have neighbouring pixels of the same channels
constexpr int kLeafVectors = 2;  // per lane
constexpr int kLeafPixels = kLeafVectors * kQuad;
constexpr int kMaxLeaves = 128;  // per block: four for each lane of a warp
constexpr int kMaxCluster = 16;

/// Number of neighbouring channels of a vector that always belong to one group: 2, 4 or 8; 1 if no
/// kernel supports it.
inline int RunOf(int group_channels) { return std::gcd(group_channels, kVector); }

/// Whether sources and outputs are whole vectors, of any element type.
inline bool HasVectors(const NormLayer& norm) {
  return norm.x.vector && norm.channels % kVector == 0 && norm.out.vector &&
         (norm.x2.data == nullptr || (norm.x2.vector && norm.channels2 % kVector == 0));
}
/// Whether they are bf16 in whole vectors (outputs also e4m3), groups have an even number of
/// channels, and the activation is none or SiLU.
inline bool SuitsOnePass(const NormLayer& norm) {
  return HasVectors(norm) && norm.x.element == Element::kBf16 &&
         (norm.out.element == Element::kBf16 || norm.out.element == Element::kE4m3x2) &&
         (norm.scale_shift.data == nullptr || norm.scale_shift.element == Element::kBf16) &&
         RunOf(norm.GroupChannels()) >= 2 &&
         (norm.activation == Activation::kNone || norm.activation == Activation::kSilu);
}

/// LoadKernel(), for clusters of up to kMaxCluster blocks.
template <typename Kernel>
cudaError_t LoadClusterKernel(Kernel* kernel, int shared_bytes) {
  if (cudaError_t error = LoadKernel(kernel, shared_bytes); error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

/// Calls load(u, pixel) for kCount of a thread's pixels, which are `step` apart, then use(u, pixel)
/// for the same: all loads come before the first store, which might alias them.
template <int kCount, typename Load, typename Use>
__device__ inline void ForPixels(int begin, int end, int step, const Load& load, const Use& use) {
  for (int first = begin; first < end; first += step * kCount) {
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const int pixel = first + u * step;
      if (pixel < end) load(u, pixel);
    }
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const int pixel = first + u * step;
      if (pixel >= end) break;
      use(u, pixel);
    }
  }
}

/// The sums over some elements of a group.
struct Sums {
  float x, squares;
};
__device__ inline Sums operator+(const Sums& a, const Sums& b) {
  return {a.x + b.x, a.squares + b.squares};
}

constexpr int kSumsBytes = sizeof(Sums);

/// How lanes of a warp add the leaves of a block, and the blocks of an image: 2^bits lanes, up to
/// four elements each.
struct SumTree {
  int leaf_bits = 0, lane_leaves = 0;
  int block_bits = 0, lane_blocks = 0;
};
/// `leaves`: a power of two.
inline SumTree MakeSumTree(int leaves, int blocks) {
  // Four elements per lane where enough lanes remain to send the sums to the other CTAs.
  SumTree tree;
  const int of_leaves = BinaryLogarithm(leaves), of_blocks = BinaryLogarithm(blocks);
  tree.leaf_bits = std::min({std::max({of_leaves - 2, of_blocks - 1, 0}), of_leaves, 5});
  tree.lane_leaves = leaves >> tree.leaf_bits;
  tree.block_bits = std::max(of_blocks - 2, 0);
  tree.lane_blocks = 1 << (of_blocks - tree.block_bits);
  return tree;
}

/// Sixteen bytes as words. For vectors that a thread keeps.
__device__ inline void Split(const uint4& vector, uint32_t (&words)[kWords]) {
  words[0] = vector.x, words[1] = vector.y, words[2] = vector.z, words[3] = vector.w;
}
/// The address of a channel of concat(x, x2), for bf16 sources.
__device__ inline const __nv_bfloat16* ChannelAt(const GroupNormLaunch& norm, int image,
                                                 int64_t pixel, int channel) {
  const bool first = channel < norm.channels;
  const Rows& source = first ? norm.x : norm.x2;
  return static_cast<const __nv_bfloat16*>(source.data) +
         (static_cast<int64_t>(image) * norm.pixels + pixel) * source.stride +
         (first ? channel : channel - norm.channels);
}
/// Adds x·xᵀ to the upper and 1·xᵀ to the lower eight rows of a 16 × 8 accumulator. Lanes 4r to
/// 4r + 3 hold row r of x, four bf16 each.
__device__ inline void AddProducts(float (&sums)[4], uint32_t x0, uint32_t x1) {
  constexpr uint32_t kOnes = 0x3f803f80;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %6, %5, %6}, {%4, %5}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(x0), "r"(x1), "r"(kOnes));
}

/// Whether this lane of its quad holds the sums of SumLeaf.
__device__ inline bool HoldsSums(int lane) { return lane % kQuad == lane / kQuad / 2; }
/// Sums a leaf, whose vectors are held by the lanes of a quad, kLeafVectors each, and calls keep(r,
/// sums) for each run r of a vector. Called by whole warps, lanes in the order of their quads.
/// Vectors outside the image are zeros.
template <int kRun, typename Keep>
__device__ inline void SumLeaf(const uint32_t (*vectors)[kWords], int lane, Keep keep) {
  static_assert(kLeafVectors == 2);
#pragma unroll
  for (int r = 0; r < kVector / kRun; ++r) {
    float products[4] = {};
#pragma unroll
    for (int w = r * kRun / 2; w < (r + 1) * kRun / 2; ++w) {
      AddProducts(products, vectors[0][w], vectors[1][w]);
    }
    // Columns 2t and 2t + 1 are lane t's of a quad.
    keep(r,
         lane / kQuad % 2 == 0 ? Sums{products[2], products[0]} : Sums{products[3], products[1]});
  }
}

/// Adds elements of each group, by all warps together. 2^bits lanes, the parts, get up to four
/// elements each from of_lane(group, part, sums); each then gets the total by take(sums, group,
/// part).
template <typename OfLane, typename Take>
__device__ inline void SumGroups(int groups, int bits, int warp, int warps, int lane,
                                 OfLane of_lane, Take take) {
  const int part = lane & ((1 << bits) - 1);
  for (int first = warp << (5 - bits); first < groups; first += warps << (5 - bits)) {
    const int group = first + (lane >> bits);
    Sums lanes[4] = {};
    if (group < groups) of_lane(group, part, lanes);
    Sums sums = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    for (int offset = 1; offset < 1 << bits; offset *= 2) {  // as a tree
      sums.x += __shfl_xor_sync(~0u, sums.x, offset);
      sums.squares += __shfl_xor_sync(~0u, sums.squares, offset);
    }
    if (group < groups) take(sums, group, part);
  }
}
/// The sums of each group over its `runs` leaves; `leaves` is [leaf][stride].
template <typename Take>
__device__ inline void SumLeaves(const SumTree& tree, const Sums* leaves, int stride, int runs,
                                 int groups, int warp, int warps, int lane, Take take) {
  SumGroups(
      groups, tree.leaf_bits, warp, warps, lane,
      [&](int group, int part, Sums(&lanes)[4]) {
        const Sums* leaf = leaves + part * tree.lane_leaves * stride + group * runs;
#pragma unroll 1
        for (int r = 0; r < runs; ++r, ++leaf) {
          Sums of_run[4] = {};  // all four loads come before the first addition
#pragma unroll
          for (int l = 0; l < 4; ++l) {
            if (l < tree.lane_leaves) of_run[l] = leaf[l * stride];
          }
#pragma unroll
          for (int l = 0; l < 4; ++l) lanes[l] = lanes[l] + of_run[l];
        }
      },
      take);
}
/// The sums of each group over blocks, [blocks][groups].
template <typename Take>
__device__ inline void SumBlocks(const SumTree& tree, const Sums* of_blocks, int blocks, int groups,
                                 int warp, int warps, int lane, Take take) {
  SumGroups(
      groups, tree.block_bits, warp, warps, lane,
      [&](int group, int part, Sums(&lanes)[4]) {
        const int first = part * tree.lane_blocks;
        const Sums* const from = of_blocks + first * groups + group;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          if (b < tree.lane_blocks && first + b < blocks) lanes[b] = from[b * groups];
        }
      },
      take);
}

struct Statistics {
  float mean, inverse_deviation;
};
__device__ inline Statistics StatisticsOf(const Sums& sums, float count_inverse, float eps) {
  Statistics statistics = {sums.x * count_inverse};
  const float mean = statistics.mean;
  const float variance = fmaxf(fmaf(-mean, mean, sums.squares * count_inverse), 0.0f);
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(statistics.inverse_deviation) : "f"(variance + eps));
  return statistics;
}

/// y = x · factor + offset, or half of it if SiluOfHalf follows.
struct Affine {
  float factor, offset;
};
constexpr int kAffineBytes = sizeof(Affine);
/// (x − mean) / deviation · factor + offset
__device__ inline Affine Apply(const Affine& affine, const Statistics& statistics) {
  const float factor = affine.factor * statistics.inverse_deviation;
  return {factor, fmaf(-statistics.mean, factor, affine.offset)};
}
/// y · (1 + scale) + shift. `unit`: 0.5 if y is halved, else 1.
template <typename T>
__device__ inline Affine Apply(const Affine& affine, T scale, T shift, float unit) {
  const float factor = 1.0f + static_cast<float>(scale);
  return {affine.factor * factor, fmaf(affine.offset, factor, unit * static_cast<float>(shift))};
}

/// The affine map of channel `c` of a normalised image.
__device__ inline Affine AffineOf(const GroupNormLaunch& norm, int64_t image, int c) {
  const float unit = norm.activation == Activation::kSilu ? 0.5f : 1.0f;
  Affine affine = {unit * norm.gamma[c], unit * norm.beta[c]};
  if (norm.scale_shift.data != nullptr) {
    affine = Apply(affine, Load(norm.scale_shift, image, c),
                   Load(norm.scale_shift, image, norm.AllChannels() + c), unit);
  }
  return affine;
}

/// The same for an image that is not normalised yet.
__device__ inline void StoreFactors(const GroupNormLaunch& norm, int64_t image, int c,
                                    const Affine& affine, const Statistics& of_group) {
  const int channels = norm.AllChannels();
  const Affine of_image = Apply(affine, of_group);
  float* const to = norm.factors + image * 2 * channels;
  to[c] = of_image.factor;
  to[channels + c] = of_image.offset;
}

/// The two channels of a word, normalised: in bf16; or divided by the output's scale, of which
/// `inverse` is the inverse, in e4m3 in the word's lower half.
template <Element kOut, typename Activate>
__device__ inline uint32_t NormaliseWord(uint32_t word, const Affine& low, const Affine& high,
                                         Activate activate, float inverse = 1) {
  const float a = activate(fmaf(Low(word), low.factor, low.offset)),
              b = activate(fmaf(High(word), high.factor, high.offset));
  return kOut == Element::kE4m3x2 ? PackE4m3(a * inverse, b * inverse) : PackBf16(a, b);
}
/// Stores eight channels in e4m3, two in the lower half of each word.
__device__ inline void StoreE4m3(const Rows& out, int64_t row, int64_t channel,
                                 const uint32_t (&words)[kWords]) {
  *reinterpret_cast<uint2*>(E4m3At(out, row, channel)) =
      make_uint2(words[0] | words[1] << 16, words[2] | words[3] << 16);
}

}  // namespace denoised::cuda
