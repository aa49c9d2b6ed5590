// Convolution and linear for Hopper, for few pixels: the products of conv2d_sm90.cu and
// conv3x3_sm90.cu in the smallest pieces, so that the device is filled soon.
//
// Policy. A unit is 64 pixels and 64 outputs. The runs of k that its layer is split into are shared
// by the blocks of a cluster: one block for each where there are few units, fewer and down to one
// where there are many. Nothing is persistent: a block makes its runs, sends their sums to the
// blocks that own the outputs, adds what it received in the order of the runs, and ends. Who adds
// does not bear on the bits.
//
// One warp copies and one warpgroup multiplies. What is copied of the input is either 64 pixels
// under one tap for each step, as in conv2d_sm90.cu, or, for a 3×3 convolution, patches of 8×8
// pixels and one around them for nine steps each, as in conv3x3_sm90.cu; where a group norm comes
// before, three more warps normalise these.
//
// Of images of up to 64 pixels a block has whole groups of up to eight channels, so it can make the
// group norm that comes after, too (NormaliseOutputs).

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/conv3x3_sm90.cuh"
#include "engine/backend/cuda/group_norm.cuh"

namespace denoised::cuda {
namespace {

constexpr int kPixels = 64, kOutputs = 64, kConsumers = 128;
constexpr int kSums = kPixels * kOutputs / kConsumers;  // a thread
constexpr int kPitch = kUnit + 2, kPatchPixels = kPitch * kPitch;
constexpr int kPatchSlot = 13 * 1024, kPatchBytes = kPatchPixels * kStepBytes;
static_assert(kPatchBytes <= kPatchSlot);
constexpr int kShortcutSlot = kPixels * kStepBytes;  // of a patch without the pixels around it

/// How inputs come: in patches, or in boxes of 64 pixels, one a step.
template <bool kInPatches, bool kShortcut>
struct Unit {
  using P = Patches<kShortcut, kPatchSlot, kShortcutSlot>;
  static constexpr int kWindowed = kInPatches ? P::kWindowed : 0;
  static constexpr int kOfShortcut = kInPatches ? P::kOfShortcut : 0;
  static constexpr int kSlots = kWindowed + kOfShortcut;
  static constexpr int kAllPatchBytes = kInPatches ? P::kBytes : 0;
  static constexpr int kWeightBytes = kOutputs * kStepBytes;
  static constexpr int kStageBytes = kWeightBytes + (kInPatches ? 0 : kPixels * kStepBytes);
  static constexpr int kTransformers = kInPatches ? 96 : 0;
  static constexpr int kThreads = kConsumers + 32 + kTransformers;
  static constexpr int kStages = 14;  // at most
  /// Steps whose weights are asked for early: more keep the first pixels waiting.
  static constexpr int kEarly = kInPatches ? 7 : 6;
  static constexpr int kBarriers = (2 * kStages + 2 * kSlots + kWindowed + 1 + 1) / 2 * 2;
};
/// Two blocks to a multiprocessor: of one launch, or of two, since the next one has its first
/// weights and its instructions brought only if there is room for it beside.
constexpr int kMostBytes = 228 * 1024 / 2 - 1024;
/// But a block that has a multiprocessor to itself and many steps gains more by a longer ring.
constexpr int kMostBytesAlone = 190 * 1024, kManySteps = 12;

struct Work {
  CUtensorMap x, x2, weight;
  int chunks = 0;  // of x
  Depth depth;
  Grid grid;
  Divisor m_tiles, n_tiles;             // m_tiles: boxes of a phase, or units of all images
  Divisor units_x, units;               // of an image, in patches
  int log_splits = 0, log_cluster = 0;  // binary logarithms
  int stages = 0;                       // that there is room for
  const float* bias = nullptr;
  Rows add;                      // per image
  float norm_count_inverse = 0;  // of the elements of a group of conv.output_norm
  ShortcutWork shortcut;
};

/// Runs of the first block are one sum, those of the others one each: in shared memory of the
/// block that owns the outputs.
__host__ __device__ constexpr int SlotsOf(int log_splits, int log_cluster) {
  return 1 + (((1 << log_cluster) - 1) << (log_splits - log_cluster));
}
__host__ __device__ constexpr int SlotBytes(int log_cluster) {
  return kPixels * kOutputs * 4 >> log_cluster;
}

struct TileAt {
  int m0, phase;    // of boxes
  int image, y, x;  // of a patch
  int n0;
};
template <bool kInPatches>
__device__ inline TileAt TileOf(const Work& work, int index) {
  const int m = index / work.n_tiles, n0 = index % work.n_tiles * kOutputs;
  if constexpr (kInPatches) {
    const int unit = m % work.units;
    return {0, 0, m / work.units, unit / work.units_x * kUnit, unit % work.units_x * kUnit, n0};
  } else {
    return {m % work.m_tiles * kPixels, m / work.m_tiles, 0, 0, 0, n0};
  }
}
template <bool kInPatches>
__device__ inline int ImageOf(const Work& work, const TileAt& tile, int pixel) {
  if constexpr (kInPatches) return tile.image;
  return min(tile.m0 + pixel, work.grid.pixels - 1) / work.grid.image_pixels;
}
/// The output pixel of a pixel of the tile, or -1.
template <bool kInPatches>
__device__ inline int64_t RowOf(const Conv2dLaunch& conv, const Work& work, const TileAt& tile,
                                int pixel) {
  if constexpr (kInPatches) {
    return (int64_t{tile.image} * conv.height + tile.y + pixel / kUnit) * conv.width + tile.x +
           pixel % kUnit;
  }
  const int m = tile.m0 + pixel;
  return m < work.grid.pixels ? OutputPixel(conv, work.grid, m, tile.phase) : -1;
}

/// What a block has made, for a group norm of it. Of each eight outputs a warp lays its 16 pixels
/// in place of their sums, and behind them the sums of their two leaves.
struct Finished {
  unsigned char* sums_received;
  static constexpr int kWarpBytes = 32 * sizeof(float4), kWarpPixels = 16;
  __device__ unsigned char* WarpAt(int j, int warp) const {
    return sums_received + (j * (kConsumers / 32) + warp) * kWarpBytes;
  }
  /// Of eight outputs in bf16.
  __device__ unsigned char* At(int j, int pixel) const {
    return WarpAt(j, pixel / kWarpPixels) + pixel % kWarpPixels * (kVector * 2);
  }
  /// [runs of a vector]
  __device__ Sums* LeafAt(int j, int leaf) const {
    return reinterpret_cast<Sums*>(WarpAt(j, leaf / 2) + kWarpPixels * kVector * 2) +
           leaf % 2 * (kVector / 2);
  }
};

/// silu(group norm) of what a block has finished, `mine` blocks of eight outputs from `output` on,
/// to `conv.out`: as LaunchGroupNormCluster would, whose leaves and trees these are. Groups have
/// kRun channels. `affine`: halves of gamma and beta of its outputs; `row_of(pixel)`: where it
/// lies, or -1.
template <int kRun, typename RowOf>
__device__ inline void NormaliseOutputs(const Conv2dLaunch& conv, const Finished& finished,
                                        const float2* affine, float count_inverse, int output,
                                        int mine, int warp, RowOf row_of) {
  constexpr int kRuns = kVector / kRun;
  const int lane = threadIdx.x % 32;
  const int image_pixels = conv.out_height * conv.out_width;  // a power of two
  const auto first_of_image = [&](int pixel) { return pixel & -image_pixels; };

  __syncwarp();
#pragma unroll 1
  for (int first = 0; first < mine; first += 4) {
    // A quad has a leaf: two have the warp's two of a block of outputs, the next two of the next.
    const int quad = lane / kQuad, j = first + quad / 2, leaf = warp * 2 + quad % 2;
    const bool is = j < mine;
    uint32_t vectors[kLeafVectors][kWords] = {};
    if (is) {
#pragma unroll
      for (int i = 0; i < kLeafVectors; ++i) {
        const uint4 vector = *reinterpret_cast<const uint4*>(
            finished.At(j, leaf * kLeafPixels + i * kQuad + lane % kQuad));
        vectors[i][0] = vector.x, vectors[i][1] = vector.y;
        vectors[i][2] = vector.z, vectors[i][3] = vector.w;
      }
    }
    SumLeaf<kRun>(vectors, lane, [&](int r, const Sums& sums) {
      if (is && HoldsSums(lane)) finished.LeafAt(j, leaf)[r] = sums;
    });
  }
  SyncWarpgroup(0);

  // Two threads a pixel, four outputs each.
  constexpr int kHalf = kVector / 2, kHalfRuns = kRun < kHalf ? kHalf / kRun : 1;
  const int pixel = threadIdx.x / 2, half = threadIdx.x % 2;
  const int first_leaf = first_of_image(pixel) / kLeafPixels, leaves = image_pixels / kLeafPixels;
  const int64_t row = row_of(pixel);
#pragma unroll 1
  for (int j = 0; j < mine; ++j) {
    const int n = output + j * kVector + half * kHalf;
    if (row < 0 || n >= conv.outputs) continue;
    Statistics statistics[kHalfRuns];
#pragma unroll
    for (int i = 0; i < kHalfRuns; ++i) {
      const int r = half * kHalf / kRun + i;
      Sums sums[kPixels / kLeafPixels];
#pragma unroll
      for (int l = 0; l < kPixels / kLeafPixels; ++l) {
        sums[l] = l < leaves ? finished.LeafAt(j, first_leaf + l)[r] : Sums{0, 0};
      }
      const Sums lower = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      const Sums upper = (sums[4] + sums[5]) + (sums[6] + sums[7]);
      statistics[i] = StatisticsOf(lower + upper, count_inverse, conv.output_norm.eps);
    }
    const uint2 words = *reinterpret_cast<const uint2*>(finished.At(j, pixel) + half * kHalf * 2);
    const auto of_output = [&](int i) {
      const float2 of = affine[j * kVector + half * kHalf + i];
      return Apply(Affine{of.x, of.y}, statistics[i * kHalfRuns / kHalf]);
    };
    const auto activate = [](float h) { return SiluOfHalf(h); };
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(conv.out.data) + row * conv.out.stride +
                              n) = {NormaliseWord(words.x, of_output(0), of_output(1), activate),
                                    NormaliseWord(words.y, of_output(2), of_output(3), activate)};
  }
}

/// kNormRun: channels of a group of conv.output_norm, or none.
template <bool kInPatches, bool kShortcut, int kNormRun>
__global__ void __launch_bounds__(Unit<kInPatches, kShortcut>::kThreads, 2)
    ConvUnitKernel(const __grid_constant__ Conv2dLaunch conv, const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using U = Unit<kInPatches, kShortcut>;
  extern __shared__ __align__(1024) unsigned char shared[];  // as the swizzle wants it
  const int stages = work.stages;
  unsigned char* const ring = shared + U::kAllPatchBytes;
  uint64_t* const full = reinterpret_cast<uint64_t*>(ring + stages * U::kStageBytes);
  uint64_t* const empty = full + U::kStages;
  uint64_t* const patch_full = empty + U::kStages;
  uint64_t* const patch_normal = patch_full + U::kSlots;  // transformed
  uint64_t* const patch_empty = patch_normal + U::kWindowed;
  uint64_t* const received = patch_empty + U::kSlots;
  float4* const sums_received = reinterpret_cast<float4*>(full + U::kBarriers);
  const auto weights_of = [&](int stage) { return ring + stage * U::kStageBytes; };
  const auto inputs_of = [&](int stage) { return weights_of(stage) + U::kWeightBytes; };
  const auto patch_of = [&](int slot) { return U::P::At(shared, slot); };

  // The same in all lanes, and known to be, so that descriptors live in uniform registers.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  const int rank = static_cast<int>(ClusterRank());
  const Depth& depth = work.depth;
  const auto begin_of = [&](int split) { return depth.steps.value * split >> work.log_splits; };
  const int runs = 1 << (work.log_splits - work.log_cluster);  // of a block
  const int first_step = begin_of(rank * runs), end_step = begin_of((rank + 1) * runs);
  using Step = StepAt<kShortcut, kInPatches ? kTaps : 0>;
  const Step first(conv, work, first_step), end(conv, work, end_step);
  const bool has_windowed = end_step - end.of_shortcut > first_step - first.of_shortcut;
  const int end_chunk = has_windowed ? end.chunk + (end.tap > 0 ? 1 : 0) : first.chunk;
  const TileAt tile = TileOf<kInPatches>(work, blockIdx.x >> work.log_cluster);
  const StartAt start = kInPatches ? StartAt{} : StartOf(work.grid, tile.m0);
  const bool clustered = work.log_cluster > 0;
  const bool normalises = kInPatches && conv.input_factors != nullptr;

  const auto copy_weights = [&](const Step& at, int stage) {
    const WeightAt from = WeightOf(work, at);
    ArriveExpecting(&full[stage], U::kStageBytes);
    CopyWeights(weights_of(stage), from.map, &full[stage], from.channel, from.tap, tile.n0,
                tile.phase);
  };

  const int early = min(min(stages, U::kEarly), end_step - first_step);
  if (warp == kConsumers / 32 && ElectOne()) {
    PrefetchMaps<kShortcut>(work);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      InitBarrier(&full[stage], 1);
      InitBarrier(&empty[stage], 1);
    }
    for (int slot = 0; slot < U::kSlots; ++slot) {
      InitBarrier(&patch_full[slot], 1);
      InitBarrier(&patch_empty[slot], 1);
    }
    for (int slot = 0; slot < U::kWindowed; ++slot) {
      InitBarrier(&patch_normal[slot], U::kTransformers);
    }
    InitBarrier(received, 1);
    FenceBarrierInit();
    if (clustered) {
      const int own = rank == 0 ? 1 : runs;
      ArriveExpecting(received, (SlotsOf(work.log_splits, work.log_cluster) - own) *
                                    SlotBytes(work.log_cluster));
    }
    // Weights are nobody's output: the first ones travel while the predecessor still runs.
    Step at = first;
#pragma unroll 1
    for (int step = 0; step < early; ++step) {
      copy_weights(at, step);
      at.Advance(conv, work);
    }
  }
  __syncthreads();
  if (clustered) ArriveAtCluster();

  if (warp >= kConsumers / 32) {
    if (warp == kConsumers / 32 && ElectOne()) {
      WaitForPredecessors();
      // The next patch under nine taps, and the next one of a shortcut.
      struct Next {
        int chunk, slot, round = 0;
      };
      Next next = {first.chunk, 0}, next_of_shortcut = {first.of_shortcut, U::kWindowed};
      const auto copy_next = [&](auto of_shortcut, Next& at) {
        constexpr bool kOf = decltype(of_shortcut)::value;
        if (at.chunk == (kOf ? end.of_shortcut : end_chunk)) return;
        Wait(&patch_empty[at.slot], (at.round & 1) ^ 1);
        ArriveExpecting(&patch_full[at.slot], kOf ? kShortcutSlot : kPatchBytes);
        const int around = kOf ? 0 : 1;
        const ChunkAt from = kOf ? ChunkOf(work.shortcut, at.chunk) : ChunkOf(work, at.chunk);
        CopyBox(patch_of(at.slot), from.map, &patch_full[at.slot], from.channel, tile.x - around,
                tile.y - around, tile.image);
        ++at.chunk;
        if (++at.slot == (kOf ? U::kSlots : U::kWindowed)) {
          at.slot = kOf ? U::kWindowed : 0, ++at.round;
        }
      };
      const auto copy_next_patch = [&] { copy_next(std::false_type(), next); };
      const auto copy_next_of_shortcut = [&] {
        if constexpr (kShortcut) copy_next(std::true_type(), next_of_shortcut);
      };
      if constexpr (kInPatches) {
        for (int i = 0; i < U::kWindowed; ++i) copy_next_patch();
        for (int i = 0; i < U::kOfShortcut; ++i) copy_next_of_shortcut();
      }

      Step at = first, used = first;
      const auto replace_used = [&] {
        if constexpr (kInPatches) {
          ReplaceUsed(conv, work, used, copy_next_patch, copy_next_of_shortcut);
        }
      };
      int stage = 0, round = 0;
#pragma unroll 1
      for (int step = first_step; step < end_step; ++step) {
        if (step >= first_step + early) {
          Wait(&empty[stage], (round & 1) ^ 1);
          copy_weights(at, stage);
        }
        if constexpr (kInPatches) {
          if (step >= first_step + stages) replace_used();
        } else {
          CopyInputs(inputs_of(stage), work, at, start, tile.m0, tile.phase, &full[stage]);
        }
        at.Advance(conv, work);
        if (++stage == stages) stage = 0, ++round;
      }
#pragma unroll 1
      while (kInPatches && (next.chunk < end_chunk || next_of_shortcut.chunk < end.of_shortcut)) {
        replace_used();
      }
    } else if (warp > kConsumers / 32 && normalises) {
      if constexpr (kInPatches) {
        const int thread = threadIdx.x - kConsumers - 32, vector = thread % 8;
        const int channels = conv.channels + conv.channels2;
        int slot = 0, round = 0;
        const uint32_t inside = PixelsInside<U::kTransformers / 8, kPatchPixels>(
            conv, kPitch, thread, tile.y - 1, tile.x - 1);
        WaitForPredecessors();
#pragma unroll 1
        for (int chunk = first.chunk; chunk < end_chunk; ++chunk) {
          const bool from_x = chunk < work.chunks;
          const int channel = (from_x ? chunk : chunk - work.chunks) * kStep + vector * 8;
          const bool has_channels = channel < (from_x ? conv.channels : conv.channels2);
          float factor[8], offset[8];
          if (has_channels) {
            const float* const from = conv.input_factors + int64_t{tile.image} * 2 * channels +
                                      (from_x ? 0 : conv.channels) + channel;
            LoadEight(from, factor);
            LoadEight(from + channels, offset);
          }
          Wait(&patch_full[slot], round & 1);
          if (has_channels) {
            Normalise<U::kTransformers / 8>(patch_of(slot), 0, thread, inside, factor, offset);
          }
          FenceForCopies();  // products read by the same way as the copy engine
          Arrive(&patch_normal[slot]);
          if (++slot == U::kWindowed) slot = 0, ++round;
        }
      }
    }
    if (clustered) WaitForCluster();
    return;
  }

  // What the block finishes: so many of the eight blocks of eight outputs. As in a product's sums,
  // a thread has two neighbouring outputs of each, of my_pixel and of the eighth pixel after it.
  const int mine = kOutputs / 8 >> work.log_cluster;
  const int my_pixel = warp * 16 + threadIdx.x % 32 / 4;
  const int64_t rows[2] = {RowOf<kInPatches>(conv, work, tile, my_pixel),
                           RowOf<kInPatches>(conv, work, tile, my_pixel + 8)};
  const auto output_of = [&](int j) {
    return tile.n0 + (rank * mine + j) * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
  };
  constexpr int kAtOnce = 2;  // blocks, whose residuals are on their way meanwhile
  const auto load_residuals = [&](int j, uint32_t(&residuals)[2 * kAtOnce]) {
#pragma unroll
    for (int i = 0; i < 2 * kAtOnce; ++i) {
      const int64_t row = rows[i % 2];
      const int output = output_of(j + i / 2);
      const bool is =
          conv.residual.data != nullptr && j + i / 2 < mine && row >= 0 && output < conv.outputs;
      residuals[i] = is ? *reinterpret_cast<const uint32_t*>(
                              static_cast<const __nv_bfloat16*>(conv.residual.data) +
                              row * conv.residual.stride + output)
                        : 0;
    }
  };
  const bool leads = threadIdx.x == 0;
  uint64_t* const patch_ready = normalises ? patch_normal : patch_full;

  const int slots = SlotsOf(work.log_splits, work.log_cluster);
  float2* const affine = reinterpret_cast<float2*>(sums_received + slots * mine * kConsumers);
  if constexpr (kNormRun > 0) {
    const int c = threadIdx.x, n = tile.n0 + rank * mine * 8 + c;
    if (c < mine * 8 && n < conv.outputs) {
      affine[c] = {0.5f * conv.output_norm.gamma[n], 0.5f * conv.output_norm.beta[n]};
    }
  }

  float sums[kSums], total[kSums];
  BeginSums(rank == 0 ? work.bias : nullptr, tile.n0, sums);
  WaitForPredecessors();  // whose output is read and overwritten from here on
  // The next convolution's weights come meanwhile, as they would have during the norm.
  if (kNormRun > 0) ReleaseDependents();
  uint32_t residuals[2 * kAtOnce];
  if constexpr (kNormRun == 0) load_residuals(0, residuals);
  constexpr int kAdds = kInPatches ? 1 : 2;  // a unit in patches is of one image
  uint32_t add[kAdds][kSums / 4];
  const bool adds = rank == 0 && work.add.data != nullptr;
  if (adds) {
#pragma unroll
    for (int h = 0; h < kAdds; ++h) {
      LoadPerImage(conv, work.add, ImageOf<kInPatches>(work, tile, my_pixel + 8 * h), tile.n0,
                   add[h]);
    }
  }

  int stage = 0, round = 0, slot = 0, patch_round = 0, previous = -1;
  int step = first_step, taps_left = 0, tap_x = 0;
  bool new_patch = true;
  uint64_t weight = MatrixDescriptor(weights_of(0)), input = MatrixDescriptor(inputs_of(0));
  uint64_t window = 0;  // the input of its next step
  const auto begin_patch = [&](int tap) {
    taps_left = kTaps - tap;
    tap_x = tap % 3;
    window =
        PatchDescriptor(patch_of(slot), kPitch) + ((tap / 3 * kPitch + tap_x) * kStepBytes >> 4);
  };
  // A step's patch is the window's present one, or the shortcut's next.
  int due = first.due, shortcut_at = 0, used_slot = -1;
  bool of_shortcut = false;
  const auto shortcut_slot = [&] { return U::kWindowed + shortcut_at % 2; };
  const auto begin_step = [&] {
    of_shortcut = kShortcut && due >= depth.steps.value;
    input = of_shortcut ? MatrixDescriptor(patch_of(shortcut_slot())) : window;
  };
  if constexpr (kInPatches) {
    begin_patch(first.tap);
    begin_step();
  }
#pragma unroll 1
  for (int run = 0; run < runs; ++run) {
    const int end = begin_of(rank * runs + run + 1);
    PinSums(sums);
#pragma unroll 1
    for (; step < end; ++step) {
      if (kInPatches && of_shortcut) {
        Wait(&patch_full[shortcut_slot()], shortcut_at / 2 & 1);
      } else if (kInPatches && new_patch) {
        Wait(&patch_ready[slot], patch_round & 1);
      }
      Wait(&full[stage], round & 1);
      FenceProducts();
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k) MultiplyAdd(sums, input + 2 * k, weight + 2 * k);
      CommitProducts();
      // What the next step needs is worked out while this one is under way: instructions, not
      // products, are what a step of so few outputs waits for.
      const int finished = previous, finished_slot = used_slot;
      previous = stage;
      if (++stage == stages) stage = 0, ++round;
      weight = MatrixDescriptor(weights_of(stage));
      if constexpr (kInPatches) {
        if (of_shortcut) {
          used_slot = shortcut_slot();
          ++shortcut_at, due -= depth.steps.value;
        } else {
          new_patch = --taps_left == 0;
          used_slot = new_patch ? slot : -1;
          if (new_patch) {
            if (++slot == U::kWindowed) slot = 0, ++patch_round;
            begin_patch(0);
          } else {
            const bool next_line = tap_x == 2;
            tap_x = next_line ? 0 : tap_x + 1;
            window += (next_line ? kPitch - 2 : 1) * kStepBytes >> 4;
          }
        }
        due += depth.shortcut;
        begin_step();
      } else {
        input = MatrixDescriptor(inputs_of(stage));
      }
      WaitProducts<1>();  // the previous step's
      if (finished >= 0 && leads) Arrive(&empty[finished]);
      if (kInPatches && finished_slot >= 0 && leads) Arrive(&patch_empty[finished_slot]);
    }
    WaitProducts<0>();
    PinSums(sums);
    if (adds && run == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) AddPerImage(add[kAdds == 1 ? 0 : h], h, sums);
    }
    // The first block's runs are one sum, the others' leave one by one.
    const bool continues = rank == 0 && run > 0;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      total[i] = continues ? total[i] + sums[i] : sums[i];
      sums[i] = 0;
    }
    if (clustered && run == 0) WaitForCluster();  // its blocks have begun
    if (rank == 0 && run < runs - 1) continue;
    // To their owners, [slots, mine, threads] of four sums.
    const int to_slot = rank == 0 ? 0 : 1 + (rank - 1) * runs + run;
    float4* const to = sums_received + to_slot * mine * kConsumers + threadIdx.x;
#pragma unroll
    for (int j = 0; j < kOutputs / 8; ++j) {
      const int owner = j >> (3 - work.log_cluster);
      float4* const at = to + (j & (mine - 1)) * kConsumers;
      const float4 four = {total[4 * j], total[4 * j + 1], total[4 * j + 2], total[4 * j + 3]};
      if (owner != rank) {
        StoreAt(AddressAt(at, owner), AddressAt(received, owner), four);
      } else {
        *at = four;
      }
    }
  }

  if (kNormRun == 0) ReleaseDependents();
  if (clustered) WaitForStores(received, 0);
  const auto sum_of = [&](int j) {
    const float4* const from = sums_received + j * kConsumers + threadIdx.x;
    float4 sum = *from;
#pragma unroll 1
    for (int slot = 1; slot < slots; ++slot) {
      const float4 part = from[slot * mine * kConsumers];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    return sum;
  };
  if constexpr (kNormRun > 0) {
    const Finished finished{reinterpret_cast<unsigned char*>(sums_received)};
#pragma unroll 1
    for (int j = 0; j < mine; ++j) {
      const float4 sum = sum_of(j);
      float v[4] = {sum.x, sum.y, sum.z, sum.w};
      FinishSums(conv, /*silu=*/false, v);
      __syncwarp();  // all of its sums are read
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        reinterpret_cast<uint32_t*>(finished.At(j, my_pixel + 8 * h))[threadIdx.x % 4] =
            PackBf16(v[2 * h], v[2 * h + 1]);
      }
    }
    NormaliseOutputs<kNormRun>(
        conv, finished, affine, work.norm_count_inverse, tile.n0 + rank * mine * 8, mine, warp,
        [&](int pixel) { return RowOf<kInPatches>(conv, work, tile, pixel); });
    return;
  }
  const bool silu = conv.activation == Activation::kSilu;
#pragma unroll 1
  for (int first = 0; first < mine; first += kAtOnce) {
    uint32_t next[2 * kAtOnce];
    load_residuals(first + kAtOnce, next);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int j = first + i;
      if (j >= mine) break;
      const float4 sum = sum_of(j);
      float v[4] = {sum.x, sum.y, sum.z, sum.w};
      if (conv.residual.data != nullptr) {
        AddPair(residuals[2 * i], v[0], v[1]);
        AddPair(residuals[2 * i + 1], v[2], v[3]);
      }
      FinishSums(conv, silu, v);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (rows[h] < 0 || output_of(j) >= conv.outputs) continue;
        *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(conv.out.data) +
                                     rows[h] * conv.out.stride + output_of(j)) =
            PackBf16(v[2 * h], v[2 * h + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kAtOnce; ++i) residuals[i] = next[i];
  }
#endif
}

using Kernel = void(Conv2dLaunch, Work);

/// Channels of a group of the norm that comes after, or 0.
int NormRunOf(const Conv2dLaunch& conv) {
  return conv.output_norm.gamma != nullptr ? conv.outputs / conv.output_norm.groups : 0;
}

/// Null when there is none.
template <bool kInPatches, bool kShortcut>
Kernel* KernelOf(int norm_run) {
  if (norm_run == 0) return ConvUnitKernel<kInPatches, kShortcut, 0>;
  if constexpr (!kShortcut) {
    switch (norm_run) {
      case 2:
        return ConvUnitKernel<kInPatches, false, 2>;
      case 4:
        return ConvUnitKernel<kInPatches, false, 4>;
      case 8:
        return ConvUnitKernel<kInPatches, false, 8>;
    }
  }
  return nullptr;
}

template <bool kInPatches, bool kShortcut>
cudaError_t LaunchAs(const Conv2dLaunch& conv, const HopperPlan& plan, const Queue& queue) {
  using U = Unit<kInPatches, kShortcut>;
  Work work;
  work.grid = GridOf(conv);
  if (kInPatches) {
    work.units_x = Divisor(conv.width / kUnit);
    work.units = Divisor(work.units_x.value * (conv.height / kUnit));
    work.m_tiles = Divisor(conv.images * work.units.value);
  } else {
    work.m_tiles = Divisor((work.grid.pixels + kPixels - 1) / kPixels);
  }
  work.n_tiles = Divisor((conv.outputs + kOutputs - 1) / kOutputs);
  work.log_splits = BinaryLogarithm(plan.splits);
  work.log_cluster = BinaryLogarithm(plan.cluster);
  const int norm_run = NormRunOf(conv);
  const int norm_bytes = norm_run > 0 ? kOutputs * sizeof(float2) >> work.log_cluster : 0;
  const int64_t tiles = int64_t{work.grid.phases} * work.m_tiles.value * work.n_tiles.value;
  const bool alone =
      tiles * plan.cluster <= queue.multiprocessors && StepsOf(conv) > kManySteps * plan.cluster;
  const int others = U::kAllPatchBytes + U::kBarriers * 8 + norm_bytes +
                     SlotsOf(work.log_splits, work.log_cluster) * SlotBytes(work.log_cluster);
  work.stages =
      std::min(U::kStages, ((alone ? kMostBytesAlone : kMostBytes) - others) / U::kStageBytes);
  work.bias = conv.bias;
  work.add = conv.add;
  if (norm_run > 0) {
    const int image_pixels = conv.out_height * conv.out_width;
    work.norm_count_inverse = 1.0f / (static_cast<float>(image_pixels) * norm_run);
  }

  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  const auto encode = [&](CUtensorMap* map, const Rows& rows, int channels, bool shortcut) {
    const int edge = shortcut ? kUnit : kPitch;
    return kInPatches ? EncodeImages(map, rows, channels, conv, kStep, edge, edge, 1)
                      : EncodeInputs(map, rows, channels, conv, work.grid,
                                     work.grid.flat || shortcut, kPixels);
  };
  const CUresult result = EncodeDepth(&work, conv, kOutputs, encode);
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;

  return LaunchDependent(
      KernelOf<kInPatches, kShortcut>(norm_run),
      {.grid = static_cast<unsigned>(tiles * plan.cluster),
       .block = U::kThreads,
       .shared_bytes = static_cast<size_t>(work.stages * U::kStageBytes + others),
       .cluster = static_cast<unsigned>(plan.cluster)},
      queue, EpilogueOf(conv), work);
}

template <bool kInPatches>
cudaError_t Launch(const Conv2dLaunch& conv, const HopperPlan& plan, const Queue& queue) {
  return conv.shortcut.x.data != nullptr ? LaunchAs<kInPatches, true>(conv, plan, queue)
                                         : LaunchAs<kInPatches, false>(conv, plan, queue);
}

template <bool kInPatches>
cudaError_t Load() {
  cudaError_t error = LoadKernel(KernelOf<kInPatches, true>(0), kMostBytesAlone);
  for (int norm_run : {0, 2, 4, 8}) {
    if (error != cudaSuccess) return error;
    error = LoadKernel(KernelOf<kInPatches, false>(norm_run), kMostBytesAlone);
  }
  return error;
}

}  // namespace

bool SuitsOutputNorm(const Conv2dLaunch& conv) {
  const int64_t image_pixels = int64_t{conv.out_height} * conv.out_width;
  const int groups = conv.output_norm.groups, run = NormRunOf(conv);
  return HasVectorOutputs(conv) && conv.residual.data == nullptr &&
         conv.shortcut.x.data == nullptr && conv.activation == Activation::kNone &&
         !conv.upsample2x && image_pixels % kLeafPixels == 0 && image_pixels <= kPixels &&
         kPixels % image_pixels == 0 && conv.outputs == groups * run &&
         (run == 2 || run == 4 || run == 8);
}

cudaError_t LaunchConvUnit(const Conv2dLaunch& conv, const HopperPlan& plan, const Queue& queue) {
  const bool powers = plan.splits == 1 << BinaryLogarithm(plan.splits) &&
                      plan.cluster == 1 << BinaryLogarithm(plan.cluster);
  if (!powers || plan.cluster > plan.splits || plan.splits > kMaxSplits ||
      !HasVectorOutputs(conv) || (conv.output_norm.gamma != nullptr && !SuitsOutputNorm(conv))) {
    return cudaErrorInvalidValue;
  }
  if (plan.tile != HopperTile::kPatchUnit) return Launch<false>(conv, plan, queue);
  return SuitsPatches(conv) ? Launch<true>(conv, plan, queue) : cudaErrorInvalidValue;
}

cudaError_t LoadConvUnitKernels() {
  const cudaError_t error = Load<true>();
  return error == cudaSuccess ? Load<false>() : error;
}

}  // namespace denoised::cuda
