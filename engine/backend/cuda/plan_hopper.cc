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
  double launch, step, finish;  // a launch; a step along k and an end of a tile
  double fold;                  // an added split of a tile that Folds()
  double alone = 1;             // of a step, of a block with a multiprocessor for itself
};
constexpr TileCost kTileCosts[] = {
    {HopperTile::kUnit, 64, 64, 0.02, 0.405, 3.44, 0.23, 0.66},
    {HopperTile::kPatchUnit, 64, 64, 0.01, 0.298, 3.36, 0.29, 0.67},
    {HopperTile::k128x32, 128, 32, 0.68, 0.358, 0.78, 0},
    {HopperTile::k128x128, 128, 128, 2.1, 0.41, 1.33, 0.28},
    {HopperTile::k128x128Turns, 128, 128, 2.5, 0.419, 0.7, 0},
    {HopperTile::k128x160, 128, 160, 1.9, 0.411, 2.22, 0.43},
    {HopperTile::k128x192, 128, 192, 1.9, 0.492, 2.76, 0.44},
    {HopperTile::k128x256, 128, 256, 1.6, 0.732, 3.26, 0},
    {HopperTile::kPatch64, 128, 64, 1.1, 0.235, 1.45, 0.1},
    {HopperTile::kPatch128, 128, 128, 2.5, 0.301, 1.7, 0.07},
    {HopperTile::kPatch192, 128, 192, 2.5, 0.456, 2.4, 0},
    {HopperTile::kPatch128Turns, 128, 128, 3.0, 0.301, 1.1, 0},
    {HopperTile::kPatch192Turns, 128, 192, 2.5, 0.456, 1.4, 0},
};
constexpr int kMinSplitSteps = 4;

int64_t ImagePixels(const Conv2dLaunch& conv) {  // of a phase
  return int64_t{conv.out_height} * conv.out_width / (conv.upsample2x ? 4 : 1);
}

int64_t TilesOf(const Conv2dLaunch& conv, int64_t pixels, int m, int n) {
  return (conv.upsample2x ? 4 : 1) * ((pixels + m - 1) / m) * ((conv.outputs + n - 1) / n);
}

/// Splits let one image fill more of the device, and cost a large batch the tiles that do not fold.
/// Where a wide one that does fits the outputs that is little, and images get two runs until they
/// fill three quarters of the device; else only small images get any. How much that is either way:
/// docs/benchmarks.md.
int SplitsOf(const Conv2dLaunch& conv) {
  if (!HasVectorOutputs(conv)) return 1;  // k128x32 alone makes them
  const bool folds_wide = conv.outputs % 192 == 0 || conv.outputs % 160 == 0;
  const int64_t few = folds_wide ? 100 : 32, enough = folds_wide ? 160 : 96;
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
    const bool narrow = cost.tile == HopperTile::k128x32;  // takes anything, with much code
    if (narrow ? vectors && conv.outputs > 32 : !vectors) continue;
    if (IsPatch(cost.tile) && !patches) continue;
    if (conv.input_factors != nullptr && !Normalises(cost.tile)) continue;
    if (splits > 1 && !Folds(cost.tile)) continue;
    const int64_t tiles = TilesOf(conv, pixels, cost.m, cost.n);
    const bool unit = IsUnit(cost.tile);
    for (int cluster = 1; cluster <= (unit ? splits : 1); cluster *= 2) {
      const int runs = splits / cluster;  // of a block
      // Clusters of fewer blocks than runs receive more sums, and have no room for two.
      const int beside = unit && (cluster == 1 || runs == 1) ? 2 : 1;
      const double waves = static_cast<double>(tiles * cluster) / (queue.multiprocessors * beside);
      const double step =
          cost.step * (beside == 2 ? std::clamp(waves, cost.alone, 1.0) : cost.alone);
      const double microseconds =
          cost.launch + std::ceil(waves) * (steps * step / cluster + cost.finish +
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
      "unit",    "patch unit", "128x32",   "128x128",  "128x128 turns",  "128x160",       "128x192",
      "128x256", "patch64",    "patch128", "patch192", "patch128 turns", "patch192 turns"};
  static_assert(std::size(kNames) == kHopperTiles);
  return fmt::format("{}{}", kNames[static_cast<int>(plan.tile)],
                     plan.cluster > 1 ? fmt::format(" in clusters of {}", plan.cluster) : "");
}

std::string Describe(const Conv2dLaunch& conv) {
  return fmt::format(
      "{} of {}x{}x{}+{}{} to {}x{}x{}: {}x{}, stride {}, pad {} {}{}{}{}{}{}{}", conv.images,
      conv.height, conv.width, conv.channels, conv.channels2, conv.upsample2x ? " doubled" : "",
      conv.out_height, conv.out_width, conv.outputs, conv.kernel, conv.kernel, conv.stride,
      conv.pad_top, conv.pad_left, conv.add.data != nullptr ? ", add" : "",
      conv.residual.data != nullptr ? ", residual" : "",
      conv.shortcut.x.data != nullptr
          ? fmt::format(", shortcut of {}+{}", conv.shortcut.channels, conv.shortcut.channels2)
          : "",
      conv.input_factors != nullptr ? ", normalised" : "",
      conv.activation != Activation::kNone ? ", activation" : "",
      HasVectorOutputs(conv) ? "" : ", one by one");
}

}  // namespace denoised::cuda
