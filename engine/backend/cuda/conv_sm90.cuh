// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <type_traits>

#include "engine/backend/cuda/epilogue_sm90.cuh"
#include "engine/backend/cuda/loader_sm90.cuh"
#include "engine/backend/cuda/mainloop_sm90.cuh"

/// What Hopper's convolution kernels are made of, and how they are listed and launched.

namespace denoised::cuda {

/// Whether a CTA starts with at least as many registers as its threads have after setmaxnreg. If
/// not, setmaxnreg would wait forever.
constexpr bool HasRegisters(const HopperTileSpec& spec) {
  const HopperKernelSpec& kernel = spec.kernel;
  const int multiplying = 128 * kernel.consumers;
  return kernel.consumer_registers * multiplying +
             kernel.producer_registers * (kernel.threads - multiplying) <=
         65536 / kernel.threads / 8 * 8 * kernel.threads;
}

/// The kernels of a file: one for each row of kTiles for which kIsHere holds, and each of the forms
/// that the row has. A form has
///   constexpr bool IsOf(spec): whether a tile has a kernel of this form;
///   bool Suits(conv, plan): whether this kernel computes a launch, if none before it does.
/// Kernel<row, form> has T, its tile; kFunction, the kernel; kLaunch(kernel, conv, plan, queue).
template <template <int, typename> typename Kernel, bool (*kIsHere)(const HopperTileSpec&),
          typename... Forms>
struct HopperKernels {
 private:
  static cudaError_t Launch(const Conv2dLaunch& conv, const HopperPlan& plan, const Queue& queue) {
    cudaError_t result = cudaErrorInvalidValue;
    Visit([&](auto row, auto form) {
      if (plan.tile != HopperTile(row.value) || !form.Suits(conv, plan)) return false;
      using K = Kernel<row, decltype(form)>;
      result = K::kLaunch(K::kFunction, conv, plan, queue);
      return true;
    });
    return result;
  }
  static cudaError_t Load() {
    cudaError_t result = cudaSuccess;
    Visit([&](auto row, auto form) {
      using K = Kernel<row, decltype(form)>;
      result = LoadKernel(K::kFunction, K::T::kSharedBytes);
      return result != cudaSuccess;
    });
    return result;
  }
  /// Until one call returns true.
  template <int kRow = 0, typename What>
  static bool Visit(const What& what) {
    if constexpr (kRow < kHopperTiles) {
      return (VisitForm<kRow, Forms>(what) || ...) || Visit<kRow + 1>(what);
    } else {
      return false;
    }
  }
  template <int kRow, typename Form, typename What>
  static bool VisitForm(const What& what) {
    constexpr HopperTileSpec kSpec = kTiles[kRow];
    if constexpr (kIsHere(kSpec) && Form::IsOf(kSpec)) {
      return what(std::integral_constant<int, kRow>(), Form());
    } else {
      return false;
    }
  }

 public:
  static constexpr HopperKernelSet kSet = {Launch, Load};
};

/// The tiles that a persistent CTA computes: every stride-th from its first on, counted in clusters
/// of CTAs (CUTLASS: PersistentTileScheduler). With ping-pong, consumers take them in turn.
template <bool kPingPong>
struct TileScheduler {
  static constexpr int kInFlight = kPingPong ? 2 : 1;  // tiles being computed at one time

  int tiles, first_tile, stride;

  __device__ TileScheduler(int tiles, int cluster)
      : tiles(tiles), first_tile(blockIdx.x / cluster), stride(gridDim.x / cluster) {}
  /// The first tile of a consumer; the next is StrideOfConsumer() further.
  __device__ int FirstTile(int group) const {
    return first_tile + (kPingPong ? group * stride : 0);
  }
  __device__ int StrideOfConsumer() const { return kInFlight * stride; }
};

/// Launches `clusters` clusters of `cluster` CTAs each. Persistent CTAs: as many as the device
/// holds, at most one cluster per tile.
template <typename Params>
cudaError_t LaunchClusters(void (*kernel)(Conv2dLaunch, Params), int64_t clusters, int cluster,
                           int threads, int shared_bytes, Conv2dLaunch conv, const Params& params,
                           const Queue& queue) {
  conv.bias = nullptr;  // accumulators start with it
  return LaunchDependent(kernel,
                         {.grid = static_cast<unsigned>(clusters * cluster),
                          .block = static_cast<unsigned>(threads),
                          .shared_bytes = static_cast<size_t>(shared_bytes),
                          .cluster = static_cast<unsigned>(cluster)},
                         queue, conv, params);
}

}  // namespace denoised::cuda
