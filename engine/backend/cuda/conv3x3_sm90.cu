// 3×3 convolution for Hopper, for images of at least a tile: like conv2d_sm90.cu, but the pixels of
// a tile come into shared memory once for all nine taps, and may be normalised there.
//
// Policy. A tile is 16×8 pixels of an image, or 8×8 of two. Its input is a patch, the tile and one
// pixel around it, of 64 channels: one copy, which also makes the zeros beyond the image's edges.
// The left operand of a tap is the patch read from another pixel on: wgmma takes 8 pixels of each
// of 8 lines, whatever lies between the lines. So shared memory receives 1.4 pixels for each output
// pixel and chunk of channels instead of 9.
//
// Where a group norm comes before, seven warps, or three beside 160 outputs and more, turn the
// patch into silu(2 · (x · factor + offset)) in place, with the arithmetic of the group norm's
// kernel: the normalised image is never in memory.
//
//   copies:     patch c+1 ─────────────▶ patch c+2 …      weights of each tap of c ─▶ ring
//   transforms:          patch c+1 in place
//   multiplies: nine taps of patch c
//
// A shortcut's chunks have one tap and are never normalised: their patches are the tile alone, and
// have room of their own, since they come between those that stay for nine taps.
//
// Where k is split a consumer adds the sums of each later run to those of the first, which takes
// more registers than two units have: the consumers then take a unit each, of the same tile. One
// that folds, or ends a tile, multiplies nothing meanwhile, so the second begins a tile some steps
// after the first, and each folds while the other multiplies. Else they take tiles in turn.
//
// Of few tiles, whose k is split in two, the two blocks of a cluster can have a run each: each then
// finishes one unit of the tile, and sends the sums of the other.
//
// The steps of k, their order and their splits are those of conv2d_sm90.cu, and so are the bits.

#include <type_traits>

#include "engine/backend/cuda/conv2d_sm90.h"
#include "engine/backend/cuda/conv3x3_sm90.cuh"

namespace denoised::cuda {
namespace {

constexpr int kPatchSlot = 25 * 1024;  // two patches of 10×10 pixels of 128 bytes; 18×10 take less
constexpr int kShortcutSlot = 2 * kUnit * kUnit * kStepBytes;

template <bool kShortcut>
using PatchesOf = Patches<kShortcut, kPatchSlot, kShortcutSlot>;

/// Tiles of 128 pixels and kN outputs for two consumer warpgroups.
template <int kN_, bool kTurns_, int kStages_, int kBuffers_, int kRegisters_, int kFree_,
          int kThreads_>
struct Tile {
  static constexpr int kN = kN_, kStages = kStages_;
  static constexpr int kBuffers = kBuffers_;  // of a consumer, for units on their way out
  static constexpr bool kTurns = kTurns_, kFold = !kTurns;
  // The first run's products add to the total itself, but for two sets of 96 sums, into either of
  // which products go, ptxas has no registers: there the total is a copy.
  static constexpr bool kFirstIsTotal = kTurns || kN < 192;
  // kFold: the second consumer begins so many steps late. As measured: docs/kernels.md.
  static constexpr int kLag = kN == 128 ? 2 : 3;
  static constexpr int kCluster = 2;          // blocks that share weights, or have a run of k each
  static constexpr bool kDivides = kN == 80;  // may do the latter
  static constexpr int kRows = kTurns ? 2 : 1;  // units of 64 pixels, a consumer
  static constexpr int kSums = kN / 2;
  static constexpr int kStageBytes = kN * kStepBytes;
  // Of 64 pixels × kBox outputs.
  static constexpr int kBox = kN % 64 == 0 ? 64 : kN % 32 == 0 ? 32 : 16, kBoxes = kN / kBox;
  static constexpr int kBoxBytes = kUnit * kUnit * kBox * 2, kBufferBytes = kBoxes * kBoxBytes;
  static constexpr int kStagingBytes = 2 * kBuffers * kBufferBytes;
  static constexpr int kReceivedBytes = kDivides ? kUnit * kUnit * kN * 4 : 0;
  static constexpr int kBarriers = 2 * kStages + 3 * PatchesOf<true>::kSlots + 2 + 2 * kBuffers + 1;
  static constexpr int kSharedBytes = PatchesOf<true>::kBytes + kStages * kStageBytes +
                                      kStagingBytes + kReceivedBytes + kBarriers * 8;
  static constexpr int kConsumerRegisters = kRegisters_, kProducerRegisters = kFree_;
  static constexpr bool kNormalises = kProducerRegisters >= 72;  // a transformer needs them
  // What is added per image is asked for before the products where there are registers for it.
  static constexpr bool kAddsEarly = kFold && kFirstIsTotal;
  static constexpr int kThreads = kThreads_;
  static constexpr int kTransformers = kThreads - 256 - 32;  // all but the copying warp
  static_assert(kN % kBox == 0 && kRows % kBuffers == 0 && kLag < kStages);
  static_assert(PatchesOf<false>::kBytes <= PatchesOf<true>::kBytes && kStages <= kTaps);
  static_assert(kSharedBytes <= 232448);
  // As many as a block begins with: who asked for more would wait for ever.
  static_assert(kConsumerRegisters * 256 + kProducerRegisters * (kThreads - 256) <=
                65536 / kThreads / 8 * 8 * kThreads);
};

struct Work {
  CUtensorMap x, x2, weight, residual, out;
  int chunks = 0;  // of x
  Depth depth;
  Divisor tiles_x, tiles_y;  // of an image
  Divisor n_tiles;
  int m_tiles = 0;  // a multiple of the blocks that share weights
  int images_at_once = 1;
  Divisor pitch;       // pixels of a line of a patch
  int unit_pixel = 0;  // of a patch, where its second unit begins
  int patch_bytes = 0;
  int shortcut_pitch = 0, shortcut_unit_pixel = 0;  // of its patches
  int log_splits = 0;
  const float* bias = nullptr;
  Rows add;  // per image
  ShortcutWork shortcut;
};

struct TileAt {
  int image, y, x, n0;
};
/// kShared: blocks of a cluster that have a tile each.
template <typename T, int kShared>
__device__ inline TileAt TileOf(const Work& work, int index, int rank) {
  const int m = index / work.n_tiles * kShared + rank % kShared, line = m / work.tiles_x;
  return {line / work.tiles_y * work.images_at_once, line % work.tiles_y * kUnit,
          m % work.tiles_x * 2 * kUnit, index % work.n_tiles * T::kN};
}

/// kDivided: the blocks of a cluster have a run of k of the same tile each, and no other tile. Each
/// finishes the unit of the consumer of its own number.
template <typename T, bool kShortcut, bool kDivided>
__global__ void __launch_bounds__(T::kThreads, 1)
    Conv3x3Kernel(const __grid_constant__ Conv2dLaunch conv, const __grid_constant__ Work work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char block_shared[];  // as the swizzle wants it
  // Through a shuffle, or every step would ask again where it lies.
  auto* const shared = static_cast<unsigned char*>(
      __cvta_shared_to_generic(__shfl_sync(~0u, SharedAddress(block_shared), 0)));
  using P = PatchesOf<kShortcut>;
  unsigned char* const ring = shared + P::kBytes;
  unsigned char* const staging = ring + T::kStages * T::kStageBytes;
  auto* const sums_received = reinterpret_cast<float4*>(staging + T::kStagingBytes);
  uint64_t* const full =
      reinterpret_cast<uint64_t*>(staging + T::kStagingBytes + T::kReceivedBytes);
  uint64_t* const empty = full + T::kStages;
  uint64_t* const patch_full = empty + T::kStages;
  uint64_t* const patch_normal = patch_full + P::kSlots;  // transformed
  uint64_t* const patch_empty = patch_normal + P::kWindowed;
  uint64_t* const turn = patch_empty + P::kSlots;  // [2]: a consumer's turn to multiply
  // [2, kBuffers]: a consumer's buffer is free, its residual there.
  uint64_t* const staged = turn + 2;
  uint64_t* const received = staged + 2 * T::kBuffers;
  const auto weights_of = [&](int stage) { return ring + stage * T::kStageBytes; };
  const auto patch_of = [&](int slot) { return P::At(shared, slot); };

  // The same in all lanes, and known to be, so that descriptors live in uniform registers.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), group = warp / 4;
  const int rank = static_cast<int>(ClusterRank());
  const Depth& depth = work.depth;
  const int steps = depth.steps.value;
  constexpr int kShared = kDivided ? 1 : T::kCluster;  // blocks that share weights
  const int tiles = work.m_tiles / kShared * work.n_tiles.value;
  const int first_tile = blockIdx.x / T::kCluster, stride = gridDim.x / T::kCluster;
  const auto tile_of = [&](int index) { return TileOf<T, kShared>(work, index, rank); };
  // Of each of its tiles.
  using Step = StepAt<kShortcut, kTaps>;
  const Step begin(conv, work, kDivided ? steps * rank >> 1 : 0);
  const int steps_here = kDivided ? (steps * (rank + 1) >> 1) - (steps * rank >> 1) : steps;
  int end_chunk = depth.windowed, end_of_shortcut = depth.shortcut;
  if (kDivided) {
    const Step end(conv, work, steps * (rank + 1) >> 1);
    end_chunk = end.chunk + (end.tap > 0 ? 1 : 0), end_of_shortcut = end.of_shortcut;
  }
  const bool normalises = T::kNormalises && conv.input_factors != nullptr;

  const auto copy_weights = [&](int n0, const Step& step, int at) {
    constexpr int kPart = T::kN / kShared;
    const WeightAt from = WeightOf(work, step);
    ArriveExpecting(&full[at], T::kStageBytes);
    if (kShared == 1) {
      CopyWeights(weights_of(at), from.map, &full[at], from.channel, from.tap, n0, 0);
    } else {
      CopyBoxTo(weights_of(at) + rank * kPart * kStepBytes, from.map, &full[at], from.channel,
                from.tap, n0 + rank * kPart, 0, static_cast<uint16_t>((1 << kShared) - 1));
    }
  };

  if (warp == 8 && ElectOne()) {
    PrefetchMaps<kShortcut>(work);
    for (int stage = 0; stage < T::kStages; ++stage) {
      InitBarrier(&full[stage], 1);
      InitBarrier(&empty[stage], (T::kTurns ? 1 : 2) * kShared);
    }
    for (int slot = 0; slot < P::kSlots; ++slot) {
      InitBarrier(&patch_full[slot], 1);
      InitBarrier(&patch_empty[slot], T::kTurns ? 1 : 2);
    }
    for (int slot = 0; slot < P::kWindowed; ++slot) {
      InitBarrier(&patch_normal[slot], T::kTransformers);
    }
    for (int i = 0; i < 2; ++i) InitBarrier(&turn[i], 4);  // a lane of each warp
    for (int i = 0; i < 2 * T::kBuffers; ++i) InitBarrier(&staged[i], 1);
    if (kDivided) InitBarrier(received, 1);
    FenceBarrierInit();
    if (kDivided) ArriveExpecting(received, T::kReceivedBytes);
  }
  __syncthreads();
  ArriveAtCluster();

  if (group >= 2) {
    KeepRegisters<T::kProducerRegisters>();
    WaitForCluster();
    if (warp == 8 && ElectOne()) {
      // Weights are nobody's output: the first ones travel while the predecessor still runs.
      const TileAt its_first = tile_of(first_tile);
      Step at = begin;
      for (int stage = 0; stage < T::kStages; ++stage) {
        copy_weights(its_first.n0, at, stage);
        at.Advance(conv, work);
      }
      WaitForPredecessors();

      // The next patch under nine taps, and the next one of a shortcut.
      struct Next {
        int index, chunk, slot;
        TileAt tile;
        int round = 0;
      };
      Next next = {first_tile, begin.chunk, 0, its_first};
      Next next_of_shortcut = {first_tile, begin.of_shortcut, P::kWindowed, its_first};
      const auto copy_next = [&](auto of_shortcut, Next& at) {
        constexpr bool kOf = decltype(of_shortcut)::value;
        const int end = kOf ? end_of_shortcut : end_chunk;
        if (at.index >= tiles || (kDivided && at.chunk == end)) return;
        const int around = kOf ? 0 : 1;
        Wait(&patch_empty[at.slot], (at.round & 1) ^ 1);
        ArriveExpecting(&patch_full[at.slot], kOf ? kShortcutSlot : work.patch_bytes);
        const ChunkAt from = kOf ? ChunkOf(work.shortcut, at.chunk) : ChunkOf(work, at.chunk);
        CopyBox(patch_of(at.slot), from.map, &patch_full[at.slot], from.channel, at.tile.x - around,
                at.tile.y - around, at.tile.image);
        if (++at.slot == (kOf ? P::kSlots : P::kWindowed)) {
          at.slot = kOf ? P::kWindowed : 0, ++at.round;
        }
        if (++at.chunk == end && !kDivided) {
          at.chunk = 0, at.index += stride;
          at.tile = tile_of(at.index);
        }
      };
      const auto copy_next_patch = [&] { copy_next(std::false_type(), next); };
      const auto copy_next_of_shortcut = [&] {
        if constexpr (kShortcut) copy_next(std::true_type(), next_of_shortcut);
      };
      // Of a run that begins within a patch, kLead of it is among the first stages.
      const int patches = kDivided && !kShortcut && begin.tap > 0 ? 3 : 2;
      for (int i = 0; i < patches; ++i) copy_next_patch();
      for (int i = 0; i < P::kOfShortcut; ++i) copy_next_of_shortcut();

      // When this tap's weights find room, the patch before has been used up.
      constexpr int kLead = T::kStages < 7 ? T::kStages + 1 : 8;
      // With a shortcut the two that there is room for come and go by their steps.
      Step used = begin;
      const auto replace_used = [&] {
        ReplaceUsed(conv, work, used, copy_next_patch, copy_next_of_shortcut);
      };
      int stage = 0, round = 1, step = T::kStages;
      for (int index = first_tile; index < tiles; index += stride, step = 0, at = begin) {
        const int n0 = tile_of(index).n0;
#pragma unroll 1
        for (; step < steps_here; ++step) {
          Wait(&empty[stage], (round & 1) ^ 1);
          copy_weights(n0, at, stage);
          if (kShortcut) {
            replace_used();
          } else if (at.tap == kLead) {
            copy_next_patch();
          }
          at.Advance(conv, work);
          if (++stage == T::kStages) stage = 0, ++round;
        }
      }
      for (int i = 0; kShortcut && i < T::kStages; ++i) replace_used();
      ReleaseDependents();
    } else if (warp > 8 && normalises) {
      const int thread = threadIdx.x - 9 * 32, vector = thread % 8;
      const int channels = conv.channels + conv.channels2;
      WaitForPredecessors();
      int slot = 0, round = 0;
      for (int index = first_tile; index < tiles; index += stride) {
        const TileAt tile = tile_of(index);
        const uint32_t inside = PixelsInside<T::kTransformers / 8, (2 * kUnit + 2) * (kUnit + 2)>(
            conv, work.pitch, thread, tile.y - 1, tile.x - 1);
#pragma unroll 1
        for (int chunk = begin.chunk; chunk < end_chunk; ++chunk) {
          const int from_source = (chunk < work.chunks ? chunk : chunk - work.chunks) * kStep;
          const bool has_channels =
              from_source + vector * 8 < (chunk < work.chunks ? conv.channels : conv.channels2);
#pragma unroll 1
          for (int i = 0; i < work.images_at_once; ++i) {
            const bool exists = has_channels && tile.image + i < conv.images;
            float factor[8], offset[8];
            if (exists) {
              const float* const from = conv.input_factors +
                                        int64_t{tile.image + i} * 2 * channels +
                                        ChannelOf(chunk, work.chunks, conv.channels) + vector * 8;
              LoadEight(from, factor);
              LoadEight(from + channels, offset);
            }
            if (i == 0) Wait(&patch_full[slot], round & 1);
            if (!exists) continue;
            Normalise<T::kTransformers / 8>(patch_of(slot), i * work.unit_pixel, thread, inside,
                                            factor, offset);
          }
          FenceForCopies();  // products read by the same way as the copy engine
          Arrive(&patch_normal[slot]);
          if (++slot == P::kWindowed) slot = 0, ++round;
        }
      }
    }
  } else {
    TakeRegisters<T::kConsumerRegisters>();
    WaitForCluster();
    uint64_t* const patch_ready = normalises ? patch_normal : patch_full;
    const auto give_turn = [&] {
      if (threadIdx.x % 32 == 0) Arrive(&turn[1 - group]);
    };
    const bool leads = threadIdx.x % 128 == 0;
    const bool has_first_run = !kDivided || rank == 0, finishes = !kDivided || group == rank;
    const bool adds = has_first_run && work.add.data != nullptr;
    // Of a row of this consumer's: its buffer, by number, and its unit of the tile.
    const auto buffer_of = [&](int row) { return group * T::kBuffers + row % T::kBuffers; };
    const auto unit_of = [&](const TileAt& tile, int row) {
      const int unit = T::kTurns ? row : group;
      TileAt at = tile;
      if (work.images_at_once == 2) {
        at.image += unit;
      } else {
        at.x += unit * kUnit;
      }
      return at;
    };
    const auto load_per_image = [&](const TileAt& tile, int row, auto& added) {
      const int image = min(unit_of(tile, row).image, conv.images - 1);  // that exists
      LoadPerImage<T::kBox>(conv, work.add, image, tile.n0, added);
    };
    const auto begin_staging = [&](const TileAt& tile, int row) {
      if (!leads) return;
      const bool has_residual = conv.residual.data != nullptr;
      const int buffer = buffer_of(row);
      ArriveExpecting(&staged[buffer], has_residual ? T::kBufferBytes : 0);
      if (!has_residual) return;
      const TileAt at = unit_of(tile, row);
      for (int box = 0; box < T::kBoxes; ++box) {
        CopyBox(staging + buffer * T::kBufferBytes + box * T::kBoxBytes, &work.residual,
                &staged[buffer], tile.n0 + box * T::kBox, at.x, at.y, at.image);
      }
    };

    constexpr int kTakers = T::kTurns ? 2 : 1;
    // In the sequences of steps and of patches.
    int step_at = T::kTurns ? group * steps : 0;
    int patch_at = T::kTurns ? group * depth.windowed : 0, shortcut_at = 0;
    int tiles_done = 0;

    WaitForPredecessors();  // whose output is read and overwritten from here on
    for (int index = first_tile + (T::kTurns ? group * stride : 0); index < tiles;
         index += kTakers * stride, ++tiles_done) {
      const TileAt tile = tile_of(index);
      int stage = step_at % T::kStages, round = step_at / T::kStages;
      int slot = patch_at % P::kWindowed, patch_round = patch_at / P::kWindowed;
      step_at += kTakers * steps, patch_at += kTakers * depth.windowed;

      int tap = begin.tap, tap_x = tap % 3, tap_pixel = tap / 3 * work.pitch.value + tap_x;
      int due = begin.due;
      int until_turn = first_tile + stride < tiles ? T::kLag : 1;  // one tile: no end to hide
      uint32_t added[T::kSums / 4];

      // Of the step before the one under way: given back when that is done.
      int used_stage = -1, used_slot = -1;
      const auto give_back = [&] {
        if (used_stage >= 0 && threadIdx.x % 128 < kShared) {
          ArriveAt(&empty[used_stage], kDivided ? rank : threadIdx.x % 128);
        }
        if (used_slot >= 0 && leads) Arrive(&patch_empty[used_slot]);
      };
      // Run number `run` of k.
      const auto multiply = [&](auto is_first, int run, auto& sums) {
        constexpr bool kIsFirst = decltype(is_first)::value;
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) PinSums(sums[i]);
        bool continues = run == 0;  // the sum that there is
        const int count =
            kDivided ? steps_here
                     : (steps * (run + 1) >> work.log_splits) - (steps * run >> work.log_splits);
        if (kDivided) Wait(&patch_ready[slot], patch_round & 1);  // within which it may begin
#pragma unroll 1
        for (int step = 0; step < count; ++step) {
          const bool of_shortcut = kShortcut && due >= steps;
          // A step's patch is the window's present one, or the shortcut's next.
          const int shortcut_slot = P::kWindowed + shortcut_at % 2;
          if (of_shortcut) {
            Wait(&patch_full[shortcut_slot], shortcut_at / 2 & 1);
          } else if (tap == 0) {
            Wait(&patch_ready[slot], patch_round & 1);
          }
          Wait(&full[stage], round & 1);
          FenceProducts();
          const uint64_t weight = MatrixDescriptor(weights_of(stage));
          const int pitch = of_shortcut ? work.shortcut_pitch : work.pitch.value;
          const int unit_pixel = of_shortcut ? work.shortcut_unit_pixel : work.unit_pixel;
          const int pixel = (of_shortcut ? 0 : tap_pixel) + (T::kTurns ? 0 : group * unit_pixel);
          const uint64_t input =
              PatchDescriptor(patch_of(of_shortcut ? shortcut_slot : slot), pitch) +
              (pixel * kStepBytes >> 4);
#pragma unroll
          for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
            for (int i = 0; i < T::kRows; ++i) {
              const uint64_t unit = input + 2 * k + i * (work.unit_pixel * kStepBytes >> 4);
              if (!kIsFirst && k == 0) {
                Multiply(sums[i], unit, weight, continues);
              } else {
                MultiplyAdd(sums[i], unit, weight + 2 * k);
              }
            }
          }
          CommitProducts();
          continues = true;
          if (T::kFold && --until_turn == 0 && group == 0) give_turn();
          WaitProducts<1>();  // the previous step's
          give_back();
          used_stage = stage;
          due += depth.shortcut;
          used_slot = of_shortcut ? shortcut_slot : tap == kTaps - 1 ? slot : -1;
          if (of_shortcut) {
            due -= steps, ++shortcut_at;
          } else {
            ++tap, ++tap_x, ++tap_pixel;
            if (tap_x == 3) tap_x = 0, tap_pixel += work.pitch.value - 3;
            if (used_slot >= 0) {
              tap = tap_x = tap_pixel = 0;
              if (++slot == P::kWindowed) slot = 0, ++patch_round;
            }
          }
          if (++stage == T::kStages) stage = 0, ++round;
        }
        if (T::kTurns) give_turn();
        WaitProducts<0>();
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) PinSums(sums[i]);
        give_back();
        used_stage = used_slot = -1;
      };

      float total[T::kRows][T::kSums], sums[T::kRows][T::kFold ? T::kSums : 1];
      const auto add_per_image = [&] {
        if (!adds) return;
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) {
          if (!T::kAddsEarly) load_per_image(tile, i, added);
          AddPerImage(added, 0, total[i]);
          AddPerImage(added, 1, total[i]);
        }
      };

      if constexpr (T::kFirstIsTotal) {
#pragma unroll
        for (int i = 0; i < T::kRows; ++i) {
          BeginSums(has_first_run ? work.bias : nullptr, tile.n0, total[i]);
        }
        AnySums(sums[0]);
      } else {
        BeginSums(work.bias, tile.n0, sums[0]);
      }
      if (T::kAddsEarly && adds) load_per_image(tile, 0, added);
      if (T::kTurns || group == 1) Wait(&turn[group], (tiles_done + group + 1) & 1);
      const int last_run = T::kFold && !kDivided ? (1 << work.log_splits) - 1 : 0;
      for (int run = 0; run <= last_run; ++run) {
        if (run == last_run && finishes) {
          if (leads) WaitUntilStoresRead();  // of the tile before
#pragma unroll
          for (int row = 0; row < T::kBuffers; ++row) begin_staging(tile, row);
        }
        if (T::kFirstIsTotal && run == 0) {
          multiply(std::true_type(), run, total);
          add_per_image();
          continue;
        }
        if constexpr (T::kFold) {
          multiply(std::false_type(), run, sums);
          if (!T::kFirstIsTotal && run == 0) {
#pragma unroll
            for (int j = 0; j < T::kSums; ++j) total[0][j] = sums[0][j];
            add_per_image();
          } else {
#pragma unroll
            for (int j = 0; j < T::kSums; ++j) total[0][j] += sums[0][j];
          }
        }
      }

      if constexpr (kDivided) {
        float4* const at = sums_received + threadIdx.x % 128;
        if (finishes) WaitForStores(received, 0);
#pragma unroll
        for (int j = 0; j < T::kSums / 4; ++j) {
          float* const four = &total[0][4 * j];
          if (finishes) {
            const float4 other = at[j * 128];
            four[0] += other.x, four[1] += other.y, four[2] += other.z, four[3] += other.w;
          } else {
            StoreAt(AddressAt(at + j * 128, group), AddressAt(received, group),
                    float4{four[0], four[1], four[2], four[3]});
          }
        }
        if (!finishes) continue;
      }

#pragma unroll
      for (int row = 0; row < T::kRows; ++row) {
        const int buffer = buffer_of(row);
        unsigned char* const unit = staging + buffer * T::kBufferBytes;
        Wait(&staged[buffer], (tiles_done * (T::kRows / T::kBuffers) + row / T::kBuffers) & 1);
        FinishStaged<T::kBox>(
            conv, total[row], [&](int box) { return unit + box * T::kBoxBytes; }, [](int) {});
        FenceForCopies();
        SyncWarpgroup(group);
        const TileAt at = unit_of(tile, row);
        if (leads) {
          for (int box = 0; box < T::kBoxes; ++box) {
            StoreBox(&work.out, unit + box * T::kBoxBytes, tile.n0 + box * T::kBox, at.x, at.y,
                     at.image);
          }
          CommitStores();
        }
        if (row + T::kBuffers < T::kRows) {
          if (leads) WaitUntilStoresRead();
          begin_staging(tile, row + T::kBuffers);
        }
      }
    }
    if (leads) WaitUntilStoresRead();
  }

  ArriveAtCluster();  // no block may go while another signals or copies into its shared memory
  WaitForCluster();
#endif
}

using Tile64 = Tile<64, false, 8, 1, 184, 72, 512>;
using Tile80 = Tile<80, false, 8, 1, 184, 72, 512>;
using Tile128 = Tile<128, false, 7, 1, 184, 72, 512>;
using Tile160 = Tile<160, false, 5, 1, 216, 72, 384>;
using Tile192 = Tile<192, false, 4, 1, 216, 72, 384>;
using Tile128Turns = Tile<128, true, 5, 2, 184, 72, 512>;
using Tile160Turns = Tile<160, true, 5, 1, 216, 72, 384>;
using Tile192Turns = Tile<192, true, 4, 1, 232, 40, 384>;

template <typename Do>
cudaError_t WithTile(HopperTile tile, const Do& what) {
  switch (tile) {
    case HopperTile::kPatch64:
      return what(Tile64());
    case HopperTile::kPatch80:
      return what(Tile80());
    case HopperTile::kPatch128:
      return what(Tile128());
    case HopperTile::kPatch160:
      return what(Tile160());
    case HopperTile::kPatch192:
      return what(Tile192());
    case HopperTile::kPatch128Turns:
      return what(Tile128Turns());
    case HopperTile::kPatch160Turns:
      return what(Tile160Turns());
    case HopperTile::kPatch192Turns:
      return what(Tile192Turns());
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename T>
cudaError_t LaunchWithTile(const Conv2dLaunch& conv, const HopperPlan& plan, const Queue& queue) {
  Work work;
  work.log_splits = BinaryLogarithm(plan.splits);
  // Each split has a step: there are kTaps and more.
  if (plan.splits != 1 << work.log_splits || plan.splits > kTaps) return cudaErrorInvalidValue;
  if (!SuitsPatches(conv) || ((plan.splits > 1 || conv.shortcut.x.data != nullptr) && !T::kFold) ||
      (conv.input_factors != nullptr && !T::kNormalises)) {
    return cudaErrorInvalidValue;
  }
  work.images_at_once = conv.width <= kUnit ? 2 : 1;
  const int tiles_x = work.images_at_once == 2 ? 1 : (conv.width + 2 * kUnit - 1) / (2 * kUnit);
  const int tiles_y = (conv.height + kUnit - 1) / kUnit;
  const int groups = (conv.images + work.images_at_once - 1) / work.images_at_once;
  const int m_tiles = tiles_x * tiles_y * groups;
  const bool divided = T::kDivides && plan.cluster > 1;
  static_assert(!T::kDivides || kLeastStepsDivided >= 2 * T::kStages);
  if (divided && (plan.splits != 2 || plan.cluster != 2 || StepsOf(conv) < kLeastStepsDivided)) {
    return cudaErrorInvalidValue;
  }
  const int shared = divided ? 1 : T::kCluster;
  work.m_tiles = (m_tiles + shared - 1) / shared * shared;
  work.tiles_x = Divisor(tiles_x), work.tiles_y = Divisor(tiles_y);
  work.n_tiles = Divisor((conv.outputs + T::kN - 1) / T::kN);
  const int pitch = work.images_at_once == 2 ? kUnit + 2 : 2 * kUnit + 2;
  work.pitch = Divisor(pitch);
  const int patch_pixels = pitch * (kUnit + 2);
  work.unit_pixel = work.images_at_once == 2 ? patch_pixels : kUnit;
  work.shortcut_pitch = work.images_at_once == 2 ? kUnit : 2 * kUnit;
  work.shortcut_unit_pixel = work.images_at_once == 2 ? kUnit * kUnit : kUnit;
  work.patch_bytes = patch_pixels * work.images_at_once * kStepBytes;
  work.bias = conv.bias;
  work.add = conv.add;

  if (GetTensorMapEncoders().error != cudaSuccess) return GetTensorMapEncoders().error;
  const auto encode_patch = [&](CUtensorMap* map, const Rows& rows, int channels, bool shortcut) {
    return EncodeImages(map, rows, channels, conv, kStep, shortcut ? work.shortcut_pitch : pitch,
                        shortcut ? kUnit : kUnit + 2, work.images_at_once);
  };
  CUresult result = EncodeDepth(&work, conv, T::kN / shared, encode_patch);
  if (result == CUDA_SUCCESS) {
    result = EncodeImages(&work.out, conv.out, conv.outputs, conv, T::kBox, kUnit, kUnit, 1);
  }
  if (result == CUDA_SUCCESS && conv.residual.data != nullptr) {
    result =
        EncodeImages(&work.residual, conv.residual, conv.outputs, conv, T::kBox, kUnit, kUnit, 1);
  }
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;

  const int64_t tiles = int64_t{work.m_tiles / shared} * work.n_tiles.value;
  const bool of_shortcut = conv.shortcut.x.data != nullptr;
  if constexpr (T::kDivides) {
    if (divided) {
      return LaunchDependent(
          of_shortcut ? Conv3x3Kernel<T, true, true> : Conv3x3Kernel<T, false, true>,
          {.grid = static_cast<unsigned>(tiles * T::kCluster),
           .block = T::kThreads,
           .shared_bytes = T::kSharedBytes,
           .cluster = T::kCluster},
          queue, EpilogueOf(conv), work);
    }
  }
  if constexpr (T::kFold) {
    if (of_shortcut) {
      return LaunchPersistent<T>(Conv3x3Kernel<T, true, false>, tiles, T::kCluster, conv, work,
                                 queue);
    }
  }
  return LaunchPersistent<T>(Conv3x3Kernel<T, false, false>, tiles, T::kCluster, conv, work, queue);
}

}  // namespace

bool SuitsPatches(const Conv2dLaunch& conv) {
  return conv.kernel == 3 && conv.stride == 1 && conv.pad_top == 1 && conv.pad_left == 1 &&
         !conv.upsample2x && conv.out_height == conv.height && conv.out_width == conv.width &&
         conv.height % kUnit == 0 && (conv.width % (2 * kUnit) == 0 || conv.width == kUnit) &&
         conv.outputs % 64 == 0 && InVectors(conv.x) && InVectors(conv.x2) &&
         conv.channels % 8 == 0 && conv.channels2 % 8 == 0 && HasVectorOutputs(conv) &&
         SuitsShortcut(conv);
}

cudaError_t LaunchConv3x3(const Conv2dLaunch& conv, const HopperPlan& plan, const Queue& queue) {
  return WithTile(plan.tile,
                  [&](auto tile) { return LaunchWithTile<decltype(tile)>(conv, plan, queue); });
}

cudaError_t LoadConv3x3HopperKernels() {
  for (HopperTile tile : {HopperTile::kPatch64, HopperTile::kPatch80, HopperTile::kPatch128,
                          HopperTile::kPatch160, HopperTile::kPatch192, HopperTile::kPatch128Turns,
                          HopperTile::kPatch160Turns, HopperTile::kPatch192Turns}) {
    const cudaError_t error = WithTile(tile, [](auto chosen) {
      using T = decltype(chosen);
      cudaError_t loaded = LoadKernel(Conv3x3Kernel<T, false, false>, T::kSharedBytes);
      if constexpr (T::kFold) {
        if (loaded == cudaSuccess) {
          loaded = LoadKernel(Conv3x3Kernel<T, true, false>, T::kSharedBytes);
        }
      }
      if constexpr (T::kDivides) {
        if (loaded == cudaSuccess) {
          loaded = LoadKernel(Conv3x3Kernel<T, false, true>, T::kSharedBytes);
        }
        if (loaded == cudaSuccess) {
          loaded = LoadKernel(Conv3x3Kernel<T, true, true>, T::kSharedBytes);
        }
      }
      return loaded;
    });
    if (error != cudaSuccess) return error;
  }
  return GetTensorMapEncoders().error;
}

}  // namespace denoised::cuda
