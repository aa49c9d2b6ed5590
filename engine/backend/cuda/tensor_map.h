// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "engine/backend/cuda/launch.h"

namespace denoised::cuda {

/// The driver's functions that describe a tensor to TMA, taken from the driver that the runtime has
/// loaded, so that we need not link libcuda. If `error` is set, they are null.
struct TensorMapEncoders {
  decltype(&cuTensorMapEncodeTiled) tiled = nullptr;
  decltype(&cuTensorMapEncodeIm2col) im2col = nullptr;
  cudaError_t error = cudaSuccess;
};
const TensorMapEncoders& GetTensorMapEncoders();

/// A tensor of bf16, or of anything else of 16 bits, from its innermost dimension outwards: its
/// extents, the elements from one index of each further dimension to the next, and a box, which is
/// filled with zeros beyond the extents.
struct TiledTensor {
  const void* data;
  std::initializer_list<int64_t> extents, strides;
  std::initializer_list<int> box;
};
CUresult EncodeTiled(CUtensorMap* map, const TiledTensor& tensor, CUtensorMapSwizzle swizzle,
                     CUtensorMapL2promotion promotion);

/// The swizzle of boxes of 16, 32 or 64 columns: of whole rows.
inline CUtensorMapSwizzle SwizzleOfBox(int columns) {
  return columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
         : columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                         : CU_TENSOR_MAP_SWIZZLE_32B;
}

/// bf16 [images, tokens, heads, dim] in boxes of `box` tokens of one head × 64 dimensions, which
/// are 128 bytes with 128-byte swizzle, and zeros beyond each extent.
CUresult EncodeHeads(CUtensorMap* map, const Rows& rows, int images, int tokens, int heads, int dim,
                     int box);

}  // namespace denoised::cuda
