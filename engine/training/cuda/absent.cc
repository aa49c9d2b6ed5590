// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cuda/cuda_backend.h"
#include "engine/training/backend.h"

/// A build without CUDA links this file instead of the backend. The error comes from serving's
/// backend and names the remedy.

namespace denoised::training {

absl::StatusOr<std::unique_ptr<Backend>> OpenCudaBackend(const CudaOptions& options) {
  return denoised::OpenCudaBackend({.number = options.number}).status();
}

absl::Status CheckCuda(const CudaOptions& options) { return OpenCudaBackend(options).status(); }

}  // namespace denoised::training
