// SPDX-License-Identifier: Apache-2.0
// Group normalisation in one pass over memory by persistent CTAs, for batches of large images that
// fill the device several times over. The bits are group_norm_cluster.cu's.
//
// Policy. A work tile is a slice of an image, of whole groups. A team of CTAs takes one work tile
// after another; each CTA holds its pixels of it in shared memory, in chunks that TMA loads and
// stores. The warps of a CTA are specialised: chunks of one work tile are loaded and reduced while
// those of the previous one are normalised and stored. This hides the exchange between CTAs.
//
//   producer      loads chunks as stages become free, and stores them
//   reducers      sum leaves as chunks arrive, and publish the CTA's sums of a work tile
//   factor warps  turn the sums of all CTAs into factors and offsets
//   normalisers   apply them to chunks in place; results in e4m3 they store themselves
//
//   memory ──▶ full ──▶ reducers ──▶ sums_full ──▶ factor warps ──▶ ready ──▶ normalisers ──▶ done
//
// Teams. Up to sixteen CTAs are a cluster and exchange sums by st.async. Larger teams exchange sums
// through global memory, which is slower; the launch is cooperative, so that all CTAs are resident.
//
// Shared memory. A row is a piece of a pixel's channels. Four neighbouring pixels must lie in
// different banks: rows are padded by TMA. If the exchange is long and much must be buffered, they
// are swizzled instead, in pieces of 64 channels.
//
// Tagged sums. In global memory a CTA publishes its sums of a group as 16 bytes, written and read
// in one access, with the number of the launch, which the last CTA increments, and of the work
// tile. So nothing has to be cleared and no fence is needed; a fence would wait for all other
// stores of the SM. The reducers publish and the factor warps poll: one kind of warp for both was
// slower.
//
// Ring lengths. The chunks in a CTA belong to at most `ahead` work tiles, of which the last is
// being reduced. When a CTA has reduced work tile u, its normalisers are done with u − ahead. So
// all CTAs had published the sums of u − ahead; hence they have normalised u − 2 · ahead and no
// longer need its sums. This gives the lengths of the rings of tagged sums, of sums that other CTAs
// write, and of factors; none needs an "empty" barrier.

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <type_traits>
#include <utility>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/backend/cuda/fast_divmod.h"
#include "engine/backend/cuda/group_norm.cuh"
#include "engine/backend/cuda/hopper.cuh"
#include "engine/backend/cuda/tensor_map.h"
#include "engine/core/mutex.h"

namespace denoised::cuda {
namespace {

constexpr int kMaxThreads = 896;
constexpr int kSharedBytes = 227 * 1024;  // per CTA, which has an SM to itself
constexpr int kMaxStages = 32;
constexpr int kMaxAhead = 8;
constexpr int kAtOnce = 2;  // leaves of a reducer, vectors of a normaliser, in registers
constexpr int kLaneLeaves = 4, kRunsAtOnce = 4;  // leaves that a lane adds, runs of each
constexpr int kMostReducers = 384;  // as measured, like threads and the sizes of chunks
constexpr int kFewChunkBytes = 8192, kMostChunkBytes = 24 * 1024;
// Loads in flight per CTA, in whole chunks. With fewer, memory is slower; with more, it is no
// faster and the exchange of sums takes longer.
constexpr int kFewInFlightBytes = 44 * 1024;
constexpr int kSectorBytes = 32;                          // of L2
constexpr int kMaxBoxChannels = 256;                      // TMA's limit
constexpr int kSwizzledChannels = 64, kSwizzledRows = 8;  // of CU_TENSOR_MAP_SWIZZLE_128B
constexpr int kMaxTeam = 128;                             // blocks
constexpr int kSumsPerThread = 8;                         // tagged sums that a thread polls
// Earlier polls find nothing and delay the stores of other CTAs.
constexpr unsigned kExchangeNs = 400;
static_assert(kMaxTeam <= kSumsPerThread * kMaxCluster, "nodes");

// Threads by kind, in whole warps: producer, factor warps, reducers, normalisers. More factor warps
// poll sums that come through global memory. In e4m3 a normaliser has more to compute for each byte
// that it stores.
constexpr int kProducers = 32;
struct Threads {
  int factors, few_normalisers;
};
constexpr Threads kAnyThreads = {256, 160}, kE4m3InClusters = {128, 256};

struct Plan {
  FastDivmod group_channels;
  int slice_groups = 0, slice_channels = 0;
  FastDivmod slices;                   // per image
  int tiles = 0;                       // images · slices
  int piece_channels = 0, pieces = 0;  // per piece; per slice
  int pieces1 = 0;                     // of all channels of the first source
  bool swizzled = false;
  int pitch = 0;                       // bytes from a row to the next
  int vectors = 0;                     // per pixel of a slice
  int leaf_lines = 0;                  // leaves that the reducers take at a time
  int pixel_lines = 0;                 // pixels that the normalisers take at a time
  int factors = 0;                     // threads, in whole warps, like
  int reducers = 0, normalisers = 0;   // these
  int chunk_pixels = 0, chunks = 0;    // per chunk; per CTA and work tile
  int in_flight = 0;                   // chunks being loaded at a time
  int stages = 0;                      // chunks in shared memory
  int ahead = 0;                       // work tiles that these belong to
  int sum_slots = 0;                   // slots of sums: 2 · ahead if other CTAs write
  int leaves = 0;                      // per block
  int blocks = 0;                      // CTAs per team: those of a slice
  bool cluster = false;                // the team is a cluster, or a single CTA
  int nodes = 0;                       // sums of a group that a factor thread adds: of CTAs, or of
                                       // kSumsPerThread CTAs whose sums came through global memory
  float count_inverse = 0;             // 1 / elements of a group
  int leaf_bits = 0, lane_leaves = 0;  // 2^bits lanes add a group's leaves, lane_leaves each
};

struct Maps {
  CUtensorMap x, x2, out;  // out: if it is bf16
};

/// Offsets in a block's shared memory, in bytes. The barriers are at the beginning.
struct Layout {
  int chunk_bytes;
  int leaf_stride;  // Sums of a leaf: odd, so that leaves lie in different banks
  int chunks, leaves, sums, affines, bytes;

  __host__ __device__ Layout(const Plan& plan, int run)
      : chunk_bytes(plan.pieces * plan.chunk_pixels * plan.pitch),
        leaf_stride(plan.slice_channels / run | 1),
        chunks(1024),
        leaves(chunks + plan.stages * chunk_bytes),  // with one more, which idle lanes write
        sums(leaves + (plan.leaves + 1) * leaf_stride * kSumsBytes),
        affines((sums + plan.sum_slots * plan.nodes * plan.slice_groups * kSumsBytes + 15) / 16 *
                16),
        bytes(affines + (plan.ahead + 1) * plan.slice_channels * kAffineBytes) {}
};
static_assert((2 * kMaxStages + 3 * kMaxAhead + 1) * sizeof(uint64_t) <= 1024, "barriers");

/// A CTA's sums of a group in global memory, tagged with the launch and the work tile.
struct TaggedSums {
  Sums sums;
  uint32_t launch, tile;
};
static_assert(sizeof(TaggedSums) == 16);
/// One 128-bit access, so a reader sees a whole write or none of it.
__device__ inline void StoreTagged(TaggedSums* to, const TaggedSums& word) {
  asm volatile(
      "{\n.reg .b64 low, high;\n.reg .b128 word;\nmov.b64 low, {%1, %2};\nmov.b64 high, {%3, %4};\n"
      "mov.b128 word, {low, high};\nst.relaxed.gpu.global.b128 [%0], word;\n}" ::"l"(to),
      "f"(word.sums.x), "f"(word.sums.squares), "r"(word.launch), "r"(word.tile)
      : "memory");
}
__device__ inline TaggedSums LoadTagged(const TaggedSums* from) {
  TaggedSums word;
  asm volatile(
      "{\n.reg .b64 low, high;\n.reg .b128 word;\nld.relaxed.gpu.global.b128 word, [%4];\n"
      "mov.b128 {low, high}, word;\nmov.b64 {%0, %1}, low;\nmov.b64 {%2, %3}, high;\n}"
      : "=f"(word.sums.x), "=f"(word.sums.squares), "=r"(word.launch), "=r"(word.tile)
      : "l"(from)
      : "memory");
  return word;
}
/// The beginning of GroupNormLaunch::flags, in its own L2 line. TaggedSums [CTAs][2 ·
/// ahead][slice_groups] follow.
struct alignas(256) LaunchCounter {
  uint32_t launches;  // number of launches that have ended
  uint32_t done;      // finished blocks of the current one
};

/// Adds as a binary tree.
template <int kCount>
__device__ inline Sums AddUp(Sums (&sums)[kCount]) {
#pragma unroll
  for (int n = 1; n < kCount; n *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2 * n) sums[i] = sums[i] + sums[i + n];
  }
  return sums[0];
}

/// A position in a ring of `count`, and the parity of its barrier's phase.
struct Place {
  int index = 0;
  uint32_t parity = 0;
  __device__ void Next(int count) {
    if (++index == count) index = 0, parity ^= 1;
  }
};

/// A CTA and the work of its warps. kRun, kOut: as in group_norm_cluster.cu.
template <int kRun, Element kOut>
struct Block {
  static constexpr int kRuns = kVector / kRun;
  static constexpr bool kRounds = kOut == Element::kE4m3x2;

  const GroupNormLaunch& norm;
  const Plan& plan;
  const Maps& maps;
  unsigned char* shared;
  Layout layout = Layout(plan, kRun);
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);  // [stages]
  uint64_t* done = full + kMaxStages;                    // likewise
  uint64_t* sums_full = done + kMaxStages;               // [2 · ahead]
  uint64_t* ready = sums_full + 2 * kMaxAhead;           // [ahead + 1]
  unsigned char* chunks = shared + layout.chunks;        // [stages][pieces][chunk_pixels][pitch]
  // [leaves + 1][layout.leaf_stride], by runs
  Sums* leaves = reinterpret_cast<Sums*>(shared + layout.leaves);
  Sums* sums = reinterpret_cast<Sums*>(shared + layout.sums);  // [sum_slots][nodes][slice_groups]
  // [ahead + 1][kVector / 2][vectors][2], by lanes that read 16 bytes each
  Affine* affines = reinterpret_cast<Affine*>(shared + layout.affines);
  int lane = threadIdx.x % 32;
  LaunchCounter* counter = static_cast<LaunchCounter*>(norm.flags);  // of teams that are no cluster
  uint32_t launch = 0;                                               // its number, not zero
  int rank = blockIdx.x;                                             // in the team
  int first_tile = blockIdx.y, step = gridDim.y;                     // the team's work tiles
  int begin = rank * plan.leaves * kLeafPixels;                      // of the CTA's pixels

  __device__ bool InCluster() const { return plan.cluster && plan.blocks > 1; }
  /// In reverse order: the previous convolution left the last image in L2.
  __device__ int ImageOf(int tile) const { return norm.images - 1 - tile / plan.slices; }
  __device__ int ChannelOf(int tile) const { return tile % plan.slices * plan.slice_channels; }
  __device__ int TileSums() const { return plan.nodes * plan.slice_groups; }
  /// The sums that CTA `of_rank` of the team publishes in `slot`, [slice_groups].
  __device__ TaggedSums* TaggedSumsOf(int of_rank, int slot) const {
    const int block = blockIdx.y * plan.blocks + of_rank;
    return reinterpret_cast<TaggedSums*>(counter + 1) +
           (block * 2 * plan.ahead + slot) * plan.slice_groups;
  }
  /// Offset of a vector in a chunk, in bytes.
  __device__ int PlaceOf(int pixel, int vector) const {
    const int piece_vectors = plan.piece_channels / kVector;
    const int row = vector / piece_vectors * plan.chunk_pixels + pixel;
    const int in_row = vector % piece_vectors;
    return row * plan.pitch + (plan.swizzled ? in_row ^ row % kSwizzledRows : in_row) * 16;
  }

  /// Called by one thread, before any other uses the barriers.
  __device__ void InitBarriers() const {
    for (int i = 0; i < plan.stages; ++i) {
      InitBarrier(full + i, 1);
      InitBarrier(done + i, plan.normalisers / 32);
    }
    for (int i = 0; i < 2 * plan.ahead; ++i) {
      InitBarrier(sums_full + i, InCluster() ? 1 : plan.reducers);
      ExpectSums(i);
    }
    for (int i = 0; i <= plan.ahead; ++i) InitBarrier(ready + i, plan.factors);
    FenceBarrierInit();
  }
  __device__ void ExpectSums(int slot) const {
    if (!InCluster()) return;
    ArriveExpectTx(sums_full + slot, TileSums() * kSumsBytes);
  }

  /// The producer is one thread, so values that change per work tile are computed once per work
  /// tile.
  __device__ void Copy() const {
    struct Chunk {
      int tile, chunk, pixel, image, first_piece;
      Place place;
    };
    const auto begin_tile = [&](Chunk& of) {
      of.chunk = 0, of.pixel = begin;
      of.image = ImageOf(of.tile);
      of.first_piece = of.tile % plan.slices * plan.pieces;
    };
    Chunk in = {first_tile}, out;
    begin_tile(in);
    out = in;
    const int piece_bytes = plan.chunk_pixels * plan.pitch;
    const auto each_piece = [&](const Chunk& of, auto copy) {
      unsigned char* at = chunks + of.place.index * layout.chunk_bytes;
#pragma unroll 1  // to keep the code small
      for (int i = 0; i < plan.pieces; ++i, at += piece_bytes) {
        copy(at, of.first_piece + i, of.pixel, of.image);
      }
    };
    const auto next = [&](Chunk& of) {
      of.place.Next(plan.stages);
      of.pixel += plan.chunk_pixels;
      if (++of.chunk < plan.chunks) return;
      of.tile += step;
      begin_tile(of);
    };
    Place arrived;
    int asked_for = 0;
    const auto load = [&] {
      if (asked_for++ >= plan.in_flight) {
        Wait(full + arrived.index, arrived.parity);
        arrived.Next(plan.stages);
      }
      uint64_t* barrier = full + in.place.index;
      ArriveExpectTx(barrier, layout.chunk_bytes);
      each_piece(in, [&](void* to, int piece, int pixel, int image) {
        const bool first = piece < plan.pieces1;
        // Slices share L2 lines, which must stay until all slices have read them.
        TmaLoadWithHint<kEvictLast>(to, first ? &maps.x : &maps.x2, barrier, 0,
                                    first ? piece : piece - plan.pieces1, pixel, image);
      });
      next(in);
      if (in.tile >= plan.tiles) ReleaseDependents();
    };
    for (int i = 0; i < plan.stages && in.tile < plan.tiles; ++i) load();
    while (out.tile < plan.tiles) {
      Wait(done + out.place.index, out.place.parity);
      if constexpr (!kRounds) {
        each_piece(out, [&](const void* from, int piece, int pixel, int image) {
          TmaStore(&maps.out, from, 0, piece, pixel, image);
        });
        TmaStoreCommit();
      }
      next(out);
      if constexpr (!kRounds) TmaStoreWaitRead();
      if (in.tile < plan.tiles) load();
    }
  }

  /// Polls the tagged sums of all CTAs of the team and adds them to nodes of kSumsPerThread CTAs
  /// each.
  __device__ void GatherSums(int tile, int slot, int thread, Sums* of_nodes) const {
    __nanosleep(kExchangeNs);
    for (int i = thread; i < TileSums(); i += plan.factors) {
      const int node = i / plan.slice_groups, group = i % plan.slice_groups;
      const int blocks = min(kSumsPerThread, plan.blocks - node * kSumsPerThread);
      const TaggedSums* const from = TaggedSumsOf(node * kSumsPerThread, slot) + group;
      const int stride = 2 * plan.ahead * plan.slice_groups;
      TaggedSums words[kSumsPerThread] = {};
      const auto missing = [&](int b) {
        return b < blocks &&
               (words[b].launch != launch || words[b].tile != static_cast<uint32_t>(tile));
      };
      for (bool all = false; !all;) {
#pragma unroll
        for (int b = 0; b < kSumsPerThread; ++b) {
          if (missing(b)) words[b] = LoadTagged(from + b * stride);
        }
        all = true;
#pragma unroll
        for (int b = 0; b < kSumsPerThread; ++b) all &= !missing(b);
      }
      Sums of_blocks[kSumsPerThread];
#pragma unroll
      for (int b = 0; b < kSumsPerThread; ++b) of_blocks[b] = words[b].sums;
      of_nodes[i] = AddUp(of_blocks);
    }
  }
  /// The sum over all CTAs of the team.
  __device__ Sums OfImage(const Sums* of_nodes, int group) const {
    Sums of_quads[kMaxCluster / kQuad] = {};
#pragma unroll
    for (int q = 0; q < kMaxCluster / kQuad; ++q) {
      if (q * kQuad >= plan.nodes) break;
      Sums quad[kQuad];
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const int node = q * kQuad + i;
        quad[i] = node < plan.nodes ? of_nodes[node * plan.slice_groups + group] : Sums{};
      }
      of_quads[q] = AddUp(quad);
    }
    return AddUp(of_quads);
  }

  // In each of the following, `thread` counts the threads of one kind.

  __device__ void MakeFactors(int thread) const {
    Place slot, sum_slot, affine_slot;
    const float half = norm.activation == Activation::kSilu ? 0.5f : 1.0f;  // SiluOfHalf
    for (int tile = first_tile; tile < plan.tiles; tile += step) {
      const int image = ImageOf(tile), channel = ChannelOf(tile);
      Affine* const of_tile = affines + affine_slot.index * plan.slice_channels;
      const auto each_channel = [&](auto make) {
        for (int c = thread; c < plan.slice_channels; c += plan.factors) {
          const int pair = c % kVector / 2 * plan.vectors + c / kVector;
          make(c, of_tile[2 * pair + c % 2]);
        }
      };
      each_channel([&](int c, Affine& affine) {
        affine = {half * norm.gamma[channel + c], half * norm.beta[channel + c]};
        if (norm.scale_shift.data != nullptr) {
          const auto* scales = static_cast<const __nv_bfloat16*>(norm.scale_shift.data) +
                               image * norm.scale_shift.stride + channel;
          const __nv_bfloat16* shifts = scales + norm.channels + norm.channels2;
          affine = Apply(affine, scales[c], shifts[c], half);
        }
      });

      Sums* const of_nodes = sums + sum_slot.index * TileSums();
      WaitForStores(sums_full + slot.index, slot.parity);
      if (thread == 0) ExpectSums(slot.index);
      if (!plan.cluster) {
        GatherSums(tile, slot.index, thread, of_nodes);
        NamedBarrierSync(2, plan.factors);
      }
      each_channel([&](int c, Affine& affine) {
        const Sums of_image = OfImage(of_nodes, c / plan.group_channels);
        affine = Apply(affine, StatisticsOf(of_image, plan.count_inverse, norm.eps));
      });
      Arrive(ready + affine_slot.index);  // by all threads: each releases its own stores
      slot.Next(2 * plan.ahead);
      sum_slot.Next(plan.sum_slots);
      affine_slot.Next(plan.ahead + 1);
    }
    if (!plan.cluster && thread == 0) CountLaunch();
  }
  /// Every CTA reads `launch` before the last one is done.
  __device__ void CountLaunch() const {
    if (atomicAdd(&counter->done, 1) != gridDim.x * gridDim.y - 1) return;
    counter->done = 0;
    counter->launches = launch == ~0u ? 0 : launch;  // never zero, the tag of cleared memory
  }

  __device__ void Sum(int thread) const {
    const int in_quad = thread % kQuad;
    // In swizzled rows, neighbouring quads take vectors that are four apart, so that the four rows
    // read by eight lanes lie in different banks.
    const int quad = thread / kQuad % plan.vectors;
    const int vector = plan.swizzled ? quad / 8 * 8 + quad % 2 * 4 + quad % 8 / 2 : quad;
    const bool idle = thread / kQuad / plan.vectors >= plan.leaf_lines;  // only fills the last warp
    const int line = idle ? 0 : thread / kQuad / plan.vectors;
    int places[kLeafVectors];
#pragma unroll
    for (int i = 0; i < kLeafVectors; ++i) places[i] = PlaceOf(in_quad + i * kQuad, vector);
    const int leaf_bytes = kLeafPixels * plan.pitch;
    const int chunk_leaves = plan.chunk_pixels / kLeafPixels;
    const bool holds = HoldsSums(lane);

    Place stage;
    int slot = 0;
    for (int tile = first_tile; tile < plan.tiles; tile += step) {
      for (int chunk = 0; chunk < plan.chunks; ++chunk) {
        Wait(full + stage.index, stage.parity);
        const unsigned char* const from = chunks + stage.index * layout.chunk_bytes;
        for (int first = 0; first < chunk_leaves; first += kAtOnce * plan.leaf_lines) {
          uint32_t kept[kAtOnce][kLeafVectors][kWords];
#pragma unroll
          for (int l = 0; l < kAtOnce; ++l) {
            const int leaf = first + l * plan.leaf_lines + line;
#pragma unroll
            for (int i = 0; i < kLeafVectors; ++i) {
              const uint4 v = *reinterpret_cast<const uint4*>(from + leaf * leaf_bytes + places[i]);
              Split(v, kept[l][i]);
            }
          }
#pragma unroll
          for (int l = 0; l < kAtOnce; ++l) {
            const int leaf = first + l * plan.leaf_lines + line;
            Sums* const to =
                leaves + vector * kRuns +
                (idle ? plan.leaves : chunk * chunk_leaves + leaf) * layout.leaf_stride;
            SumLeaf<kRun>(kept[l], lane, [&](int r, Sums of_run) {
              // Computed by all lanes, to avoid a branch.
              asm volatile("" : "+f"(of_run.x), "+f"(of_run.squares));
              if (holds) {
                *reinterpret_cast<float2*>(to + r) = make_float2(of_run.x, of_run.squares);
              }
            });
          }
        }
        stage.Next(plan.stages);
      }

      NamedBarrierSync(1, plan.reducers);
      Sums* const mine = sums + slot * TileSums() + (InCluster() ? rank * plan.slice_groups : 0);
      SumGroups(
          plan.slice_groups, plan.leaf_bits, thread / 32, plan.reducers / 32, lane,
          [&](int group, int part, Sums(&lanes)[kLaneLeaves]) { SumOfLane(group, part, lanes); },
          [&](const Sums& of_block, int group, int part) {
            if (InCluster()) {
              for (int to = part; to < plan.blocks; to += 1 << plan.leaf_bits) {
                StoreAsync(ClusterAddress(mine + group, to), ClusterAddress(sums_full + slot, to),
                           of_block.x, of_block.squares);
              }
            } else if (part == 0 && plan.cluster) {
              mine[group] = of_block;
            } else if (part == 0) {
              StoreTagged(TaggedSumsOf(rank, slot) + group,
                          {of_block, launch, static_cast<uint32_t>(tile)});
            }
          });
      if (!InCluster()) Arrive(sums_full + slot);
      NamedBarrierSync(1, plan.reducers);
      if (++slot == 2 * plan.ahead) slot = 0;
    }
  }

  /// Adds a lane's leaves of a group, over runs in order, as SumLeaves() does. But loads do not
  /// wait for sums, and few runs take few instructions.
  __device__ void SumOfLane(int group, int part, Sums (&lanes)[kLaneLeaves]) const {
    int runs = plan.group_channels.value / kRun;
    const Sums* at = leaves + part * plan.lane_leaves * layout.leaf_stride + group * runs;
    const auto add = [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      float2 of_runs[kLaneLeaves][kCount];
#pragma unroll
      for (int l = 0; l < kLaneLeaves; ++l) {
#pragma unroll
        for (int r = 0; r < kCount; ++r) {
          const auto* run = reinterpret_cast<const float2*>(at + l * layout.leaf_stride + r);
          of_runs[l][r] = l < plan.lane_leaves ? *run : float2{};
        }
      }
#pragma unroll
      for (int l = 0; l < kLaneLeaves; ++l) {
#pragma unroll
        for (int r = 0; r < kCount; ++r) {
          lanes[l] = lanes[l] + Sums{of_runs[l][r].x, of_runs[l][r].y};
        }
      }
      at += kCount, runs -= kCount;
    };
#pragma unroll 1
    while (runs >= kRunsAtOnce) add(std::integral_constant<int, kRunsAtOnce>());
#pragma unroll 1
    while (runs > 0) add(std::integral_constant<int, 1>());
  }

  template <typename Activate>
  __device__ void Normalise(int thread, Activate activate) const {
    const int vector = thread % plan.vectors, line = thread / plan.vectors;
    const int first_pixel = line < plan.pixel_lines ? line : plan.chunk_pixels;
    int places[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) places[i] = PlaceOf(line + i * plan.pixel_lines, vector);
    const int step_bytes = kAtOnce * plan.pixel_lines * plan.pitch;
    const float inverse = 1.0f / norm.out.scale;  // kRounds
    Place stage, affine_slot;
    for (int tile = first_tile; tile < plan.tiles; tile += step) {
      Wait(ready + affine_slot.index, affine_slot.parity);
      Affine of_channels[kVector];
#pragma unroll
      for (int pair = 0; pair < kVector / 2; ++pair) {
        const float4 of_pair = reinterpret_cast<const float4*>(
            affines + affine_slot.index * plan.slice_channels)[pair * plan.vectors + vector];
        of_channels[2 * pair] = {of_pair.x, of_pair.y};
        of_channels[2 * pair + 1] = {of_pair.z, of_pair.w};
      }
      affine_slot.Next(plan.ahead + 1);
      const int64_t image_begin = static_cast<int64_t>(ImageOf(tile)) * norm.pixels;
      const int channel = ChannelOf(tile) + vector * kVector;
      for (int chunk = 0; chunk < plan.chunks; ++chunk) {
        const int chunk_begin = begin + chunk * plan.chunk_pixels;
        Wait(full + stage.index, stage.parity);
        unsigned char* at = chunks + stage.index * layout.chunk_bytes;
        for (int pixel = first_pixel; pixel < plan.chunk_pixels;
             pixel += kAtOnce * plan.pixel_lines) {
          uint4 vectors[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            vectors[i] = *reinterpret_cast<const uint4*>(at + places[i]);
          }
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            uint32_t words[kWords];
            Split(vectors[i], words);
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
              words[w] = NormaliseWord<kOut>(words[w], of_channels[2 * w], of_channels[2 * w + 1],
                                             activate, inverse);
            }
            if constexpr (kRounds) {
              const int in_image = chunk_begin + pixel + i * plan.pixel_lines;
              if (in_image < norm.pixels)
                StoreE4m3(norm.out, image_begin + in_image, channel, words);
            } else {
              *reinterpret_cast<uint4*>(at + places[i]) =
                  make_uint4(words[0], words[1], words[2], words[3]);
            }
          }
          at += step_bytes;
        }
        if constexpr (!kRounds) FenceProxyAsync();
        __syncwarp();
        if (lane == 0) Arrive(done + stage.index);
        stage.Next(plan.stages);
      }
    }
  }
};

/// grid (plan.blocks: a team, teams); block: producer, factor warps, reducers, normalisers.
template <int kRun, Element kOut>
__global__ void __launch_bounds__(kMaxThreads, 1)
    GroupNormStreamKernel(const __grid_constant__ GroupNormLaunch norm,
                          const __grid_constant__ Plan plan, const __grid_constant__ Maps maps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) unsigned char stream_shared[];
  Block<kRun, kOut> block = {norm, plan, maps, stream_shared};
  if (threadIdx.x == 0) block.InitBarriers();
  __syncthreads();
  if (block.InCluster()) {
    ArriveAtCluster();
    WaitForCluster();
  }
  WaitForPredecessors();
  if (!plan.cluster) block.launch = __ldcg(&block.counter->launches) + 1;
  int thread = threadIdx.x;  // counted within its kind
  if (thread < kProducers) {
    if (ElectOne()) block.Copy();
  } else if ((thread -= kProducers) < plan.factors) {
    block.MakeFactors(thread);
  } else if ((thread -= plan.factors) < plan.reducers) {
    block.Sum(thread);
  } else if (norm.activation == Activation::kSilu) {
    block.Normalise(thread - plan.reducers, [](float h) { return SiluOfHalf(h); });
  } else {
    block.Normalise(thread - plan.reducers, [](float y) { return y; });
  }
#endif
}

auto* KernelOf(int run, Element out) {
  return WithConstant<2, 4, 8>(run, [&](auto known) {
    return out == Element::kE4m3x2 ? &GroupNormStreamKernel<known, Element::kE4m3x2>
                                   : &GroupNormStreamKernel<known, Element::kBf16>;
  });
}

bool HasSectors(int channels) { return channels * 2 % kSectorBytes == 0; }
/// Bytes of a row of `channels` channels, padded so that four neighbouring rows lie in different
/// banks. Rows that are not whole sectors are not padded, because TMA does that slowly.
int PitchOf(int channels) {
  int bytes = channels * 2;
  while (HasSectors(channels) && bytes % 64 != 32) bytes += 16;
  return bytes;
}
int ThreadsOf(const Plan& plan) {
  return kProducers + plan.factors + plan.reducers + plan.normalisers;
}
Layout LayoutOf(const Plan& plan) { return {plan, RunOf(plan.group_channels.value)}; }

/// `most_blocks`: a power of two.
Plan MakePlan(const NormLayer& norm, int slice_channels, int most_blocks, bool cluster) {
  const int channels = norm.AllChannels();
  Plan plan;
  plan.group_channels = FastDivmod(norm.GroupChannels());
  plan.slice_channels = slice_channels;
  plan.slice_groups = slice_channels / plan.group_channels;
  plan.slices = FastDivmod(channels / slice_channels);
  plan.vectors = slice_channels / kVector;
  const bool e4m3 = norm.out.element == Element::kE4m3x2;
  const Threads& threads = e4m3 && cluster ? kE4m3InClusters : kAnyThreads;
  plan.factors = threads.factors;
  const int line_reducers = kQuad * plan.vectors, line_normalisers = plan.vectors;
  plan.leaf_lines = plan.pixel_lines = 1;
  while (2 * plan.leaf_lines * line_reducers <= kMostReducers &&
         2 * plan.leaf_lines * kAtOnce * kLeafPixels * PitchOf(slice_channels) <= kMostChunkBytes) {
    plan.leaf_lines *= 2;
  }
  while (plan.pixel_lines * line_normalisers < threads.few_normalisers) plan.pixel_lines *= 2;
  const auto whole_warps = [](int threads) { return (threads + 31) / 32 * 32; };
  plan.reducers = whole_warps(line_reducers * plan.leaf_lines);
  plan.normalisers = whole_warps(line_normalisers * plan.pixel_lines);

  plan.chunk_pixels = std::max(kAtOnce * kLeafPixels * plan.leaf_lines, kAtOnce * plan.pixel_lines);
  while (plan.chunk_pixels * slice_channels * 2 < kFewChunkBytes) plan.chunk_pixels *= 2;
  int pixels = plan.chunk_pixels;  // per block
  while (pixels * most_blocks < norm.pixels) pixels *= 2;
  plan.chunks = pixels / plan.chunk_pixels;
  plan.leaves = pixels / kLeafPixels;
  plan.blocks = (norm.pixels + pixels - 1) / pixels;
  plan.count_inverse = 1.0f / (static_cast<float>(norm.pixels) * plan.group_channels.value);
  plan.cluster = cluster || plan.blocks == 1;
  plan.nodes = plan.cluster ? plan.blocks : (plan.blocks + kSumsPerThread - 1) / kSumsPerThread;
  const int group_lanes = std::min(32, plan.reducers / plan.slice_groups);
  plan.lane_leaves = std::min(kLaneLeaves, plan.leaves);
  while (plan.lane_leaves > 1 && 2 * plan.leaves / plan.lane_leaves <= group_lanes) {
    plan.lane_leaves /= 2;
  }
  plan.leaf_bits = BinaryLogarithm(plan.leaves / plan.lane_leaves);

  const int widest = std::gcd(slice_channels, norm.channels);
  // Two steps of the normalisers must be whole periods of the swizzle.
  plan.swizzled = !plan.cluster && widest % kSwizzledChannels == 0 &&
                  kAtOnce * plan.pixel_lines % kSwizzledRows == 0;
  plan.piece_channels = plan.swizzled ? kSwizzledChannels : widest;
  for (int parts = 1; widest % parts != 0 || plan.piece_channels % kVector != 0 ||
                      PitchOf(plan.piece_channels) > 2 * kMaxBoxChannels;) {
    plan.piece_channels = widest / ++parts;
  }
  plan.pieces = slice_channels / plan.piece_channels;
  plan.pieces1 = norm.channels / plan.piece_channels;
  plan.pitch = plan.swizzled ? 2 * kSwizzledChannels : PitchOf(plan.piece_channels);

  // More work tiles need longer rings of sums and factors, and leave less room for chunks.
  for (int ahead = 1; ahead <= kMaxAhead; ++ahead) {
    Plan longer = plan;
    longer.stages = 0;
    longer.ahead = ahead;
    longer.sum_slots = plan.cluster ? 2 * ahead : 2;
    const Layout empty = LayoutOf(longer);
    longer.stages = std::min(
        {(kSharedBytes - empty.bytes) / empty.chunk_bytes, ahead * plan.chunks, kMaxStages});
    if (longer.stages > plan.stages) plan = longer;
  }
  const int chunk_bytes = plan.chunk_pixels * slice_channels * 2;
  plan.in_flight = std::min(plan.stages, (kFewInFlightBytes + chunk_bytes - 1) / chunk_bytes);
  return plan;
}

/// A CTA's part of a work tile, in elements.
int PartOf(const Plan& plan) { return plan.leaves * kLeafPixels * plan.slice_channels; }

/// Whether the plan is possible and useful. It needs rows that TMA moves fast (a single CTA has
/// longer work tiles and was slow with rows of 96 bytes), work tiles that take longer than the
/// exchange of sums, and shared memory for nearly two of them.
bool Suits(const Plan& plan) {
  const int kFewPieceChannels = plan.blocks == 1 ? 64 : 48;
  constexpr int kFewElements = 24 * 1024;
  return ThreadsOf(plan) <= kMaxThreads && plan.leaves <= kMaxLeaves && plan.blocks >= 1 &&
         plan.blocks <= (plan.cluster ? kMaxCluster : kMaxTeam) &&
         plan.piece_channels >= kFewPieceChannels && PartOf(plan) >= kFewElements &&
         plan.stages >= kAtOnce + 1 && 8 * plan.stages >= 15 * plan.chunks;
}

/// Number of teams that are resident at one time, or 0. A CTA has an SM to itself, so it depends on
/// the cluster size alone. The query is slow, so its result is cached.
int TeamsOf(const Plan& plan) {
  static Mutex mutex;
  static std::map<std::pair<int, int>, int> known;  // clusters by device and blocks
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  const int cluster = plan.cluster ? plan.blocks : 1;
  MutexLock lock(&mutex);
  const auto [at, is_new] = known.try_emplace({device, cluster}, 0);
  if (is_new) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(cluster);
    config.blockDim = dim3(kMaxThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&at->second, KernelOf(kVector, Element::kBf16), &config) !=
        cudaSuccess) {
      at->second = 0;
    }
  }
  return at->second * cluster / plan.blocks;
}

/// A plan, the number of teams, and the number of work tiles of the busiest team.
struct Choice {
  Plan plan;
  int teams = 0, tiles = 0;
};
/// The time of a team for `tiles` work tiles, measured in elements that a CTA moves. During the
/// first one nothing is stored, and during the last one nothing is loaded.
double CostOf(const Plan& plan, int tiles) {
  constexpr int kTileElements = 2048;      // overhead per work tile
  constexpr double kSlowRows = 1.25;       // slices share sectors
  constexpr double kThroughGlobal = 1.25;  // exchange through global memory
  const double slower =
      (plan.cluster ? 1 : kThroughGlobal) * (HasSectors(plan.piece_channels) ? 1 : kSlowRows);
  return (tiles + 1.0) * (PartOf(plan) + kTileElements) * slower;
}
/// The plan whose busiest team ends first; no teams if no plan suits the layer.
Choice Choose(const NormLayer& norm, int images) {
  Choice choice;
  if (!SuitsOnePass(norm)) return choice;
  const int channels = norm.AllChannels();
  const int granule = std::lcm(norm.GroupChannels(), kVector);
  double least = std::numeric_limits<double>::max();
  for (int slice = granule; slice <= channels; slice += granule) {
    if (channels % slice != 0) continue;
    for (int blocks = 1; blocks <= kMaxTeam; blocks *= 2) {
      Plan plan = MakePlan(norm, slice, blocks, /*cluster=*/blocks <= kMaxCluster);
      const int teams = Suits(plan) ? TeamsOf(plan) : 0;
      const size_t tagged_sums = size_t{2} * plan.ahead * plan.slice_groups * plan.blocks * teams;
      const bool fits = sizeof(LaunchCounter) + tagged_sums * sizeof(TaggedSums) <= kFlagBytes;
      if (teams == 0 || (blocks > kMaxCluster && !fits)) continue;
      plan.tiles = images * plan.slices.value;
      const int tiles = (plan.tiles + teams - 1) / teams;
      const double cost = CostOf(plan, tiles);
      if (cost < least) least = cost, choice = {plan, teams, tiles};
    }
  }
  return choice;
}

/// [images, pixels, channels / piece, piece], in boxes of one piece of a chunk's pixels, as wide as
/// a padded row: TMA fills the padding with zeros and does not store it.
CUresult Encode(CUtensorMap* map, const Rows& rows, int channels, const GroupNormLaunch& norm,
                const Plan& plan) {
  const int piece = plan.piece_channels;
  return EncodeTiled(map,
                     {rows.data,
                      {piece, channels / piece, norm.pixels, norm.images},
                      {piece, rows.stride, rows.stride * norm.pixels},
                      {plan.pitch / 2, 1, plan.chunk_pixels, 1}},
                     plan.swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

}  // namespace

bool SuitsGroupNormStream(const NormLayer& norm) { return Choose(norm, 1).teams > 0; }

/// As measured: if teams have more than one CTA and at least three work tiles each, about equally
/// many. Two are enough if a group's channels neither divide a vector nor are whole vectors,
/// because group_norm_cluster.cu is slow then.
bool PrefersGroupNormStream(const GroupNormLaunch& norm, const Queue& queue) {
  if (!SuitsGroupNormCluster(norm, queue)) return true;
  const auto [plan, teams, tiles] = Choose(norm, norm.images);
  if (20 * plan.tiles < 17 * tiles * teams) return false;
  const bool badly =
      RunOf(plan.group_channels.value) < std::min(plan.group_channels.value, kVector);
  return badly ? tiles >= 2 : tiles >= 3 && plan.blocks > 1;
}

cudaError_t LaunchGroupNormStream(const GroupNormLaunch& norm, const Queue& queue) {
  const auto [plan, teams, tiles] = Choose(norm, norm.images);
  if (teams == 0) return cudaErrorInvalidValue;
  if (const cudaError_t error = GetTensorMapEncoders().error; error != cudaSuccess) return error;
  Maps maps = {};
  if (Encode(&maps.x, norm.x, norm.channels, norm, plan) != CUDA_SUCCESS ||
      (norm.channels2 > 0 &&
       Encode(&maps.x2, norm.x2, norm.channels2, norm, plan) != CUDA_SUCCESS) ||
      (norm.out.element == Element::kBf16 &&
       Encode(&maps.out, norm.out, norm.AllChannels(), norm, plan) != CUDA_SUCCESS)) {
    return cudaErrorInvalidValue;
  }
  const unsigned blocks = plan.blocks, cluster = plan.cluster ? blocks : 1;
  return LaunchDependent(KernelOf(RunOf(plan.group_channels.value), norm.out.element),
                         {.grid = dim3(blocks, std::min(teams, plan.tiles)),
                          .block = dim3(ThreadsOf(plan)),
                          .shared_bytes = static_cast<size_t>(LayoutOf(plan).bytes),
                          .cluster = cluster,
                          .cooperative = !plan.cluster},
                         queue, norm, plan, maps);
}

cudaError_t LoadGroupNormStreamKernels() {
  for (int run : {2, 4, 8}) {
    for (Element out : {Element::kBf16, Element::kE4m3x2}) {
      const cudaError_t error = LoadClusterKernel(KernelOf(run, out), kSharedBytes);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace denoised::cuda
