// SPDX-License-Identifier: Apache-2.0
// Convolution and linear for Hopper: conv2d_sm90.cuh's kernels in bf16, and the launcher of all of
// Hopper's convolutions. conv2d_e4m3_sm90.cu has those in e4m3.

#include "engine/backend/cuda/conv2d_sm90.cuh"

namespace denoised::cuda {
namespace {

constexpr HopperKernelSet kConv2dKernels = im2col::Kernels<Element::kBf16>::kSet;

const HopperKernelSet& KernelsOf(const HopperTileSpec& spec) {
  if (!spec.IsPersistent()) return kConvFewPixelsKernels;
  if (spec.loader == Loader::kHaloTile) return kConv3x3Kernels;
  return spec.element == Element::kE4m3x2 ? kConv2dE4m3Kernels : kConv2dKernels;
}

}  // namespace

cudaError_t LaunchConv2dHopper(const Conv2dLaunch& conv, const HopperPlan& plan,
                               const Queue& queue) {
  if (!Supports(plan, conv)) return cudaErrorInvalidValue;
  return KernelsOf(SpecOf(plan.tile)).launch(conv, plan, queue);
}

cudaError_t LoadConv2dHopperKernels() {
  for (const HopperKernelSet* kernels :
       {&kConv2dKernels, &kConv2dE4m3Kernels, &kConv3x3Kernels, &kConvFewPixelsKernels}) {
    if (cudaError_t error = kernels->load(); error != cudaSuccess) return error;
  }
  return GetTensorMapEncoders().error;
}

}  // namespace denoised::cuda
