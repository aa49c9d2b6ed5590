// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "engine/backend/cuda/launch.h"

/// Group norm by whichever of launch.h's kernels suits: plan_group_norm.cc. What decides bits sees
/// the layer alone; kernels with the same bits are chosen by the launch.
///
///   group_norm.cu          two passes: for any layer, or by factors for bf16 images of any size
///   group_norm_cluster.cu  one pass: images that fit the registers of a cluster, or of a CTA
///   group_norm_stream.cu   one pass on Hopper: large images in batches that fill the device
///   group_norm_pieces.cu   factors alone on Hopper: images of batches that fill the device
///
/// The last three have the same bits; what they share is in group_norm.cuh.

namespace denoised::cuda {

/// For the factors of 1024 images of 1024 channels.
constexpr size_t kNormFactorBytes = size_t{8} << 20;
/// Images whose factors fit, and that fit a grid.
int NormImagesAtOnce(const NormLayer& norm);

/// Whether factors can be computed, and `out` from them.
bool HasNormFactors(const NormLayer& norm, const Queue& queue);
/// norm.factors, if HasNormFactors().
cudaError_t LaunchNormFactors(const GroupNormLaunch& norm, const Queue& queue);
/// norm.out. `factors`: kNormFactorBytes of memory.
cudaError_t LaunchNorm(const GroupNormLaunch& norm, float* factors, const Queue& queue);
/// The same, rounded to e4m3; norm.out may be overwritten.
cudaError_t LaunchNormE4m3(const GroupNormLaunch& norm, const Rows& rounded, float* factors,
                           const Queue& queue);

/// Calls launch(first, count) for all images, at most `at_once` of them at a time, until one fails.
template <typename Launch>
cudaError_t ForImages(int images, size_t at_once, const Launch& launch) {
  if (at_once == 0) return cudaErrorInvalidValue;
  const int most = static_cast<int>(std::min<size_t>(at_once, 65535));  // of a grid
  for (int first = 0; first < images; first += most) {
    const cudaError_t error = launch(first, std::min(most, images - first));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace denoised::cuda
