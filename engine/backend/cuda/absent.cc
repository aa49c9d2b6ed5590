// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cuda/cuda_backend.h"

/// A build without CUDA links this file instead of the backend, so that callers need no #if.

namespace denoised {

absl::StatusOr<std::unique_ptr<Backend>> OpenCudaBackend(const BackendOptions& options) {
  return FailedPrecondition(
      "device is \"cuda:{}\", but this build has no CUDA; install the CUDA Toolkit and configure "
      "with -DDENOISED_CUDA=ON, or choose the device \"cpu\"",
      options.number);
}

const cuda::Queue* QueueOf(Backend&) { return nullptr; }

int CudaDeviceCount() { return 0; }

}  // namespace denoised
