// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "engine/backend/cuda/launch.h"

/// Launches that overlap their predecessor's tail (programmatic dependent launch), for .cu files.
///
/// A kernel may start while the one before it in the stream, or in the graph captured from it,
/// still runs. Until then it may only do what needs no result of an earlier kernel (indices,
/// weights of the model; AttentionArgs says why some keys, too). It calls WaitForPredecessors()
/// before it reads or writes anything else, because memory that it overwrites may still be read.
/// ReleaseDependents() lets the next kernel start early; without the call, it starts when this
/// kernel ends. Wherever the call is, the next kernel sees memory as it is at this kernel's end.
///
/// Long kernels (convolutions, attention) call it when their last loads are issued. Norms,
/// embeddings and linears of few rows, which are short and come before a kernel that can load
/// weights, call it at their start. If all kernels did, many would wait on the SMs
/// (docs/kernels.md).
///
/// In every kernel launched by LaunchDependent(), each block has threads that wait, on every path.
/// So no kernel ends before its predecessors, which makes the order transitive. Kernels launched
/// with <<<>>> can be mixed with these; they start when all of these have ended. Before sm_90 all
/// of this is an ordinary launch.

namespace denoised::cuda {

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;
  unsigned cluster = 1;  // neighbouring blocks along x; more than 1 needs sm_90
  /// All blocks are resident at the same time, so they may wait for each other.
  bool cooperative = false;
};

/// Whether a kernel should start before its predecessor has ended. With many CTAs, the SMs that are
/// free first take more than their share and end last. Hopper's own kernels gain nevertheless.
inline bool StartsEarly(const dim3& grid, const Queue& queue) {
  const int64_t blocks = int64_t{grid.x} * grid.y * grid.z;
  return queue.dependent_launch && (queue.hopper || 2 * blocks <= queue.multiprocessors);
}

template <typename... Parameters, typename... Arguments>
cudaError_t LaunchDependent(void (*kernel)(Parameters...), const LaunchShape& shape,
                            const Queue& queue, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[3] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = queue.stream;
  config.attrs = attributes;
  if (StartsEarly(shape.grid, queue)) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {shape.cluster, 1, 1};
  }
  if (shape.cooperative) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

/// Waits until every earlier kernel has ended and its writes are visible.
__device__ inline void WaitForPredecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Whether this block is the last of `count` to call it with `done`, which is zero before the first
/// and after the last call. The last block sees what the others wrote before their calls. Called by
/// all threads.
__device__ inline bool IsLast(int* done, int count) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(done, 1) == count - 1;
    if (is_last) *done = 0;
  }
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
}

/// The next kernel may start once every block has called this or ended.
__device__ inline void ReleaseDependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace denoised::cuda
