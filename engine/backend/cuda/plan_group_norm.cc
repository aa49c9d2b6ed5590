// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "engine/backend/backend.h"
#include "engine/backend/cuda/group_norm.h"

namespace denoised::cuda {
namespace {

/// Whether group_norm_pieces.cu can compute the factors.
bool InPieces(const NormLayer& norm, const Queue& queue) {
  return queue.hopper && SuitsGroupNormPieces(norm);
}
/// Whether `out` and the factors can be computed in one pass; they then have the same bits.
bool InOnePass(const NormLayer& norm, const Queue& queue) {
  return SuitsGroupNormCluster(norm, queue) ||
         (InPieces(norm, queue) && SuitsGroupNormStream(norm));
}
cudaError_t LaunchOnePass(const GroupNormLaunch& norm, const Queue& queue) {
  if (queue.hopper && norm.factors != nullptr && PrefersGroupNormPieces(norm, queue)) {
    return LaunchGroupNormPieces(norm, queue);
  }
  if (queue.hopper && norm.factors == nullptr && PrefersGroupNormStream(norm, queue)) {
    return LaunchGroupNormStream(norm, queue);
  }
  return LaunchGroupNormCluster(norm, queue);
}

/// Images [first, first + images) of a group norm.
GroupNormLaunch Images(GroupNormLaunch norm, int first, int images) {
  norm.images = images;
  for (Rows* rows : {&norm.x, &norm.x2, &norm.out}) {
    *rows = RowsFrom(*rows, int64_t{first} * norm.pixels);
  }
  norm.scale_shift = RowsFrom(norm.scale_shift, first);
  return norm;
}
/// `out`: norm.out, or the same in e4m3.
cudaError_t LaunchFactorsThenScale(const GroupNormLaunch& norm, const Rows& out, float* factors,
                                   const Queue& queue) {
  return ForImages(norm.images, NormImagesAtOnce(norm), [&](int first, int images) {
    GroupNormLaunch part = norm;
    part.factors = factors;
    const cudaError_t error = LaunchNormFactors(Images(part, first, images), queue);
    part.out = out;
    return error != cudaSuccess ? error : LaunchGroupScale(Images(part, first, images), queue);
  });
}

}  // namespace

int NormImagesAtOnce(const NormLayer& norm) {
  return static_cast<int>(
      std::min<size_t>(65535, kNormFactorBytes / (2 * sizeof(float) * norm.AllChannels())));
}

bool HasNormFactors(const NormLayer& norm, const Queue& queue) {
  return InOnePass(norm, queue) || InPieces(norm, queue) || SuitsGroupNormFactors(norm);
}

cudaError_t LaunchNormFactors(const GroupNormLaunch& norm, const Queue& queue) {
  if (InOnePass(norm, queue)) return LaunchOnePass(norm, queue);
  return InPieces(norm, queue) ? LaunchGroupNormPieces(norm, queue)
                               : LaunchGroupNormFactors(norm, queue);
}

cudaError_t LaunchNorm(const GroupNormLaunch& norm, float* factors, const Queue& queue) {
  if (InOnePass(norm, queue)) return LaunchOnePass(norm, queue);
  if (!HasNormFactors(norm, queue)) return LaunchGroupNorm(norm, queue);
  return LaunchFactorsThenScale(norm, norm.out, factors, queue);
}

cudaError_t LaunchNormE4m3(const GroupNormLaunch& norm, const Rows& rounded, float* factors,
                           const Queue& queue) {
  const int channels = norm.AllChannels();
  if (RoundedBytes(channels) != channels || !HasNormFactors(norm, queue)) {
    const cudaError_t error = LaunchNorm(norm, factors, queue);
    return error != cudaSuccess
               ? error
               : LaunchRoundToE4m3(norm.out, channels, {}, 0, int64_t{norm.images} * norm.pixels,
                                   rounded, queue);
  }
  GroupNormLaunch rounding = norm;
  rounding.out = rounded;
  return InOnePass(rounding, queue) ? LaunchOnePass(rounding, queue)
                                    : LaunchFactorsThenScale(norm, rounded, factors, queue);
}

}  // namespace denoised::cuda
