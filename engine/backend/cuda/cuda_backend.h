#pragma once

#include <memory>

#include "engine/backend/backend.h"

namespace denoised {

/// CUDA device `device` (an index as CUDA counts them). FailedPrecondition, with the remedy, when
/// it is not there or when this build has no CUDA. options.device is not looked at.
absl::StatusOr<std::unique_ptr<Backend>> OpenCudaBackend(int device, const BackendOptions& options);

/// 0 without a device, without a driver, or in a build without CUDA.
int CudaDeviceCount();

}  // namespace denoised
