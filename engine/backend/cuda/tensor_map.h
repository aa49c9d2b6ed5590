// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

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

/// bf16 [images, tokens, heads, dim] in boxes of `box` tokens of one head × 64 dimensions, which
/// are 128 bytes with 128-byte swizzle, and zeros beyond each extent.
CUresult EncodeHeads(CUtensorMap* map, const Rows& rows, int images, int tokens, int heads, int dim,
                     int box);

}  // namespace denoised::cuda
