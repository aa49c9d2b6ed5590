// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "engine/backend/backend.h"

namespace denoised {

namespace cuda {
struct Queue;  // launch.h
}

/// The CUDA device of options.number. FailedPrecondition, with the remedy, when it is not there or
/// when this build has no CUDA. options.device is not looked at.
absl::StatusOr<std::unique_ptr<Backend>> OpenCudaBackend(const BackendOptions& options);

/// Where a backend of OpenCudaBackend() enqueues its ops: for further kernels between them, in
/// order. Lives as long as the backend. Null in a build without CUDA.
const cuda::Queue* QueueOf(Backend& cuda_backend);

/// 0 without a device, without a driver, or in a build without CUDA.
int CudaDeviceCount();

}  // namespace denoised
