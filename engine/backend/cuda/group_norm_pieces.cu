// SPDX-License-Identifier: Apache-2.0
// The factors of a group norm alone, by CTAs that each read a piece of an image, for batches that
// fill the device. The bits are group_norm_cluster.cu's.
//
// Policy. Nothing is normalised here, so no values are kept, and no CTA waits for another. A piece
// is a run of pixels with all channels. A CTA sums its leaves as they are loaded; several CTAs
// share an SM, so that loads are always in flight. A CTA stores the sums of its groups, a node of
// the tree, and increments a semaphore. The last CTA of an image adds the nodes and computes the
// factors.

#include <algorithm>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/fast_divmod.h"
#include "engine/backend/cuda/group_norm.cuh"

namespace denoised::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTileVectors = 32 / kQuad;  // loaded by a warp together
constexpr int kMaxSharedBytes = 48 * 1024;
constexpr int kMaxPieces = 128;         // four for each lane of a warp
constexpr int kMostBytes = 128 * 1024;  // per piece, unless there would be too many pieces
constexpr int kAtOnce = 2;              // leaves in a warp's registers

struct Plan {
  int group_channels = 0;
  // Per pixel.
  int vectors = 0;
  FastDivmod tiles;
  int leaves = 0, pieces = 0;  // per piece, a power of two; per image
  int leaf_stride = 0;         // Sums of a leaf: odd, so that leaves lie in different banks
  float count_inverse = 0;     // 1 / elements of a group
  SumTree tree;
};

/// grid (pieces, images); shared [leaves][leaf_stride] Sums. `nodes` [images][pieces][groups];
/// `arrived` [images], zero before and after. kRun: as in group_norm_cluster.cu.
template <int kRun>
__global__ void __launch_bounds__(kThreads, 4)
    GroupNormPiecesKernel(const __grid_constant__ GroupNormLaunch norm,
                          const __grid_constant__ Plan plan, int first_image, Sums* nodes,
                          int* arrived) {
#if __CUDA_ARCH__ >= 900
  constexpr int kRuns = kVector / kRun;
  extern __shared__ __align__(16) unsigned char pieces_shared[];
  auto* const leaves = reinterpret_cast<Sums*>(pieces_shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, in_quad = lane % kQuad;
  // In reverse order: the previous convolution left the last image in L2. The next kernel begins
  // with the first one.
  const int piece = gridDim.x - 1 - blockIdx.x, of_launch = gridDim.y - 1 - blockIdx.y;
  const int image = first_image + of_launch;
  WaitForPredecessors();
  ReleaseDependents();

  for (int unit = warp; unit < plan.tiles.value * plan.leaves / kAtOnce; unit += kWarps) {
    const int leaf = unit / plan.tiles * kAtOnce;
    const int of_lane = unit % plan.tiles * kTileVectors + lane / kQuad;
    const bool idle = of_lane >= plan.vectors;
    const int vector = idle ? 0 : of_lane, channel = vector * kVector;
    const int pixel = (piece * plan.leaves + leaf) * kLeafPixels + in_quad;
    const __nv_bfloat16* const from = ChannelAt(norm, image, pixel, channel);
    const int64_t stride = kQuad * (channel < norm.channels ? norm.x.stride : norm.x2.stride);
    uint32_t kept[kAtOnce * kLeafVectors][kWords];
#pragma unroll
    for (int i = 0; i < kAtOnce * kLeafVectors; ++i) {
      Split(pixel + i * kQuad < norm.pixels ? *reinterpret_cast<const uint4*>(from + i * stride)
                                            : make_uint4(0, 0, 0, 0),
            kept[i]);
    }
#pragma unroll
    for (int l = 0; l < kAtOnce; ++l) {
      SumLeaf<kRun>(kept + l * kLeafVectors, lane, [&](int r, const Sums& of_run) {
        if (HoldsSums(lane) && !idle) {
          leaves[(leaf + l) * plan.leaf_stride + vector * kRuns + r] = of_run;
        }
      });
    }
  }
  __syncthreads();

  Sums* const of_image = nodes + static_cast<int64_t>(of_launch) * plan.pieces * norm.groups;
  SumLeaves(plan.tree, leaves, plan.leaf_stride, plan.group_channels / kRun, norm.groups, warp,
            kWarps, lane, [&](const Sums& of_piece, int group, int part) {
              if (part == 0) of_image[piece * norm.groups + group] = of_piece;
            });
  if (!IsLast(arrived + of_launch, plan.pieces)) return;

  auto* const statistics = reinterpret_cast<Statistics*>(pieces_shared);  // by group
  SumBlocks(plan.tree, of_image, plan.pieces, norm.groups, warp, kWarps, lane,
            [&](const Sums& sums, int group, int part) {
              if (part == 0) statistics[group] = StatisticsOf(sums, plan.count_inverse, norm.eps);
            });
  __syncthreads();
  for (int c = threadIdx.x; c < norm.AllChannels(); c += kThreads) {
    StoreFactors(norm, image, c, AffineOf(norm, image, c), statistics[c / plan.group_channels]);
  }
#endif
}

int SharedBytes(const Plan& plan) { return plan.leaves * plan.leaf_stride * kSumsBytes; }

Plan MakePlan(const NormLayer& norm) {
  Plan plan;
  const int channels = norm.AllChannels();
  plan.group_channels = norm.GroupChannels();
  plan.vectors = channels / kVector;
  plan.tiles = FastDivmod((plan.vectors + kTileVectors - 1) / kTileVectors);
  plan.leaf_stride = channels / RunOf(plan.group_channels) | 1;
  const auto cut = [&](int leaves) {
    const int pixels = leaves * kLeafPixels;
    plan.leaves = leaves, plan.pieces = (norm.pixels + pixels - 1) / pixels;
  };
  cut(kAtOnce);
  while (plan.pieces > 1 && 2 * plan.leaves <= kMaxLeaves &&
         2 * SharedBytes(plan) <= kMaxSharedBytes &&
         (plan.pieces > kMaxPieces || 2 * plan.leaves * kLeafPixels * channels * 2 <= kMostBytes)) {
    cut(2 * plan.leaves);
  }
  plan.count_inverse = 1.0f / (static_cast<float>(norm.pixels) * plan.group_channels);
  plan.tree = MakeSumTree(plan.leaves, plan.pieces);
  return plan;
}

}  // namespace

bool SuitsGroupNormPieces(const NormLayer& norm) {
  if (!SuitsOnePass(norm)) return false;
  const Plan plan = MakePlan(norm);
  return plan.pieces <= kMaxPieces && SharedBytes(plan) <= kMaxSharedBytes;
}

/// As measured: batches whose pieces fill the device several times.
bool PrefersGroupNormPieces(const GroupNormLaunch& norm, const Queue& queue) {
  constexpr int64_t kMuchBytes = 18 << 20;
  if (!SuitsGroupNormCluster(norm, queue)) return true;
  const int64_t bytes = int64_t{norm.images} * norm.pixels * norm.AllChannels() * 2;
  return bytes >= kMuchBytes && SuitsGroupNormPieces(norm);
}

cudaError_t LaunchGroupNormPieces(const GroupNormLaunch& norm, const Queue& queue) {
  if (!SuitsGroupNormPieces(norm)) return cudaErrorInvalidValue;
  const Plan plan = MakePlan(norm);
  const auto kernel = WithConstant<2, 4, 8>(RunOf(plan.group_channels),
                                            [](auto run) { return &GroupNormPiecesKernel<run>; });
  const size_t image_bytes = sizeof(Sums) * plan.pieces * norm.groups;  // of nodes
  const size_t at_once = std::min<size_t>(norm.workspace_bytes / image_bytes, kSemaphores);
  return ForImages(norm.images, at_once, [&](int first, int images) {
    return LaunchDependent(kernel,
                           {.grid = dim3(plan.pieces, images),
                            .block = dim3(kThreads),
                            .shared_bytes = static_cast<size_t>(SharedBytes(plan))},
                           queue, norm, plan, first, static_cast<Sums*>(norm.workspace),
                           norm.semaphores);
  });
}

cudaError_t LoadGroupNormPiecesKernels() {
  return LoadKernels(0, GroupNormPiecesKernel<2>, GroupNormPiecesKernel<4>,
                     GroupNormPiecesKernel<8>);
}

}  // namespace denoised::cuda
