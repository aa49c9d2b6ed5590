// SPDX-License-Identifier: Apache-2.0
// conv2d_sm90.cuh's kernels in e4m3, compiled apart because they take as long as those in bf16.

#include "engine/backend/cuda/conv2d_sm90.cuh"

namespace denoised::cuda {

cudaError_t LaunchConv2dE4m3(const Conv2dLaunch& conv, const HopperPlan& plan, const Queue& queue) {
  return im2col::Kernels<Element::kE4m3x2>::Launch(conv, plan, queue);
}

cudaError_t LoadConv2dE4m3Kernels() { return im2col::Kernels<Element::kE4m3x2>::Load(); }

}  // namespace denoised::cuda
