// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "engine/backend/backend.h"

struct CUstream_st;  // CUDA's: cudaStream_t points to it

namespace denoised {

/// The CUDA device of options.number. FailedPrecondition, with the remedy, when it is not there or
/// when this build has no CUDA. options.device is not looked at.
absl::StatusOr<std::unique_ptr<Backend>> OpenCudaBackend(const BackendOptions& options);

/// The stream on which a backend of OpenCudaBackend() enqueues its ops: for further kernels between
/// them, in order. Null in a build without CUDA.
CUstream_st* StreamOf(Backend& cuda_backend);
/// Whether it uses the kernels for compute capability 9.0.
bool UsesHopperKernels(Backend& cuda_backend);

/// 0 without a device, without a driver, or in a build without CUDA.
int CudaDeviceCount();

}  // namespace denoised
