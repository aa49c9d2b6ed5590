// SPDX-License-Identifier: Apache-2.0
// Convolutions with few input channels or few outputs: the first and the last one of a UNet, on
// tensor cores, for every architecture from sm_80 on. There is little to multiply, so the aim is to
// read every activation from memory once.
//
// Few inputs. A block loads the halo tile of a tile of pixels into shared memory. For each 16
// pixels, the lanes of a warp gather the inputs, at most 64 per pixel, in the layout of mma's left
// operand. The weights of 64 outputs stay in registers.
//
// Few outputs. Every pixel is multiplied with the weights of all taps at once, by mma, straight
// from global memory: products [pixels, taps · outputs]. An output adds nine of these from its
// neighbours, in the order of the taps, so the bits are the same wherever a block's tile begins.

#include <algorithm>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/backend/cuda/fast_divmod.h"
#include "engine/backend/cuda/mma.cuh"

namespace denoised::cuda {
namespace {

constexpr int kRows = 16;  // pixels per mma
constexpr int kStep = 16;  // inputs per mma
constexpr int kTile = 8;   // outputs per mma

bool IsBare(const ConvLayer& conv) {
  return conv.x2.data == nullptr && conv.stride == 1 && !conv.upsample2x &&
         conv.weight_element == Element::kBf16 && conv.input_factors == nullptr &&
         conv.add.data == nullptr && conv.residual.data == nullptr && conv.scale == 1 &&
         conv.activation == Activation::kNone;
}

// Few inputs.

constexpr int kInputThreads = 128;
constexpr int kInputTiles = 8;  // per warp: 64 outputs
/// Blocks that fit on a multiprocessor beside each other.
constexpr int InputBlocks(int steps) { return steps > 3 ? 2 : steps > 2 ? 3 : 4; }

/// Permutes 32 outputs so that lane t of four, which has columns 2t and 2t + 1 of four tiles, has
/// eight neighbouring outputs.
__device__ int OutputOf(int tile, int column) {
  return tile / 4 * 32 + column / 2 * 8 + tile % 4 * 2 + column % 2;
}

struct InputTile {
  int height;
  FastDivmod width;
  FastDivmod across, of_image;  // tiles
  FastDivmod channels;
  int tiles;
};

/// grid (blocks that share the tiles, outputs / 64); shared: bf16 [height + kernel - 1,
/// width + kernel - 1, channels].
template <int kSteps, Element kElement>
__global__ void __launch_bounds__(kInputThreads, InputBlocks(kSteps))
    FewInputsKernel(const __grid_constant__ Conv2dLaunch conv,
                    const __grid_constant__ InputTile size) {
  extern __shared__ uint16_t seen[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
  const int first_output = blockIdx.y * kInputTiles * kTile;
  const auto* weight = static_cast<const __nv_bfloat16*>(conv.weight);
  uint32_t weights[kInputTiles][kSteps][2];
  float bias[kInputTiles][2];
#pragma unroll
  for (int tile = 0; tile < kInputTiles; ++tile) {
    const auto* of_output =
        weight + static_cast<int64_t>(first_output + OutputOf(tile, row)) * conv.weight_stride;
#pragma unroll
    for (int i = 0; i < kSteps * 2; ++i) {
      weights[tile][i / 2][i % 2] = *reinterpret_cast<const uint32_t*>(of_output + 8 * i + 2 * t);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bias[tile][i] =
          conv.bias == nullptr ? 0.0f : conv.bias[first_output + OutputOf(tile, 2 * t + i)];
    }
  }
  // Offsets of the inputs that this lane gathers, in the order (kh, kw, channel), from a pixel's
  // first one.
  const int line = (size.width.value + conv.kernel - 1) * conv.channels;
  int offsets[kSteps * 4];
#pragma unroll
  for (int i = 0; i < kSteps * 4; ++i) {
    const int k = i / 2 * 8 + 2 * t + i % 2, of_line = conv.kernel * conv.channels;
    offsets[i] = k < conv.kernel * of_line ? k / of_line * line + k % of_line : -1;
  }

  WaitForPredecessors();
  ReleaseDependents();
  for (int index = blockIdx.x; index < size.tiles; index += gridDim.x) {
    const int image = index / size.of_image, tile = index % size.of_image;
    const int top = tile / size.across * size.height, left = tile % size.across * size.width.value;
    __syncthreads();  // all warps have gathered from the previous tile
    for (int i = threadIdx.x; i < line; i += kInputThreads) {
      const int x = left - conv.pad_left + i / size.channels, channel = i % size.channels;
      const bool inside_x = static_cast<unsigned>(x) < static_cast<unsigned>(conv.width);
#pragma unroll 5
      for (int y = 0; y < size.height + conv.kernel - 1; ++y) {
        const int in_y = top - conv.pad_top + y;
        const bool inside =
            inside_x && static_cast<unsigned>(in_y) < static_cast<unsigned>(conv.height);
        const int64_t pixel = (static_cast<int64_t>(image) * conv.height + in_y) * conv.width + x;
        const int64_t at = pixel * conv.x.stride + channel;
        uint16_t bits = 0;
        if (inside) {
          if constexpr (kElement == Element::kBf16) {
            bits = static_cast<const uint16_t*>(conv.x.data)[at];
          } else {
            bits = __bfloat16_as_ushort(
                __float2bfloat16_rn(static_cast<const float*>(conv.x.data)[at]));
          }
        }
        seen[y * line + i] = bits;
      }
    }
    __syncthreads();

    for (int first = warp * kRows; first < size.height * size.width.value;
         first += kInputThreads / 32 * kRows) {
      uint32_t left_operand[kSteps][4];
      __nv_bfloat16* to[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int m = first + row + 8 * r;
        const int tile_y = m / size.width, tile_x = m % size.width;
        const int y = top + tile_y, x = left + tile_x;
        const bool exists = tile_y < size.height && y < conv.out_height && x < conv.out_width;
        const int64_t pixel =
            (static_cast<int64_t>(image) * conv.out_height + y) * conv.out_width + x;
        to[r] = exists ? static_cast<__nv_bfloat16*>(conv.out.data) + pixel * conv.out.stride +
                             first_output + 8 * t
                       : nullptr;
        const uint16_t* const from = seen + tile_y * line + tile_x * conv.channels;
#pragma unroll
        for (int i = 0; i < kSteps * 2; ++i) {
          uint32_t pair = 0;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int offset = offsets[2 * i + j];
            const uint32_t input = exists && offset >= 0 ? from[offset] : 0;
            pair |= input << 16 * j;
          }
          left_operand[i / 2][i % 2 * 2 + r] = pair;
        }
      }
      float sums[kInputTiles][4];
#pragma unroll
      for (int tile = 0; tile < kInputTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][i] = bias[tile][i % 2];
      }
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int tile = 0; tile < kInputTiles; ++tile) {
          Multiply(sums[tile], left_operand[s], weights[tile][s][0], weights[tile][s][1]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (to[r] == nullptr) continue;
#pragma unroll
        for (int part = 0; part < kInputTiles / 4; ++part) {
          float v[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) v[i] = sums[4 * part + i / 2][2 * r + i % 2];
          *reinterpret_cast<uint4*>(to[r] + 32 * part) = PackBf16(v);
        }
      }
    }
  }
}

template <int kSteps>
cudaError_t LaunchFewInputs(const Conv2dLaunch& conv, const Queue& queue) {
  const unsigned slices = conv.outputs / (kInputTiles * kTile);
  InputTile size;
  const int width = std::min(conv.out_width, 32);
  size.width = FastDivmod(width);
  size.across = FastDivmod((conv.out_width + width - 1) / width);
  size.channels = FastDivmod(conv.channels);
  // Large tiles load fewer pixels twice; small ones let one image fill the device.
  const int64_t pixels = int64_t{conv.images} * conv.out_height * conv.out_width;
  const int tile_pixels = pixels < int64_t{queue.multiprocessors} * 256 ? 64 : 256;
  size.height = std::max(1, tile_pixels / width);
  size.of_image =
      FastDivmod(size.across.value * ((conv.out_height + size.height - 1) / size.height));
  size.tiles = conv.images * size.of_image.value;
  // Persistent blocks read the weights once.
  const unsigned resident = InputBlocks(kSteps) * queue.multiprocessors;
  const unsigned blocks = std::min<unsigned>(size.tiles, std::max(resident / slices, 1u));
  const size_t shared = sizeof(uint16_t) * (size.height + conv.kernel - 1) *
                        (width + conv.kernel - 1) * conv.channels;
  return LaunchDependent(conv.x.element == Element::kBf16 ? FewInputsKernel<kSteps, Element::kBf16>
                                                          : FewInputsKernel<kSteps, Element::kF32>,
                         {dim3(blocks, slices), kInputThreads, shared}, queue, conv, size);
}

// Few outputs.

constexpr int kOutputThreads = 256;
constexpr int kTaps = 9;
constexpr int kChunk = 2 * kStep;  // channels that a quad of lanes loads: eight each
constexpr int kMaxChunks = 10;     // 320 channels

struct OutputTile {
  int height;
  FastDivmod width, seen_width;  // without and with the halo
  FastDivmod outputs;            // of the convolution
};

__host__ __device__ constexpr int ProductStride(int tiles) { return tiles * kTile + 4; }

/// grid (tiles along x, along y, images); shared: weights as the right operands of all products,
/// then fp32 [(tile.height + 2) · (tile.width + 2), ProductStride()]. kTiles: of kTaps · outputs.
template <int kTiles>
__global__ void __launch_bounds__(kOutputThreads)
    FewOutputsKernel(const __grid_constant__ Conv2dLaunch conv,
                     const __grid_constant__ OutputTile size) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
  const int chunks = conv.channels / kChunk;
  auto* weights = reinterpret_cast<uint4*>(shared);  // [chunks, kTiles, lanes]
  auto* products = reinterpret_cast<float*>(weights + chunks * kTiles * 32);

  // Lane t loads channels 8t … 8t + 7 of a chunk: four for each of two mma.
  const auto* weight = static_cast<const __nv_bfloat16*>(conv.weight);
  for (int i = threadIdx.x; i < chunks * kTiles * 32; i += kOutputThreads) {
    const int column = i / 32 % kTiles * kTile + i % 32 / 4,
              channel = i / 32 / kTiles * kChunk + i % 4 * 8;
    const int tap = column / size.outputs, output = column % size.outputs;
    weights[i] = tap < kTaps ? *reinterpret_cast<const uint4*>(
                                   weight + static_cast<int64_t>(output) * conv.weight_stride +
                                   tap * conv.channels + channel)
                             : make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  WaitForPredecessors();
  ReleaseDependents();
  const int top = blockIdx.y * size.height - 1, left = blockIdx.x * size.width.value - 1;
  const int64_t image = static_cast<int64_t>(blockIdx.z) * conv.height * conv.width;
  const int seen_width = size.seen_width.value, seen = (size.height + 2) * seen_width;
  for (int first = warp * kRows; first < seen; first += kOutputThreads / 32 * kRows) {
    const __nv_bfloat16* from[2];
    bool inside[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int m = first + row + 8 * r;
      const int y = top + m / size.seen_width, x = left + m % size.seen_width;
      inside[r] = m < seen && static_cast<unsigned>(y) < static_cast<unsigned>(conv.height) &&
                  static_cast<unsigned>(x) < static_cast<unsigned>(conv.width);
      from[r] = static_cast<const __nv_bfloat16*>(conv.x.data) +
                (image + y * conv.width + x) * conv.x.stride + 8 * t;
    }
    float sums[kTiles][4] = {};
#pragma unroll 4
    for (int chunk = 0; chunk < chunks; ++chunk) {
      uint4 v[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        v[r] = inside[r] ? *reinterpret_cast<const uint4*>(from[r] + chunk * kChunk)
                         : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint4 w = weights[(chunk * kTiles + tile) * 32 + lane];
        Multiply(sums[tile], {v[0].x, v[1].x, v[0].y, v[1].y}, w.x, w.y);
        Multiply(sums[tile], {v[0].z, v[1].z, v[0].w, v[1].w}, w.z, w.w);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (first + row + 8 * r >= seen) continue;
      float* to = products + (first + row + 8 * r) * ProductStride(kTiles) + 2 * t;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        *reinterpret_cast<float2*>(to + tile * kTile) =
            make_float2(sums[tile][2 * r], sums[tile][2 * r + 1]);
      }
    }
  }
  __syncthreads();

  const int all = size.height * size.width.value * conv.outputs;
  for (int i = threadIdx.x; i < all; i += kOutputThreads) {
    const int pixel = i / size.outputs, output = i % size.outputs;
    const int tile_y = pixel / size.width, tile_x = pixel % size.width;
    const int y = top + 1 + tile_y, x = left + 1 + tile_x;
    if (y >= conv.height || x >= conv.width) continue;
    float sum = conv.bias == nullptr ? 0.0f : conv.bias[output];
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      sum += products[((tile_y + tap / 3) * seen_width + tile_x + tap % 3) * ProductStride(kTiles) +
                      tap * conv.outputs + output];
    }
    Store(conv.out, image + y * conv.width + x, output, sum);
  }
}

size_t SharedBytes(const Conv2dLaunch& conv, const OutputTile& size, int tiles) {
  return size_t{16} * 32 * tiles * (conv.channels / kChunk) +
         sizeof(float) * (size.height + 2) * size.seen_width.value * ProductStride(tiles);
}

template <int kTiles>
cudaError_t LaunchFewOutputs(const Conv2dLaunch& conv, const Queue& queue) {
  // Large tiles read fewer pixels twice; small ones let one image fill the device.
  const int64_t pixels = int64_t{conv.images} * conv.height * conv.width;
  const bool small = pixels < int64_t{queue.multiprocessors} * 256;
  const int height = small || kTiles > 4 ? 4 : 8, width = std::min(conv.width, small ? 8 : 32);
  const OutputTile size = {height, FastDivmod(width), FastDivmod(width + 2),
                           FastDivmod(conv.outputs)};
  const dim3 grid((conv.width + width - 1) / width, (conv.height + height - 1) / height);
  constexpr int kMostImages = 65535;  // CUDA's limit of gridDim.z
  for (int first = 0; first < conv.images; first += kMostImages) {
    Conv2dLaunch part = conv;
    const int64_t row = int64_t{first} * conv.height * conv.width;
    part.x = RowsFrom(conv.x, row), part.out = RowsFrom(conv.out, row);
    const unsigned images = std::min(conv.images - first, kMostImages);
    if (cudaError_t error = LaunchDependent(
            FewOutputsKernel<kTiles>,
            {dim3(grid.x, grid.y, images), kOutputThreads, SharedBytes(conv, size, kTiles)}, queue,
            part, size);
        error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

constexpr int kMaxOutputs = 6;
constexpr int kSharedLimit = 96 * 1024;  // consumer GPUs of sm_86 and later: 99 KiB per block

}  // namespace

bool SuitsFewInputs(const ConvLayer& conv) {
  // A 1×1 convolution of whole vectors is a plain GEMM. This kernel would take ten times as long as
  // memory needs (docs/kernels-measured.md).
  return IsBare(conv) && (conv.kernel > 1 || conv.channels % 8 != 0) &&
         conv.kernel * conv.kernel * conv.channels <= 4 * kStep &&
         conv.weight_stride % kStep == 0 && conv.outputs % (kInputTiles * kTile) == 0 &&
         conv.out.element == Element::kBf16 && conv.out.vector;
}

cudaError_t LaunchConv2dFewInputs(const Conv2dLaunch& conv, const Queue& queue) {
  const int steps = (conv.kernel * conv.kernel * conv.channels + kStep - 1) / kStep;
  return WithConstant<1, 2, 3, 4>(steps,
                                  [&](auto steps) { return LaunchFewInputs<steps>(conv, queue); });
}

bool SuitsFewOutputs(const ConvLayer& conv) {
  return IsBare(conv) && conv.kernel == 3 && conv.pad_top == 1 && conv.pad_left == 1 &&
         conv.out_height == conv.height && conv.out_width == conv.width &&
         conv.channels % kChunk == 0 && conv.channels <= kMaxChunks * kChunk &&
         conv.x.element == Element::kBf16 && conv.x.vector && conv.outputs <= kMaxOutputs;
}

cudaError_t LaunchConv2dFewOutputs(const Conv2dLaunch& conv, const Queue& queue) {
  const int tiles = (kTaps * conv.outputs + kTile - 1) / kTile;
  return WithConstant<2, 3, 4, 5, 6, 7>(
      tiles, [&](auto tiles) { return LaunchFewOutputs<tiles>(conv, queue); });
}

cudaError_t LoadConv2dNarrowKernels() {
  const cudaError_t error =
      LoadKernels(0, FewInputsKernel<1, Element::kBf16>, FewInputsKernel<2, Element::kBf16>,
                  FewInputsKernel<3, Element::kBf16>, FewInputsKernel<4, Element::kBf16>,
                  FewInputsKernel<1, Element::kF32>, FewInputsKernel<2, Element::kF32>,
                  FewInputsKernel<3, Element::kF32>, FewInputsKernel<4, Element::kF32>);
  return error != cudaSuccess ? error
                              : LoadKernels(kSharedLimit, FewOutputsKernel<2>, FewOutputsKernel<3>,
                                            FewOutputsKernel<4>, FewOutputsKernel<5>,
                                            FewOutputsKernel<6>, FewOutputsKernel<7>);
}

}  // namespace denoised::cuda
