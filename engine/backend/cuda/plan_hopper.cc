#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "engine/backend/cuda/conv2d_sm90.h"

/// Which tiles can compute a convolution on Hopper, in how many runs of k, what each should cost,
/// and the names by which measurements are kept.

namespace denoised::cuda {
namespace {

/// Microseconds as measured on an H200 over the layers of our models: docs/kernels.md.
struct TileCost {
  HopperTile tile;
  int m, n;
  int cluster;                  // that shares weights; those that share splits go by plan
  double launch, step, finish;  // a launch; a step along k and an end of a tile
  double fold;                  // an added split of a tile that Folds()
  double alone = 1;             // of a step, of a block with a multiprocessor for itself
  double busy = 1;              // of a step, where more than kFewRounds of tiles fill the device:
                                // narrow tiles ask more of caches and power
};
constexpr double kFewRounds = 4;
// Of more outputs, blocks that can share weights do, if that makes no tile more: at the power limit
// they are up to 18 % faster and at most 2 % slower, which launches measured briefly do not tell.
constexpr int kFewOutputs = 1024;
constexpr TileCost kTileCosts[] = {
    {HopperTile::kUnit, 64, 64, 1, 0.02, 0.3, 2.3, 0.23, 0.89},
    {HopperTile::kPatchUnit, 64, 64, 1, 0.01, 0.298, 2.5, 0.29, 0.67},
    {HopperTile::k128x32, 128, 32, 1, 0.68, 0.358, 0.78, 0},
    {HopperTile::k128x128, 128, 128, 1, 1.4, 0.364, 0.9, 0.28, 1, 1.12},
    {HopperTile::k128x128, 128, 128, 2, 1.8, 0.386, 0.8, 0.28, 1, 1.07},
    {HopperTile::k128x128Turns, 128, 128, 1, 1.7, 0.363, 0.6, 0, 1, 1.15},
    {HopperTile::k128x128Turns, 128, 128, 2, 2.1, 0.371, 0.53, 0, 1, 1.19},
    {HopperTile::k128x160, 128, 160, 1, 1.1, 0.465, 1.0, 0.43, 1, 1.08},
    {HopperTile::k128x160, 128, 160, 2, 1.7, 0.478, 0.8, 0.43, 1, 1.10},
    {HopperTile::k128x160Turns, 128, 160, 1, 1.3, 0.465, 0.7, 0, 1, 1.06},
    {HopperTile::k128x160Turns, 128, 160, 2, 1.8, 0.475, 0.6, 0, 1, 1.06},
    {HopperTile::k128x192, 128, 192, 1, 1.1, 0.56, 1.1, 0.44, 1, 1.06},
    {HopperTile::k128x192, 128, 192, 2, 1.6, 0.56, 1.1, 0.44, 1, 1.04},
    {HopperTile::k128x256, 128, 256, 1, 0.8, 0.73, 1.6, 0, 1, 1.05},
    {HopperTile::k128x256, 128, 256, 2, 1.5, 0.75, 1.4, 0, 1, 1.02},
    {HopperTile::k192x192, 192, 192, 1, 1.0, 0.82, 1.5, 0, 1, 1.04},
    {HopperTile::k192x192, 192, 192, 2, 1.8, 0.86, 1.2, 0, 1, 1.03},
    {HopperTile::kPatch64, 128, 64, 1, 1.1, 0.235, 1.45, 0.1},
    {HopperTile::kPatch80, 128, 80, 1, 1.5, 0.256, 1.8, 0.1},
    {HopperTile::kPatch128, 128, 128, 1, 2.5, 0.301, 1.7, 0.07},
    {HopperTile::kPatch160, 128, 160, 1, 2.5, 0.375, 2.0, 0.08},
    {HopperTile::kPatch192, 128, 192, 1, 2.5, 0.456, 2.4, 0},
    {HopperTile::kPatch128Turns, 128, 128, 1, 3.0, 0.301, 1.1, 0},
    {HopperTile::kPatch160Turns, 128, 160, 1, 2.8, 0.375, 1.3, 0},
    {HopperTile::kPatch192Turns, 128, 192, 1, 2.5, 0.456, 1.4, 0},
};
constexpr int kMinSplitSteps = 4;

int64_t ImagePixels(const Conv2dLaunch& conv) {  // of a phase
  return int64_t{conv.out_height} * conv.out_width / (conv.upsample2x ? 4 : 1);
}

/// Of all phases; along m as whole clusters.
int64_t TilesOf(const Conv2dLaunch& conv, int64_t pixels, int m, int n, int cluster = 1) {
  m *= cluster;
  return (conv.upsample2x ? 4 : 1) * ((pixels + m - 1) / m) * cluster *
         ((conv.outputs + n - 1) / n);
}

/// Splits let one image fill more of the device, and cost a large batch the tiles that do not fold.
/// Where a wide one that does fits the outputs that is little, and images get two runs until they
/// fill three quarters of the device; else until they fill a half, if they filled a quarter at
/// most. How much that is either way: docs/benchmarks.md.
int SplitsOf(const Conv2dLaunch& conv) {
  if (!HasVectorOutputs(conv)) return 1;  // k128x32 alone makes them
  const bool folds_wide = conv.outputs % 192 == 0 || conv.outputs % 160 == 0;
  const int64_t few = folds_wide ? 100 : 33, enough = folds_wide ? 160 : 96;
  const int64_t of_an_image = TilesOf(conv, ImagePixels(conv), 64, 64);
  int splits = 1;
  // A 1×1 layer has few steps: only the longest gain, and all lose in a batch.
  const int steps = StepsOf(conv);
  const bool worth = conv.kernel > 1 || steps >= 16;
  while (worth && of_an_image < few && splits < kMaxSplits &&
         (splits == 1 || of_an_image * splits * 2 <= enough) &&
         steps >= splits * 2 * kMinSplitSteps) {
    splits *= 2;
  }
  return splits;
}

}  // namespace

int StepsOf(const Conv2dLaunch& conv) {
  const int taps = conv.upsample2x ? 4 : conv.kernel * conv.kernel;
  return taps * (ChunksOf(conv.channels) + ChunksOf(conv.channels2)) +
         ChunksOf(conv.shortcut.channels) + ChunksOf(conv.shortcut.channels2);
}

bool SuitsShortcut(const Conv2dLaunch& conv) {
  const ShortcutLaunch& shortcut = conv.shortcut;
  return shortcut.x.data == nullptr ||
         (InVectors(shortcut.x) && InVectors(shortcut.x2) && shortcut.channels % 8 == 0 &&
          shortcut.channels2 % 8 == 0 && !conv.upsample2x && SplitsOf(conv) > 1);
}

std::vector<HopperCandidate> HopperCandidates(const Conv2dLaunch& conv, const Queue& queue) {
  const int steps = StepsOf(conv), splits = SplitsOf(conv);
  const int64_t pixels = conv.images * ImagePixels(conv);
  const bool vectors = HasVectorOutputs(conv), patches = SuitsPatches(conv);
  std::vector<HopperCandidate> candidates;
  for (const TileCost& cost : kTileCosts) {
    if ((cost.tile == HopperTile::k128x32) == vectors) continue;  // takes anything, one by one
    if (IsPatch(cost.tile) && !patches) continue;
    if (conv.input_factors != nullptr && !Normalises(cost.tile)) continue;
    if (conv.output_norm.gamma != nullptr && !IsUnit(cost.tile)) continue;
    if (splits > 1 && !Folds(cost.tile)) continue;
    const int64_t tiles = TilesOf(conv, pixels, cost.m, cost.n, cost.cluster);
    const bool unit = IsUnit(cost.tile);
    const bool could_share = vectors && cost.cluster == 1 && !unit && !IsPatch(cost.tile);
    if (could_share && conv.outputs > kFewOutputs &&
        tiles == TilesOf(conv, pixels, cost.m, cost.n, /*cluster=*/2)) {
      continue;
    }
    const bool divides =
        unit || (cost.tile == HopperTile::kPatch80 && splits == 2 && steps >= kLeastStepsDivided);
    for (int cluster = cost.cluster; cluster <= (divides ? splits : cost.cluster); cluster *= 2) {
      const int blocks = divides ? cluster : 1;  // that share the splits of a tile
      const int runs = splits / blocks;          // of each
      // Clusters of fewer blocks than runs receive more sums: as measured they cost what they would
      // with a multiprocessor to themselves.
      const int beside = unit && (blocks == 1 || runs == 1) ? 2 : 1;
      const double waves = static_cast<double>(tiles * blocks) / (queue.multiprocessors * beside);
      const double step = cost.step * (waves > kFewRounds ? cost.busy : 1) *
                          (beside == 2 ? std::clamp(waves, cost.alone, 1.0) : cost.alone);
      const double microseconds =
          cost.launch + std::ceil(waves) * (steps * step / blocks + cost.finish +
                                            (runs > 1 ? runs * cost.fold : 0));
      candidates.push_back({{cost.tile, splits, cluster}, microseconds});
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const HopperCandidate& a, const HopperCandidate& b) {
                     return a.microseconds < b.microseconds;
                   });
  return candidates;
}

std::string NameOf(const HopperPlan& plan) {
  constexpr const char* kNames[] = {
      "unit",           "patch unit",     "128x32",        "128x128",  "128x128 turns",
      "128x160",        "128x160 turns",  "128x192",       "128x256",  "192x192",
      "patch64",        "patch80",        "patch128",      "patch160", "patch192",
      "patch128 turns", "patch160 turns", "patch192 turns"};
  static_assert(std::size(kNames) == kHopperTiles);
  return fmt::format("{}{}", kNames[static_cast<int>(plan.tile)],
                     plan.cluster > 1 ? fmt::format(" in clusters of {}", plan.cluster) : "");
}

std::string Describe(const Conv2dLaunch& conv) {
  return fmt::format(
      "{} of {}x{}x{}+{}{} to {}x{}x{}: {}x{}, stride {}, pad {} {}{}{}{}{}{}{}{}", conv.images,
      conv.height, conv.width, conv.channels, conv.channels2, conv.upsample2x ? " doubled" : "",
      conv.out_height, conv.out_width, conv.outputs, conv.kernel, conv.kernel, conv.stride,
      conv.pad_top, conv.pad_left, conv.add.data != nullptr ? ", add" : "",
      conv.residual.data != nullptr ? ", residual" : "",
      conv.shortcut.x.data != nullptr
          ? fmt::format(", shortcut of {}+{}", conv.shortcut.channels, conv.shortcut.channels2)
          : "",
      conv.input_factors != nullptr ? ", normalised" : "",
      conv.activation != Activation::kNone ? ", activation" : "",
      conv.output_norm.gamma != nullptr ? fmt::format(", then {} groups", conv.output_norm.groups)
                                        : "",
      HasVectorOutputs(conv) ? "" : ", one by one");
}

}  // namespace denoised::cuda
