// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/backend.h"
#include "engine/backend/cpu/cpu_backend.h"
#include "engine/backend/cuda/cuda_backend.h"

namespace denoised {

absl::StatusOr<std::unique_ptr<Backend>> OpenBackend(const BackendOptions& options) {
  const std::string& device = options.device;
  if (device == "cpu" || (device == "auto" && CudaDeviceCount() == 0))
    return OpenCpuBackend(options);
  if (device == "cuda" || device == "auto") return OpenCudaBackend(options);
  return InvalidArgument(
      "device is \"{}\"; it must be \"auto\", \"cpu\" or \"cuda\", and the numbers of the devices "
      "are given apart",
      device);
}

}  // namespace denoised
