// SPDX-License-Identifier: Apache-2.0
// attention.cu's two kernels for Hopper, with TMA, wgmma and mbarriers. See docs/kernels.md for a
// picture.
//
// Policy. A persistent CTA takes one work item after another: own tokens of one head, 64 per
// consumer warpgroup, which iterates over the others in tiles. A producer warp loads the own tokens
// (those of the next item early if there is room) and both tensors of a tile into a stage of the
// ring, which the warpgroups share. If the others are queries, it also writes their log-sum-exp and
// Δ. A warpgroup issues the scores and dP of tile i, then the gradient products of tile i − 1, and
// computes P and dS of tile i while the latter run. P and dS stay in registers: the accumulator of
// one product has the layout of the next one's left operand. TMA fills with zeros beyond a head's
// dimensions and an image's tokens.

#include <algorithm>
#include <type_traits>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/fast_divmod.h"
#include "engine/backend/cuda/hopper.cuh"
#include "engine/backend/cuda/mma.cuh"
#include "engine/backend/cuda/tensor_map.h"
#include "engine/training/cuda/attention.cuh"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kTile = 64;  // own tokens per warpgroup: M of one wgmma
constexpr int kLine = 64;  // dimensions: 128 bytes of bf16, the widest swizzle
constexpr int kGroups = 2;
// The producer is a whole warpgroup, because setmaxnreg moves registers between warpgroups.
constexpr int kThreads = 128 * (kGroups + 1);

/// For heads of up to kDim dimensions; the others come in tiles of kOthers.
template <int kDim_, int kOthers_, int kOwnBuffers_, int kStages_, bool kOfKeys_>
struct Shape {
  static constexpr int kDim = kDim_, kOthers = kOthers_, kOwnBuffers = kOwnBuffers_,
                       kStages = kStages_;
  static constexpr bool kOfKeys = kOfKeys_;
  static constexpr int kLines = kDim / kLine;
  // Whether the left operands of scores and dP fit in registers.
  static constexpr bool kOwnInRegisters = kDim <= 64;
  // If registers cannot hold both gradients of a key, one warpgroup computes dV and the other dK,
  // of the same keys.
  static constexpr bool kShared = kOfKeys && kDim > 128;
  static constexpr int kOwnTiles = kShared ? 1 : kGroups;
  static constexpr int kOwnTileBytes = kTile * kDim * 2, kOwnBytes = 2 * kOwnTiles * kOwnTileBytes;
  static constexpr int kOthersBytes = kOthers * kDim * 2, kStageBytes = 2 * kOthersBytes;
  static constexpr int kNumbers = 2 * kOthers;  // per stage: log-sum-exp · log₂ e, and Δ
  static constexpr int kSharedBytes = kOwnBuffers * kOwnBytes +
                                      kStages * (kStageBytes + kNumbers * 4) +
                                      2 * (kStages + kOwnBuffers) * 8;
  static_assert(kSharedBytes <= 232448);
};

/// TMA boxes are tokens of one head. Items are ordered by image, head and block of own tokens.
struct Params {
  CUtensorMap own_first, own_second, first, second;
  int items = 0;
  FastDivmod blocks, heads;
};

/// A work item: own tokens from `begin` on.
struct Item {
  int begin, head, image;
  int64_t queries;  // index of the first query of its head
};

/// A CTA's shared memory and work.
template <typename S>
struct Cta {
  const Gradient& gradient;
  const Params& params;
  unsigned char* const own;                    // [kOwnBuffers]
  unsigned char* const ring;                   // [kStages]
  float* const numbers;                        // [kStages][kNumbers]
  uint64_t *const full, *const empty;          // [kStages]
  uint64_t *const own_full, *const own_empty;  // [kOwnBuffers]
  const int tiles;                             // of the others

  __device__ Cta(const Gradient& gradient, const Params& params, unsigned char* memory)
      : gradient(gradient),
        params(params),
        own(memory),
        ring(own + S::kOwnBuffers * S::kOwnBytes),
        numbers(reinterpret_cast<float*>(ring + S::kStages * S::kStageBytes)),
        full(reinterpret_cast<uint64_t*>(numbers + S::kStages * S::kNumbers)),
        empty(full + S::kStages),
        own_full(empty + S::kStages),
        own_empty(own_full + S::kOwnBuffers),
        tiles((gradient.others.count + S::kOthers - 1) / S::kOthers) {}

  __device__ Item ItemAt(int index) const {
    const int of_head = index / params.blocks;
    Item item = {(index - of_head * params.blocks.value) * S::kOwnTiles * kTile,
                 of_head % params.heads, of_head / params.heads, 0};
    item.queries = int64_t{of_head} * (S::kOfKeys ? gradient.others.count : gradient.own.count);
    return item;
  }
  /// Tile `tile` of own tokens, of tensor 0 or 1.
  __device__ unsigned char* Own(int ahead, int tensor, int tile) const {
    return own + ahead * S::kOwnBytes + (tensor * S::kOwnTiles + tile) * S::kOwnTileBytes;
  }
  __device__ unsigned char* Others(int stage, int tensor) const {
    return ring + stage * S::kStageBytes + tensor * S::kOthersBytes;
  }
  /// Called by one thread.
  __device__ void InitBarriers() const {
    for (int stage = 0; stage < S::kStages; ++stage) {
      InitBarrier(&full[stage], S::kOfKeys ? 1 + 32 : 1);
      InitBarrier(&empty[stage], kGroups * 4);
    }
    for (int i = 0; i < S::kOwnBuffers; ++i) {
      InitBarrier(&own_full[i], 1);
      InitBarrier(&own_empty[i], kGroups * 4);
    }
    FenceBarrierInit();
  }
};

/// The warp that loads.
template <typename S>
struct Producer {
  static constexpr int kRead = S::kOthers / 32;  // queries of a tile for a lane

  const Gradient& gradient;
  const Params& params;
  const Cta<S>& cta;
  int lane;
  float log2[kRead], delta[kRead];  // prefetched for the next tile

  __device__ void ReadNumbers(const Item& item, int tile) {
#pragma unroll
    for (int i = 0; S::kOfKeys && i < kRead; ++i) {
      const int query = tile * S::kOthers + i * 32 + lane;
      const bool valid = query < gradient.others.count;
      log2[i] = valid ? gradient.log_sum_exp[item.queries + query] * kLog2E : 0.0f;
      delta[i] = valid ? gradient.delta[item.queries + query] : 0.0f;
    }
  }
  __device__ void LoadOwn(const Item& item, int ahead) const {
    ArriveExpectTx(&cta.own_full[ahead], S::kOwnBytes);
    for (int i = 0; i < 2 * S::kOwnTiles; ++i) {
      for (int line = 0; line < S::kLines; ++line) {
        TmaLoad(cta.Own(ahead, 0, i) + line * kTile * kLine * 2,
                i < S::kOwnTiles ? &params.own_first : &params.own_second, &cta.own_full[ahead],
                line * kLine, item.head, item.begin + i % S::kOwnTiles * kTile, item.image);
      }
    }
  }
  __device__ void LoadOthers(const Item& item, int tile, int stage) const {
    ArriveExpectTx(&cta.full[stage], S::kStageBytes);
    for (int i = 0; i < 2; ++i) {
      for (int line = 0; line < S::kLines; ++line) {
        TmaLoad(cta.Others(stage, i) + line * S::kOthers * kLine * 2,
                i == 0 ? &params.first : &params.second, &cta.full[stage], line * kLine, item.head,
                tile * S::kOthers, item.image);
      }
    }
  }

  __device__ void Load() {
    int loaded = 0;  // tiles
    for (int index = blockIdx.x, turn = 0; index < params.items; index += gridDim.x, ++turn) {
      const Item item = cta.ItemAt(index);
      ReadNumbers(item, 0);
      const int ahead = turn % S::kOwnBuffers;
      Wait(&cta.own_empty[ahead], (turn / S::kOwnBuffers & 1) ^ 1);
      if (ElectOne()) LoadOwn(item, ahead);
      for (int tile = 0; tile < cta.tiles; ++tile, ++loaded) {
        const int stage = loaded % S::kStages;
        Wait(&cta.empty[stage], (loaded / S::kStages & 1) ^ 1);
        if (ElectOne()) LoadOthers(item, tile, stage);
        if constexpr (S::kOfKeys) {
          float* const to = cta.numbers + stage * S::kNumbers + lane;
#pragma unroll
          for (int i = 0; i < kRead; ++i) {
            to[i * 32] = log2[i];
            to[S::kOthers + i * 32] = delta[i];
          }
          Arrive(&cta.full[stage]);
          ReadNumbers(item, tile + 1);
        }
      }
    }
    ReleaseDependents();
  }
};

/// A consumer warpgroup. kFirst, kSecond: the gradients that it computes.
template <typename S, bool kFirst, bool kSecond>
struct Consumer {
  const Gradient& gradient;
  const Params& params;
  const Cta<S>& cta;
  const int warp, lane, own_tile;
  const float scale_log2;   // exp(x) = exp2(x log₂ e)
  int done = 0, ahead = 0;  // tiles before this item; buffer of its own tokens
  // Accumulators (hopper.cuh): in each octet j of columns, a thread has columns 2 · (lane % 4) + i
  // of its two rows, at index 4j + 2 · row + i.
  float s[S::kOthers / 2], dp[kFirst ? S::kOthers / 2 : 1];
  float sums_first[kFirst ? S::kDim / 2 : 1], sums_second[kSecond ? S::kDim / 2 : 1];
  uint32_t p_words[kSecond ? S::kOthers / 4 : 1], ds_words[kFirst ? S::kOthers / 4 : 1];
  uint32_t own_words[2][S::kOwnInRegisters ? S::kDim / 4 : 1];
  float own_log2[2], own_delta[2];

  __device__ Consumer(const Cta<S>& cta, int warp, int lane)
      : gradient(cta.gradient),
        params(cta.params),
        cta(cta),
        warp(warp),
        lane(lane),
        own_tile(S::kOwnTiles == 1 ? 0 : warp / 4),
        scale_log2(cta.gradient.scale * kLog2E) {}

  __device__ int Stage(int tile) const { return (done + tile) % S::kStages; }

  __device__ void Product(int tile, int tensor, float (&to)[S::kOthers / 2]) const {
    const uint64_t left = MatrixDescriptor(cta.Own(ahead, tensor, own_tile));
    const uint64_t right = MatrixDescriptor(cta.Others(Stage(tile), tensor));
#pragma unroll
    for (int d = 0; d < S::kDim; d += 16) {
      const uint64_t columns = right + d / kLine * (S::kOthers * kLine * 2 >> 4) + d % kLine / 8;
      if constexpr (S::kOwnInRegisters) {
        Wgmma(to, own_words[tensor] + d / 4, columns, d > 0);
      } else {
        Wgmma(to, left + d / kLine * (kTile * kLine * 2 >> 4) + d % kLine / 8, columns, d > 0);
      }
    }
  }
  /// Starts the scores and dP of a tile.
  __device__ void Multiply(int tile) {
    Wait(&cta.full[Stage(tile)], (done + tile) / S::kStages & 1);
    WgmmaFence();
    Product(tile, 0, s);
    if constexpr (kFirst) Product(tile, 1, dp);
    WgmmaCommit();
  }
  /// Starts the products of a tile that are added to the gradients.
  __device__ void Add(int tile) {
    WgmmaFence();
    const uint64_t first = TransposedDescriptor(cta.Others(Stage(tile), 0), S::kOthers * kLine * 2);
    const uint64_t second =
        TransposedDescriptor(cta.Others(Stage(tile), 1), S::kOthers * kLine * 2);
#pragma unroll
    for (int i = 0; i < S::kOthers; i += 16) {
      if constexpr (kSecond) Wgmma(sums_second, p_words + i / 4, second + i * 8);
      if constexpr (kFirst) Wgmma(sums_first, ds_words + i / 4, first + i * 8);
    }
    WgmmaCommit();
  }
  __device__ void PinScores() {
    PinAccumulators(s);
    PinAccumulators(dp);
  }
  __device__ void PinSums() {
    PinAccumulators(sums_first);
    PinAccumulators(sums_second);
  }
  /// s becomes P, dp becomes dS. Missing queries need no mask, since their operands, log-sum-exp
  /// and Δ are zeros; only the last tile has missing keys. No branches: the compiler waits for a
  /// wgmma before any branch.
  template <bool kLast>
  __device__ void Weigh(int tile) {
    [[maybe_unused]] const float* const of_tile =
        cta.numbers + Stage(tile) * S::kNumbers + lane % 4 * 2;
    const int valid = gradient.others.count - tile * S::kOthers - lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < S::kOthers / 8; ++j) {
      float2 log2, delta;
      if constexpr (S::kOfKeys) {
        log2 = *reinterpret_cast<const float2*>(of_tile + j * 8);
        if constexpr (kFirst)
          delta = *reinterpret_cast<const float2*>(of_tile + S::kOthers + j * 8);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float minus = S::kOfKeys ? (e % 2 == 0 ? log2.x : log2.y) : own_log2[e / 2];
        float p = Exp2(fmaf(s[4 * j + e], scale_log2, -minus));
        if constexpr (!S::kOfKeys && kLast) p = j * 8 + e % 2 < valid ? p : 0;
        s[4 * j + e] = p;
        if constexpr (kFirst) {
          const float d = S::kOfKeys ? (e % 2 == 0 ? delta.x : delta.y) : own_delta[e / 2];
          dp[4 * j + e] = p * (dp[4 * j + e] - d);
        }
      }
    }
  }
  __device__ void Pack() {
#pragma unroll
    for (int i = 0; i < S::kOthers / 4; ++i) {
      if constexpr (kSecond) p_words[i] = PackBf16(s[2 * i], s[2 * i + 1]);
      if constexpr (kFirst) ds_words[i] = PackBf16(dp[2 * i], dp[2 * i + 1]);
    }
  }
  __device__ void Release(int tile) const {
    if (lane == 0) Arrive(&cta.empty[Stage(tile)]);
  }
  __device__ void ReleaseOwn() const {
    if (lane == 0) Arrive(&cta.own_empty[ahead]);
  }
  /// Reads left operands for wgmma from a swizzled tile: 16-byte columns are XORed with the line.
  __device__ void ReadOwn() {
#pragma unroll
    for (int tensor = 0; tensor < 2; ++tensor) {
      const uint32_t line =
          SharedAddress(cta.Own(ahead, tensor, own_tile)) + (warp % 4 * 16 + lane % 16) * kLine * 2;
#pragma unroll
      for (int d = 0; d < S::kDim; d += 16) {
        uint32_t words[4];
        LoadMatrices(words, line + ((d / 8 + lane / 16) ^ (lane % 8)) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) own_words[tensor][d / 4 + i] = words[i];
      }
    }
  }
  /// Reads log-sum-exp and computes Δ of this thread's queries.
  __device__ void ReadQueries(const Item& item, int first_row) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = min(first_row + 8 * r, gradient.own.count - 1);
      const int64_t row = static_cast<int64_t>(item.image) * gradient.own.count + query;
      const int64_t column = static_cast<int64_t>(item.head) * gradient.dim;
      float sum = 0;
#pragma unroll
      for (int c = 0; c < S::kDim; c += 32) {
        const bool valid = c + lane % 4 * 8 < gradient.dim;
        const int64_t at = column + (valid ? c + lane % 4 * 8 : 0);
        float dout[8], out[8], part = 0;
        LoadVectorOf<Element::kBf16>(gradient.own.second, row * gradient.own.second.stride + at,
                                     dout);
        LoadVectorOf<Element::kBf16>(gradient.out, row * gradient.out.stride + at, out);
#pragma unroll
        for (int i = 0; i < 8; ++i) part = fmaf(dout[i], out[i], part);
        sum += valid ? part : 0;
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      own_delta[r] = sum;
      own_log2[r] = gradient.log_sum_exp[item.queries + query] * kLog2E;
      if (lane % 4 == 0 && first_row + 8 * r < gradient.own.count)
        gradient.delta[item.queries + query] = sum;
    }
  }
  template <int kSums>
  __device__ void Store(const Item& item, int first_row, const Rows& to, const float (&sums)[kSums],
                        float scale) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 8 * r;
      auto* const line = static_cast<__nv_bfloat16*>(to.data) +
                         (static_cast<int64_t>(item.image) * gradient.own.count + row) * to.stride +
                         static_cast<int64_t>(item.head) * gradient.dim;
#pragma unroll
      for (int first = 0; first < S::kDim / 8; first += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = 4 * (first + i) + 2 * r;
          words[i] = PackBf16(sums[j] * scale, sums[j + 1] * scale);
        }
        ExchangeInQuad(words);  // from two columns of each octet to the eight of one
        const int column = (first + lane % 4) * 8;
        if (row < gradient.own.count && column < gradient.dim) {
          *reinterpret_cast<uint4*>(line + column) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  /// A tile but the first: its scores and dP, and the gradient products of the tile before.
  template <bool kLast>
  __device__ void AddTile(int tile) {
    Multiply(tile);
    Add(tile - 1);
    WgmmaWait<1>();
    PinScores();
    if (!S::kOwnInRegisters && kLast) ReleaseOwn();
    Weigh<kLast>(tile);
    PinScores();  // keeps the compiler from moving the wait before P and dS
    WgmmaWait<0>();
    PinSums();
    Release(tile - 1);
    Pack();
  }

  __device__ void Run() {
    const int tiles = cta.tiles;
    for (int index = blockIdx.x, turn = 0; index < params.items;
         index += gridDim.x, ++turn, done += tiles) {
      const Item item = cta.ItemAt(index);
      const int first_row = item.begin + own_tile * kTile + warp % 4 * 16 + lane / 4;
      ahead = turn % S::kOwnBuffers;
      Wait(&cta.own_full[ahead], turn / S::kOwnBuffers & 1);
      if constexpr (S::kOwnInRegisters) {
        ReadOwn();
        ReleaseOwn();
      }
#pragma unroll
      for (float& sum : sums_first) sum = 0;
#pragma unroll
      for (float& sum : sums_second) sum = 0;
      Multiply(0);
      if constexpr (!S::kOfKeys) ReadQueries(item, first_row);
      WgmmaWait<0>();
      PinScores();
      if (!S::kOwnInRegisters && tiles == 1) ReleaseOwn();
      if (tiles == 1) {
        Weigh<true>(0);
      } else {
        Weigh<false>(0);
      }
      Pack();
#pragma unroll 1
      for (int tile = 1; tile < tiles - 1; ++tile) AddTile<false>(tile);
      if (tiles > 1) AddTile<true>(tiles - 1);
      Add(tiles - 1);
      WgmmaWait<0>();
      PinSums();
      Release(tiles - 1);
      if constexpr (kFirst) Store(item, first_row, gradient.d_first, sums_first, gradient.scale);
      if constexpr (kSecond) Store(item, first_row, gradient.d_second, sums_second, 1);
    }
  }
};

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    GradientHopperKernel(const __grid_constant__ Gradient gradient,
                         const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char block_shared[];  // the swizzle's alignment
  const Cta<S> cta(gradient, params, block_shared);
  const int warp = UniformWarp(), group = warp / 4;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) cta.InitBarriers();
  __syncthreads();
  WaitForPredecessors();

  if (group == kGroups) {
    DecreaseRegisters<40>();
    if (warp == kGroups * 4) Producer<S>{gradient, params, cta, lane}.Load();
    return;
  }
  IncreaseRegisters<232>();
  if constexpr (!S::kShared) {
    Consumer<S, true, S::kOfKeys>(cta, warp, lane).Run();
  } else if (group == 0) {
    Consumer<S, false, true>(cta, warp, lane).Run();
  } else {
    Consumer<S, true, false>(cta, warp, lane).Run();
  }
#endif
}

template <typename S>
cudaError_t LaunchShape(const Gradient& gradient, int images, const Queue& queue) {
  Params params;
  const auto encode = [&](CUtensorMap* map, const Rows& rows, const Tokens& tokens, int box) {
    return EncodeHeads(map, rows, images, tokens.count, gradient.heads, gradient.dim, box);
  };
  for (CUresult result :
       {encode(&params.own_first, gradient.own.first, gradient.own, kTile),
        encode(&params.own_second, gradient.own.second, gradient.own, kTile),
        encode(&params.first, gradient.others.first, gradient.others, S::kOthers),
        encode(&params.second, gradient.others.second, gradient.others, S::kOthers)}) {
    if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  }
  constexpr int kOwn = S::kOwnTiles * kTile;
  const int blocks = (gradient.own.count + kOwn - 1) / kOwn;
  const int64_t items = int64_t{blocks} * gradient.heads * images;
  if (items > INT32_MAX) return cudaErrorInvalidValue;
  params.items = static_cast<int>(items);
  params.blocks = FastDivmod(blocks), params.heads = FastDivmod(gradient.heads);
  const auto kernel = GradientHopperKernel<S>;
  if (cudaError_t error = LoadKernel(kernel, S::kSharedBytes); error != cudaSuccess) return error;
  return LaunchDependent(
      kernel,
      {.grid = static_cast<unsigned>(std::min(params.items, queue.multiprocessors)),
       .block = kThreads,
       .shared_bytes = S::kSharedBytes},
      queue, gradient, params);
}

}  // namespace

template <bool kOfKeys>
cudaError_t LaunchGradientHopper(const Gradient& gradient, int images, const Queue& queue) {
  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  if (gradient.dim <= 64) return LaunchShape<Shape<64, 64, 2, 4, kOfKeys>>(gradient, images, queue);
  if (gradient.dim <= 128)
    return LaunchShape<Shape<128, 32, 2, 4, kOfKeys>>(gradient, images, queue);
  return LaunchShape<Shape<256, 32, kOfKeys ? 2 : 1, 3, kOfKeys>>(gradient, images, queue);
}
template cudaError_t LaunchGradientHopper<false>(const Gradient&, int, const Queue&);
template cudaError_t LaunchGradientHopper<true>(const Gradient&, int, const Queue&);

}  // namespace denoised::training::cuda
