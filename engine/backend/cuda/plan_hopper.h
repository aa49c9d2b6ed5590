// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "engine/backend/cuda/hopper_tiles.h"
#include "engine/backend/cuda/launch.h"

/// Which tiles can compute a convolution on Hopper, the number of splits of k, the cost of each
/// tile, and the names of plans and launches. Defined in plan_hopper.cc, except SuitsOutputNorm().

namespace denoised::cuda {

/// Channels of x, or of x2, in a step along k; in e4m3, pairs of channels. 128 bytes in any case.
constexpr int kStep = 64;
inline int ChunksOf(int channels) { return (channels + kStep - 1) / kStep; }

/// Pixels along the edge of a subtile of a halo tile: 64 in all, M of a wgmma.
constexpr int kSubtileEdge = 8;

constexpr int kMaxSplits = 8;
/// Steps along k that a persistent tile needs to split k over a cluster: each split fills the
/// pipeline.
constexpr int kMinStepsSplitOverCluster = 16;
/// How a layer is computed. The bits of the result depend on `splits` alone.
struct HopperPlan {
  HopperTile tile = kTile64x64;
  int splits = 1;  // split-K: a power of two
  /// CTAs of a cluster. With SplitK::kCluster and kEach they divide the splits among them; in other
  /// tiles they multicast weights.
  int cluster = 1;
};

/// Steps along k of one output, those of a shortcut included.
int StepsOf(const ConvLayer& layer);
int SplitsOf(const ConvLayer& layer);
/// Whether there is no shortcut, or it is computed as extra steps along k. The latter is done if k
/// is split.
bool SuitsShortcut(const ConvLayer& layer);
/// Whether TMA can read the sources: bf16, or pairs in e4m3, in multiples of eight, aligned, with
/// strides up to eight.
bool SuitsHopper(const ConvLayer& conv);
/// Whether it is a 3×3 convolution with bf16 outputs of images that halo tiles cover with little
/// waste.
bool SuitsHaloTile(const ConvLayer& conv);
/// Whether a 64×64 tile holds whole groups of whole images of conv.output_norm, and the epilogue
/// does nothing else.
bool SuitsOutputNorm(const ConvLayer& conv);
/// Whether the layer's gate can be part of the launch.
bool SuitsGate(const ConvLayer& conv);
/// Whether the plan can compute the layer. Nothing else decides that.
bool Supports(const HopperPlan& plan, const ConvLayer& conv);
/// What a launch takes its time for, in units of HopperTileCost.
struct HopperWork {
  bool multicasts = false;  // HopperTileCost::multicast counts, not `single`
  bool busy = false;        // a step takes HopperTileCost::Launch::busy times as long
  double steps = 0, finishes = 0, folds = 0;  // of all waves, which come one after the other
};
/// Of a plan that Supports() the launch.
HopperWork WorkOf(const HopperPlan& plan, const Conv2dLaunch& conv, const Queue& queue);
struct HopperCandidate {
  HopperPlan plan;
  double microseconds = 0;  // expected for a launch
};
/// All plans for `conv`, the cheapest first; SuitsHopper() or SuitsHaloTile() must hold. `splits`
/// is the same in all plans, so all give the same bits.
std::vector<HopperCandidate> HopperCandidates(const Conv2dLaunch& conv, const Queue& queue);
/// The name of a plan, unique among those of one launch; and a key of everything about a launch
/// that affects its speed.
std::string NameOf(const HopperPlan& plan);
std::string Describe(const Conv2dLaunch& conv);

}  // namespace denoised::cuda
