// SPDX-License-Identifier: Apache-2.0
#include "engine/backend/cuda/device.h"

namespace denoised::cuda {

namespace {

absl::Status OutOfMemory(std::string_view needs) {
  size_t free = 0, total = 0;
  DENOISED_RETURN_IF_ERROR(ToStatus(cudaMemGetInfo(&free, &total), "cudaMemGetInfo"));
  return ResourceExhausted(
      "{}, {} of {} bytes are free; use a smaller model or batch, or free memory that other "
      "processes hold (nvidia-smi)",
      needs, free, total);
}

}  // namespace

absl::Status ToStatus(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  static_cast<void>(cudaGetLastError());  // otherwise the next launch would report it again
  if (error == cudaErrorMemoryAllocation) {
    return OutOfMemory(fmt::format("{} needs GPU memory", what));
  }
  return Internal("{}: {}: {}", what, cudaGetErrorName(error), cudaGetErrorString(error));
}

absl::StatusOr<Stream> NewStream() {
  cudaStream_t stream = nullptr;
  DENOISED_RETURN_IF_ERROR(
      ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
  return Stream(stream);
}

absl::StatusOr<Event> NewEvent(bool timing) {
  cudaEvent_t event = nullptr;
  // Blocking sync: otherwise a thread that waits for the event spins and occupies a core.
  const unsigned flags = cudaEventBlockingSync | (timing ? 0 : cudaEventDisableTiming);
  DENOISED_RETURN_IF_ERROR(ToStatus(cudaEventCreateWithFlags(&event, flags), "cudaEventCreate"));
  return Event(event);
}

absl::StatusOr<RecordedGraph> RecordGraph(cudaStream_t stream, const std::function<void()>& body) {
  DENOISED_RETURN_IF_ERROR(
      ToStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "Capture"));
  body();
  cudaGraph_t recorded = nullptr;
  const cudaError_t error = cudaStreamEndCapture(stream, &recorded);
  RecordedGraph owner(recorded);
  DENOISED_RETURN_IF_ERROR(ToStatus(error, "Capture"));
  return owner;
}

absl::StatusOr<GraphExec> Instantiate(cudaGraph_t recorded) {
  size_t launches = 0;
  DENOISED_RETURN_IF_ERROR(
      ToStatus(cudaGraphGetNodes(recorded, nullptr, &launches), "cudaGraphGetNodes"));
  cudaGraphExec_t graph = nullptr;
  DENOISED_RETURN_IF_ERROR(ToStatus(cudaGraphInstantiateWithFlags(&graph, recorded, 0),
                                    fmt::format("a CUDA graph of {} launches", launches)));
  return GraphExec(graph);
}

absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes, std::string_view purpose) {
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, bytes > 0 ? bytes : 1);
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());  // as ToStatus()
    return OutOfMemory(fmt::format("{} needs {} bytes of GPU memory", purpose, bytes));
  }
  DENOISED_RETURN_IF_ERROR(ToStatus(error, "cudaMalloc"));
  return DeviceMemory(data);
}

absl::StatusOr<PinnedMemory> AllocatePinned(size_t bytes, std::string_view purpose) {
  int device = 0;
  DENOISED_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "cudaGetDevice"));
  void* data = nullptr;
  const cudaError_t error = cudaMallocHost(&data, bytes > 0 ? bytes : 1);
  if (error == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());  // as ToStatus()
    return ResourceExhausted(
        "{} needs {} bytes of page-locked host memory, which the system refused; raise its limit "
        "(ulimit -l) or free host memory",
        purpose, bytes);
  }
  DENOISED_RETURN_IF_ERROR(ToStatus(error, "cudaMallocHost"));
  return PinnedMemory(data, FreePinned{device});
}

absl::StatusOr<std::shared_ptr<Context>> Context::Open(int device) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0, runtime = 0;
    DENOISED_RETURN_IF_ERROR(ToStatus(cudaDriverGetVersion(&driver), "cudaDriverGetVersion"));
    DENOISED_RETURN_IF_ERROR(ToStatus(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion"));
    if (driver == 0) {
      return FailedPrecondition(
          "device is \"cuda:{}\", but no NVIDIA driver is loaded; install it, give the container "
          "its GPUs (--gpus all), or choose the device \"cpu\"",
          device);
    }
    return FailedPrecondition(
        "device is \"cuda:{}\", but the NVIDIA driver supports CUDA {}.{} and this build needs "
        "{}.{}; update the driver, or choose the device \"cpu\"",
        device, driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
  }
  if (error != cudaSuccess && error != cudaErrorNoDevice) {
    return FailedPrecondition(
        "device is \"cuda:{}\", but CUDA does not start ({}: {}); check nvidia-smi, or choose the "
        "device \"cpu\"",
        device, cudaGetErrorName(error), cudaGetErrorString(error));
  }
  if (device < 0 || device >= count) {
    return FailedPrecondition(
        "device is \"cuda:{}\", but CUDA sees {} devices; choose a number below that (see "
        "nvidia-smi and CUDA_VISIBLE_DEVICES), or the device \"cpu\"",
        device, count);
  }
  if (cudaError_t opened = cudaSetDevice(device); opened != cudaSuccess) {
    return FailedPrecondition(
        "device \"cuda:{}\" cannot be opened ({}: {}); another process may hold it (nvidia-smi)",
        device, cudaGetErrorName(opened), cudaGetErrorString(opened));
  }
  auto context = std::make_shared<Context>();
  context->device_ = device;
  DENOISED_ASSIGN_OR_RETURN(context->compute_, NewStream());
  DENOISED_ASSIGN_OR_RETURN(context->uploads_, NewStream());
  DENOISED_ASSIGN_OR_RETURN(context->downloads_, NewStream());
  return context;
}

void Context::Use() { Record(cudaSetDevice(device_), "cudaSetDevice"); }

void Context::Record(cudaError_t error, std::string_view what) {
  if (error != cudaSuccess) Record(ToStatus(error, what));
}

void Context::Record(const absl::Status& status) {
  if (status_.ok()) status_ = status;
}

bool Context::Reached(cudaEvent_t event, std::string_view what) {
  const cudaError_t error = cudaEventQuery(event);
  if (error == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());  // "not ready" is an answer; a launch must not report it
    return false;
  }
  Record(error, what);
  return error == cudaSuccess;
}

}  // namespace denoised::cuda
