// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/backend/cuda/plan_hopper.h"

/// Convolution and linear on Hopper. conv2d_sm90.cu: im2col, any shape. conv3x3_sm90.cu: 3×3 from
/// halo tiles, if SuitsHaloTile(). conv_few_pixels_sm90.cu: few pixels. plan_hopper.cc chooses.

namespace denoised::cuda {

/// conv.weight: [phases, outputs, taps, channels + channels2] without padding; phases are 4 and
/// taps 2×2 with upsample2x, else 1 and kernel². An error unless the plan Supports() the layer.
cudaError_t LaunchConv2dHopper(const Conv2dLaunch& conv, const HopperPlan& plan,
                               const Queue& queue);
cudaError_t LoadConv2dHopperKernels();
/// Launches and loads the kernels of one file: those of some tiles.
struct HopperKernelSet {
  cudaError_t (*launch)(const Conv2dLaunch& conv, const HopperPlan& plan, const Queue& queue);
  cudaError_t (*load)();
};
extern const HopperKernelSet kConv2dE4m3Kernels, kConv3x3Kernels, kConvFewPixelsKernels;

}  // namespace denoised::cuda
