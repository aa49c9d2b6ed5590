#pragma once

#include <string>
#include <vector>

#include "engine/backend/cuda/launch.h"

/// Convolution and linear on Hopper: conv2d_sm90.cu, conv_unit_sm90.cu for few pixels, and for what
/// SuitsPatches() conv3x3_sm90.cu; plan_hopper.cc chooses how.

namespace denoised::cuda {

/// Pixels × outputs that a block makes at a time. Unit: of conv_unit_sm90.cu, 64×64. Turns: its two
/// consumers take tiles in turn. Patch: of SuitsPatches(); 128 pixels, or a unit's 64.
enum class HopperTile : uint8_t {
  kUnit,
  kPatchUnit,
  k128x32,
  k128x128,
  k128x128Turns,
  k128x160,
  k128x160Turns,
  k128x192,
  k128x256,
  k192x192,
  kPatch64,
  kPatch80,
  kPatch128,
  kPatch160,
  kPatch192,
  kPatch128Turns,
  kPatch160Turns,
  kPatch192Turns,
};
constexpr int kHopperTiles = 18;
inline bool IsUnit(HopperTile tile) { return tile <= HopperTile::kPatchUnit; }
inline bool IsPatch(HopperTile tile) {
  return tile == HopperTile::kPatchUnit || tile >= HopperTile::kPatch64;
}
/// Whether the tile takes input_factors.
inline bool Normalises(HopperTile tile) {
  return IsPatch(tile) && tile != HopperTile::kPatch192Turns;
}

/// Whether the tile can add up several runs of k.
inline bool Folds(HopperTile tile) {
  switch (tile) {
    case HopperTile::k128x32:
    case HopperTile::k128x128Turns:
    case HopperTile::k128x160Turns:
    case HopperTile::k128x256:
    case HopperTile::k192x192:
    case HopperTile::kPatch128Turns:
    case HopperTile::kPatch160Turns:
    case HopperTile::kPatch192Turns:
      return false;
    default:
      return true;
  }
}

/// Channels of x, or of x2, that are multiplied at a time.
constexpr int kStep = 64;
inline int ChunksOf(int channels) { return (channels + kStep - 1) / kStep; }

constexpr int kMaxSplits = 8;
/// Of a kPatch80 whose two runs of k have a block each: every run fills the ring.
constexpr int kLeastStepsDivided = 16;
/// How a layer is computed. Only `splits` bears on the bits of the result.
struct HopperPlan {
  HopperTile tile = HopperTile::kUnit;
  int splits = 1;  // runs of k that are summed apart: a power of two
  /// Blocks of a cluster. Those of a unit share its splits, as many each; two of a kPatch80 have
  /// one of its two each; those of a tile of conv2d_sm90.cu share weights.
  int cluster = 1;
};

/// Of one output along k, those of a shortcut included.
int StepsOf(const Conv2dLaunch& conv);
/// Whether there is no shortcut, or one that goes along as steps: of an image that leaves much of
/// the device idle, so that k is split. By the layer's shape alone.
bool SuitsShortcut(const Conv2dLaunch& conv);
/// Whether the copy engine can read the sources: bf16 in multiples of eight channels, aligned.
bool SuitsHopper(const Conv2dLaunch& conv);
/// Whether it is a 3×3 convolution with bf16 outputs of images that patches cover without much left
/// over.
bool SuitsPatches(const Conv2dLaunch& conv);
/// Whether a unit holds whole groups of whole images of conv.output_norm, and nothing else becomes
/// of its sums.
bool SuitsOutputNorm(const Conv2dLaunch& conv);
struct HopperCandidate {
  HopperPlan plan;
  double microseconds = 0;  // that a launch should take
};
/// Every plan for `conv`, for which SuitsHopper() or SuitsPatches(), the cheapest first. `splits`
/// follows from the shape of one image and is the same in all, so all give the same bits.
std::vector<HopperCandidate> HopperCandidates(const Conv2dLaunch& conv, const Queue& queue);
/// Names of a plan, among those for one launch, and of all of a launch that bears on their speed.
std::string NameOf(const HopperPlan& plan);
std::string Describe(const Conv2dLaunch& conv);
/// conv.weight: [phases, outputs, taps, channels + channels2] without padding; phases are 4 and
/// taps 2×2 with upsample2x, else 1 and kernel². An error for a tile that cannot do what is asked.
cudaError_t LaunchConv2dHopper(const Conv2dLaunch& conv, const HopperPlan& plan,
                               const Queue& queue);
cudaError_t LaunchConv3x3(const Conv2dLaunch& conv, const HopperPlan& plan, const Queue& queue);
cudaError_t LaunchConvUnit(const Conv2dLaunch& conv, const HopperPlan& plan, const Queue& queue);
cudaError_t LoadConv2dHopperKernels();
cudaError_t LoadConv3x3HopperKernels();
cudaError_t LoadConvUnitKernels();

}  // namespace denoised::cuda
