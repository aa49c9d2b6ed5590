// SPDX-License-Identifier: Apache-2.0
// conv2d_sm90.cuh's kernels in e4m3, compiled apart because they take as long as those in bf16.

#include "engine/backend/cuda/conv2d_sm90.cuh"

namespace denoised::cuda {

const HopperKernelSet kConv2dE4m3Kernels = im2col::Kernels<Element::kE4m3x2>::kSet;

}  // namespace denoised::cuda
