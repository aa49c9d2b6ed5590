// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace denoised::cuda {

/// The driver's functions that describe a tensor to TMA, from the driver that the
/// runtime has loaded anyway: no link to libcuda. With an `error` they are null.
struct TensorMapEncoders {
  decltype(&cuTensorMapEncodeTiled) tiled = nullptr;
  decltype(&cuTensorMapEncodeIm2col) im2col = nullptr;
  cudaError_t error = cudaSuccess;
};
const TensorMapEncoders& GetTensorMapEncoders();

}  // namespace denoised::cuda
