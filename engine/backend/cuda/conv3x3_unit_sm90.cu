// 3×3 convolution for Hopper from patches, for few small images: like conv3x3_sm90.cu, with a block
// for each split of k, so that the device is filled soon.
//
// Policy. A cluster makes one unit of 8×8 pixels and 64 outputs, each of its blocks a run of the
// steps along k. One warp copies patches and weights, three normalise patches where a group norm
// comes before, and one warpgroup multiplies. Each block owns some of the outputs and receives
// everyone's sums of these, which it adds in order: the bits of conv3x3_sm90.cu.

#include <algorithm>

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/conv3x3_sm90.cuh"
#include "engine/backend/cuda/dependent_launch.h"

namespace denoised::cuda {
namespace {

constexpr int kPixels = kUnit * kUnit, kOutputs = 64;
constexpr int kPitch = kUnit + 2, kPatchPixels = kPitch * kPitch;
constexpr int kPatches = 3, kPatchSlot = 13 * 1024, kPatchBytes = kPatchPixels * kStepBytes;
constexpr int kStages = 7, kStageBytes = kOutputs * kStepBytes;
constexpr int kSumsBytes = kPixels * kOutputs * 4;
constexpr int kThreads = 256, kConsumers = 128, kTransformers = kThreads - kConsumers - 32;
constexpr int kPixelStride = kTransformers / 8;
constexpr int kBarriers = 2 * kStages + 3 * kPatches + 1;
constexpr int kSharedBytes =
    kPatches * kPatchSlot + kStages * kStageBytes + kSumsBytes + kBarriers * 8;
static_assert(kPatchBytes <= kPatchSlot && kSharedBytes <= 115 * 1024);  // two blocks
constexpr int kMostVectors = kPixels * kOutputs / 8 / kConsumers / 2;    // of outputs, a thread

struct Work {
  CUtensorMap x, x2, weight;
  int chunks = 0, chunks2 = 0;
  int units_x = 0, units = 0;  // of an image
  int n_tiles = 0;
  int splits = 1;
  const float* bias = nullptr;
  Rows add;  // per image
  ShortcutWork shortcut;
};

struct TileAt {
  int image, y, x, n0;
};
__device__ inline TileAt TileOf(const Work& work, int index) {
  const int n = index % work.n_tiles, m = index / work.n_tiles;
  const int image = m / work.units, unit = m % work.units;
  return {image, unit / work.units_x * kUnit, unit % work.units_x * kUnit, n * kOutputs};
}

template <bool kShortcut>
__global__ void __launch_bounds__(kThreads, 2)
    Conv3x3UnitKernel(const __grid_constant__ Conv2dLaunch conv,
                      const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared[];  // as the swizzle wants it
  unsigned char* const ring = shared + kPatches * kPatchSlot;
  float* const sums_received = reinterpret_cast<float*>(ring + kStages * kStageBytes);
  uint64_t* const full = reinterpret_cast<uint64_t*>(ring + kStages * kStageBytes + kSumsBytes);
  uint64_t* const empty = full + kStages;
  uint64_t* const patch_full = empty + kStages;
  uint64_t* const patch_normal = patch_full + kPatches;  // transformed
  uint64_t* const patch_empty = patch_normal + kPatches;
  uint64_t* const received = patch_empty + kPatches;
  const auto weights_of = [&](int stage) { return ring + stage * kStageBytes; };
  const auto patch_of = [&](int slot) { return shared + slot * kPatchSlot; };

  // The same in all lanes, and known to be, so that descriptors live in uniform registers.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  const int rank = static_cast<int>(ClusterRank());
  const int windowed = work.chunks + work.chunks2;  // chunks under nine taps
  const int chunks = kShortcut ? windowed + work.shortcut.chunks + work.shortcut.chunks2 : windowed;
  const int steps = windowed * (kTaps - 1) + chunks;
  const int first_step = steps * rank / work.splits, end_step = steps * (rank + 1) / work.splits;
  const StepAt first = StepOf<kShortcut>(first_step, windowed, kTaps);
  const int end_chunk = StepOf<kShortcut>(end_step - 1, windowed, kTaps).chunk + 1;
  const TileAt tile = TileOf(work, blockIdx.x / work.splits);
  const bool normalises = conv.input_factors != nullptr;

  const auto channel_of = [&](int chunk) {  // of concat(x, x2)
    return chunk < work.chunks ? chunk * kStep : conv.channels + (chunk - work.chunks) * kStep;
  };
  const auto copy_weights = [&](int step, int at) {
    const StepAt from = StepOf<kShortcut>(step, windowed, kTaps);
    const ChunkAt chunk = ChunkOf<kShortcut>(conv, work, from.chunk);
    ArriveExpecting(&full[at], kStageBytes);
    CopyBox(weights_of(at), chunk.weight, &full[at], chunk.weight_channel, from.tap, tile.n0, 0);
  };

  ReleaseDependents();
  const bool copies = warp == kConsumers / 32 && ElectOne();
  int early = first_step;
  if (copies) {
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(&full[stage], 1);
      InitBarrier(&empty[stage], 1);
    }
    for (int slot = 0; slot < kPatches; ++slot) {
      InitBarrier(&patch_full[slot], 1);
      InitBarrier(&patch_normal[slot], kTransformers);
      InitBarrier(&patch_empty[slot], 1);
    }
    InitBarrier(received, 1);
    FenceBarrierInit();
    ArriveExpecting(received, kSumsBytes);
    // Weights are nobody's output: the first ones travel while the predecessor still runs.
    for (; early < min(first_step + kStages, end_step); ++early) {
      copy_weights(early, early - first_step);
    }
  }
  __syncthreads();
  ArriveAtCluster();

  if (warp >= kConsumers / 32) {
    if (copies) {
      WaitForPredecessors();
      int patch_chunk = first.chunk, slot = 0, patch_round = 0;
      const auto copy_next_patch = [&] {
        if (patch_chunk == end_chunk) return;
        Wait(&patch_empty[slot], (patch_round & 1) ^ 1);
        ArriveExpecting(&patch_full[slot], kPatchBytes);
        const ChunkAt from = ChunkOf<kShortcut>(conv, work, patch_chunk);
        CopyBox(patch_of(slot), from.source, &patch_full[slot], from.channel, tile.x - 1,
                tile.y - 1, tile.image);
        if (++slot == kPatches) slot = 0, ++patch_round;
        ++patch_chunk;
      };
      for (int i = 0; i < kPatches - 1; ++i) copy_next_patch();

      // When this tap's weights find room, the patch before has been used up.
      constexpr int kLead = kStages + 1;
      static_assert(kLead < kTaps);
      // With a shortcut as in conv3x3_sm90.cu.
      int until_patch = kStages - 1, until_used = (first.chunk < windowed ? kTaps : 1) - first.tap;
      int used_chunk = first.chunk;
      int stage = 0, round = 0;
#pragma unroll 1
      for (int step = first_step; step < end_step; ++step) {
        if (step >= early) {
          Wait(&empty[stage], (round & 1) ^ 1);
          copy_weights(step, stage);
        }
        if (kShortcut ? until_patch-- == 0 : step % kTaps == kLead) {
          copy_next_patch();
          if (kShortcut) {
            until_patch = until_used - 1;
            until_used = ++used_chunk < windowed ? kTaps : 1;
          }
        }
        if (++stage == kStages) stage = 0, ++round;
      }
      while (kShortcut && patch_chunk < end_chunk) copy_next_patch();
    } else if (warp > kConsumers / 32 && normalises) {
      const int thread = threadIdx.x - kConsumers - 32, vector = thread % 8;
      const int channels = conv.channels + conv.channels2;
      WaitForPredecessors();
      int slot = 0, round = 0;
      const uint32_t inside = PixelsInside<kPixelStride, kPatchPixels>(
          conv, kPitch, 65536 / kPitch + 1, thread, tile.y - 1, tile.x - 1);
#pragma unroll 1
      for (int chunk = first.chunk; chunk < end_chunk; ++chunk) {
        const int from_source = (chunk < work.chunks ? chunk : chunk - work.chunks) * kStep;
        const bool has_channels =
            (!kShortcut || chunk < windowed) &&
            from_source + vector * 8 < (chunk < work.chunks ? conv.channels : conv.channels2);
        float factor[8], offset[8];
        if (has_channels) {
          const float* const from = conv.input_factors + int64_t{tile.image} * 2 * channels +
                                    channel_of(chunk) + vector * 8;
          LoadEight(from, factor);
          LoadEight(from + channels, offset);
        }
        Wait(&patch_full[slot], round & 1);
        if (has_channels) {
          Normalise<kPixelStride>(patch_of(slot), 0, thread, inside, factor, offset);
        }
        FenceForCopies();  // products read by the same way as the copy engine
        Arrive(&patch_normal[slot]);
        if (++slot == kPatches) slot = 0, ++round;
      }
    }
    WaitForCluster();
    return;
  }

  // What this thread finishes: vectors of eight outputs of the `width` that the block owns.
  const int width = kOutputs / work.splits;
  const auto for_vectors = [&](const auto& what) {
#pragma unroll
    for (int i = 0; i < kMostVectors; ++i) {
      const int vector = i * kConsumers + threadIdx.x, of_pixel = width / 8;
      const int pixel = vector / of_pixel, column = vector % of_pixel * 8;
      const int output = tile.n0 + rank * width + column;
      if (pixel >= kPixels || output >= conv.outputs) continue;
      const int64_t row =
          (int64_t{tile.image} * conv.height + tile.y + pixel / kUnit) * conv.width + tile.x +
          pixel % kUnit;
      what(i, pixel, column, row, output);
    }
  };
  const bool leads = threadIdx.x == 0, has_residual = conv.residual.data != nullptr;
  uint64_t* const patch_ready = normalises ? patch_normal : patch_full;

  WaitForPredecessors();  // whose output is read and overwritten from here on
  uint4 residual[kMostVectors];
  if (has_residual) {
    for_vectors([&](int i, int, int, int64_t row, int output) {
      residual[i] =
          *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(conv.residual.data) +
                                          row * conv.residual.stride + output);
    });
  }

  float sums[kOutputs / 2];
  BeginSums(conv, rank == 0 ? work.bias : nullptr, tile.n0, sums);
  PinSums(sums);
  int stage = 0, round = 0, slot = 0, patch_round = 0, tap = first.tap, previous = -1;
  int chunk = first.chunk;
  bool new_patch = true;
#pragma unroll 1
  for (int step = first_step; step < end_step; ++step) {
    if (new_patch) Wait(&patch_ready[slot], patch_round & 1);
    Wait(&full[stage], round & 1);
    FenceProducts();
    const uint64_t weight = MatrixDescriptor(weights_of(stage));
    const bool in_shortcut = kShortcut && chunk >= windowed;
    if (in_shortcut) tap = kTaps / 2;  // the one in the middle
    const uint64_t input =
        PatchDescriptor(patch_of(slot), kPitch) + ((tap / 3 * kPitch + tap % 3) * kStepBytes >> 4);
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) MultiplyAdd(sums, input + 2 * k, weight + 2 * k);
    CommitProducts();
    WaitProducts<1>();  // the previous step's
    if (previous >= 0 && leads) Arrive(&empty[previous]);
    if (new_patch && step > first_step && leads) {
      Arrive(&patch_empty[slot == 0 ? kPatches - 1 : slot - 1]);
    }
    previous = stage;
    new_patch = ++tap == kTaps || in_shortcut;
    if (new_patch) {
      tap = 0, ++chunk;
      if (++slot == kPatches) slot = 0, ++patch_round;
    }
    if (++stage == kStages) stage = 0, ++round;
  }
  WaitProducts<0>();
  PinSums(sums);
  if (rank == 0 && work.add.data != nullptr) {
    AddPerImage(conv, work.add, tile.image, tile.n0, sums);
  }

  // Sums to their owner, [splits, pixels, width].
  WaitForCluster();  // its blocks have begun
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int pixel = warp * 16 + threadIdx.x % 32 / 4 + 8 * h;
#pragma unroll
    for (int j = 0; j < kOutputs / 8; ++j) {
      const int owner = j * 8 / width, column = j * 8 % width + threadIdx.x % 4 * 2;
      const float* const to = sums_received + (rank * kPixels + pixel) * width + column;
      StoreAt(AddressAt(to, owner), AddressAt(received, owner), sums[4 * j + 2 * h],
              sums[4 * j + 2 * h + 1]);
    }
  }
  WaitForStores(received, 0);
  for_vectors([&](int i, int pixel, int column, int64_t row, int output) {
    float v[8];
    for (int split = 0; split < work.splits; ++split) {
      float part[8];
      LoadEight(sums_received + (split * kPixels + pixel) * width + column, part);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = split == 0 ? part[j] : v[j] + part[j];
    }
    if (has_residual) {
      AddPair(residual[i].x, v[0], v[1]);
      AddPair(residual[i].y, v[2], v[3]);
      AddPair(residual[i].z, v[4], v[5]);
      AddPair(residual[i].w, v[6], v[7]);
    }
    FinishSums(conv, v);
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(conv.out.data) + row * conv.out.stride +
                              output) = PackBf16(v);
  });
#endif
}

}  // namespace

cudaError_t LaunchConv3x3Unit(Conv2dLaunch conv, const HopperPlan& plan, const Queue& queue) {
  if (!SuitsPatches(conv) || !plan.clustered || plan.splits < 2) return cudaErrorInvalidValue;
  Work work;
  work.units_x = conv.width / kUnit;
  work.units = work.units_x * (conv.height / kUnit);
  work.n_tiles = (conv.outputs + kOutputs - 1) / kOutputs;
  work.splits = plan.splits;
  work.bias = conv.bias;
  work.add = conv.add;

  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  const auto encode_patch = [&](CUtensorMap* map, const Rows& rows, int channels, bool) {
    return EncodeImages(map, rows, channels, conv, kPitch, kPitch, 1);
  };
  const CUresult result = EncodeDepth(&work, conv, kTaps, /*phases=*/1, kOutputs, encode_patch);
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;

  const int64_t tiles = int64_t{conv.images} * work.units * work.n_tiles;
  const unsigned splits = work.splits;
  conv.bias = nullptr;  // sums begin with it
  conv.add = {};        // and with this
  return LaunchDependent(
      conv.shortcut.x.data != nullptr ? Conv3x3UnitKernel<true> : Conv3x3UnitKernel<false>,
      {.grid = static_cast<unsigned>(tiles) * splits,
       .block = kThreads,
       .shared_bytes = kSharedBytes,
       .cluster = splits},
      queue, conv, work);
}

cudaError_t LoadConv3x3UnitKernel() {
  const cudaError_t error = LoadKernel(Conv3x3UnitKernel<true>, kSharedBytes);
  return error == cudaSuccess ? LoadKernel(Conv3x3UnitKernel<false>, kSharedBytes) : error;
}

}  // namespace denoised::cuda
