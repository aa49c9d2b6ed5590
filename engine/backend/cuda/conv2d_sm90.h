#pragma once

#include "engine/backend/cuda/launch.h"

/// Convolution and linear on Hopper (conv2d_sm90.cu).

namespace denoised::cuda {

/// Pixels × outputs that a block makes at a time. kTurns: its two consumers take tiles in turn.
enum class HopperTile : uint8_t {
  k64x64,
  k128x32,
  k128x128,
  k128x128Turns,
  k64x192Turns,
  k64x256Turns,
  k256x128,
  k128x160,
  k128x192,
  k128x256,
};
constexpr int kHopperTiles = 10;

/// How a layer is computed. Only `splits` bears on the bits of the result.
struct HopperPlan {
  HopperTile tile = HopperTile::k64x64;
  int splits = 1;          // runs of k that are summed apart
  bool clustered = false;  // a block for each split; k64x64 and k128x128 alone
};

/// Whether the copy engine can read the sources: bf16 in multiples of eight channels, aligned.
bool SuitsHopper(const Conv2dLaunch& conv);
/// Splits by the shape of one image; the tile by what the whole launch should cost.
HopperPlan PlanHopper(const Conv2dLaunch& conv, const Queue& queue);
/// conv.weight: [phases, outputs, taps, channels + channels2] without padding; phases are 4 and
/// taps 2×2 with upsample2x, else 1 and kernel².
cudaError_t LaunchConv2dHopper(const Conv2dLaunch& conv, const HopperPlan& plan,
                               const Queue& queue);
cudaError_t LoadConv2dHopperKernels();

}  // namespace denoised::cuda
