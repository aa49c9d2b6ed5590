// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "engine/core/status.h"

/// RAII owners of CUDA objects, and conversion of its return codes.

namespace denoised::cuda {

// Destructors ignore errors: these calls only fail after an earlier error, which was reported.
struct Destroy {
  void operator()(cudaStream_t stream) const { static_cast<void>(cudaStreamDestroy(stream)); }
  void operator()(cudaEvent_t event) const { static_cast<void>(cudaEventDestroy(event)); }
  void operator()(cudaGraph_t graph) const { static_cast<void>(cudaGraphDestroy(graph)); }
  void operator()(cudaGraphExec_t graph) const { static_cast<void>(cudaGraphExecDestroy(graph)); }
};
struct FreeDevice {
  void operator()(void* data) const { static_cast<void>(cudaFree(data)); }
};
/// On any thread: without its device, the call would open device 0.
struct FreePinned {
  int device = 0;
  void operator()(void* data) const {
    static_cast<void>(cudaSetDevice(device));
    static_cast<void>(cudaFreeHost(data));
  }
};
using Stream = std::unique_ptr<CUstream_st, Destroy>;
using Event = std::unique_ptr<CUevent_st, Destroy>;
using RecordedGraph = std::unique_ptr<CUgraph_st, Destroy>;
using GraphExec = std::unique_ptr<CUgraphExec_st, Destroy>;
using DeviceMemory = std::unique_ptr<void, FreeDevice>;
using PinnedMemory = std::unique_ptr<void, FreePinned>;

/// OK, Internal ("what: cudaErrorX: CUDA's own description") or ResourceExhausted, which says how
/// much is free. An error is reported once: afterwards the thread's last error is OK.
absl::Status ToStatus(cudaError_t error, std::string_view what);

absl::StatusOr<Stream> NewStream();
/// cudaEventSynchronize() of it sleeps; it does not spin.
absl::StatusOr<Event> NewEvent(bool timing);
/// Captures what `body` enqueues to `stream`, instead of executing it.
absl::StatusOr<RecordedGraph> RecordGraph(cudaStream_t stream, const std::function<void()>& body);
absl::StatusOr<GraphExec> Instantiate(cudaGraph_t recorded);
/// On the current device. ResourceExhausted says what `purpose` needed and what is free.
absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes, std::string_view purpose);
/// Page-locked host memory, allocated by the current device.
absl::StatusOr<PinnedMemory> AllocatePinned(size_t bytes, std::string_view purpose);

/// One device, its three streams, and the first error it reported, which is final. Markers and
/// downloads share it, so they may be destroyed after the backend. One thread at a time.
class Context {
 public:
  /// FailedPrecondition, with the remedy, if the device cannot be opened.
  static absl::StatusOr<std::shared_ptr<Context>> Open(int device);

  int device() const { return device_; }
  cudaStream_t compute() const { return compute_.get(); }
  cudaStream_t uploads() const { return uploads_.get(); }
  cudaStream_t downloads() const { return downloads_.get(); }

  /// Makes the device current on this thread; before any other call of CUDA.
  void Use();
  /// Keeps the first error.
  void Record(cudaError_t error, std::string_view what);
  void Record(const absl::Status& status);
  const absl::Status& status() const { return status_; }

  /// Whether the event has happened. False if this call records an error.
  bool Reached(cudaEvent_t event, std::string_view what);

 private:
  int device_ = 0;
  Stream compute_, uploads_, downloads_;
  absl::Status status_;
};

}  // namespace denoised::cuda
