// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "engine/backend/cuda/conv2d_sm90.h"

/// Which tiles can compute a convolution on Hopper, with how many splits of k, what each should
/// cost, and the names under which measurements are kept.

namespace denoised::cuda {
namespace {

/// Microseconds, fitted to the layers of our models on an H200.
struct TileCost {
  HopperTile tile;
  int m, n;
  int cluster;                  // CTAs that multicast weights
  double launch, step, finish;  // a launch; a step along k and the epilogue of a tile
  double fold;                  // adding one more split, for tiles with SupportsSplitK()
  double alone = 1;             // factor of a step of a CTA that has an SM to itself
  double busy = 1;              // factor of a step with more than kFewWaves waves: narrow tiles
                                // need more bandwidth and power
};
constexpr double kFewWaves = 4;
// With more outputs, CTAs multicast weights wherever that adds no tile. At the power limit this is
// up to 18 % faster and at most 2 % slower, which short measurements do not show.
constexpr int kFewOutputs = 1024;
constexpr TileCost kTileCosts[] = {
    {HopperTile::k64x64, 64, 64, 1, 0.02, 0.3, 2.3, 0.23, 0.89},
    {HopperTile::kHaloTile64x64, 64, 64, 1, 0.01, 0.298, 2.5, 0.29, 0.67},
    {HopperTile::k128x32, 128, 32, 1, 0.68, 0.358, 0.78, 0},
    {HopperTile::k128x128, 128, 128, 1, 1.4, 0.364, 0.9, 0.28, 1, 1.12},
    {HopperTile::k128x128, 128, 128, 2, 1.8, 0.386, 0.8, 0.28, 1, 1.07},
    {HopperTile::k128x128PingPong, 128, 128, 1, 1.7, 0.363, 0.6, 0, 1, 1.15},
    {HopperTile::k128x128PingPong, 128, 128, 2, 2.1, 0.371, 0.53, 0, 1, 1.19},
    {HopperTile::k128x160, 128, 160, 1, 1.1, 0.465, 1.0, 0.43, 1, 1.08},
    {HopperTile::k128x160, 128, 160, 2, 1.7, 0.478, 0.8, 0.43, 1, 1.10},
    {HopperTile::k128x160PingPong, 128, 160, 1, 1.3, 0.465, 0.7, 0, 1, 1.06},
    {HopperTile::k128x160PingPong, 128, 160, 2, 1.8, 0.475, 0.6, 0, 1, 1.06},
    {HopperTile::k128x192, 128, 192, 1, 1.1, 0.56, 1.1, 0.44, 1, 1.06},
    {HopperTile::k128x192, 128, 192, 2, 1.6, 0.56, 1.1, 0.44, 1, 1.04},
    {HopperTile::k128x256, 128, 256, 1, 0.8, 0.73, 1.6, 0, 1, 1.05},
    {HopperTile::k128x256, 128, 256, 2, 1.5, 0.75, 1.4, 0, 1, 1.02},
    {HopperTile::k192x192, 192, 192, 1, 1.0, 0.82, 1.5, 0, 1, 1.04},
    {HopperTile::k192x192, 192, 192, 2, 1.8, 0.86, 1.2, 0, 1, 1.03},
    {HopperTile::kHaloTile128x64, 128, 64, 1, 1.1, 0.235, 1.45, 0.1},
    {HopperTile::kHaloTile128x80, 128, 80, 1, 1.5, 0.256, 1.8, 0.1},
    {HopperTile::kHaloTile128x128, 128, 128, 1, 2.5, 0.301, 1.7, 0.07},
    {HopperTile::kHaloTile128x160, 128, 160, 1, 2.5, 0.375, 2.0, 0.08},
    {HopperTile::kHaloTile128x192, 128, 192, 1, 2.5, 0.456, 2.4, 0},
    {HopperTile::kHaloTile128x128PingPong, 128, 128, 1, 3.0, 0.301, 1.1, 0},
    {HopperTile::kHaloTile128x160PingPong, 128, 160, 1, 2.8, 0.375, 1.3, 0},
    {HopperTile::kHaloTile128x192PingPong, 128, 192, 1, 2.5, 0.456, 1.4, 0},
};
constexpr int kMinSplitSteps = 4;

int64_t ImagePixels(const Conv2dLaunch& conv) {  // of a phase
  return int64_t{conv.out_height} * conv.out_width / (conv.upsample2x ? 4 : 1);
}

/// CTA tiles of all phases; along m whole clusters.
int64_t TilesOf(const Conv2dLaunch& conv, int64_t pixels, int m, int n, int cluster = 1) {
  m *= cluster;
  return (conv.upsample2x ? 4 : 1) * ((pixels + m - 1) / m) * cluster *
         ((conv.outputs + n - 1) / n);
}

/// Split-K lets one image fill more of the device, but rules out tiles without it, which costs
/// large batches. Where a wide tile with split-K fits the outputs the loss is small: images are
/// split until they fill three quarters of the device. Else only images that fill a quarter or less
/// are, until they fill a half. Figures: docs/benchmarks.md.
int SplitsOf(const Conv2dLaunch& conv) {
  if (!HasVectorOutputs(conv)) return 1;  // k128x32 alone makes them
  const bool folds_wide = conv.outputs % 192 == 0 || conv.outputs % 160 == 0;
  const int64_t few = folds_wide ? 100 : 33, enough = folds_wide ? 160 : 96;
  const int64_t of_an_image = TilesOf(conv, ImagePixels(conv), 64, 64);
  int splits = 1;
  // A 1×1 layer has few steps: only the longest gain in small batches, and all lose in large ones.
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
  const bool vectors = HasVectorOutputs(conv), halo_tiles = SuitsHaloTile(conv);
  std::vector<HopperCandidate> candidates;
  for (const TileCost& cost : kTileCosts) {
    if ((cost.tile == HopperTile::k128x32) == vectors) continue;  // the tile for other outputs
    if (IsHaloTile(cost.tile) && !halo_tiles) continue;
    if (conv.input_factors != nullptr && !FusesInputNorm(cost.tile)) continue;
    if (conv.output_norm.gamma != nullptr && !Is64x64(cost.tile)) continue;
    if (splits > 1 && !SupportsSplitK(cost.tile)) continue;
    const int64_t tiles = TilesOf(conv, pixels, cost.m, cost.n, cost.cluster);
    const bool is_64x64 = Is64x64(cost.tile);
    const bool could_share = vectors && cost.cluster == 1 && !is_64x64 && !IsHaloTile(cost.tile);
    if (could_share && conv.outputs > kFewOutputs &&
        tiles == TilesOf(conv, pixels, cost.m, cost.n, /*cluster=*/2)) {
      continue;
    }
    const bool splits_over_cluster =
        is_64x64 || (cost.tile == HopperTile::kHaloTile128x80 && splits == 2 &&
                     steps >= kMinStepsSplitOverCluster);
    for (int cluster = cost.cluster; cluster <= (splits_over_cluster ? splits : cost.cluster);
         cluster *= 2) {
      const int blocks = splits_over_cluster ? cluster : 1;  // CTAs that share a tile's splits
      const int splits_each = splits / blocks;
      // CTAs with several splits receive more partial sums: as measured they cost as much as if
      // each had an SM to itself.
      const int beside = is_64x64 && (blocks == 1 || splits_each == 1) ? 2 : 1;
      const double waves = static_cast<double>(tiles * blocks) / (queue.multiprocessors * beside);
      const double step = cost.step * (waves > kFewWaves ? cost.busy : 1) *
                          (beside == 2 ? std::clamp(waves, cost.alone, 1.0) : cost.alone);
      const double microseconds =
          cost.launch + std::ceil(waves) * (steps * step / blocks + cost.finish +
                                            (splits_each > 1 ? splits_each * cost.fold : 0));
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
  constexpr const char* kNames[] = {"64x64",
                                    "halo tile 64x64",
                                    "128x32",
                                    "128x128",
                                    "128x128 ping-pong",
                                    "128x160",
                                    "128x160 ping-pong",
                                    "128x192",
                                    "128x256",
                                    "192x192",
                                    "halo tile 128x64",
                                    "halo tile 128x80",
                                    "halo tile 128x128",
                                    "halo tile 128x160",
                                    "halo tile 128x192",
                                    "halo tile 128x128 ping-pong",
                                    "halo tile 128x160 ping-pong",
                                    "halo tile 128x192 ping-pong"};
  static_assert(std::size(kNames) == kHopperTiles);
  return fmt::format("{}{}", kNames[static_cast<int>(plan.tile)],
                     plan.cluster > 1 ? fmt::format(" in clusters of {}", plan.cluster) : "");
}

std::string Describe(const Conv2dLaunch& conv) {
  return fmt::format(
      "{} of {}x{}x{}+{}{} to {}x{}x{}: {}x{}, stride {}, pad {} {}{}{}{}{}{}{}{}{}{}", conv.images,
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
      HasVectorOutputs(conv) ? "" : ", one by one",
      conv.x.element == Element::kF32 ? ", fp32 inputs" : "",
      conv.out.element == Element::kF32 ? ", fp32 outputs" : "");
}

}  // namespace denoised::cuda
