// Convolution and linear on tensor cores: an implicit GEMM, out[m, n] = Σ_k in[m, k] · weight[n, k]
// with m a pixel of any image, n an output channel and k = (kh, kw, channel); see docs/kernels.md.
//
// Policy. One block makes one kM × kN tile of the output with the whole of k, in steps of 32 through
// a ring of kStages tiles in shared memory, each step two mma of depth 16. An output is therefore
// summed in the same order whatever the tile size and the batch, and the launcher may choose the tile
// by the size of the grid. k is never split. bf16 operands, fp32 accumulation.
//
// Inputs reach shared memory in one of three ways: 16-byte asynchronous copies; through registers, 16
// bytes at a time, when they are fp32 or want an activation first; or one element at a time, when the
// channels are no multiple of eight (3, 4, 9) or not aligned.

#include "engine/backend/cuda/implicit_gemm.cuh"
#include "engine/backend/cuda/mma.cuh"

namespace denoised::cuda {
namespace {

constexpr int kDepth = kDepthPadding;
constexpr int kStages = 4;
// Eight elements of padding put the eight rows of an 8×8 matrix into different banks.
constexpr int kLine = kDepth + 8;

enum class Inputs { kCopied, kVector, kScalar };

template <int kM_, int kN_, int kWarpsM_, int kWarpsN_>
struct Tile {
  static constexpr int kM = kM_, kN = kN_, kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kRingBytes = kStages * (kM + kN) * kLine * 2;
  static constexpr int kOutputBytes = kM * (kN + 4) * 4;
  static constexpr int kSharedBytes = kRingBytes > kOutputBytes ? kRingBytes : kOutputBytes;
};
using LargeTile = Tile<128, 128, 2, 2>;
using MediumTile = Tile<128, 64, 2, 2>;
using SmallTile = Tile<64, 64, 2, 2>;

template <typename T, Inputs kInputs>
__global__ void __launch_bounds__(T::kThreads, 2)
    Conv2dKernel(const __grid_constant__ Conv2dLaunch conv, int n_tiles) {
  constexpr int kChunks = kDepth / 8;  // of eight elements along k
  constexpr int kRowsApart = T::kThreads / kChunks;
  constexpr int kRows = T::kM / kRowsApart, kWeightRows = T::kN / kRowsApart;
  constexpr int kWarpM = T::kM / T::kWarpsM, kWarpN = T::kN / T::kWarpsN;
  constexpr int kFragmentsM = kWarpM / 16, kFragmentsN = kWarpN / 8;

  extern __shared__ __align__(16) unsigned char shared[];
  auto* input_ring = reinterpret_cast<__nv_bfloat16*>(shared);        // [kStages][kM][kLine]
  auto* weight_ring = input_ring + kStages * T::kM * kLine;           // [kStages][kN][kLine]

  // Neighbouring blocks share their pixels, which are many, rather than their weights.
  const int m0 = static_cast<int>(blockIdx.x / n_tiles) * T::kM;
  const int n0 = static_cast<int>(blockIdx.x % n_tiles) * T::kN;

  // This thread fills column `chunk` of rows first_row, first_row + kRowsApart, …
  const int chunk = threadIdx.x % kChunks, first_row = threadIdx.x / kChunks;
  Window windows[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) windows[i] = WindowOf(conv, m0 + first_row + i * kRowsApart);
  Tap tap;
  tap.Advance(conv, chunk * 8);
  const __nv_bfloat16* weight = static_cast<const __nv_bfloat16*>(conv.weight) +
                                static_cast<int64_t>(n0 + first_row) * conv.weight_stride +
                                chunk * 8;

  // Asynchronous copies: where each row's inputs under `tap` lie. Addresses are made when the tap or
  // the source changes and advance along the channels in between, since index arithmetic would
  // otherwise outweigh the multiplications.
  const __nv_bfloat16* from[kRows];
  bool inside[kRows];
  int channels_left = 0;
  const auto locate = [&] {
    const bool first = tap.channel < conv.channels;
    const Rows& rows = first ? conv.x : conv.x2;
    const int channel = first ? tap.channel : tap.channel - conv.channels;
    channels_left = (first ? conv.channels : conv.channels2) - channel;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int pixel = PixelAt(conv, windows[i], tap);
      inside[i] = pixel >= 0;
      from[i] = static_cast<const __nv_bfloat16*>(rows.data) +
                (inside[i] ? pixel * rows.stride + channel : 0);
    }
  };
  if constexpr (kInputs == Inputs::kCopied) locate();

  const auto fill = [&](int stage) {
    __nv_bfloat16* inputs = input_ring + (stage * T::kM + first_row) * kLine + chunk * 8;
    __nv_bfloat16* weights = weight_ring + (stage * T::kN + first_row) * kLine + chunk * 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      __nv_bfloat16* to = inputs + i * kRowsApart * kLine;
      if constexpr (kInputs == Inputs::kCopied) {
        CopyAsync16(to, from[i], inside[i]);
        from[i] += kDepth;
      } else {
        float v[8];
        if constexpr (kInputs == Inputs::kVector) {
          LoadInputs(conv, windows[i], tap, v);
        } else {
          GatherInputs(conv, windows[i], tap, v);
        }
        ActivateInputs(conv.input_activation, v);
        *reinterpret_cast<uint4*>(to) = PackBf16(v);
      }
    }
#pragma unroll
    for (int i = 0; i < kWeightRows; ++i) {
      const bool valid = n0 + first_row + i * kRowsApart < conv.outputs;
      const int64_t offset = static_cast<int64_t>(i * kRowsApart) * conv.weight_stride;
      CopyAsync16(weights + i * kRowsApart * kLine, valid ? weight + offset : conv.weight, valid);
    }
    tap.Advance(conv, kDepth);
    weight += kDepth;
    channels_left -= kDepth;
    if (kInputs == Inputs::kCopied && channels_left <= 0) locate();
  };

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp / T::kWarpsN * kWarpM, warp_n = warp % T::kWarpsN * kWarpN;
  float sums[kFragmentsM][kFragmentsN][4] = {};

  const int steps = conv.weight_stride / kDepth;
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < steps) fill(stage);
    CommitCopies();
  }
  for (int step = 0; step < steps; ++step) {
    WaitCopies<kStages - 2>();
    __syncthreads();  // this step's tiles are there, and everyone is done with the previous ones
    if (step + kStages - 1 < steps) fill((step + kStages - 1) % kStages);
    CommitCopies();

    const int stage = step % kStages;
    const __nv_bfloat16* inputs = input_ring + (stage * T::kM + warp_m) * kLine;
    const __nv_bfloat16* weights = weight_ring + (stage * T::kN + warp_n) * kLine;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t a[kFragmentsM][4];
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        LoadMatrices(a[i], inputs + (i * 16 + lane % 16) * kLine + k + lane / 16 * 8);
      }
#pragma unroll
      for (int j = 0; j < kFragmentsN; j += 2) {
        uint32_t b[4];
        LoadMatrices(b, weights + (j * 8 + lane % 8 + lane / 16 * 8) * kLine + k + lane / 8 % 2 * 8);
#pragma unroll
        for (int i = 0; i < kFragmentsM; ++i) {
          Multiply(sums[i][j], a[i], b[0], b[1]);
          Multiply(sums[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  // Through shared memory, so that each thread finishes eight neighbouring outputs.
  WaitCopies<0>();
  __syncthreads();
  float* tile = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) {
      float* to = tile + (warp_m + i * 16 + lane / 4) * (T::kN + 4) + warp_n + j * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = make_float2(sums[i][j][0], sums[i][j][1]);
      *reinterpret_cast<float2*>(to + 8 * (T::kN + 4)) = make_float2(sums[i][j][2], sums[i][j][3]);
    }
  }
  __syncthreads();
  FinishTile<T::kM, T::kN, T::kThreads>(conv, tile, m0, n0);
}

int64_t Blocks(const Conv2dLaunch& conv, int tile_m, int tile_n) {
  const int64_t m = static_cast<int64_t>(conv.images) * conv.out_height * conv.out_width;
  return (m + tile_m - 1) / tile_m * ((conv.outputs + tile_n - 1) / tile_n);
}

template <typename T, Inputs kInputs>
cudaError_t LaunchTile(const Conv2dLaunch& conv, const Queue& queue) {
  const int n_tiles = (conv.outputs + T::kN - 1) / T::kN;
  const unsigned blocks = static_cast<unsigned>(Blocks(conv, T::kM, T::kN));
  Conv2dKernel<T, kInputs><<<blocks, T::kThreads, T::kSharedBytes, queue.stream>>>(conv, n_tiles);
  return cudaGetLastError();
}

template <typename T, Inputs kInputs>
cudaError_t LoadTile() {
  return LoadKernel(Conv2dKernel<T, kInputs>, T::kSharedBytes);
}

}  // namespace

cudaError_t LaunchConv2d(const Conv2dLaunch& conv, const Queue& queue) {
  if (!HasVectorInputs(conv)) return LaunchTile<SmallTile, Inputs::kScalar>(conv, queue);
  if (conv.x.element == Element::kF32 || conv.input_activation != Activation::kNone) {
    return LaunchTile<SmallTile, Inputs::kVector>(conv, queue);
  }
  // The largest tile that still fills the device.
  if (conv.outputs > 64 && Blocks(conv, 128, 128) >= queue.multiprocessors) {
    return LaunchTile<LargeTile, Inputs::kCopied>(conv, queue);
  }
  if (Blocks(conv, 128, 64) >= queue.multiprocessors) {
    return LaunchTile<MediumTile, Inputs::kCopied>(conv, queue);
  }
  return LaunchTile<SmallTile, Inputs::kCopied>(conv, queue);
}

cudaError_t LoadConv2dKernels() {
  for (cudaError_t error : {LoadTile<LargeTile, Inputs::kCopied>(),
                            LoadTile<MediumTile, Inputs::kCopied>(),
                            LoadTile<SmallTile, Inputs::kCopied>(),
                            LoadTile<SmallTile, Inputs::kVector>(),
                            LoadTile<SmallTile, Inputs::kScalar>()}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace denoised::cuda
