// SPDX-License-Identifier: Apache-2.0
// Vector quantisation: each pixel becomes the nearest row of a codebook.
//
// Policy. A few million distances per image, once per request. A warp owns a pixel. Each lane takes
// every 32nd code and keeps the first of its nearest. The lanes then find the smallest distance; of
// equals, the smallest index.

#include <climits>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"

namespace denoised::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

__global__ void __launch_bounds__(kThreads)
    NearestCodeKernel(const float* x, const float* codebook, int codes, int64_t pixels,
                      int channels, Rows out) {
  WaitForPredecessors();
  ReleaseDependents();
  const int64_t pixel = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (pixel >= pixels) return;
  const int lane = threadIdx.x % 32;
  const float* const from = x + pixel * channels;
  float least = INFINITY;
  int nearest = INT_MAX;
  for (int code = lane; code < codes; code += 32) {
    const float* const candidate = codebook + static_cast<int64_t>(code) * channels;
    float distance = 0;
    for (int c = 0; c < channels; ++c) {
      const float difference = from[c] - candidate[c];
      // As the CPU adds: the same distances, so the same codes.
      distance = __fadd_rn(distance, __fmul_rn(difference, difference));
    }
    if (distance < least) least = distance, nearest = code;
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other_least = __shfl_xor_sync(~0u, least, offset);
    const int other = __shfl_xor_sync(~0u, nearest, offset);
    if (other_least < least || (other_least == least && other < nearest)) {
      least = other_least;
      nearest = other;
    }
  }
  if (nearest >= codes) nearest = 0;  // a pixel that is not finite
  for (int c = lane; c < channels; c += 32) {
    Store(out, pixel, c, codebook[static_cast<int64_t>(nearest) * channels + c]);
  }
}

}  // namespace

cudaError_t LaunchNearestCode(const float* x, const float* codebook, int codes, int64_t pixels,
                              int channels, const Rows& out, const Queue& queue) {
  const LaunchShape shape = {.grid = dim3(static_cast<unsigned>((pixels + kWarps - 1) / kWarps)),
                             .block = dim3(kThreads)};
  return LaunchDependent(NearestCodeKernel, shape, queue, x, codebook, codes, pixels, channels,
                         out);
}

cudaError_t LoadNearestCodeKernels() { return LoadKernel(NearestCodeKernel); }

}  // namespace denoised::cuda
