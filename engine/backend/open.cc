#include <charconv>

#include "engine/backend/backend.h"
#include "engine/backend/cpu/cpu_backend.h"
#include "engine/backend/cuda/cuda_backend.h"

namespace denoised {

absl::StatusOr<std::unique_ptr<Backend>> OpenBackend(const BackendOptions& options) {
  const std::string& device = options.device;
  if (device == "cpu" || (device == "auto" && CudaDeviceCount() == 0)) return OpenCpuBackend();
  if (device == "cuda" || device == "auto") return OpenCudaBackend(0, options);
  constexpr std::string_view kPrefix = "cuda:";
  if (device.starts_with(kPrefix)) {
    int index = 0;
    const char* end = device.data() + device.size();
    const auto [rest, error] = std::from_chars(device.data() + kPrefix.size(), end, index);
    if (error == std::errc() && rest == end && index >= 0) {
      return OpenCudaBackend(index, options);
    }
  }
  return InvalidArgument(
      "device is \"{}\"; it must be \"auto\", \"cpu\", \"cuda\" or \"cuda:N\" with the device's "
      "number N",
      device);
}

}  // namespace denoised
