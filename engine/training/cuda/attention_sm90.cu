// SPDX-License-Identifier: Apache-2.0
// attention.cu's backward pass for Hopper, for heads of up to 64 dimensions: its two kernels with
// TMA, wgmma and mbarriers.
//
// Policy. A CTA owns kGroups · 64 tokens of one head, 64 for each warpgroup, and walks over the
// others in tiles of 64. A producer warp loads both tensors of a tile into a stage of the ring that
// all warpgroups share; of queries, it writes log-sum-exp and Δ beside them. A warpgroup
// starts the scores and dP of tile i, then what tile i − 1 adds to the gradients, and computes P
// and dS of tile i under the latter. P and dS stay in registers: the layout of one product's sums
// is that of the next one's left operand. TMA fills what is beyond a head's dimensions and an
// image's tokens with zeros.

#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/hopper.cuh"
#include "engine/backend/cuda/tensor_map.h"
#include "engine/training/cuda/attention.cuh"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kDim = 64;   // 128 bytes of bf16, the widest swizzle
constexpr int kTile = 64;  // tokens: what one wgmma multiplies
constexpr int kTileBytes = kTile * kDim * 2;
constexpr int kStages = 4;

/// Boxes of kTile tokens of one head.
struct Maps {
  CUtensorMap own_first, own_second, first, second;
};

constexpr int kGroups = 2, kOwn = kGroups * kTile;
// The producer is a whole warpgroup, so that its registers can go to the others.
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kOwnBytes = 2 * kGroups * kTileBytes, kStageBytes = 2 * kTileBytes;
constexpr int kNumbers = 2 * kTile;  // of a stage: log-sum-exp by log₂ e, Δ
constexpr int kSharedBytes =
    kOwnBytes + kStages * (kStageBytes + kNumbers * 4) + (2 * kStages + 1) * 8;

template <bool kOfKeys>
__global__ void __launch_bounds__(kThreads, 1)
    GradientHopperKernel(const __grid_constant__ Gradient gradient,
                         const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char own[];  // as the swizzle wants it
  unsigned char* const ring = own + kOwnBytes;
  auto* const numbers = reinterpret_cast<float*>(ring + kStages * kStageBytes);
  auto* const full = reinterpret_cast<uint64_t*>(numbers + kStages * kNumbers);
  uint64_t* const empty = full + kStages;
  uint64_t* const own_full = empty + kStages;

  // Uniform for the compiler, so that descriptors live in uniform registers.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), group = warp / 4;
  const int lane = threadIdx.x % 32;
  const int begin = blockIdx.x * kOwn, head = blockIdx.y, image = blockIdx.z;
  const int tiles = (gradient.others.count + kTile - 1) / kTile;
  const int64_t queries = (static_cast<int64_t>(image) * gradient.heads + head) *
                          (kOfKeys ? gradient.others.count : gradient.own.count);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(&full[stage], kOfKeys ? 1 + 32 : 1);
      InitBarrier(&empty[stage], kGroups * 4);
    }
    InitBarrier(own_full, 1);
    FenceBarrierInit();
  }
  __syncthreads();

  if (group == kGroups) {
    DecreaseRegisters<40>();
    if (warp != kGroups * 4) return;
    if (ElectOne()) {
      ArriveExpectTx(own_full, kOwnBytes);
      for (int i = 0; i < kGroups; ++i) {
        TmaLoad(own + i * kTileBytes, &maps.own_first, own_full, 0, head, begin + i * kTile, image);
        TmaLoad(own + (kGroups + i) * kTileBytes, &maps.own_second, own_full, 0, head,
                begin + i * kTile, image);
      }
    }
    // A lane has two queries; those of the next tile are read ahead.
    const auto read = [&](const float* from, int query, float scale) {
      const auto at = [&](int q) {
        return q < gradient.others.count ? from[queries + q] * scale : 0.0f;
      };
      return make_float2(at(query), at(query + 1));
    };
    float2 log2 = {}, delta = {};
    const auto read_numbers = [&](int tile) {
      if constexpr (kOfKeys) {
        log2 = read(gradient.log_sum_exp, tile * kTile + 2 * lane, kLog2E);
        delta = read(gradient.delta, tile * kTile + 2 * lane, 1);
      }
    };
    read_numbers(0);
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % kStages;
      Wait(&empty[stage], (tile / kStages & 1) ^ 1);
      if (ElectOne()) {
        ArriveExpectTx(&full[stage], kStageBytes);
        unsigned char* const to = ring + stage * kStageBytes;
        TmaLoad(to, &maps.first, &full[stage], 0, head, tile * kTile, image);
        TmaLoad(to + kTileBytes, &maps.second, &full[stage], 0, head, tile * kTile, image);
      }
      if constexpr (kOfKeys) {
        auto* const to = reinterpret_cast<float2*>(numbers + stage * kNumbers);
        to[lane] = log2;
        to[kTile / 2 + lane] = delta;
        Arrive(&full[stage]);
        read_numbers(tile + 1);
      }
    }
    return;
  }

  IncreaseRegisters<232>();
  const float scale_log2 = gradient.scale * kLog2E;  // exp(x) = exp2(x log₂ e)
  // A thread's sums (hopper.cuh): of every eight columns 2 · (lane % 4) and the next, of its rows 0
  // and 1; index 4j + 2 · row + i.
  const int first_row = begin + group * kTile + warp % 4 * 16 + lane / 4;
  float own_log2[2], own_delta[2];
  if constexpr (!kOfKeys) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = first_row + 8 * r;
      const bool valid = query < gradient.own.count;
      own_delta[r] = 0;
      for (int c = lane % 4 * 8; valid && c < gradient.dim; c += 32) {
        const int64_t row = static_cast<int64_t>(image) * gradient.own.count + query;
        const int64_t column = static_cast<int64_t>(head) * gradient.dim + c;
        float dout[8], out[8];
        LoadVectorOf<Element::kBf16>(gradient.own.second, row * gradient.own.second.stride + column,
                                     dout);
        LoadVectorOf<Element::kBf16>(gradient.out, row * gradient.out.stride + column, out);
#pragma unroll
        for (int i = 0; i < 8; ++i) own_delta[r] = fmaf(dout[i], out[i], own_delta[r]);
      }
      own_delta[r] += __shfl_xor_sync(~0u, own_delta[r], 1);
      own_delta[r] += __shfl_xor_sync(~0u, own_delta[r], 2);
      own_log2[r] = valid ? gradient.log_sum_exp[queries + query] * kLog2E : INFINITY;
      if (valid && lane % 4 == 0) gradient.delta[queries + query] = own_delta[r];
    }
  }

  float s[kTile / 2], dp[kTile / 2], sums_first[kDim / 2], sums_second[kOfKeys ? kDim / 2 : 2];
  uint32_t p_words[kOfKeys ? kTile / 4 : 1], ds_words[kTile / 4];
#pragma unroll
  for (float& sum : sums_first) sum = 0;
#pragma unroll
  for (float& sum : sums_second) sum = 0;
  const uint64_t own_first = MatrixDescriptor(own + group * kTileBytes);
  const uint64_t own_second = MatrixDescriptor(own + (kGroups + group) * kTileBytes);

  const auto multiply = [&](int tile) {
    const int stage = tile % kStages;
    Wait(&full[stage], tile / kStages & 1);
    WgmmaFence();
    const uint64_t first = MatrixDescriptor(ring + stage * kStageBytes);
    const uint64_t second = MatrixDescriptor(ring + stage * kStageBytes + kTileBytes);
#pragma unroll
    for (int d = 0; d < kDim; d += 16) Wgmma(s, own_first + d / 8, first + d / 8, d > 0);
#pragma unroll
    for (int d = 0; d < kDim; d += 16) Wgmma(dp, own_second + d / 8, second + d / 8, d > 0);
    WgmmaCommit();
  };
  const auto add = [&](int tile) {
    const int stage = tile % kStages;
    WgmmaFence();
    const uint64_t first = TransposedDescriptor(ring + stage * kStageBytes, 0);
    const uint64_t second = TransposedDescriptor(ring + stage * kStageBytes + kTileBytes, 0);
#pragma unroll
    for (int i = 0; i < kTile; i += 16) {
      if constexpr (kOfKeys) Wgmma(sums_second, p_words + i / 4, second + i * 8);
      Wgmma(sums_first, ds_words + i / 4, first + i * 8);
    }
    WgmmaCommit();
  };
  /// s becomes P, dp becomes dS. Missing queries have zeros as operands and numbers, so they need
  /// no mask; missing keys are in the last tile alone. No branches: the compiler ends a wgmma
  /// before any branch.
  const auto weigh = [&](int tile, auto last) {
    [[maybe_unused]] const float* const of_tile =
        numbers + tile % kStages * kNumbers + lane % 4 * 2;
    const int valid = gradient.others.count - tile * kTile - lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      float2 log2, delta;
      if constexpr (kOfKeys) {
        log2 = *reinterpret_cast<const float2*>(of_tile + j * 8);
        delta = *reinterpret_cast<const float2*>(of_tile + kTile + j * 8);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float minus = kOfKeys ? (e % 2 == 0 ? log2.x : log2.y) : own_log2[e / 2];
        float p = Exp2(fmaf(s[4 * j + e], scale_log2, -minus));
        if constexpr (!kOfKeys && decltype(last)::value) p = j * 8 + e % 2 < valid ? p : 0;
        s[4 * j + e] = p;
        dp[4 * j + e] =
            p * (dp[4 * j + e] - (kOfKeys ? (e % 2 == 0 ? delta.x : delta.y) : own_delta[e / 2]));
      }
    }
  };
  const auto pack = [&] {
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) {
      if constexpr (kOfKeys) p_words[i] = PackBf16(s[2 * i], s[2 * i + 1]);
      ds_words[i] = PackBf16(dp[2 * i], dp[2 * i + 1]);
    }
  };
  const auto release = [&](int tile) {
    if (lane == 0) Arrive(&empty[tile % kStages]);
  };

  Wait(own_full, 0);
  multiply(0);
  WgmmaWait<0>();
  HoldRegisters(s);
  HoldRegisters(dp);
  if (tiles == 1) {
    weigh(0, std::true_type());
  } else {
    weigh(0, std::false_type());
  }
  pack();
  const auto add_tile = [&](int tile, auto last) {
    multiply(tile);
    add(tile - 1);
    WgmmaWait<1>();
    HoldRegisters(s);
    HoldRegisters(dp);
    weigh(tile, last);
    HoldRegisters(s);  // the wait must not move up before P and dS
    HoldRegisters(dp);
    WgmmaWait<0>();
    HoldRegisters(sums_first);
    HoldRegisters(sums_second);
    release(tile - 1);
    pack();
  };
#pragma unroll 1
  for (int tile = 1; tile < tiles - 1; ++tile) add_tile(tile, std::false_type());
  if (tiles > 1) add_tile(tiles - 1, std::true_type());
  add(tiles - 1);
  WgmmaWait<0>();
  HoldRegisters(sums_first);
  HoldRegisters(sums_second);

  const auto store = [&](const Rows& to, const float* sums, float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 8 * r;
      if (row >= gradient.own.count) continue;
      auto* const line = static_cast<__nv_bfloat16*>(to.data) +
                         (static_cast<int64_t>(image) * gradient.own.count + row) * to.stride +
                         static_cast<int64_t>(head) * gradient.dim + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        if (j * 8 < gradient.dim) {
          *reinterpret_cast<uint32_t*>(line + j * 8) =
              PackBf16(sums[4 * j + 2 * r] * scale, sums[4 * j + 2 * r + 1] * scale);
        }
      }
    }
  };
  store(gradient.d_first, sums_first, gradient.scale);
  if constexpr (kOfKeys) store(gradient.d_second, sums_second, 1);
#endif
}

CUresult EncodeTiles(CUtensorMap* map, const Rows& rows, const Gradient& gradient, int images,
                     int tokens) {
  const cuuint64_t dims[4] = {static_cast<cuuint64_t>(gradient.dim),
                              static_cast<cuuint64_t>(gradient.heads),
                              static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(images)};
  const cuuint64_t token_bytes = static_cast<cuuint64_t>(rows.stride) * 2;
  const cuuint64_t strides[3] = {dims[0] * 2, token_bytes, token_bytes * dims[2]};
  const cuuint32_t box[4] = {kDim, 1, kTile, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  return GetTensorMapEncoders().tiled(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, rows.data, dims, strides, box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace

template <bool kOfKeys>
cudaError_t LaunchGradientHopper(const Gradient& gradient, int images, cudaStream_t stream) {
  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  Maps maps;
  const auto encode = [&](CUtensorMap* map, const Rows& rows, const Tokens& tokens) {
    return EncodeTiles(map, rows, gradient, images, tokens.count);
  };
  for (CUresult result : {encode(&maps.own_first, gradient.own.first, gradient.own),
                          encode(&maps.own_second, gradient.own.second, gradient.own),
                          encode(&maps.first, gradient.others.first, gradient.others),
                          encode(&maps.second, gradient.others.second, gradient.others)}) {
    if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  }
  const auto kernel = GradientHopperKernel<kOfKeys>;
  if (cudaError_t error = LoadKernel(kernel, kSharedBytes); error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>((gradient.own.count + kOwn - 1) / kOwn),
                  static_cast<unsigned>(gradient.heads), static_cast<unsigned>(images));
  kernel<<<grid, kThreads, kSharedBytes, stream>>>(gradient, maps);
  return cudaGetLastError();
}
template cudaError_t LaunchGradientHopper<false>(const Gradient&, int, cudaStream_t);
template cudaError_t LaunchGradientHopper<true>(const Gradient&, int, cudaStream_t);

}  // namespace denoised::training::cuda
