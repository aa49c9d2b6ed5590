// SPDX-License-Identifier: Apache-2.0
// Rounds master weights into the layouts of the forward pass and of the gradient of the input.
//
// Policy. A block transposes 32 outputs × 32 channels of a layer with all taps through shared
// memory, so that reads and both writes are contiguous. One launch has many layers: most are too
// small to fill a GPU.

#include <map>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/element.cuh"
#include "engine/training/cuda/launch.h"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kThreads = 256, kEdge = 32;

/// Sums the taps of a 3×3 window that read the same pixel of the image before it is doubled, in the
/// order of the taps (as engine/backend/cuda/pack_weight.cu).
__device__ float PhaseTap(const float* taps, int phase, int tap) {
  constexpr int kTapUnder[2][3] = {{0, 1, 1}, {0, 0, 1}};
  float sum = 0;
  for (int i = 0; i < 9; ++i) {
    if (kTapUnder[phase / 2][i / 3] * 2 + kTapUnder[phase % 2][i % 3] == tap) sum += taps[i];
  }
  return sum;
}

/// Pixels from pixel `of_dx` of a pair to pixel `of_dout` of the pair that is `pairs` further.
__device__ int PairOffset(int pairs, int of_dx, int of_dout) { return 2 * pairs + of_dout - of_dx; }

/// Rounds and stores `count` ≤ 8 values, by one store if they are a whole, aligned vector.
template <typename Value>
__device__ void StoreRun(const Rows& rows, int64_t row, int64_t column, int count, bool vectors,
                         const Value& value) {
  if (vectors && count == 8) {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = value(i);
    StoreVector(rows, row, column, values);
  } else {
    for (int i = 0; i < count; ++i) Store(rows, row, column + i, value(i));
  }
}

/// Layers with the same number of taps.
struct Batch {
  static constexpr int kMost = 320;  // a launch's parameters hold a few more
  int count = 0;
  int first_block[kMost + 1] = {};  // of each layer
  PackLaunch packs[kMost];
};
static_assert(sizeof(Batch) <= 32764, "CUDA's limit of a launch's parameters");

int EdgesOf(int extent) { return (extent + kEdge - 1) / kEdge; }

/// kTaps: taps of the weights, or 0 for any number. Indices count through a whole tile even at the
/// edges, so that the many divisions are by constants.
template <int kTaps>
__global__ void __launch_bounds__(kThreads) PackKernel(const __grid_constant__ Batch batch) {
  WaitForPredecessors();
  ReleaseDependents();
  extern __shared__ __align__(16) float tile[];  // [kEdge][line]: outputs, then channel and tap
  const int index = blockIdx.x;
  int layer = 0, end = batch.count;  // found by bisection
  while (end - layer > 1) {
    const int middle = (layer + end) / 2;
    (batch.first_block[middle] <= index ? layer : end) = middle;
  }
  const PackLaunch& pack = batch.packs[layer];
  const int block = index - batch.first_block[layer];
  const int blocks_across = (pack.channels + kEdge - 1) / kEdge;
  const int first_channel = block % blocks_across * kEdge, first = block / blocks_across * kEdge;
  const int channels = min(kEdge, pack.channels - first_channel);
  const int outputs = min(kEdge, pack.outputs - first);
  const int taps = kTaps > 0 ? kTaps : pack.taps, width = kEdge * taps, line = width + 1;
  if (channels == kEdge && pack.channels % 4 == 0 &&
      reinterpret_cast<uintptr_t>(pack.weight) % 16 == 0) {
    for (int i = threadIdx.x; i < outputs * (width / 4); i += kThreads) {
      const int o = i / (width / 4), at = i % (width / 4) * 4;
      const float4 four = *reinterpret_cast<const float4*>(
          pack.weight + (static_cast<int64_t>(first + o) * pack.channels + first_channel) * taps +
          at);
      float* to = tile + o * line + at;
      to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    }
  } else {
    for (int i = threadIdx.x; i < outputs * width; i += kThreads) {
      const int o = i / width, at = i % width;
      if (at >= channels * taps) continue;
      tile[o * line + at] =
          pack.weight[(static_cast<int64_t>(first + o) * pack.channels + first_channel) * taps +
                      at];
    }
  }
  __syncthreads();
  // Runs of eight: [outputs][taps][channels / 8], and [channels][taps][outputs / 8].
  constexpr int kRuns = kEdge / 8;
  const bool forward_vectors = pack.forward.vector && pack.channels % 8 == 0;
  const bool backward_vectors =
      pack.backward.vector && pack.all_outputs % 8 == 0 && pack.first_output % 8 == 0;
  for (int i = threadIdx.x; i < kEdge * taps * kRuns; i += kThreads) {
    const int run = i % kRuns * 8, tap = i / kRuns % taps, outer = i / (kRuns * taps);
    if (!pack.phases && pack.forward.data != nullptr && run < channels && outer < outputs) {
      StoreRun(pack.forward, pack.first_output + first + outer,
               static_cast<int64_t>(tap) * pack.channels + first_channel + run,
               min(8, channels - run), forward_vectors,
               [&](int u) { return tile[outer * line + (run + u) * taps + tap]; });
    }
    if (pack.backward_form == BackwardForm::kRotated && outer < channels && run < outputs) {
      StoreRun(
          pack.backward, first_channel + outer,
          static_cast<int64_t>(taps - 1 - tap) * pack.all_outputs + pack.first_output + first + run,
          min(8, outputs - run), backward_vectors,
          [&](int u) { return tile[(run + u) * line + outer * taps + tap]; });
    }
  }
  if (pack.phases) {
    for (int i = threadIdx.x; i < kEdge * kEdge * 16; i += kThreads) {
      const int c = i % kEdge, tap = i / kEdge % 4, phase = i / kEdge / 4 % 4;
      const int o = i / kEdge / 16;
      if (c >= channels || o >= outputs) continue;
      Store(pack.forward, static_cast<int64_t>(phase) * pack.all_outputs + first + o,
            static_cast<int64_t>(tap) * pack.channels + first_channel + c,
            PhaseTap(tile + o * line + c * taps, phase, tap));
    }
  }
  if (pack.backward_form == BackwardForm::kPhases) {
    for (int i = threadIdx.x; i < kEdge * 16 * kRuns; i += kThreads) {
      const int run = i % kRuns * 8, at = i / kRuns % 4, phase = i / kRuns / 4 % 4;
      const int c = i / (kRuns * 16);
      if (c >= channels || run >= outputs) continue;
      const int y = StridedTap(pack.pad_top, phase / 2, at / 2),
                x = StridedTap(pack.pad_left, phase % 2, at % 2);
      const bool exists = y >= 0 && y < 3 && x >= 0 && x < 3;
      StoreRun(pack.backward, static_cast<int64_t>(phase) * pack.channels + first_channel + c,
               static_cast<int64_t>(at) * pack.all_outputs + pack.first_output + first + run,
               min(8, outputs - run), backward_vectors, [&](int u) {
                 return exists ? tile[(run + u) * line + c * taps + y * 3 + x] : 0.0f;
               });
    }
  }
  if (pack.backward_form == BackwardForm::kPairs) {
    for (int i = threadIdx.x; i < kEdge * 36 * kRuns; i += kThreads) {
      const int run = i % kRuns * 8, of_dout = i / kRuns % 2, tap = i / kRuns / 2 % 9;
      const int of_dx = i / kRuns / 18 % 2, c = i / (kRuns * 36);
      if (c >= channels || run >= outputs) continue;
      const int x = 1 - PairOffset(tap % 3 - 1, of_dx, of_dout);
      const int at = (2 - tap / 3) * 3 + x;
      StoreRun(pack.backward, static_cast<int64_t>(of_dx) * pack.channels + first_channel + c,
               (static_cast<int64_t>(tap) * 2 + of_dout) * pack.all_outputs + pack.first_output +
                   first + run,
               min(8, outputs - run), backward_vectors, [&](int u) {
                 return x >= 0 && x < 3 ? tile[(run + u) * line + c * taps + at] : 0.0f;
               });
    }
  }
  if (pack.bias != nullptr && first_channel == 0) {
    for (int o = threadIdx.x; o < outputs; o += kThreads)
      pack.packed_bias[pack.first_output + first + o] = pack.bias[first + o];
  }
}

cudaError_t Launch(const Batch& batch, const Queue& queue) {
  const int taps = batch.packs[0].taps;
  const int bytes = kEdge * (kEdge * taps + 1) * static_cast<int>(sizeof(float));
  if (bytes > 96 << 10) return cudaErrorInvalidValue;  // a kernel of more than 4 × 4
  const auto kernel = taps == 9 ? PackKernel<9> : taps == 1 ? PackKernel<1> : PackKernel<0>;
  if (bytes > 48 << 10) {
    if (cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        error != cudaSuccess) {
      return error;
    }
  }
  return LaunchDependent(kernel,
                         {.grid = static_cast<unsigned>(batch.first_block[batch.count]),
                          .block = kThreads,
                          .shared_bytes = static_cast<size_t>(bytes)},
                         queue, batch);
}

/// Serving's kernels load weights before they wait for their predecessors. This one is launched
/// without dependent launch, so it and all after it start when the packs have ended.
__global__ void PackedKernel() {}

}  // namespace

cudaError_t LaunchPacks(const std::vector<PackLaunch>& packs, const Queue& queue) {
  std::map<int, Batch> batches;  // by taps
  for (const PackLaunch& pack : packs) {
    Batch& batch = batches[pack.taps];
    batch.packs[batch.count++] = pack;
    batch.first_block[batch.count] =
        batch.first_block[batch.count - 1] + EdgesOf(pack.channels) * EdgesOf(pack.outputs);
    if (batch.count < Batch::kMost) continue;
    if (cudaError_t error = Launch(batch, queue); error != cudaSuccess) return error;
    batches.erase(pack.taps);
  }
  for (const auto& [taps, batch] : batches) {
    if (cudaError_t error = Launch(batch, queue); error != cudaSuccess) return error;
  }
  PackedKernel<<<1, 1, 0, queue.stream>>>();
  return cudaGetLastError();
}

}  // namespace denoised::training::cuda
