// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "engine/backend/cuda/launch.h"

/// Convolution and linear on Hopper. conv2d_sm90.cu: im2col, any shape. conv3x3_sm90.cu: 3×3 from
/// halo tiles, for what SuitsHaloTile(). conv64x64_sm90.cu: few pixels. plan_hopper.cc chooses.

namespace denoised::cuda {

/// A CTA tile: pixels × outputs. 64x64: of conv64x64_sm90.cu. HaloTile: for what SuitsHaloTile().
/// PingPong: the two consumer warpgroups have a tile each; else they cooperate on one.
enum class HopperTile : uint8_t {
  k64x64,
  kHaloTile64x64,
  k128x32,
  k128x128,
  k128x128PingPong,
  k128x160,
  k128x160PingPong,
  k128x192,
  k128x256,
  k192x192,
  kHaloTile128x64,
  kHaloTile128x80,
  kHaloTile128x128,
  kHaloTile128x160,
  kHaloTile128x192,
  kHaloTile128x128PingPong,
  kHaloTile128x160PingPong,
  kHaloTile128x192PingPong,
};
constexpr int kHopperTiles = 18;
inline bool Is64x64(HopperTile tile) { return tile <= HopperTile::kHaloTile64x64; }
inline bool IsHaloTile(HopperTile tile) {
  return tile == HopperTile::kHaloTile64x64 || tile >= HopperTile::kHaloTile128x64;
}
/// Whether the tile can normalise its input (Conv2dLaunch::input_factors).
inline bool FusesInputNorm(HopperTile tile) {
  return IsHaloTile(tile) && tile != HopperTile::kHaloTile128x192PingPong;
}

/// Whether the tile can add up several splits of k.
inline bool SupportsSplitK(HopperTile tile) {
  switch (tile) {
    case HopperTile::k128x32:
    case HopperTile::k128x128PingPong:
    case HopperTile::k128x160PingPong:
    case HopperTile::k128x256:
    case HopperTile::k192x192:
    case HopperTile::kHaloTile128x128PingPong:
    case HopperTile::kHaloTile128x160PingPong:
    case HopperTile::kHaloTile128x192PingPong:
      return false;
    default:
      return true;
  }
}

/// Channels of x, or of x2, in a step along k.
constexpr int kStep = 64;
inline int ChunksOf(int channels) { return (channels + kStep - 1) / kStep; }

constexpr int kMaxSplits = 8;
/// Steps along k that kHaloTile128x80 needs to split k over a cluster: each split fills the
/// pipeline.
constexpr int kMinStepsSplitOverCluster = 16;
/// How a layer is computed. The bits of the result depend on `splits` alone.
struct HopperPlan {
  HopperTile tile = HopperTile::k64x64;
  int splits = 1;  // split-K: a power of two
  /// CTAs of a cluster. In a 64×64 tile they divide the splits among them; two of a kHaloTile128x80
  /// have one of its two splits each; other tiles multicast weights.
  int cluster = 1;
};

/// Steps along k of one output, those of a shortcut included.
int StepsOf(const Conv2dLaunch& conv);
/// Whether there is no shortcut, or one that is computed as steps along k: where k is split. By the
/// layer's shape alone.
bool SuitsShortcut(const Conv2dLaunch& conv);
/// Whether TMA can read the sources: bf16 in multiples of eight channels, aligned.
bool SuitsHopper(const Conv2dLaunch& conv);
/// Whether it is a 3×3 convolution with bf16 outputs of images that halo tiles cover with little
/// waste.
bool SuitsHaloTile(const Conv2dLaunch& conv);
/// Whether a 64×64 tile holds whole groups of whole images of conv.output_norm, and the epilogue
/// does nothing else.
bool SuitsOutputNorm(const Conv2dLaunch& conv);
struct HopperCandidate {
  HopperPlan plan;
  double microseconds = 0;  // expected for a launch
};
/// Every plan for `conv`, for which SuitsHopper() or SuitsHaloTile(), the cheapest first. `splits`
/// follows from the shape of one image and is the same in all, so all give the same bits.
std::vector<HopperCandidate> HopperCandidates(const Conv2dLaunch& conv, const Queue& queue);
/// The name of a plan, unique among those of one launch; everything about a launch that affects its
/// speed, in words.
std::string NameOf(const HopperPlan& plan);
std::string Describe(const Conv2dLaunch& conv);
/// conv.weight: [phases, outputs, taps, channels + channels2] without padding; phases are 4 and
/// taps 2×2 with upsample2x, else 1 and kernel². An error for a tile that cannot do what is asked.
cudaError_t LaunchConv2dHopper(const Conv2dLaunch& conv, const HopperPlan& plan,
                               const Queue& queue);
cudaError_t LaunchConv3x3Hopper(const Conv2dLaunch& conv, const HopperPlan& plan,
                                const Queue& queue);
cudaError_t LaunchConv64x64(const Conv2dLaunch& conv, const HopperPlan& plan, const Queue& queue);
cudaError_t LoadConv2dHopperKernels();
cudaError_t LoadConv3x3HopperKernels();
cudaError_t LoadConv64x64Kernels();

}  // namespace denoised::cuda
