// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cuda/plan_hopper.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace denoised::cuda {
namespace {

constexpr double kFewWaves = 4;
// With more outputs, CTAs multicast weights wherever that adds no tile. At the power limit this is
// up to 18 % faster and at most 2 % slower, which short measurements do not show.
// With more outputs, too, tiles of 128 pixels for few pixels gain more from reading weights once
// than they lose by keeping the next launch out.
constexpr int kFewOutputs = 1024;
constexpr double kGatedFinish = 2;  // factor of an epilogue that computes GELU
constexpr int kMinSplitSteps = 4;
constexpr int kMaxStride = 8;  // elementStrides of cuTensorMapEncodeIm2col

int PhasesOf(const ConvLayer& layer) { return layer.upsample2x ? 4 : 1; }

int64_t ImagePixels(const ConvLayer& layer) {  // per phase
  return int64_t{layer.out_height} * layer.out_width / PhasesOf(layer);
}

/// Number of CTA tiles of all phases; along m, in whole clusters.
int64_t CtaTilesOf(const ConvLayer& layer, int64_t pixels, int m, int n, int cluster = 1) {
  m *= cluster;
  return PhasesOf(layer) * ((pixels + m - 1) / m) * cluster * ((layer.outputs + n - 1) / n);
}
int64_t CtaTilesOf(const Conv2dLaunch& conv, const HopperTileSpec& spec, int cluster) {
  return CtaTilesOf(conv, conv.images * ImagePixels(conv), spec.m, spec.n, cluster);
}

}  // namespace

int StepsOf(const ConvLayer& layer) {
  const int taps = layer.upsample2x ? 4 : layer.kernel * layer.kernel;
  return taps * (ChunksOf(layer.channels) + ChunksOf(layer.channels2)) +
         ChunksOf(layer.shortcut.channels) + ChunksOf(layer.shortcut.channels2);
}

/// Split-K lets one image fill more of the device, but excludes tiles without split-K, which slows
/// down large batches. If a wide tile with split-K fits the outputs, the loss is small: k is split
/// until an image fills three quarters of the device. Otherwise it is split only if an image fills
/// a quarter or less, until it fills a half. Figures: docs/benchmarks.md.
int SplitsOf(const ConvLayer& layer) {
  if (!HasVectorOutputs(layer)) return 1;  // the tile that stores outputs one by one has no split-K
  if (IsE4m3(layer)) return 1;             // nor has any tile in e4m3
  if (layer.zero_taps != 0) return 1;      // only tiles without split-K leave taps out
  const bool folds_wide = layer.outputs % 192 == 0 || layer.outputs % 160 == 0;
  const int64_t few = folds_wide ? 100 : 33, enough = folds_wide ? 160 : 96;
  const int64_t of_an_image = CtaTilesOf(layer, ImagePixels(layer), 64, 64);
  int splits = 1;
  // Of 1×1 layers, which have few steps, only the longest gain in small batches, and all lose in
  // large. So do 3×3 layers of up to 64 channels, which have nine.
  const int steps = StepsOf(layer);
  const bool worth = layer.upsample2x || steps >= (layer.kernel > 1 ? 10 : 16);
  while (worth && of_an_image < few && splits < kMaxSplits &&
         (splits == 1 || of_an_image * splits * 2 <= enough) &&
         steps >= splits * 2 * kMinSplitSteps) {
    splits *= 2;
  }
  return splits;
}

bool SuitsShortcut(const ConvLayer& layer) {
  const ShortcutLaunch& shortcut = layer.shortcut;
  if (shortcut.x.data == nullptr) return true;
  return InVectors(shortcut.x) && InVectors(shortcut.x2) && shortcut.channels % 8 == 0 &&
         shortcut.channels2 % 8 == 0 && !layer.upsample2x &&
         (IsE4m3(layer) ? HasVectorOutputs(layer) : SplitsOf(layer) > 1);
}

bool SuitsGate(const ConvLayer& conv) {
  return conv.gated && conv.kernel == 1 && !conv.upsample2x && conv.outputs % 16 == 0 &&
         HasVectorOutputs(conv) && conv.add.data == nullptr && conv.residual.data == nullptr &&
         conv.shortcut.x.data == nullptr && conv.activation == Activation::kNone &&
         conv.scale == 1 && SplitsOf(conv) == 1;
}

bool SuitsHopper(const ConvLayer& conv) {
  return (conv.x.element == Element::kBf16 || IsE4m3(conv)) && HasVectorInputs(conv) &&
         conv.input_factors == nullptr && conv.stride <= kMaxStride && conv.pad_top < 128 &&
         conv.pad_left < 128 && SuitsShortcut(conv);
}

bool SuitsHaloTile(const ConvLayer& conv) {
  return conv.kernel == 3 && conv.stride == 1 && conv.pad_top == 1 && conv.pad_left == 1 &&
         !conv.upsample2x && conv.out_height == conv.height && conv.out_width == conv.width &&
         conv.height % kSubtileEdge == 0 &&
         (conv.width % (2 * kSubtileEdge) == 0 || conv.width == kSubtileEdge) &&
         conv.outputs % 32 == 0 && conv.x.element != Element::kF32 && HasVectorInputs(conv) &&
         HasVectorOutputs(conv) && SuitsShortcut(conv);
}

bool Supports(const HopperPlan& plan, const ConvLayer& conv) {
  const HopperTileSpec& spec = SpecOf(plan.tile);
  const bool halo_tiles = spec.loader == Loader::kHaloTile;
  const bool shortcut = conv.shortcut.x.data != nullptr;
  // Splits of k, and who has them.
  const auto is_power = [](int value) { return value > 0 && (value & (value - 1)) == 0; };
  if (!is_power(plan.splits) || plan.splits > kMaxSplits || !is_power(plan.cluster)) return false;
  if (!spec.IsPersistent()) {
    if (plan.cluster > plan.splits) return false;
    if (spec.split_k == SplitK::kEach && plan.cluster != plan.splits) return false;
  } else if (plan.cluster > 1) {
    const bool splits = spec.split_k == SplitK::kCluster && plan.splits == 2 &&
                        StepsOf(conv) >= kMinStepsSplitOverCluster;
    if (plan.cluster > 2 || !(splits || spec.cost.Multicasts())) return false;
  }
  const bool e4m3 = IsE4m3(conv);
  if ((plan.splits > 1 || (shortcut && !e4m3)) &&
      (spec.split_k == SplitK::kNone || conv.gated || conv.zero_taps != 0)) {
    return false;
  }
  // Inputs.
  if (e4m3 != (spec.element == Element::kE4m3x2)) return false;
  if (e4m3 && (conv.x2.data != nullptr || (shortcut && spec.StoresOneByOne()))) return false;
  if (!(halo_tiles ? SuitsHaloTile(conv) : SuitsHopper(conv))) return false;
  if (conv.input_factors != nullptr && !spec.FusesInputNorm()) return false;
  // Outputs. Persistent halo tiles read conv.add by whole boxes.
  if (!spec.StoresOneByOne() && !HasVectorOutputs(conv)) return false;
  // Of odd lines, TMA copies single pixels, which must begin at multiples of 128 bytes in shared
  // memory.
  if (spec.IsPersistent() && conv.upsample2x && conv.width % 2 != 0 && !spec.StoresOneByOne() &&
      spec.BoxOutputs() < 64) {
    return false;
  }
  if (halo_tiles && spec.IsPersistent() && conv.outputs % spec.BoxOutputs() != 0) return false;
  if (conv.gated && !(spec.FusesGate() && SuitsGate(conv))) return false;
  if (conv.rounded_out.data != nullptr &&
      !(conv.gated && e4m3 && conv.outputs / 2 % kE4m3Vector == 0)) {
    return false;
  }
  return conv.output_norm.gamma == nullptr || (spec.FusesOutputNorm() && SuitsOutputNorm(conv));
}

namespace {

/// Whether the tile may be the fastest of those that can compute the layer.
bool IsWorthTrying(const HopperTileSpec& spec, const ConvLayer& conv) {
  if (spec.StoresOneByOne() && HasVectorOutputs(conv)) return false;
  return spec.IsPersistent() || spec.kernel.consumers == 1 || conv.outputs > kFewOutputs;
}

/// Expected microseconds of a launch.
double MicrosecondsOf(const HopperPlan& plan, const HopperWork& work) {
  const HopperTileCost& tile = SpecOf(plan.tile).cost;
  const HopperTileCost::Launch& cost = work.multicasts ? tile.multicast : tile.single;
  return cost.launch + work.steps * cost.step * (work.busy ? cost.busy : 1) +
         work.finishes * cost.finish + work.folds * tile.fold;
}

}  // namespace

HopperWork WorkOf(const HopperPlan& plan, const Conv2dLaunch& conv, const Queue& queue) {
  const HopperTileSpec& spec = SpecOf(plan.tile);
  HopperWork work{.multicasts = plan.cluster > 1 && spec.cost.Multicasts()};
  const int64_t tiles = CtaTilesOf(conv, spec, work.multicasts ? plan.cluster : 1);
  const int blocks = work.multicasts ? 1 : plan.cluster;  // CTAs that share a tile's splits
  const int splits_each = plan.splits / blocks;
  // CTAs with several splits receive more partial sums. As measured, they cost as much as if each
  // had an SM to itself, as tiles of 128 pixels do.
  const bool shares = !spec.IsPersistent() && spec.kernel.consumers == 1;
  const int beside = shares && (blocks == 1 || splits_each == 1) ? 2 : 1;
  const double waves = static_cast<double>(tiles * blocks) / (queue.multiprocessors * beside);
  const double begun = std::ceil(waves);
  work.busy = waves > kFewWaves;
  work.steps = begun * StepsOf(conv) / blocks *
               (beside == 2 ? std::clamp(waves, spec.cost.alone, 1.0) : spec.cost.alone);
  work.finishes = begun * (conv.gated ? kGatedFinish : 1);
  work.folds = splits_each > 1 ? begun * splits_each : 0;
  return work;
}

std::vector<HopperCandidate> HopperCandidates(const Conv2dLaunch& conv, const Queue& queue) {
  const int splits = SplitsOf(conv);
  std::vector<HopperCandidate> candidates;
  for (int row = 0; row < kHopperTiles; ++row) {
    const HopperTileSpec& spec = kTiles[row];
    if (!IsWorthTrying(spec, conv)) continue;
    const bool always_multicasts = spec.cost.Multicasts() && conv.outputs > kFewOutputs &&
                                   CtaTilesOf(conv, spec, 1) == CtaTilesOf(conv, spec, 2);
    for (int cluster = always_multicasts ? 2 : 1; cluster <= std::max(2, splits); cluster *= 2) {
      const HopperPlan plan{HopperTile(row), splits, cluster};
      if (!Supports(plan, conv)) continue;
      candidates.push_back({plan, MicrosecondsOf(plan, WorkOf(plan, conv, queue))});
    }
  }
  return CheapestFirst(std::move(candidates));
}

std::string NameOf(const HopperPlan& plan) {
  const HopperTileSpec& spec = SpecOf(plan.tile);
  return fmt::format("{}{}{}{}x{}{}{}", spec.IsPersistent() ? "" : "few pixels ",
                     spec.element == Element::kE4m3x2 ? "e4m3 " : "",
                     spec.loader == Loader::kHaloTile ? "halo tile " : "", spec.m, spec.n,
                     spec.schedule == Schedule::kPingPong ? " ping-pong" : "",
                     plan.cluster > 1 ? fmt::format(" in clusters of {}", plan.cluster) : "");
}

std::string Describe(const Conv2dLaunch& conv) {
  return fmt::format(
      "{} of {}x{}x{}+{}{} to {}x{}x{}: {}x{}, stride {}, pad {} {}{}{}{}{}{}{}{}{}{}{}{}{}{}",
      conv.images, conv.height, conv.width, conv.channels, conv.channels2,
      conv.upsample2x ? " doubled" : "", conv.out_height, conv.out_width, conv.outputs, conv.kernel,
      conv.kernel, conv.stride, conv.pad_top, conv.pad_left,
      conv.zero_taps != 0 ? fmt::format(", zero taps {:x}", conv.zero_taps) : "",
      conv.gated ? ", gated" : "", conv.rounded_out.data != nullptr ? ", rounded" : "",
      conv.add.data != nullptr ? ", add" : "", conv.residual.data != nullptr ? ", residual" : "",
      conv.shortcut.x.data != nullptr
          ? fmt::format(", shortcut of {}+{}", conv.shortcut.channels, conv.shortcut.channels2)
          : "",
      conv.input_factors != nullptr ? ", normalised" : "",
      conv.activation != Activation::kNone ? ", activation" : "", IsE4m3(conv) ? ", e4m3" : "",
      conv.output_norm.gamma != nullptr ? fmt::format(", then {} groups", conv.output_norm.groups)
                                        : "",
      HasVectorOutputs(conv) ? "" : ", one by one",
      conv.x.element == Element::kF32 ? ", fp32 inputs" : "",
      conv.out.element == Element::kF32 ? ", fp32 outputs" : "");
}

}  // namespace denoised::cuda
