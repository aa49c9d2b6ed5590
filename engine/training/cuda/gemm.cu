// SPDX-License-Identifier: Apache-2.0
// Gradients of weights: the product of dout and the input, summed over all pixels or tokens. For a
// convolution the input is its im2col matrix, which is not written to memory: loads compute the
// addresses (implicit GEMM).
//
// Policy. Tensor cores: a block of 256 threads owns a tile of out and loops over k in steps of 32
// through a ring of cp.async stages. Eight warps share the tile as 2 × 4 and read fragments by
// transposing ldmatrix, because neither operand is contiguous along k. The im2col columns of all
// taps are numbered through, so a tile may span taps; a thread loads the same columns, of one tap,
// in every step. Without tensor cores: the same loop over tiles in fp32, for any shape. Every
// element of out is a sum over ascending k in one thread or fragment, whatever the tile and the
// batch.

#include <algorithm>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/fast_divmod.h"
#include "engine/backend/cuda/mma.cuh"
#include "engine/training/cuda/launch.h"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kThreads = 256;

/// GemmLaunch as kernels read it.
struct Gemm {
  Operand a, b;
  Element element;
  int64_t m, n, k, k_part;
  int inner;
  float* out;
  int64_t out_stride, out_outer, out_inner;
  Patches patches;
  FastDivmod out_height, out_width, channels;  // of one tap; n counts the channels of all taps
};

/// The batch, tile and range of k of this block.
struct Place {
  int64_t outer, inner, m, n, k_begin, k_end;
};
template <int kM, int kN>
__device__ Place PlaceOf(const Gemm& gemm) {
  Place place;
  place.outer = blockIdx.z / gemm.inner;
  place.inner = blockIdx.z % gemm.inner;
  place.n = static_cast<int64_t>(blockIdx.x) * kN;
  place.m = static_cast<int64_t>(blockIdx.y) * kM;
  place.k_begin = gemm.k_part > 0 ? place.inner * gemm.k_part : 0;
  place.k_end = gemm.k_part > 0 ? min(gemm.k, place.k_begin + gemm.k_part) : gemm.k;
  if (gemm.k_part > 0) place.inner = 0;  // parts of one operand
  return place;
}

/// Offset in the convolution's input of element (p, n) of the im2col matrix; −1 beyond the edge.
__device__ int64_t PatchAt(const Gemm& gemm, int64_t p, int64_t n) {
  const Patches& patches = gemm.patches;
  const int tap = static_cast<int>(n) / gemm.channels,
            channel = static_cast<int>(n) % gemm.channels;
  const int line = static_cast<int>(p) / gemm.out_width;
  const int image = line / gemm.out_height;
  int h = line % gemm.out_height * patches.stride - patches.pad_top + tap / patches.kernel;
  int w = static_cast<int>(p) % gemm.out_width * patches.stride - patches.pad_left +
          tap % patches.kernel;
  const int up = patches.upsample2x ? 1 : 0;
  if (h < 0 || w < 0 || h >= patches.height << up || w >= patches.width << up) return -1;
  return ((static_cast<int64_t>(image) * patches.height + (h >> up)) * patches.width + (w >> up)) *
             gemm.b.stride +
         channel;
}

__device__ float LoadElement(const void* data, Element element, int64_t i) {
  return element == Element::kBf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i])
                                   : static_cast<const float*>(data)[i];
}

/// Offset in out of element (m, 0) of the block's batch.
__device__ int64_t OutOf(const Gemm& gemm, const Place& place, int64_t m) {
  return place.outer * gemm.out_outer + blockIdx.z % gemm.inner * gemm.out_inner +
         m * gemm.out_stride;
}

// Tensor cores.

constexpr int kStages = 4, kStep = 32;
constexpr int kVector = 8, kPadding = 8;  // elements; the padding avoids bank conflicts of ldmatrix

/// A stage's tile of one operand: kSize rows or columns of out.
template <int kSize>
struct Tile {
  static constexpr int kLine = kSize + kPadding;
  static constexpr int kElements = kLine * kStep;
  static constexpr int kVectorsOfLine = kSize / kVector;
  static constexpr int kLoads = kStep * kVectorsOfLine / kThreads;  // per thread
};

/// `base` is the operand's first element in this batch, `first` the tile's first row or column of
/// out.
template <int kSize, bool kPatches>
__device__ void LoadTile(const Gemm& gemm, const Operand& operand, const __nv_bfloat16* base,
                         const Place& place, int64_t first, int64_t size, int64_t k,
                         __nv_bfloat16* tile) {
  using T = Tile<kSize>;
#pragma unroll
  for (int i = 0; i < T::kLoads; ++i) {
    const int v = i * kThreads + threadIdx.x;
    const int line = v / T::kVectorsOfLine, column = v % T::kVectorsOfLine * kVector;
    const int64_t row = first + column, at_k = k + line;
    bool valid = row < size && at_k < place.k_end;
    int64_t offset = 0;
    if constexpr (kPatches) {
      offset = valid ? PatchAt(gemm, place.outer * operand.outer + at_k, row) : -1;
      valid = offset >= 0;
    } else {
      offset = at_k * operand.stride + row;
    }
    CopyAsync16(tile + line * T::kLine + column, valid ? base + offset : base, valid);
  }
}

template <int kM, int kN>
constexpr int kSharedBytes = kStages*(Tile<kM>::kElements + Tile<kN>::kElements) * 2;

/// Blocks per multiprocessor, limited by registers.
template <int kM, int kN>
constexpr int kBlocks = kM* kN >= 128 * 128  ? 2
                        : kM* kN >= 64 * 128 ? 3
                                             : 4;

template <int kM, int kN, bool kPatches>
__global__ void __launch_bounds__(kThreads, kBlocks<kM, kN>)
    TensorCoreKernel(const __grid_constant__ Gemm gemm) {
  WaitForPredecessors();
  using A = Tile<kM>;
  using B = Tile<kN>;
  constexpr int kTilesM = kM / 32, kTilesN = kN / 32;  // per warp, of 16 rows and of 8 columns
  extern __shared__ __align__(16) __nv_bfloat16 stages[];
  const Place place = PlaceOf<kM, kN>(gemm);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp / 4 * (kM / 2), warp_n = warp % 4 * (kN / 4);
  const auto* a = static_cast<const __nv_bfloat16*>(gemm.a.data) + place.outer * gemm.a.outer +
                  place.inner * gemm.a.inner;
  const auto* b = static_cast<const __nv_bfloat16*>(gemm.b.data) +
                  (kPatches ? 0 : place.outer * gemm.b.outer + place.inner * gemm.b.inner);
  const auto stage_of = [&](int step) {
    return stages + step % kStages * (A::kElements + B::kElements);
  };
  const int steps = static_cast<int>((place.k_end - place.k_begin + kStep - 1) / kStep);
  const auto load = [&](int step) {
    if (step < steps) {
      const int64_t k = place.k_begin + static_cast<int64_t>(step) * kStep;
      LoadTile<kM, false>(gemm, gemm.a, a, place, place.m, gemm.m, k, stage_of(step));
      LoadTile<kN, kPatches>(gemm, gemm.b, b, place, place.n, gemm.n, k,
                             stage_of(step) + A::kElements);
    }
    CommitCopies();
  };

  float sums[kTilesM][kTilesN][4] = {};
  for (int step = 0; step < kStages - 1; ++step) load(step);
  for (int step = 0; step < steps; ++step) {
    WaitCopies<kStages - 2>();
    __syncthreads();  // this stage is full, and no warp reads the one that is filled next
    load(step + kStages - 1);
    const __nv_bfloat16* tile_a = stage_of(step);
    const __nv_bfloat16* tile_b = tile_a + A::kElements;
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      // Lane 8i + j gives the address of line j of the i-th 8×8 matrix; mma.cuh has the layouts.
      const int j = lane % 8, i = lane / 8;
      uint32_t fragments_a[kTilesM][4], fragments_b[kTilesN / 2][4];
#pragma unroll
      for (int t = 0; t < kTilesM; ++t) {
        const int m = warp_m + t * 16 + i % 2 * 8, at_k = k + i / 2 * 8;
        LoadMatricesTransposed(fragments_a[t], tile_a + (at_k + j) * A::kLine + m);
      }
#pragma unroll
      for (int t = 0; t < kTilesN / 2; ++t) {
        const int n = warp_n + t * 16 + i / 2 * 8, at_k = k + i % 2 * 8;
        LoadMatricesTransposed(fragments_b[t], tile_b + (at_k + j) * B::kLine + n);
      }
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          Multiply(sums[m][n], fragments_a[m], fragments_b[n / 2][n % 2 * 2],
                   fragments_b[n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }
  WaitCopies<0>();
  ReleaseDependents();

#pragma unroll
  for (int t = 0; t < kTilesM; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t m = place.m + warp_m + t * 16 + half * 8 + lane / 4;
      if (m >= gemm.m) continue;
      const int64_t line = OutOf(gemm, place, m);
#pragma unroll
      for (int u = 0; u < kTilesN; ++u) {
        const int64_t n = place.n + warp_n + u * 8 + lane % 4 * 2;
        if (n >= gemm.n) continue;
        *reinterpret_cast<float2*>(gemm.out + line + n) =
            make_float2(sums[t][u][half * 2], sums[t][u][half * 2 + 1]);
      }
    }
  }
}

// Plain.

constexpr int kPlainTile = 64, kPlainStep = 16;

template <bool kPatches>
__global__ void __launch_bounds__(kThreads) PlainKernel(const __grid_constant__ Gemm gemm) {
  WaitForPredecessors();
  __shared__ float tile_a[kPlainStep][kPlainTile + 1], tile_b[kPlainStep][kPlainTile + 1];
  const Place place = PlaceOf<kPlainTile, kPlainTile>(gemm);
  const int64_t a = place.outer * gemm.a.outer + place.inner * gemm.a.inner;
  const int64_t b = place.outer * gemm.b.outer + place.inner * gemm.b.inner;
  const int row = threadIdx.x / 16, column = threadIdx.x % 16;  // of a 16 × 16 grid of 4 × 4
  // Neighbouring threads read neighbouring elements of a line.
  const auto fill = [&](const Operand& operand, int64_t base, int64_t first, int64_t size,
                        int64_t k, bool patches, float(*tile)[kPlainTile + 1]) {
    for (int i = threadIdx.x; i < kPlainStep * kPlainTile; i += kThreads) {
      const int at_k = i / kPlainTile, at = i % kPlainTile;
      float value = 0;
      if (first + at < size && k + at_k < place.k_end) {
        const int64_t r = first + at, c = k + at_k;
        int64_t offset = base + c * operand.stride + r;
        if (patches) offset = PatchAt(gemm, place.outer * operand.outer + c, r);
        if (offset >= 0) value = LoadElement(operand.data, gemm.element, offset);
      }
      tile[at_k][at] = value;
    }
  };
  float sums[4][4] = {};
  for (int64_t k = place.k_begin; k < place.k_end; k += kPlainStep) {
    __syncthreads();
    fill(gemm.a, a, place.m, gemm.m, k, false, tile_a);
    fill(gemm.b, b, place.n, gemm.n, k, kPatches, tile_b);
    __syncthreads();
#pragma unroll
    for (int at_k = 0; at_k < kPlainStep; ++at_k) {
      float x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = tile_a[at_k][row + 16 * i];
        y[i] = tile_b[at_k][column + 16 * i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(x[i], y[j], sums[i][j]);
      }
    }
  }
  for (int i = 0; i < 4; ++i) {
    const int64_t m = place.m + row + 16 * i;
    if (m >= gemm.m) continue;
    for (int j = 0; j < 4; ++j) {
      const int64_t n = place.n + column + 16 * j;
      if (n < gemm.n) gemm.out[OutOf(gemm, place, m) + n] = sums[i][j];
    }
  }
}

// Launches.

dim3 GridOf(const Gemm& gemm, const GemmLaunch& launch, int tile_m, int tile_n) {
  return dim3(static_cast<unsigned>((gemm.n + tile_n - 1) / tile_n),
              static_cast<unsigned>((gemm.m + tile_m - 1) / tile_m),
              static_cast<unsigned>(launch.outer * launch.inner));
}

template <int kM, int kN, bool kPatches>
cudaError_t LaunchTile(const Gemm& gemm, const GemmLaunch& launch, const Queue& queue) {
  constexpr int kBytes = kSharedBytes<kM, kN>;
  const auto kernel = TensorCoreKernel<kM, kN, kPatches>;
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  return LaunchDependent(
      kernel, {.grid = GridOf(gemm, launch, kM, kN), .block = kThreads, .shared_bytes = kBytes},
      queue, gemm);
}

template <bool kPatches>
cudaError_t LaunchTensorCores(const Gemm& gemm, const GemmLaunch& launch, const Queue& queue) {
  const auto tile =
      launch.m <= 64
          ? (gemm.n <= 64 ? LaunchTile<64, 64, kPatches> : LaunchTile<64, 128, kPatches>)
          : (gemm.n <= 64 ? LaunchTile<128, 64, kPatches> : LaunchTile<128, 128, kPatches>);
  return tile(gemm, launch, queue);
}

/// Of a launch: blocks along z.
constexpr int kMostBatches = 65535;

/// `count` of the outer batches, from `first` on.
GemmLaunch OuterPart(GemmLaunch launch, int64_t first, int count) {
  const int64_t bytes = launch.element == Element::kBf16 ? 2 : 4;
  int64_t of_b = first * launch.b.outer;
  if (const Patches* const patches = launch.patches) {
    const int64_t images = of_b / (int64_t{patches->out_height} * patches->out_width);
    of_b = images * patches->height * patches->width * launch.b.stride;
  }
  launch.a.data = static_cast<const char*>(launch.a.data) + first * launch.a.outer * bytes;
  launch.b.data = static_cast<const char*>(launch.b.data) + of_b * bytes;
  launch.out += first * launch.out_outer;
  launch.outer = count;
  return launch;
}

bool InVectors(const Operand& operand, int64_t size) {
  return reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 && operand.stride % kVector == 0 &&
         operand.inner % kVector == 0 && size % kVector == 0;
}
/// Operands must be bf16 in aligned vectors of eight, lines of the result aligned pairs.
bool SuitsTensorCores(const GemmLaunch& gemm) {
  const bool in_pairs = reinterpret_cast<uintptr_t>(gemm.out) % 8 == 0 &&
                        gemm.out_stride % 2 == 0 && gemm.out_outer % 2 == 0 &&
                        gemm.out_inner % 2 == 0 && gemm.n % 2 == 0;
  return gemm.element == Element::kBf16 && in_pairs && InVectors(gemm.a, gemm.m) &&
         gemm.a.outer % kVector == 0 && InVectors(gemm.b, gemm.n) &&
         (gemm.patches != nullptr || gemm.b.outer % kVector == 0);
}

}  // namespace

cudaError_t LaunchGemm(const GemmLaunch& launch, const Queue& queue) {
  if (launch.inner > kMostBatches) return cudaErrorInvalidValue;
  if (const int most = kMostBatches / launch.inner; launch.outer > most) {
    const cudaError_t error = LaunchGemm(OuterPart(launch, 0, most), queue);
    if (error != cudaSuccess) return error;
    return LaunchGemm(OuterPart(launch, most, launch.outer - most), queue);
  }
  Gemm gemm;
  gemm.a = launch.a, gemm.b = launch.b;
  gemm.element = launch.element;
  gemm.m = launch.m, gemm.n = launch.n, gemm.k = launch.k, gemm.k_part = launch.k_part;
  gemm.inner = launch.inner;
  gemm.out = launch.out;
  gemm.out_stride = launch.out_stride;
  gemm.out_outer = launch.out_outer, gemm.out_inner = launch.out_inner;
  const bool patches = launch.patches != nullptr;
  if (patches) {
    gemm.patches = *launch.patches;
    gemm.channels = FastDivmod(static_cast<int>(launch.n));
    gemm.n *= launch.patches->kernel * launch.patches->kernel;
    gemm.out_height = FastDivmod(launch.patches->out_height);
    gemm.out_width = FastDivmod(launch.patches->out_width);
  }
  if (SuitsTensorCores(launch)) {
    return patches ? LaunchTensorCores<true>(gemm, launch, queue)
                   : LaunchTensorCores<false>(gemm, launch, queue);
  }
  const dim3 grid = GridOf(gemm, launch, kPlainTile, kPlainTile);
  const auto plain = patches ? PlainKernel<true> : PlainKernel<false>;
  return LaunchDependent(plain, {.grid = grid, .block = kThreads}, queue, gemm);
}

int SplitsOfK(int64_t m, int64_t columns, int64_t k) {
  // About two tiles for each of 132 multiprocessors when a batch has eight chunks; a part is at
  // least 512 deep.
  const int64_t tiles = ((m + 127) / 128) * ((columns + 127) / 128);
  int splits = 1;
  while (splits < 32 && tiles * 8 * splits < 264 && k / (2 * splits) >= 512) splits *= 2;
  return splits;
}

}  // namespace denoised::training::cuda
