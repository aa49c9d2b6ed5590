// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "engine/backend/backend.h"

namespace denoised {

/// The CUDA device of options.number. FailedPrecondition, with the remedy, when it is not there or
/// when this build has no CUDA. options.device is not looked at.
absl::StatusOr<std::unique_ptr<Backend>> OpenCudaBackend(const BackendOptions& options);

/// 0 without a device, without a driver, or in a build without CUDA.
int CudaDeviceCount();

}  // namespace denoised
