// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include "tests/engine/busy_gpu.h"

namespace denoised {
namespace {

constexpr int kThreads = 1024, kBlocksOfMultiprocessor = 2;  // all the threads that it has

__global__ void WaitFor(const volatile int* go_on) {
  while (*go_on == 0) __nanosleep(1000);
}

}  // namespace

BusyGpu::BusyGpu(int device) {
  int multiprocessors = 0;
  if (cudaSetDevice(device) != cudaSuccess ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
          cudaSuccess ||
      cudaHostAlloc(&go_on_, sizeof(int), cudaHostAllocPortable) != cudaSuccess) {
    return;
  }
  *go_on_ = 0;
  // Of highest priority, so that its blocks are next when those of an evaluation end.
  int least = 0, greatest = 0;
  cudaStream_t stream = nullptr;
  ok_ = cudaDeviceGetStreamPriorityRange(&least, &greatest) == cudaSuccess &&
        cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest) == cudaSuccess;
  if (!ok_) return;
  WaitFor<<<multiprocessors * kBlocksOfMultiprocessor, kThreads, 0, stream>>>(go_on_);
  ok_ = cudaGetLastError() == cudaSuccess;
}

BusyGpu::~BusyGpu() {
  // The memory stays: freeing it would wait for both GPUs.
  if (go_on_ != nullptr) *static_cast<volatile int*>(go_on_) = 1;
}

}  // namespace denoised
