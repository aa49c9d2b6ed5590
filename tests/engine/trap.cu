#include <cuda_runtime_api.h>

#include "tests/engine/trap.h"

namespace denoised {
namespace {

__global__ void Trap() { __trap(); }

}  // namespace

bool TrapOnGpu(int device) {
  if (cudaSetDevice(device) != cudaSuccess) return false;
  Trap<<<1, 1>>>();
  return cudaDeviceSynchronize() == cudaErrorLaunchFailure;
}

}  // namespace denoised
