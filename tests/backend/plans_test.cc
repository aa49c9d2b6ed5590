// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <ostream>
#include <random>
#include <set>

#include "engine/backend/backend.h"
#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/device.h"
#include "engine/core/e4m3.h"
#include "tests/needs_gpu.h"

/// Whatever the tuner or a launcher chooses, the bits are the same: every candidate for a launch,
/// by itself, on a GPU. The lists of candidates are tested without one.

namespace denoised::cuda {
namespace {

struct Case {
  int images, height, width, channels, channels2, outputs, kernel;
  int stride = 1;
  bool upsample2x = false, narrow = false;
  int shortcut = 0, shortcut2 = 0;
};

const std::vector<Case> kCases = {{3, 32, 32, 128, 0, 128, 3},
                                  {5, 16, 16, 256, 128, 384, 3},
                                  {9, 8, 8, 256, 0, 256, 3},
                                  {2, 64, 64, 192, 0, 192, 3},
                                  {2, 64, 64, 320, 0, 320, 3},
                                  {3, 16, 16, 640, 64, 640, 3},
                                  {2, 16, 16, 192, 0, 1280, 3},
                                  {2, 16, 16, 64, 0, 64, 3},
                                  {2, 32, 32, 32, 0, 32, 3},
                                  {3, 16, 16, 96, 0, 32, 3},
                                  {70, 4, 4, 320, 64, 320, 3},
                                  {1, 8, 8, 768, 0, 768, 3},
                                  {3, 16, 16, 96, 0, 128, 3},
                                  {2, 16, 16, 40, 0, 192, 3},
                                  {6, 16, 16, 128, 0, 160, 3, 1, true},
                                  {70, 16, 16, 128, 0, 128, 3, 1, true},  // several waves
                                  {3, 5, 3, 64, 0, 264, 3, 1, true},
                                  {2, 20, 12, 64, 64, 256, 3, 1, true},
                                  {5, 4, 4, 320, 64, 320, 3, 1, true},
                                  {1, 3, 128, 64, 0, 128, 3, 1, true},
                                  {3, 7, 6, 64, 0, 320, 3, 1, true},
                                  {2, 5, 96, 64, 0, 128, 3, 1, true},
                                  {3, 15, 17, 64, 0, 72, 3, 2},
                                  {40, 1, 256, 192, 0, 576, 1},
                                  {3, 1, 2045, 320, 0, 1288, 1},
                                  {1, 1, 1, 768, 0, 3080, 1},
                                  {2, 64, 64, 64, 0, 24, 3},
                                  {3, 16, 16, 64, 32, 40, 3, 1, false, true},
                                  {5, 16, 16, 256, 128, 384, 3, 1, false, false, 256, 96},
                                  {9, 8, 8, 256, 0, 256, 3, 1, false, false, 256, 512},
                                  {3, 16, 16, 320, 0, 320, 3, 1, false, false, 128, 72},
                                  {3, 32, 32, 128, 64, 128, 3, 1, false, false, 192, 64},
                                  {2, 32, 32, 128, 0, 128, 3, 1, false, false, 64, 0},
                                  {2, 16, 16, 64, 0, 128, 3, 1, false, false, 64, 0},
                                  {70, 4, 4, 320, 64, 320, 3, 1, false, false, 72, 0},
                                  {40, 32, 32, 128, 0, 128, 3, 1, false, false, 192, 64},
                                  {150, 16, 16, 128, 0, 128, 3, 1, false, false, 64, 0},
                                  {301, 8, 8, 128, 0, 128, 3, 1, false, false, 72, 0},
                                  {3, 8, 8, 256, 0, 1280, 3},
                                  {3, 8, 8, 128, 0, 1280, 3},
                                  {2, 32, 32, 64, 0, 1280, 3},
                                  {5, 8, 8, 256, 0, 1280, 3, 1, false, false, 128, 72},
                                  {3, 4, 4, 256, 64, 1288, 3, 1, false, false, 72, 0},
                                  {5, 1, 33, 1536, 0, 1288, 1},
                                  {3, 15, 17, 320, 0, 1320, 3, 2},
                                  {3, 15, 17, 64, 0, 72, 3, 2, false, false, 64, 8}};

struct NormCase {
  int images, height, width, channels, channels2, groups;
  bool scaled = false;
};

/// A launch with pointers to nothing.
Conv2dLaunch ShapeOf(const Case& c) {
  Conv2dLaunch conv;
  conv.images = c.images, conv.height = c.height, conv.width = c.width;
  conv.channels = c.channels, conv.channels2 = c.channels2, conv.outputs = c.outputs;
  conv.kernel = c.kernel, conv.stride = c.stride, conv.upsample2x = c.upsample2x;
  conv.pad_top = conv.pad_left = c.kernel / 2;
  const int factor = c.upsample2x ? 2 : 1;
  conv.out_height = (c.height * factor - 1) / c.stride + 1;
  conv.out_width = (c.width * factor - 1) / c.stride + 1;
  static std::byte nothing;
  const auto rows = [](int channels, bool fp32 = false) {
    return channels == 0 ? Rows()
                         : Rows{&nothing, channels, fp32 ? Element::kF32 : Element::kBf16, true};
  };
  conv.x = rows(c.channels), conv.x2 = rows(c.channels2);
  conv.add = rows(c.outputs);
  conv.shortcut.x = rows(c.shortcut), conv.shortcut.x2 = rows(c.shortcut2);
  conv.shortcut.channels = c.shortcut, conv.shortcut.channels2 = c.shortcut2;
  if (c.shortcut == 0) conv.residual = rows(c.outputs);
  conv.activation = Activation::kSilu;
  conv.out = rows(c.outputs, c.narrow);
  return conv;
}

/// The same layer in e4m3: of pairs of channels, with one source. A shortcut stays in bf16.
Conv2dLaunch InE4m3(Conv2dLaunch conv) {
  conv.x.element = conv.weight_element = Element::kE4m3x2;
  conv.x2 = {}, conv.channels2 = 0;
  return conv;
}

TEST(HopperCandidatesTest, SplitsFollowFromOneImage) {
  std::set<std::string> seen;
  const auto expect = [&](Case c, const auto& launch_of) {
    std::set<int> splits;
    for (const int images : {c.images, 1, 2, 16, 64, 256}) {
      c.images = images;
      const Conv2dLaunch conv = launch_of(c);
      SCOPED_TRACE(Describe(conv));
      ASSERT_TRUE(SuitsHopper(conv));
      const std::vector<HopperCandidate> candidates =
          HopperCandidates(conv, {.multiprocessors = 132, .hopper = true});
      ASSERT_FALSE(candidates.empty());
      std::set<std::string> names;
      for (const HopperCandidate& candidate : candidates) {
        EXPECT_TRUE(names.insert(NameOf(candidate.plan)).second) << NameOf(candidate.plan);
        EXPECT_GE(candidate.microseconds, candidates.front().microseconds);
        const HopperTileSpec& spec = SpecOf(candidate.plan.tile);
        if (!spec.IsPersistent()) {
          EXPECT_EQ(candidate.plan.splits % candidate.plan.cluster, 0) << NameOf(candidate.plan);
          EXPECT_TRUE(spec.split_k != SplitK::kEach ||
                      candidate.plan.splits == candidate.plan.cluster)
              << NameOf(candidate.plan);
        } else if (spec.loader == Loader::kHaloTile) {
          // They read conv.add by whole boxes, without looking where its row ends.
          EXPECT_EQ(conv.outputs % spec.BoxOutputs(), 0) << NameOf(candidate.plan);
        }
        splits.insert(candidate.plan.splits);
      }
      seen.merge(names);
    }
    EXPECT_EQ(splits.size(), 1u) << Describe(launch_of(c));
  };
  for (const Case& c : kCases) {
    expect(c, ShapeOf);
    expect(c, [](const Case& of) { return InE4m3(ShapeOf(of)); });
  }
  size_t all = 0;
  for (const HopperTileSpec& spec : kTiles) {
    const bool over_cluster = spec.split_k == SplitK::kCluster || spec.split_k == SplitK::kEach;
    // In clusters of 2, 4 and 8, or of 2.
    all += 1 + (spec.cost.Multicasts() ? 1 : 0) + (over_cluster ? spec.IsPersistent() ? 1 : 3 : 0);
  }
  EXPECT_EQ(seen.size(), all) << "a tile is never among the candidates";
}

TEST(HopperCandidatesTest, TmaHasNoStrideAboveEight) {
  Conv2dLaunch conv = ShapeOf(kCases[0]);
  for (const int stride : {1, 2, 8}) {
    conv.stride = stride;
    EXPECT_TRUE(SuitsHopper(conv)) << stride;
  }
  conv.stride = 9;
  EXPECT_FALSE(SuitsHopper(conv));
}

/// The row of kTiles in e4m3.
HopperTile FindE4m3Tile(Loader loader, int n) {
  int row = 0;
  while (kTiles[row].element != Element::kE4m3x2 || kTiles[row].loader != loader ||
         kTiles[row].n != n) {
    ++row;
  }
  return HopperTile(row);
}

// Each refusal is beside a plan or a layer that differs in one thing and is supported, so that no
// other condition refuses in place of the one that is meant.
constexpr HopperTile kCooperative = FindTile(Loader::kIm2col, Schedule::kCooperative, 128, 128);
constexpr HopperTile kPingPong = FindTile(Loader::kIm2col, Schedule::kPingPong, 128, 128);
constexpr HopperTile kOneByOne = FindTile(Loader::kIm2col, Schedule::kCooperative, 128, 32);
constexpr HopperTile kHaloTile = FindTile(Loader::kHaloTile, Schedule::kCooperative, 128, 80);
constexpr HopperTile kEach = FindTile(Loader::kIm2col, Schedule::kClusterSplitK, 128, 128);
const Case kPlain = {3, 32, 32, 128, 0, 160, 3};
float something;  // that a pointer can point to

TEST(HopperCandidatesTest, TilesRefuseSplitsTheyCannotAdd) {
  const Conv2dLaunch conv = ShapeOf(kPlain);
  EXPECT_TRUE(Supports({kCooperative, 1, 1}, conv));
  EXPECT_TRUE(Supports({kCooperative, 4, 2}, conv));
  EXPECT_FALSE(Supports({kCooperative, 3, 1}, conv)) << "not a power of two";
  EXPECT_FALSE(Supports({kCooperative, 16, 1}, conv)) << "too many splits";
  EXPECT_FALSE(Supports({kCooperative, 1, 4}, conv)) << "multicast in fours";
  EXPECT_TRUE(Supports({kPingPong, 1, 2}, conv));
  EXPECT_FALSE(Supports({kPingPong, 2, 1}, conv)) << "no split-K";
  EXPECT_TRUE(Supports({kOneByOne, 1, 1}, conv));
  EXPECT_FALSE(Supports({kOneByOne, 1, 2}, conv)) << "no multicast";
  EXPECT_TRUE(Supports({kTile64x64, 4, 2}, conv));
  EXPECT_FALSE(Supports({kTile64x64, 4, 3}, conv)) << "not a power of two";
  EXPECT_FALSE(Supports({kTile64x64, 2, 4}, conv)) << "CTAs without a split";
  EXPECT_TRUE(Supports({kEach, 4, 4}, conv));
  EXPECT_FALSE(Supports({kEach, 4, 2}, conv)) << "two splits each";

  EXPECT_TRUE(Supports({kHaloTile, 2, 2}, conv));
  EXPECT_FALSE(Supports({kHaloTile, 4, 2}, conv)) << "two splits each";
  EXPECT_FALSE(Supports({kHaloTile, 1, 2}, conv)) << "a CTA without a split";
  constexpr HopperTile kInCta = FindTile(Loader::kHaloTile, Schedule::kCooperative, 128, 32);
  EXPECT_TRUE(Supports({kInCta, 2, 1}, conv));
  EXPECT_FALSE(Supports({kInCta, 2, 2}, conv)) << "one CTA has all splits";
  Case few_steps = kPlain;
  few_steps.channels = 64;
  const Conv2dLaunch narrow = ShapeOf(few_steps);
  ASSERT_LT(StepsOf(narrow), kMinStepsSplitOverCluster);
  EXPECT_TRUE(Supports({kHaloTile, 2, 1}, narrow));
  EXPECT_FALSE(Supports({kHaloTile, 2, 2}, narrow)) << "no split fills the pipeline";

  Conv2dLaunch zeros = conv;
  zeros.zero_taps = 1;
  EXPECT_TRUE(Supports({kCooperative, 1, 1}, zeros));
  EXPECT_FALSE(Supports({kCooperative, 2, 1}, zeros)) << "taps are left out of whole sums";
  const Conv2dLaunch shortcut = ShapeOf({5, 16, 16, 256, 0, 160, 3, 1, false, false, 128, 0});
  ASSERT_TRUE(SuitsShortcut(shortcut));
  EXPECT_TRUE(Supports({kCooperative, 1, 1}, shortcut));
  EXPECT_FALSE(Supports({kPingPong, 1, 1}, shortcut)) << "a shortcut is added where splits are";
  Conv2dLaunch without = shortcut;
  without.shortcut = {};
  EXPECT_TRUE(Supports({kPingPong, 1, 1}, without));

  // In e4m3, where no tile splits k, a shortcut is a run of its own.
  const HopperTile e4m3_tile = FindE4m3Tile(Loader::kIm2col, 160),
                   e4m3_one_by_one = FindE4m3Tile(Loader::kIm2col, 32);
  EXPECT_TRUE(Supports({e4m3_tile, 1, 1}, InE4m3(shortcut)));
  EXPECT_FALSE(Supports({e4m3_tile, 2, 1}, InE4m3(shortcut))) << "no split-K";
  EXPECT_FALSE(Supports({e4m3_one_by_one, 1, 1}, InE4m3(shortcut))) << "a shortcut, one by one";
  EXPECT_TRUE(Supports({e4m3_one_by_one, 1, 1}, InE4m3(without)));
}

TEST(HopperCandidatesTest, TilesRefuseInputsTheyCannotRead) {
  const Conv2dLaunch conv = ShapeOf(kPlain);
  const HopperTile e4m3_tile = FindE4m3Tile(Loader::kIm2col, 128);
  EXPECT_FALSE(Supports({kCooperative, 1, 1}, InE4m3(conv)));
  EXPECT_FALSE(Supports({e4m3_tile, 1, 1}, conv));
  EXPECT_TRUE(Supports({e4m3_tile, 1, 1}, InE4m3(conv)));
  Conv2dLaunch other = InE4m3(conv);
  other.x2 = other.x, other.channels2 = other.channels;
  EXPECT_FALSE(Supports({e4m3_tile, 1, 1}, other)) << "a second source in e4m3";

  other = conv, other.stride = 8;
  EXPECT_TRUE(Supports({kCooperative, 1, 1}, other));
  EXPECT_FALSE(Supports({kHaloTile, 1, 1}, other)) << "halo tiles have no stride";
  other.stride = 9;
  EXPECT_FALSE(Supports({kCooperative, 1, 1}, other)) << "TMA has no such stride";
  const Conv2dLaunch odd = ShapeOf({3, 15, 17, 128, 0, 160, 3});
  EXPECT_TRUE(Supports({kCooperative, 1, 1}, odd));
  EXPECT_FALSE(Supports({kHaloTile, 1, 1}, odd)) << "no whole halo tiles";

  other = conv, other.input_factors = &something;
  EXPECT_TRUE(Supports({kHaloTile, 1, 1}, other));
  EXPECT_FALSE(Supports({kCooperative, 1, 1}, other)) << "no norm of its input";
  constexpr HopperTile kNormalises = FindTile(Loader::kHaloTile, Schedule::kPingPong, 128, 64);
  constexpr HopperTile kTooWide = FindTile(Loader::kHaloTile, Schedule::kPingPong, 128, 192);
  other.outputs = 192;
  EXPECT_TRUE(Supports({kNormalises, 1, 1}, other));
  EXPECT_FALSE(Supports({kTooWide, 1, 1}, other)) << "no registers to normalise";
  other.input_factors = nullptr;
  EXPECT_TRUE(Supports({kTooWide, 1, 1}, other));
}

TEST(HopperCandidatesTest, TilesRefuseOutputsTheyCannotStore) {
  const Conv2dLaunch conv = ShapeOf(kPlain);
  constexpr HopperTile kWideBoxes = FindTile(Loader::kHaloTile, Schedule::kCooperative, 128, 128);
  constexpr HopperTile kNoBoxes = FindTile(Loader::kHaloTile, Schedule::kClusterSplitK, 64, 64);
  EXPECT_FALSE(Supports({kWideBoxes, 1, 1}, conv)) << "no whole boxes of 64 outputs";
  EXPECT_TRUE(Supports({kNoBoxes, 1, 1}, conv));
  Conv2dLaunch other = conv;
  other.outputs = 192;
  EXPECT_TRUE(Supports({kWideBoxes, 1, 1}, other));
  other = conv, other.out.element = Element::kF32;
  EXPECT_TRUE(Supports({kOneByOne, 1, 1}, other));
  EXPECT_FALSE(Supports({kCooperative, 1, 1}, other)) << "outputs in fp32";
  constexpr HopperTile kNarrowBoxes = FindTile(Loader::kIm2col, Schedule::kCooperative, 128, 160);
  const Conv2dLaunch even = ShapeOf({2, 30, 30, 64, 0, 320, 3, 1, true}),
                     odd = ShapeOf({2, 31, 31, 64, 0, 320, 3, 1, true});
  EXPECT_TRUE(Supports({kNarrowBoxes, 1, 1}, even));
  EXPECT_FALSE(Supports({kNarrowBoxes, 1, 1}, odd)) << "single pixels of boxes of 32 outputs";
  EXPECT_TRUE(Supports({kCooperative, 1, 1}, odd));
  EXPECT_TRUE(Supports({kOneByOne, 1, 1}, odd));
}

TEST(HopperCandidatesTest, TilesRefuseGatesTheyCannotCompute) {
  const auto gated_of = [](int outputs) {
    Conv2dLaunch conv = ShapeOf({2, 1, 1024, 320, 0, outputs, 1});
    conv.gated = true;
    conv.add = conv.residual = {};
    conv.activation = Activation::kNone;
    return conv;
  };
  const Conv2dLaunch gated = gated_of(2560);
  ASSERT_TRUE(SuitsGate(gated));
  EXPECT_TRUE(Supports({kCooperative, 1, 1}, gated));
  EXPECT_FALSE(Supports({kOneByOne, 1, 1}, gated)) << "no epilogue for gates";
  EXPECT_FALSE(Supports({kCooperative, 2, 1}, gated)) << "a gate of split-K";
  Conv2dLaunch other = gated;
  other.gated = false;
  EXPECT_TRUE(Supports({kOneByOne, 1, 1}, other));
  EXPECT_TRUE(Supports({kCooperative, 2, 1}, other));
  other = gated, other.scale = 0.5f;
  EXPECT_FALSE(Supports({kCooperative, 1, 1}, other)) << "a scale behind the gate";

  const HopperTile e4m3_tile = FindE4m3Tile(Loader::kIm2col, 128);
  const auto rounded = [](Conv2dLaunch conv) {
    conv.rounded_out = {&something, RoundedBytes(conv.outputs / 2) / 2, Element::kE4m3x2, true};
    return conv;
  };
  EXPECT_FALSE(Supports({kCooperative, 1, 1}, rounded(gated))) << "rounded, of bf16";
  EXPECT_TRUE(Supports({e4m3_tile, 1, 1}, rounded(InE4m3(gated))));
  other = rounded(InE4m3(gated)), other.gated = false;
  EXPECT_FALSE(Supports({e4m3_tile, 1, 1}, other)) << "rounded without a gate";
  other.rounded_out = {};
  EXPECT_TRUE(Supports({e4m3_tile, 1, 1}, other));
  const Conv2dLaunch half_vectors = InE4m3(gated_of(208));  // 104 are six and a half
  EXPECT_TRUE(Supports({e4m3_tile, 1, 1}, half_vectors));
  EXPECT_FALSE(Supports({e4m3_tile, 1, 1}, rounded(half_vectors))) << "no whole vectors in e4m3";
}

TEST(HopperCandidatesTest, TilesRefuseNormsTheyCannotCompute) {
  constexpr HopperTile kTwoConsumers = FindTile(Loader::kIm2col, Schedule::kClusterSplitK, 128, 64);
  Conv2dLaunch normed = ShapeOf({9, 8, 8, 256, 0, 256, 3});
  normed.residual = {};
  normed.activation = Activation::kNone;
  const Conv2dLaunch plain = normed;
  normed.output_norm = {&something, &something, 32, 1e-5f};
  EXPECT_TRUE(Supports({kTile64x64, 1, 1}, normed));
  EXPECT_FALSE(Supports({kTwoConsumers, 1, 1}, normed)) << "no norm of its outputs";
  EXPECT_TRUE(Supports({kTwoConsumers, 1, 1}, plain));
  normed.output_norm.groups = 16;  // of 16 channels
  EXPECT_FALSE(Supports({kTile64x64, 1, 1}, normed)) << "groups that the tile cannot sum";
}

// Launches of one description share a measurement.
TEST(GenericCandidatesTest, DescriptionsTellDtypesApart) {
  Conv2dLaunch conv = ShapeOf(kCases[0]);
  std::set<std::string> seen;
  for (const Element in : {Element::kBf16, Element::kF32}) {
    for (const Element out : {Element::kBf16, Element::kF32}) {
      conv.x.element = in, conv.out.element = out;
      conv.out.vector = false;  // otherwise HasVectorOutputs() tells the outputs apart
      EXPECT_TRUE(seen.insert(Describe(conv)).second) << Describe(conv);
    }
  }
}

/// The generic kernels' candidates for a convolution that either of add and residual is added to.
std::vector<ConvCandidate> GenericCandidates(const Conv2dLaunch& conv, const Queue& queue) {
  return SuitsConv3x3(conv) ? Conv3x3Candidates(conv, queue) : Conv2dCandidates(conv, queue);
}

TEST(GenericCandidatesTest, HaveNamesAndAreAllReached) {
  std::set<std::string> seen_3x3, seen;
  for (Case c : kCases) {
    if (c.shortcut > 0) continue;
    for (const int images : {c.images, 1, 64}) {
      c.images = images;
      Conv2dLaunch conv = ShapeOf(c);
      conv.weight_element = Element::kBf16;
      conv.add = {};
      conv.weight_stride = c.kernel * c.kernel * (c.channels + c.channels2);
      conv.workspace_bytes = 8 << 20;
      std::set<std::string> names;
      double last = 0;
      for (const ConvCandidate& candidate : GenericCandidates(conv, {.multiprocessors = 108})) {
        EXPECT_TRUE(names.insert(candidate.name).second) << candidate.name;
        EXPECT_GE(candidate.microseconds, last) << candidate.name;
        last = candidate.microseconds;
      }
      EXPECT_FALSE(names.empty()) << Describe(conv);
      (SuitsConv3x3(conv) ? seen_3x3 : seen).merge(names);
    }
  }
  EXPECT_EQ(seen.size(), 5u) << "a tile of conv2d.cu is never among the candidates";
  // Six tiles, seven with split-K; those of doubled images have the names of others.
  EXPECT_EQ(seen_3x3.size(), 6u + 7u) << "a tile of conv3x3.cu is never among the candidates";
}

// Names are of sizes, which the tiles of several kinds of inputs share: they are told apart by
// their launches.
TEST(GenericCandidatesTest, EveryKindOfInputHasItsTiles) {
  using Launch = decltype(ConvCandidate::launch);
  std::set<Launch> copied, in_registers, one_by_one, in_e4m3, all;
  const auto expect = [&](Conv2dLaunch conv, std::set<Launch>& of_inputs) {
    conv.add = {};
    for (const bool vectors : {true, false}) {
      if (!vectors) conv.out.element = Element::kF32;
      ASSERT_EQ(HasVectorOutputs(conv), vectors);
      const auto candidates = Conv2dCandidates(conv, {.multiprocessors = 108});
      EXPECT_FALSE(candidates.empty()) << Describe(conv);
      for (const ConvCandidate& candidate : candidates) {
        of_inputs.insert(candidate.launch);
        all.insert(candidate.launch);
      }
    }
  };
  const auto of = [](int channels, int channels2, Element element) {
    Conv2dLaunch conv = ShapeOf({3, 16, 16, channels, channels2, 128, 3});
    conv.x.element = element;
    conv.weight_element = Element::kBf16;
    return conv;
  };
  expect(of(128, 0, Element::kBf16), copied);
  expect(of(128, 64, Element::kBf16), copied);
  expect(of(128, 0, Element::kF32), in_registers);
  for (const Element element : {Element::kBf16, Element::kF32}) {
    expect(of(9, 0, element), one_by_one);
    expect(of(128, 3, element), one_by_one);
    Conv2dLaunch unaligned = of(128, 0, element);
    unaligned.x.vector = false;
    expect(unaligned, one_by_one);
  }
  expect(InE4m3(of(128, 0, Element::kBf16)), in_e4m3);
  EXPECT_EQ(copied.size(), 5u + 1u);
  EXPECT_EQ(in_registers.size(), 1u);
  EXPECT_EQ(one_by_one.size(), 1u);
  EXPECT_EQ(in_e4m3.size(), 2u);
  EXPECT_EQ(all.size(), 10u) << "a tile of conv2d.cu is for inputs that it cannot read";
}

class CudaPlansTest : public testing::Test {
 protected:
  void SetUp() override {
    cudaDeviceProp properties;
    DENOISED_NEEDS_GPU();
    ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    auto backend = OpenBackend({.device = "cuda"});  // loads the kernels
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    auto stream = NewStream();
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *std::move(stream);
    queue_ = {stream_.get(), properties.multiProcessorCount, false, properties.major >= 9};
  }

  Tensor Random(const Shape& shape, DType dtype, float deviation = 1) {
    std::normal_distribution<float> normal(0, deviation);
    Tensor host = Tensor::Host(shape, dtype);
    for (int64_t i = 0; i < shape.elements(); ++i) {
      const float value = normal(random_);
      if (dtype == DType::kF32) {
        host.as<float>()[i] = value;
      } else {
        host.as<uint16_t>()[i] = FloatToBFloat16(value);
      }
    }
    Tensor tensor = Zeros(shape, dtype);
    backend_->Upload(host.data(), host.bytes(), tensor);
    return tensor;
  }
  Tensor Zeros(const Shape& shape, DType dtype) {
    Tensor tensor = backend_->Allocate(shape, dtype, "a test").value();
    EXPECT_EQ(cudaMemset(tensor.data(), 0, tensor.bytes()), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // before an upload in another stream
    kept_.push_back(tensor);
    return tensor;
  }
  static Rows View(const Tensor& tensor) {
    return {tensor.data(), tensor.dim(-1),
            tensor.dtype() == DType::kF32 ? Element::kF32 : Element::kBf16, true};
  }

  Conv2dLaunch Launch(const Case& c) {
    Conv2dLaunch conv = ShapeOf(c);
    const int64_t pixels = int64_t{c.images} * c.height * c.width;
    const int64_t out_pixels = int64_t{c.images} * conv.out_height * conv.out_width;
    conv.x = View(Random({pixels, c.channels}, DType::kBF16));
    if (c.channels2 > 0) conv.x2 = View(Random({pixels, c.channels2}, DType::kBF16));
    const int64_t depth =
        int64_t{c.upsample2x ? 4 : c.kernel * c.kernel} * (c.channels + c.channels2);
    const Tensor weight = Random({int64_t{c.upsample2x ? 4 : 1} * c.outputs,
                                  (depth + kDepthPadding - 1) / kDepthPadding * kDepthPadding},
                                 DType::kBF16, 1 / std::sqrt(static_cast<float>(depth)));
    conv.weight = weight.data();
    conv.weight_stride = static_cast<int>(weight.dim(1));
    conv.weight_element = Element::kBf16;
    conv.bias = Random({c.outputs + kBiasPadding}, DType::kF32).as<float>();
    conv.add = View(Random({c.images, c.outputs}, DType::kBF16));
    if (c.shortcut > 0) {
      conv.shortcut = Shortcut(c, out_pixels);
    } else {
      conv.residual = View(Random({out_pixels, c.outputs}, DType::kBF16));
    }
    out_ = Zeros({out_pixels, c.outputs}, c.narrow ? DType::kF32 : DType::kBF16);
    conv.out = View(out_);
    return conv;
  }

  /// Matrices in e4m3, of `columns` pairs.
  Tensor RandomE4m3(int64_t rows, int64_t columns) {
    std::normal_distribution<float> normal(0, 30);
    Tensor host = Tensor::Host({rows, 2 * columns}, DType::kU8);
    for (uint8_t& value : host.span<uint8_t>()) value = FloatToE4m3(normal(random_));
    Tensor tensor = Zeros(host.shape(), DType::kU8);
    backend_->Upload(host.data(), host.bytes(), tensor);
    return tensor;
  }
  Conv2dLaunch LaunchInE4m3(const Case& c) {
    Conv2dLaunch conv = InE4m3(Launch(c));
    const int64_t depth = int64_t{c.upsample2x ? 4 : c.kernel * c.kernel} * c.channels;
    conv.x.data = RandomE4m3(int64_t{c.images} * c.height * c.width, c.channels).data();
    conv.weight = RandomE4m3(int64_t{c.upsample2x ? 4 : 1} * c.outputs, depth).data();
    conv.weight_stride = static_cast<int>(depth);
    const Tensor scales = Zeros({c.outputs + kBiasPadding}, DType::kF32);
    std::vector<float> powers(c.outputs);
    for (int i = 0; i < c.outputs; ++i) powers[i] = std::ldexp(1.0f, -17 - i % 3);
    backend_->Upload(powers.data(), powers.size() * sizeof(float), scales.Slice(0, c.outputs));
    conv.scales = scales.as<float>();
    return conv;
  }

  GroupNormLaunch Launch(const NormCase& c, bool factors) {
    GroupNormLaunch norm;
    const int64_t pixels = int64_t{c.images} * c.height * c.width;
    const int channels = c.channels + c.channels2;
    norm.channels = c.channels, norm.channels2 = c.channels2;
    norm.images = c.images, norm.pixels = c.height * c.width;
    norm.groups = c.groups;
    norm.eps = 1e-5f;
    norm.x = View(Random({pixels, c.channels}, DType::kBF16));
    if (c.channels2 > 0) norm.x2 = View(Random({pixels, c.channels2}, DType::kBF16, 3));
    norm.gamma = Random({channels}, DType::kF32).as<float>();
    norm.beta = Random({channels}, DType::kF32).as<float>();
    if (c.scaled) norm.scale_shift = View(Random({c.images, 2 * channels}, DType::kBF16));
    norm.activation = c.scaled ? Activation::kSilu : Activation::kNone;
    out_ = factors ? Zeros({c.images, 2 * channels}, DType::kF32)
                   : Zeros({pixels, channels}, DType::kBF16);
    norm.out = {out_.data(), channels, Element::kBf16, true};
    if (factors) norm.factors = out_.as<float>();
    const Tensor workspace = Zeros({c.images, 128, c.groups, 2}, DType::kF32);
    norm.workspace = workspace.data();
    norm.workspace_bytes = workspace.bytes();
    norm.semaphores = static_cast<int*>(Zeros({kSemaphores}, DType::kF32).data());
    if (flags_.data() == nullptr) flags_ = Zeros({kFlagBytes / 4}, DType::kF32);
    norm.flags = flags_.data();
    return norm;
  }

  ShortcutLaunch Shortcut(const Case& c, int64_t out_pixels) {
    ShortcutLaunch shortcut;
    shortcut.channels = c.shortcut, shortcut.channels2 = c.shortcut2;
    shortcut.x = View(Random({out_pixels, c.shortcut}, DType::kBF16));
    if (c.shortcut2 > 0) shortcut.x2 = View(Random({out_pixels, c.shortcut2}, DType::kBF16));
    const int depth = c.shortcut + c.shortcut2;
    shortcut.weight_stride = (depth + kDepthPadding - 1) / kDepthPadding * kDepthPadding;
    shortcut.weight = Random({c.outputs, shortcut.weight_stride}, DType::kBF16,
                             1 / std::sqrt(static_cast<float>(depth)))
                          .data();
    return shortcut;
  }

  /// What `launch` leaves in out_.
  template <typename Launch>
  std::vector<std::byte> Run(const std::string& name, Launch launch) {
    EXPECT_TRUE(backend_->Synchronize().ok());  // uploads are in its stream
    std::vector<std::byte> bytes(out_.bytes());
    EXPECT_EQ(cudaMemsetAsync(out_.data(), 0xff, out_.bytes(), stream_.get()), cudaSuccess);
    EXPECT_EQ(launch(), cudaSuccess) << name;
    EXPECT_EQ(cudaMemcpyAsync(bytes.data(), out_.data(), bytes.size(), cudaMemcpyDeviceToHost,
                              stream_.get()),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_.get()), cudaSuccess) << name;
    return bytes;
  }
  std::vector<std::byte> Run(const Conv2dLaunch& conv, const HopperPlan& plan) {
    return Run(NameOf(plan), [&] { return LaunchConv2dHopper(conv, plan, queue_); });
  }

  /// The bits that all candidates give.
  std::vector<std::byte> RunAll(const Conv2dLaunch& conv) {
    const std::vector<HopperCandidate> candidates = HopperCandidates(conv, queue_);
    const std::vector<std::byte> first = Run(conv, candidates.front().plan);
    EXPECT_NE(first, std::vector<std::byte>(first.size(), std::byte{0xff}));
    for (const HopperCandidate& candidate : candidates) {
      EXPECT_TRUE(Run(conv, candidate.plan) == first) << NameOf(candidate.plan);
    }
    return first;
  }

  std::mt19937 random_{3};
  std::unique_ptr<Backend> backend_;
  std::vector<Tensor> kept_;
  Stream stream_;
  Queue queue_;
  Tensor out_;
  Tensor flags_;  // for all launches, as a backend has it: each finds what others left
};

TEST_F(CudaPlansTest, AllGenericCandidatesGiveTheSameBits) {
  for (const Case& c : kCases) {
    if (c.shortcut > 0) continue;
    kept_.clear();
    Conv2dLaunch conv = Launch(c);
    conv.add = {};
    const Tensor workspace = Zeros({8 << 20}, DType::kU8);
    conv.workspace = workspace.data();
    conv.workspace_bytes = workspace.bytes();
    conv.semaphores = static_cast<int*>(Zeros({kSemaphores}, DType::kF32).data());
    SCOPED_TRACE(Describe(conv));
    std::vector<std::byte> first;
    for (const ConvCandidate& candidate : GenericCandidates(conv, queue_)) {
      const auto bytes = Run(candidate.name, [&] { return candidate.launch(conv, queue_); });
      EXPECT_NE(bytes, std::vector<std::byte>(bytes.size(), std::byte{0xff})) << candidate.name;
      if (first.empty()) first = bytes;
      EXPECT_TRUE(bytes == first) << candidate.name;
    }
  }
}

/// With the kernels that only Hopper has.
class HopperPlansTest : public CudaPlansTest {
 protected:
  void SetUp() override {
    CudaPlansTest::SetUp();
    if (IsSkipped()) return;
#ifdef DENOISED_SM90A
    cudaDeviceProp properties;
    ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    queue_.hopper = properties.major == 9;
#endif
    if (!queue_.hopper) GTEST_SKIP() << "needs a GPU of compute capability 9.0 and its kernels";
  }
};

TEST_F(HopperPlansTest, AllCandidatesGiveTheSameBits) {
  for (const Case& c : kCases) {
    kept_.clear();
    const Conv2dLaunch conv = Launch(c);
    SCOPED_TRACE(Describe(conv));
    const std::vector<std::byte> first = RunAll(conv);
    if (HopperCandidates(conv, queue_).front().plan.splits > 1) {
      EXPECT_FALSE(Run(conv, {.tile = kTile64x64, .splits = 1}) == first)
          << "the bits depend on the splits";
    }
  }
}

// Layers with neither addend nor activation have kernels of their own, with and without a residual.
TEST_F(HopperPlansTest, AllOfEachEndingGiveTheSameBits) {
  for (const Case& c : {Case{2, 64, 64, 64, 0, 320, 3}, Case{3, 16, 16, 128, 64, 192, 3},
                        Case{5, 8, 8, 256, 0, 128, 3}, Case{2, 1, 1024, 320, 0, 960, 1},
                        Case{3, 15, 17, 64, 0, 256, 3, 2}, Case{1, 1, 333, 96, 0, 72, 1},
                        Case{3, 16, 16, 64, 0, 128, 3, 1, true}}) {
    for (const bool e4m3 : {false, true}) {
      kept_.clear();
      const Conv2dLaunch any = e4m3 ? LaunchInE4m3(c) : Launch(c);
      std::set<std::vector<std::byte>> results;
      for (const bool adds : {false, true}) {
        for (const bool residual : {false, true}) {
          for (const Activation activation : {Activation::kNone, Activation::kSilu}) {
            Conv2dLaunch conv = any;
            if (!adds) conv.add = {};
            if (!residual) conv.residual = {};
            conv.activation = activation;
            conv.scale = 0.7f;
            SCOPED_TRACE(Describe(conv));
            results.insert(RunAll(conv));
          }
        }
      }
      EXPECT_EQ(results.size(), 8u);
    }
  }
}

TEST_F(HopperPlansTest, TapsOfZerosAreLeftOut) {
  for (const Case& c :
       {Case{3, 16, 16, 64, 0, 128, 3, 1, true}, Case{2, 20, 12, 64, 64, 256, 3, 1, true},
        Case{6, 16, 16, 128, 0, 160, 3, 1, true}, Case{70, 16, 16, 128, 0, 128, 3, 1, true},
        Case{5, 4, 4, 64, 0, 128, 3, 1, true}, Case{1, 3, 128, 64, 0, 128, 3, 1, true}}) {
    // What a strided convolution's gradient lacks, with padding before and without.
    for (const uint16_t zero_taps : {0x0537, 0xeca0}) {
      kept_.clear();
      Conv2dLaunch conv = Launch(c);
      conv.zero_taps = zero_taps;
      SCOPED_TRACE(Describe(conv));
      const std::vector<std::byte> without =
          Run(conv, {.tile = FindTile(Loader::kIm2col, Schedule::kCooperative, 128, 128)});
      const int channels = c.channels + c.channels2;
      auto* const weight = static_cast<uint16_t*>(const_cast<void*>(conv.weight));
      for (int i = 0; i < 16; ++i) {
        if ((zero_taps >> i & 1) == 0) continue;
        uint16_t* const tap =
            weight + int64_t{i / 4} * c.outputs * conv.weight_stride + i % 4 * channels;
        ASSERT_EQ(cudaMemset2D(tap, conv.weight_stride * 2, 0, channels * 2, c.outputs),
                  cudaSuccess);
      }
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      // Other tiles multiply the zeros.
      EXPECT_TRUE(RunAll(conv) == without);
    }
  }
}

// The tests of layers in e4m3 skip a backend that denies them.
TEST_F(HopperPlansTest, HopperMultipliesE4m3) {
  EXPECT_TRUE(backend_->MultipliesE4m3());
  const auto generic = OpenBackend({.device = "cuda", .generic_kernels = true});
  ASSERT_TRUE(generic.ok()) << generic.status();
  EXPECT_TRUE((*generic)->MultipliesE4m3());
}

TEST_F(HopperPlansTest, AllCandidatesInE4m3GiveTheSameBits) {
  for (const Case& c : kCases) {
    kept_.clear();
    const Conv2dLaunch conv = LaunchInE4m3(c);
    SCOPED_TRACE(Describe(conv));
    RunAll(conv);
  }
}

TEST_F(HopperPlansTest, AllWithAFusedNormGiveTheSameBits) {
  for (const Case& c : {Case{3, 32, 32, 128, 0, 128, 3}, Case{2, 64, 64, 192, 0, 192, 3},
                        Case{5, 16, 16, 256, 128, 384, 3}, Case{9, 8, 8, 256, 0, 256, 3},
                        Case{3, 32, 32, 64, 128, 320, 3}, Case{2, 8, 8, 320, 0, 640, 3},
                        Case{2, 16, 16, 192, 0, 1280, 3},
                        Case{5, 16, 16, 256, 128, 384, 3, 1, false, false, 256, 96},
                        Case{9, 8, 8, 256, 0, 256, 3, 1, false, false, 72, 0},
                        Case{2, 32, 32, 320, 0, 320, 3, 1, false, false, 320, 320}}) {
    kept_.clear();
    Conv2dLaunch conv = Launch(c);
    conv.input_factors =
        Random({c.images, 2 * (c.channels + c.channels2)}, DType::kF32).as<float>();
    SCOPED_TRACE(Describe(conv));
    ASSERT_TRUE(SuitsHaloTile(conv));
    RunAll(conv);
  }
}

TEST_F(HopperPlansTest, GatesOfOutputsHaveTheBitsOfGeglu) {
  struct {
    Case conv;
    size_t candidates;
    bool e4m3;
  } cases[] = {{{2, 1, 1024, 320, 0, 2560, 1}, 7},       {{3, 1, 333, 64, 0, 5120, 1}, 7},
               {{1, 1, 77, 640, 0, 208, 1}, 7},          {{40, 1, 64, 128, 0, 1024, 1}, 7},
               {{2, 1, 1024, 320, 0, 2560, 1}, 3, true}, {{1, 1, 77, 640, 0, 208, 1}, 3, true},
               {{3, 1, 333, 64, 0, 544, 1}, 3, true}};
  for (const auto& [c, least, e4m3] : cases) {
    kept_.clear();
    Conv2dLaunch conv = e4m3 ? LaunchInE4m3(c) : Launch(c);
    conv.add = conv.residual = {};
    conv.activation = Activation::kNone;
    conv.scale = 1;
    const int64_t pixels = int64_t{c.images} * c.width;
    SCOPED_TRACE(Describe(conv));
    const Tensor gated = Zeros({pixels, c.outputs / 2}, DType::kBF16);
    const HopperPlan plain = HopperCandidates(conv, queue_).front().plan;
    const Rows values_and_gates = conv.out;
    out_ = gated;
    const std::vector<std::byte> expected = Run("linear, then gate", [&] {
      const cudaError_t error = LaunchConv2dHopper(conv, plain, queue_);
      return error == cudaSuccess
                 ? LaunchGegluGate(values_and_gates, pixels, c.outputs / 2, View(gated), queue_)
                 : error;
    });
    conv.gated = true;
    conv.out = View(gated);
    ASSERT_TRUE(SuitsGate(conv));
    const std::vector<HopperCandidate> candidates = HopperCandidates(conv, queue_);
    EXPECT_GE(candidates.size(), least);
    for (const HopperCandidate& candidate : candidates)
      EXPECT_TRUE(Run(conv, candidate.plan) == expected) << NameOf(candidate.plan);
    constexpr HopperTile k128x32 = FindTile(Loader::kIm2col, Schedule::kCooperative, 128, 32);
    EXPECT_NE(LaunchConv2dHopper(conv, {.tile = k128x32}, queue_), cudaSuccess);
    constexpr HopperTile k128x128 = FindTile(Loader::kIm2col, Schedule::kCooperative, 128, 128);
    EXPECT_NE(LaunchConv2dHopper(conv, {.tile = k128x128, .splits = 2}, queue_), cudaSuccess);

    // Rounded for the reader; a row behind it stays as it is.
    const int features = c.outputs / 2;
    const Tensor rounded = Zeros({pixels + 1, RoundedBytes(features)}, DType::kU8);
    const Rows rows = {rounded.data(), RoundedBytes(features) / 2, Element::kE4m3x2, true, 0x1p-5f};
    out_ = rounded;
    const std::vector<std::byte> then_rounded = Run("round", [&] {
      return LaunchRoundToE4m3(View(gated), features, {}, 0, pixels, rows, queue_);
    });
    conv.rounded_out = rows;
    for (const HopperCandidate& candidate : candidates) {
      if (e4m3 && RoundedBytes(features) == features) {
        EXPECT_TRUE(Run(conv, candidate.plan) == then_rounded) << NameOf(candidate.plan);
      } else {
        EXPECT_NE(LaunchConv2dHopper(conv, candidate.plan, queue_), cudaSuccess);
      }
    }
  }
}

// Groups of two, four and eight channels; one, four and eight images a tile, the last ones of it
// missing; outputs that tiles do not divide; halo tiles and im2col.
TEST_F(HopperPlansTest, NormsOfOutputsHaveTheBitsOfGroupNorms) {
  struct {
    Case conv;
    int groups;
  } cases[] = {{{1, 8, 8, 256, 0, 256, 3}, 32},     {{9, 8, 8, 256, 128, 128, 3}, 32},
               {{5, 4, 4, 256, 0, 256, 3}, 32},     {{70, 4, 4, 320, 64, 320, 3}, 40},
               {{3, 2, 4, 128, 0, 64, 3}, 32},      {{7, 4, 8, 64, 0, 72, 3}, 18},
               {{3, 15, 15, 64, 0, 256, 3, 2}, 64}, {{11, 1, 64, 256, 0, 72, 1}, 9},
               {{33, 8, 8, 512, 0, 256, 3}, 128}};
  for (const auto& [c, groups] : cases) {
    kept_.clear();
    Conv2dLaunch conv = Launch(c);
    conv.residual = {};
    conv.activation = Activation::kNone;
    const Tensor made = out_;
    GroupNormLaunch norm;
    norm.images = c.images, norm.pixels = conv.out_height * conv.out_width;
    norm.channels = c.outputs, norm.groups = groups;
    norm.eps = 1e-5f;
    norm.activation = Activation::kSilu;
    norm.gamma = Random({c.outputs}, DType::kF32).as<float>();
    norm.beta = Random({c.outputs}, DType::kF32).as<float>();
    norm.x = View(made);
    ASSERT_EQ(LaunchConv2dHopper(conv, HopperCandidates(conv, queue_).front().plan, queue_),
              cudaSuccess);
    out_ = Zeros(made.shape(), DType::kBF16);
    norm.out = conv.out = View(out_);
    ASSERT_TRUE(SuitsGroupNormCluster(norm, queue_));
    const std::vector<std::byte> apart =
        Run("apart", [&] { return LaunchGroupNormCluster(norm, queue_); });
    conv.output_norm = {norm.gamma, norm.beta, groups, norm.eps};
    SCOPED_TRACE(Describe(conv));
    ASSERT_TRUE(SuitsOutputNorm(conv));
    EXPECT_TRUE(RunAll(conv) == apart);
    conv.output_norm.eps *= 2;
    EXPECT_FALSE(RunAll(conv) == apart);
  }
}

// Runs of two, four and eight channels; clusters of one block to sixteen, teams of up to 128;
// pixels that chunks and blocks do not divide; slices across both sources, of several boxes; more
// work tiles than teams; channels that tiles do not divide.
const NormCase kNormCases[] = {{17, 64, 64, 192, 0, 32, true},  {2, 61, 67, 192, 0, 32},
                               {3, 64, 64, 384, 192, 32, true}, {3, 63, 65, 256, 256, 32, true},
                               {70, 16, 16, 576, 0, 32, true},  {9, 31, 33, 384, 384, 32},
                               {5, 31, 33, 576, 384, 32, true}, {2, 37, 41, 320, 0, 32},
                               {3, 16, 16, 768, 576, 32},       {40, 16, 16, 1152, 0, 32},
                               {3, 64, 64, 576, 0, 32, true},   {5, 31, 33, 960, 0, 32},
                               {9, 128, 128, 128, 0, 32, true}, {2, 127, 129, 128, 128, 32},
                               {3, 256, 256, 128, 0, 32, true}, {2, 128, 128, 320, 0, 32},
                               {2, 48, 48, 768, 0, 32}};

void PrintTo(const NormCase& c, std::ostream* out) {
  *out << fmt::format("{}x{}x{}x{}x{}", c.images, c.height, c.width, c.channels, c.channels2);
}

class HopperGroupNormTest : public HopperPlansTest, public testing::WithParamInterface<NormCase> {};

TEST_P(HopperGroupNormTest, GiveTheSameBits) {
  const NormCase& c = GetParam();
  for (const bool factors : {false, true}) {
    kept_.clear();
    const GroupNormLaunch norm = Launch(c, factors);
    SCOPED_TRACE(fmt::format("factors {}", factors));
    ASSERT_TRUE(SuitsGroupNormStream(norm) && SuitsGroupNormPieces(norm));
    const auto launch = [&](const GroupNormLaunch& norm) {
      return factors ? LaunchGroupNormPieces(norm, queue_) : LaunchGroupNormStream(norm, queue_);
    };
    const std::vector<std::byte> all = Run("all", [&] { return launch(norm); });
    EXPECT_TRUE(Run("again", [&] { return launch(norm); }) == all);
    if (SuitsGroupNormCluster(norm, queue_)) {
      EXPECT_TRUE(Run("cluster", [&] { return LaunchGroupNormCluster(norm, queue_); }) == all);
    } else {
      EXPECT_TRUE(PrefersGroupNormStream(norm, queue_) && PrefersGroupNormPieces(norm, queue_));
      if (!factors) {
        GroupNormLaunch scaled = norm;
        scaled.factors = Zeros({c.images, 2 * (c.channels + c.channels2)}, DType::kF32).as<float>();
        const auto make_and_apply = [&] {
          const cudaError_t error = LaunchGroupNormPieces(scaled, queue_);
          return error == cudaSuccess ? LaunchGroupScale(scaled, queue_) : error;
        };
        EXPECT_TRUE(Run("factors, then applied", make_and_apply) == all);
      }
    }
    GroupNormLaunch first = norm;
    first.images = 1;
    const std::vector<std::byte> alone = Run("alone", [&] { return launch(first); });
    EXPECT_TRUE(std::equal(alone.begin(), alone.begin() + all.size() / c.images, all.begin()));
    EXPECT_TRUE(std::all_of(alone.begin() + all.size() / c.images, alone.end(), [](std::byte byte) {
      return byte == std::byte{0xff};
    })) << "it wrote beyond its image";
    GroupNormLaunch other = norm;
    other.eps *= 2;
    EXPECT_FALSE(Run("other", [&] { return launch(other); }) == all);
    if (factors) {
      GroupNormLaunch few = norm;  // images at a time
      few.workspace_bytes = std::max<size_t>(few.workspace_bytes / 4, 128 * 8 * c.groups);
      EXPECT_TRUE(Run("few", [&] { return launch(few); }) == all);
    }
  }
}

// The results are rounded once: to e4m3, not to bf16 first.
TEST_P(HopperGroupNormTest, InE4m3AreTheNearestOfTheResult) {
  const NormCase& c = GetParam();
  GroupNormLaunch norm = Launch(c, /*factors=*/false);
  const int channels = c.channels + c.channels2;
  const int64_t pixels = int64_t{c.images} * norm.pixels;
  const float scale = 0x1p-5f;
  const std::vector<std::byte> in_bf16 =
      Run("bf16", [&] { return LaunchGroupNormStream(norm, queue_); });
  out_ = Zeros({pixels, channels}, DType::kU8);
  norm.out = {out_.data(), channels / 2, Element::kE4m3x2, true, scale};
  const std::vector<std::byte> all =
      Run("stream", [&] { return LaunchGroupNormStream(norm, queue_); });
  int64_t differ = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    uint16_t bits;
    std::memcpy(&bits, in_bf16.data() + 2 * i, sizeof bits);
    const float y = BFloat16ToFloat(bits), apart = RoundToE4m3(y / scale) * scale;
    const float together = E4m3ToFloat(static_cast<uint8_t>(all[i])) * scale;
    if (together == apart) continue;
    ++differ;
    // y was between them, but for its own rounding.
    ASSERT_LE(std::abs(together - y), std::abs(apart - y) + std::abs(y) * 0x1p-8f) << i;
  }
  // bf16 lies on a tie of e4m3 in one of 32 cases, and then half of them differ.
  EXPECT_LT(differ, static_cast<int64_t>(all.size()) / 20);
  EXPECT_GT(differ, static_cast<int64_t>(all.size()) / 200) << "rounded twice";
  if (SuitsGroupNormCluster(norm, queue_)) {
    EXPECT_TRUE(Run("cluster", [&] { return LaunchGroupNormCluster(norm, queue_); }) == all);
  }
  norm.images = 1;
  const std::vector<std::byte> alone =
      Run("alone", [&] { return LaunchGroupNormStream(norm, queue_); });
  const auto end = alone.begin() + all.size() / c.images;
  EXPECT_TRUE(std::equal(alone.begin(), end, all.begin()));
  EXPECT_TRUE(std::all_of(end, alone.end(), [](std::byte byte) { return byte == std::byte{0xff}; }))
      << "it wrote beyond its image";
}

INSTANTIATE_TEST_SUITE_P(Shapes, HopperGroupNormTest, testing::ValuesIn(kNormCases),
                         testing::PrintToStringParamName());

// Blocks of a team wait for each other, and two launches that each got half of the multiprocessors
// would for ever.
TEST_F(HopperPlansTest, TeamsOfTwoStreamsEndSideBySide) {
  const auto stream = NewStream();
  ASSERT_TRUE(stream.ok()) << stream.status();
  std::vector<GroupNormLaunch> norms;
  std::vector<Queue> queues = {queue_, queue_};
  queues[1].stream = stream->get();
  std::vector<Tensor> outs;
  std::vector<std::vector<std::byte>> alone;
  for (int i = 0; i < 2; ++i) {
    flags_ = {};
    norms.push_back(Launch({3, 128, 128, 128, 0, 32, true}, /*factors=*/false));
    outs.push_back(out_);
    alone.push_back(Run("alone", [&] { return LaunchGroupNormStream(norms[i], queue_); }));
    ASSERT_EQ(cudaMemset(out_.data(), 0xff, out_.bytes()), cudaSuccess);
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int launch = 0; launch < 200; ++launch) {
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(LaunchGroupNormStream(norms[i], queues[i]), cudaSuccess);
    }
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int i = 0; i < 2; ++i) {
    std::vector<std::byte> bytes(outs[i].bytes());
    ASSERT_EQ(cudaMemcpy(bytes.data(), outs[i].data(), bytes.size(), cudaMemcpyDeviceToHost),
              cudaSuccess);
    EXPECT_TRUE(bytes == alone[i]);
  }
}

TEST_F(HopperPlansTest, GroupNormsOfLargeBatchesHaveTheirKernels) {
  static std::byte nothing;
  const auto norm_of = [](int images, int size, int channels) {
    const Rows rows = {&nothing, channels, Element::kBf16, true};
    GroupNormLaunch norm;
    norm.x = norm.out = rows;
    norm.channels = channels, norm.groups = 32;
    norm.images = images, norm.pixels = size * size;
    return norm;
  };
  EXPECT_TRUE(PrefersGroupNormStream(norm_of(1024, 16, 576), queue_));
  EXPECT_FALSE(PrefersGroupNormStream(norm_of(1, 16, 576), queue_));
  EXPECT_FALSE(PrefersGroupNormStream(norm_of(1024, 16, 256), queue_));
  EXPECT_TRUE(PrefersGroupNormStream(norm_of(1024, 32, 128), queue_));
  EXPECT_FALSE(PrefersGroupNormStream(norm_of(64, 32, 128), queue_));
  EXPECT_FALSE(SuitsGroupNormStream(norm_of(1024, 8, 256)));
  EXPECT_TRUE(PrefersGroupNormPieces(norm_of(64, 64, 192), queue_));
  EXPECT_FALSE(PrefersGroupNormPieces(norm_of(1, 64, 192), queue_));
  // Slices of 168 channels at least, so more than the usual threads.
  EXPECT_FALSE(PrefersGroupNormStream(norm_of(1, 16, 1344), queue_));
  EXPECT_FALSE(PrefersGroupNormPieces(norm_of(1, 8, 1344), queue_));
}

}  // namespace
}  // namespace denoised::cuda
