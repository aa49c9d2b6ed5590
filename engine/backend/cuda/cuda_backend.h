// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "engine/backend/backend.h"

namespace denoised {

namespace cuda {
struct Queue;  // launch.h
}

/// The CUDA device of options.number. FailedPrecondition, with the remedy, if it does not exist or
/// this build has no CUDA. options.device is ignored.
absl::StatusOr<std::unique_ptr<Backend>> OpenCudaBackend(const BackendOptions& options);

/// The queue in which a backend of OpenCudaBackend() enqueues its ops, for additional kernels
/// between them. Lives as long as the backend. Null in a build without CUDA.
const cuda::Queue* QueueOf(Backend& cuda_backend);

/// 0 without a device, without a driver, or in a build without CUDA.
int CudaDeviceCount();

}  // namespace denoised
