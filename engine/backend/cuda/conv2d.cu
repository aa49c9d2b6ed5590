// SPDX-License-Identifier: Apache-2.0
// Convolution and linear on tensor cores: an implicit GEMM, out[m, n] = Σ_k in[m, k] · weight[n, k]
// with m a pixel of any image, n an output channel and k = (kh, kw, channel); see docs/kernels.md.
//
// Policy. A CTA computes one kM × kN tile of the output over all of k, in steps of 32 through a
// pipeline of kStages stages in shared memory; a step is two mma of depth 16. There is no split-K,
// so an output is summed in the same order whatever the tile and the batch, and the launcher may
// choose the tile by the size of the grid. bf16 operands, fp32 accumulators. Warp tiles are up to
// 64 × 64: shared memory traffic grows with a tile's edges, products with its area. If k is short
// they are half as large, so that four warps per scheduler hide prologue and epilogue. The operands
// of the next mma are loaded while the current one multiplies.
//
// Inputs reach shared memory in one of three ways: by cp.async, 16 bytes at a time; through
// registers, eight at a time, if they are fp32; or one element at a time, if the number of channels
// is not a multiple of eight (3, 4, 9) or they are not aligned.
//
// In e4m3 an element of 16 bits is a pair of numbers, so a step is 64 numbers deep. The sums of
// each step are added to fp32 accumulators.

#include <utility>

#include "engine/backend/cuda/conv_mma.cuh"
#include "engine/backend/cuda/dependent_launch.h"

namespace denoised::cuda {
namespace {

enum class Inputs { kCopied, kVector, kScalar };

/// kBlocks: blocks per multiprocessor, which limits the registers per thread.
template <int kM_, int kN_, int kWarpsM_, int kWarpsN_, int kStages_, int kBlocks_,
          Element kElement_ = Element::kBf16>
struct Tile {
  static constexpr bool kE4m3 = kElement_ == Element::kE4m3x2;
  static constexpr int kM = kM_, kN = kN_, kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kSharedBytes = kStages * (kM + kN) * kDepth * 2;
};

/// A thread's copies of pixels and weights to shared memory: column `chunk` of rows row,
/// row + kRowsApart, … of a step.
template <typename T, Inputs kInputs>
struct Copies {
  static constexpr int kRowsApart = T::kThreads / kChunks;
  static constexpr int kRows = T::kM / kRowsApart, kWeightRows = T::kN / kRowsApart;
  static_assert(kRowsApart % 8 == 0);

  const Conv2dLaunch& conv;
  __nv_bfloat16 *input_ring, *weight_ring;  // [kStages][kM or kN][kDepth]
  int chunk, row, at, n0;
  const __nv_bfloat16* weight;
  Window windows[kRows];
  Tap tap;
  // Asynchronous copies: for each row the pixel at `tap`, or −1, and the channel in its source.
  // They are computed when the tap or the source changes, and advance along the channels in
  // between: otherwise index arithmetic would cost more than the products.
  int pixels[kRows];
  const __nv_bfloat16* source = nullptr;
  int source_stride = 0, channels = 0, channels_done = 0;

  __device__ Copies(const Conv2dLaunch& conv, const Plane& plane, __nv_bfloat16* input_ring,
                    __nv_bfloat16* weight_ring, int m0, int n0, int phase)
      : conv(conv),
        input_ring(input_ring),
        weight_ring(weight_ring),
        chunk(threadIdx.x % kChunks),
        row(threadIdx.x / kChunks),
        at(Swizzled(row, chunk)),
        n0(n0),
        weight(static_cast<const __nv_bfloat16*>(conv.weight) +
               static_cast<int64_t>(phase * conv.outputs + n0 + row) * conv.weight_stride +
               chunk * 8) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      windows[i] = WindowOf(conv, plane, m0 + row + i * kRowsApart, phase);
    }
    tap.Advance(conv, chunk * 8);
    if constexpr (kInputs == Inputs::kCopied) Locate();
  }

  __device__ void Locate() {
    const bool first = tap.channel < conv.channels;
    const Rows& rows = first ? conv.x : conv.x2;
    const int channel = first ? tap.channel : tap.channel - conv.channels;
    channels = (first ? conv.channels : conv.channels2) - channel;
    channels_done = 0;
    source = static_cast<const __nv_bfloat16*>(rows.data) + channel;
    source_stride = static_cast<int>(rows.stride);
#pragma unroll
    for (int i = 0; i < kRows; ++i) pixels[i] = PixelAt(conv, windows[i], tap);
  }
  __device__ void CopyInputs(int stage, int i) const {
    __nv_bfloat16* to = input_ring + stage * T::kM * kDepth + at + i * kRowsApart * kDepth;
    if constexpr (kInputs == Inputs::kCopied) {
      CopyAsync16(to, source + static_cast<int64_t>(pixels[i]) * source_stride, pixels[i] >= 0);
    } else {
      float v[8];
      if constexpr (kInputs == Inputs::kVector) {
        LoadInputs(conv, windows[i], tap, v);
      } else {
        GatherInputs(conv, windows[i], tap, v);
      }
      *reinterpret_cast<uint4*>(to) = PackBf16(v);
    }
  }
  /// Of `steps` steps further on.
  __device__ void CopyWeights(int stage, int i, int steps = 0) const {
    CopyAsync16(weight_ring + stage * T::kN * kDepth + at + i * kRowsApart * kDepth,
                weight + static_cast<int64_t>(i * kRowsApart) * conv.weight_stride + steps * kDepth,
                n0 + row + i * kRowsApart < conv.outputs);
  }
  /// Copy number `part` of a step's kRows + kWeightRows.
  __device__ void Copy(int stage, int part) const {
    part < kRows ? CopyInputs(stage, part) : CopyWeights(stage, part - kRows);
  }
  __device__ void Advance() {
    weight += kDepth;
    if constexpr (kInputs == Inputs::kCopied) {
      source += kDepth;
      channels_done += kDepth;
      if (channels_done >= channels) {
        tap.Advance(conv, channels_done);
        Locate();
      }
    } else {
      tap.Advance(conv, kDepth);
    }
  }
};

/// Accumulators begin with `bias`, which is conv's; conv.bias itself is null. kVectors: outputs are
/// computed by FinishVector. grid (tiles, phases).
template <typename T, Inputs kInputs, bool kVectors>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
    Conv2dKernel(const __grid_constant__ Conv2dLaunch conv, const float* bias,
                 const __grid_constant__ Plane plane, const __grid_constant__ FastDivmod n_tiles) {
  constexpr int kStages = T::kStages;
  constexpr int kWarpM = T::kM / T::kWarpsM, kWarpN = T::kN / T::kWarpsN;
  constexpr int kFragmentsM = kWarpM / 16, kFragmentsN = kWarpN / 8;
  static_assert(kFragmentsN % 2 == 0);

  extern __shared__ __align__(128) unsigned char shared[];
  auto* input_ring = reinterpret_cast<__nv_bfloat16*>(shared);  // [kStages][kM][kDepth]
  auto* weight_ring = input_ring + kStages * T::kM * kDepth;    // [kStages][kN][kDepth]

  // Neighbouring blocks share pixels, not weights, because there are more pixels.
  const int m0 = static_cast<int>(blockIdx.x) / n_tiles * T::kM;
  const int n0 = static_cast<int>(blockIdx.x) % n_tiles * T::kN;
  const int phase = static_cast<int>(blockIdx.y);

  Copies<T, kInputs> copies(conv, plane, input_ring, weight_ring, m0, n0, phase);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp / T::kWarpsN * kWarpM, warp_n = warp % T::kWarpsN * kWarpN;
  float sums[kFragmentsM][kFragmentsN][4];
  InitWithBias(T::kE4m3 ? nullptr : bias, n0 + warp_n, conv.outputs, sums);
  float of_step[T::kE4m3 ? kFragmentsM : 1][T::kE4m3 ? kFragmentsN : 1][4];
  uint32_t a[2][kFragmentsM][4], b[2][kFragmentsN / 2][4];  // one multiplied, one being loaded
  // Where this lane reads the first of its warp's rows. 16 rows further, the swizzle is the same;
  // 16 elements along k further, one bit of the swizzled address differs (two chunks).
  const int input_at = Swizzled(warp_m + lane % 16, lane / 16);
  const int weight_at = Swizzled(warp_n + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const auto load = [&](int into, int stage, int k, int part) {
    if (part < kFragmentsM) {
      LoadMatrices(a[into][part],
                   input_ring + (stage * T::kM + part * 16) * kDepth + (input_at ^ k));
    } else {
      const int j = part - kFragmentsM;
      LoadMatrices(b[into][j], weight_ring + (stage * T::kN + j * 16) * kDepth + (weight_at ^ k));
    }
  };
  constexpr int kRows = Copies<T, kInputs>::kRows, kWeightRows = Copies<T, kInputs>::kWeightRows;
  constexpr int kFills = kRows + kWeightRows, kLoads = kFragmentsM + kFragmentsN / 2;

  const int steps = conv.weight_stride / kDepth;
  for (int stage = 0; stage < kStages - 1; ++stage) {  // weights: no kernel writes them
    if (stage < steps)
      Interleave<kWeightRows, 1>(0, [&](int i) { copies.CopyWeights(stage, i, stage); });
  }
  WaitForPredecessors();
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < steps) {
      Interleave<kRows, 1>(0, [&](int i) { copies.CopyInputs(stage, i); });
      copies.Advance();
    }
    CommitCopies();
  }
  WaitCopies<kStages - 2>();
  __syncthreads();
  Interleave<kLoads, 1>(0, [&](int part) { load(0, 0, 0, part); });
  int stage = 0, empty_stage = kStages - 1;
  for (int step = 0; step < steps; ++step) {
    const bool filling = step + kStages - 1 < steps;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      const int now = k / 16 % 2;
      if (k + 16 == kDepth) {
        // The next step's tiles are complete, and all warps have loaded their fragments of this
        // one's. After the last step, the fragments loaded here are not used.
        WaitCopies<kStages - 2>();
        __syncthreads();
        empty_stage = stage;
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        // Copies and loads are interleaved with MMAs, which would otherwise wait for them.
        Interleave<kLoads, kFragmentsN>(
            j, [&](int part) { load(1 - now, stage, (k + 16) % kDepth, part); });
        if (k == 0 && filling) {
          Interleave<kFills, kFragmentsN>(j, [&](int part) { copies.Copy(empty_stage, part); });
        }
#pragma unroll
        for (int i = 0; i < kFragmentsM; ++i) {
          const uint32_t(&columns)[4] = b[now][j / 2];
          if constexpr (T::kE4m3) {
            float(&part)[4] = of_step[i][j];
            if (k == 0) part[0] = part[1] = part[2] = part[3] = 0;
            MultiplyE4m3(part, a[now][i], columns[j % 2 * 2], columns[j % 2 * 2 + 1]);
            if (k + 16 == kDepth) {
#pragma unroll
              for (int c = 0; c < 4; ++c) sums[i][j][c] += part[c];
            }
          } else {
            Multiply(sums[i][j], a[now][i], columns[j % 2 * 2], columns[j % 2 * 2 + 1]);
          }
        }
      }
      if (k == 0) {
        if (filling) copies.Advance();
        CommitCopies();
      }
    }
  }

  WaitCopies<0>();
  __syncthreads();
  ReleaseDependents();
  static_assert(T::kThreads / 32 * kFinishBytes<kFragmentsN> <= T::kSharedBytes);
  if constexpr (T::kE4m3) {
    ScaleAndAddBias(conv.scales, bias, n0 + warp_n, conv.outputs, sums);
  }
  const int pixels_end = conv.images * plane.pixels.value;
  FinishWarp<kVectors>(conv, sums,
                       reinterpret_cast<float*>(shared) + warp * (kFinishBytes<kFragmentsN> / 4),
                       n0 + warp_n, [&](int row) {
                         const int m = m0 + warp_m + row;
                         if (m >= pixels_end) return -1;
                         return conv.upsample2x ? OutputOf(conv, PixelOf(plane, m), phase) : m;
                       });
}

/// Blocks per phase.
int64_t Blocks(const Conv2dLaunch& conv, int tile_m, int tile_n) {
  const int64_t m = static_cast<int64_t>(conv.images) * PlaneOf(conv).pixels.value;
  return (m + tile_m - 1) / tile_m * ((conv.outputs + tile_n - 1) / tile_n);
}

template <typename T, Inputs kInputs, bool kVectors>
cudaError_t LaunchTile(Conv2dLaunch conv, const Queue& queue) {
  const FastDivmod n_tiles((conv.outputs + T::kN - 1) / T::kN);
  const unsigned blocks = static_cast<unsigned>(Blocks(conv, T::kM, T::kN));
  const float* bias = conv.bias;
  conv.bias = nullptr;
  return LaunchDependent(Conv2dKernel<T, kInputs, kVectors>,
                         {.grid = dim3(blocks, PhasesOf(conv)),
                          .block = dim3(T::kThreads),
                          .shared_bytes = T::kSharedBytes},
                         queue, conv, bias, PlaneOf(conv), n_tiles);
}

/// A tile, and which layers have it: their elements, how their inputs are read, and whether their
/// outputs are vectors.
struct Choice {
  int m, n;
  bool e4m3;
  Inputs inputs;
  bool vectors;
  TileCost cost;
  TileKernel kernel;
};
template <typename T, Inputs kInputs = Inputs::kCopied, bool kVectors = true>
constexpr Choice ChoiceOf(double step_alone = 0, double rest_alone = 0, double step_shared = 0,
                          double rest_shared = 0) {
  return {T::kM,
          T::kN,
          T::kE4m3,
          kInputs,
          kVectors,
          {T::kBlocks, step_alone, rest_alone, step_shared, rest_shared},
          {LaunchTile<T, kInputs, kVectors>,
           [] { return LoadKernel(Conv2dKernel<T, kInputs, kVectors>, T::kSharedBytes); }}};
}
using SmallTile = Tile<64, 64, 2, 2, 4, 4>;
using E4m3Tile = Tile<64, 64, 2, 2, 4, 3, Element::kE4m3x2>;  // two sets of accumulators
/// Costs were fitted to 32 layers that were measured with every tile. For all but two of them, the
/// tile with the lowest cost is the fastest or within 10 % of it. A tile that is its layers' only
/// one needs no cost.
constexpr Choice kChoices[] = {
    ChoiceOf<Tile<128, 256, 2, 4, 4, 1>>(0.614, 10.7, 0.614, 10.7),
    ChoiceOf<Tile<128, 128, 2, 4, 4, 2>>(0.434, 3.36, 0.704, 7.35),
    ChoiceOf<Tile<128, 64, 2, 2, 3, 3>>(0.325, 2.2, 0.598, 7.08),
    ChoiceOf<SmallTile>(0.236, 1.31, 0.512, 3.12),
    ChoiceOf<Tile<64, 32, 2, 2, 8, 4>>(0.174, 1.12, 0.349, 2.91),
    ChoiceOf<SmallTile, Inputs::kCopied, false>(),
    ChoiceOf<SmallTile, Inputs::kVector, false>(),
    ChoiceOf<SmallTile, Inputs::kScalar, false>(),
    ChoiceOf<E4m3Tile>(),
    ChoiceOf<E4m3Tile, Inputs::kCopied, false>(),
};

}  // namespace

std::vector<ConvCandidate> Conv2dCandidates(const Conv2dLaunch& conv, const Queue& queue) {
  const bool e4m3 = conv.x.element == Element::kE4m3x2;
  const Inputs inputs = e4m3                              ? Inputs::kCopied
                        : !HasVectorInputs(conv)          ? Inputs::kScalar
                        : conv.x.element == Element::kF32 ? Inputs::kVector
                                                          : Inputs::kCopied;
  const bool vectors = inputs == Inputs::kCopied && FinishesInVectors(conv);
  std::vector<ConvCandidate> candidates;
  for (const Choice& choice : kChoices) {
    if (choice.e4m3 != e4m3 || choice.inputs != inputs || choice.vectors != vectors) continue;
    const int64_t tiles = PhasesOf(conv) * Blocks(conv, choice.m, choice.n);
    candidates.push_back(
        {std::to_string(choice.m) + "x" + std::to_string(choice.n),
         Microseconds(choice.cost, tiles, conv.weight_stride / kDepth, queue.multiprocessors),
         choice.kernel.launch});
  }
  return CheapestFirst(std::move(candidates));
}

bool HasE4m3Kernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, Conv2dKernel<E4m3Tile, Inputs::kCopied, true>) ==
             cudaSuccess &&
         attributes.ptxVersion >= 89;
}

cudaError_t LoadConv2dKernels() { return LoadChoices(kChoices); }

}  // namespace denoised::cuda
