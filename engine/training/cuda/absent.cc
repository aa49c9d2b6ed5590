// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cuda/cuda_backend.h"
#include "engine/training/backend.h"

/// What a build without CUDA links in place of the backend: serving's refuses with the remedy.

namespace denoised::training {

absl::StatusOr<std::unique_ptr<Backend>> OpenCudaBackend(const CudaOptions& options) {
  return denoised::OpenCudaBackend({.number = options.number}).status();
}

absl::Status CheckCuda(const CudaOptions& options) { return OpenCudaBackend(options).status(); }

}  // namespace denoised::training
