// SPDX-License-Identifier: Apache-2.0
// Convolution and linear for Hopper: conv2d_sm90.cuh's kernels in bf16, and the launcher of all of
// Hopper's convolutions. conv2d_e4m3_sm90.cu has those in e4m3.

#include "engine/backend/cuda/conv2d_sm90.cuh"

namespace denoised::cuda {

cudaError_t LaunchConv2dHopper(const Conv2dLaunch& conv, const HopperPlan& plan,
                               const Queue& queue) {
  const HopperTileSpec& spec = SpecOf(plan.tile);
  if (!Supports(plan, conv)) return cudaErrorInvalidValue;
  if (!spec.IsPersistent()) return LaunchConvFewPixels(conv, plan, queue);
  if (spec.loader == Loader::kHaloTile) return LaunchConv3x3Hopper(conv, plan, queue);
  if (spec.element == Element::kE4m3x2) return LaunchConv2dE4m3(conv, plan, queue);
  return im2col::Kernels<Element::kBf16>::Launch(conv, plan, queue);
}

cudaError_t LoadConv2dHopperKernels() {
  for (cudaError_t (*load)() : {im2col::Kernels<Element::kBf16>::Load, LoadConv2dE4m3Kernels,
                                LoadConv3x3HopperKernels, LoadConvFewPixelsKernels}) {
    if (cudaError_t error = load(); error != cudaSuccess) return error;
  }
  return GetTensorMapEncoders().error;
}

}  // namespace denoised::cuda
