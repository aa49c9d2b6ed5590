// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <iterator>

#include "engine/backend/cuda/launch.h"

/// The CTA tiles of Hopper's convolutions. kTiles is the only place that defines a tile: kernels,
/// shared memory, launches, candidates, their names and their expected times are derived from its
/// rows. To add a tile, add a row of a width that Wgmma in hopper.cuh has.

namespace denoised::cuda {

/// How a tile's pixels are loaded into shared memory.
enum class Loader : uint8_t {
  kIm2col,    // conv2d_sm90.cu: in each step the pixels at one tap; any layer
  kHaloTile,  // conv3x3_sm90.cu: the pixels at all taps at once; layers that SuitsHaloTile()
};

enum class Schedule : uint8_t {
  kCooperative,    // persistent; the consumer warpgroups share a tile
  kPingPong,       // persistent; each consumer warpgroup has its own tile
  kClusterSplitK,  // not persistent, for few pixels: conv_few_pixels_sm90.cu, with either loader
};

/// Where the splits of k are added, and in bf16 the steps of a shortcut.
enum class SplitK : uint8_t {
  kNone,     // nowhere: there is one split
  kCta,      // one CTA has all splits
  kCluster,  // in a CTA or a cluster; with kCooperative two CTAs, one split each
  kEach,     // in a cluster, one split each
};

struct HopperKernelSpec {
  int stages = 0;                  // of the pipeline; kClusterSplitK: at most
  int consumers = 0, threads = 0;  // consumer warpgroups; threads per CTA
  /// Per thread after setmaxnreg, if the kernel is persistent. producer_registers: of all threads
  /// that are not consumers.
  int consumer_registers = 0, producer_registers = 0;
  // kHaloTile:
  int epilogue_buffers = 0;  // per consumer, one subtile each
  int lag = 0;               // kCooperative: steps by which the second consumer starts later
};

/// Microseconds on an H200, fitted to layers of our models: those of tiles in e4m3 by
/// tests/bench/fit_tile_costs.py, the others before there was that script.
struct HopperTileCost {
  struct Launch {
    double launch = 0, step = 0, finish = 0;  // a launch; a tile's step along k and its epilogue
    double busy = 1;                          // factor of a step with more than kFewWaves waves
  };
  Launch single;
  Launch multicast;  // kIm2col: in clusters of two that multicast weights; empty: not supported
  double fold = 0;   // adding one more split
  double alone = 1;  // kClusterSplitK: factor of a step if a CTA has an SM to itself

  constexpr bool Multicasts() const { return multicast.launch > 0; }
};

struct HopperTileSpec {
  Loader loader;
  Schedule schedule;
  SplitK split_k;
  int m, n;  // pixels × outputs
  HopperKernelSpec kernel;
  HopperTileCost cost;
  Element element = Element::kBf16;  // of both operands; kE4m3x2: kCooperative, kNone

  constexpr bool IsPersistent() const { return schedule != Schedule::kClusterSplitK; }
  /// Outputs of a TMA box of the epilogue of persistent tiles.
  constexpr int BoxOutputs() const { return n % 64 == 0 ? 64 : n % 32 == 0 ? 32 : 16; }
  /// Whether the tile can normalise its input (Conv2dLaunch::input_factors).
  constexpr bool FusesInputNorm() const {
    constexpr int kRegisters = 72;  // needed to normalise
    constexpr int kProducers = 64;  // kClusterSplitK: the other threads normalise
    return loader == Loader::kHaloTile &&
           (IsPersistent() ? kernel.producer_registers >= kRegisters
                           : kernel.threads > kernel.consumers * 128 + kProducers);
  }
  /// Whether the tile can compute the norm after it (Conv2dLaunch::output_norm).
  constexpr bool FusesOutputNorm() const { return !IsPersistent() && kernel.consumers == 1; }
  /// Whether the tile has an epilogue for Conv2dLaunch::gated.
  constexpr bool FusesGate() const {
    return loader == Loader::kIm2col && IsPersistent() && n >= 128;
  }
  /// Whether the epilogue stores outputs one by one, of any dtype, alignment, number and
  /// activation. All other tiles need HasVectorOutputs().
  constexpr bool StoresOneByOne() const {
    return loader == Loader::kIm2col && IsPersistent() && n <= 64;
  }
};

// clang-format off
constexpr HopperTileSpec kTiles[] = {
    {Loader::kIm2col,   Schedule::kClusterSplitK, SplitK::kCluster, 64, 64,
     {14, 1, 192}, {{0.02, 0.3, 2.3}, {}, 0.23, 0.89}},
    {Loader::kHaloTile, Schedule::kClusterSplitK, SplitK::kCluster, 64, 64,
     {14, 1, 288}, {{0.01, 0.298, 2.5}, {}, 0.29, 0.67}},
    {Loader::kIm2col,   Schedule::kClusterSplitK, SplitK::kCluster, 128, 64,
     {14, 2, 320}, {{0.02, 0.25, 2.5}, {}, 0.23}},
    {Loader::kHaloTile, Schedule::kClusterSplitK, SplitK::kCluster, 128, 64,
     {14, 2, 320}, {{0.01, 0.245, 2.7}, {}, 0.29}},
    {Loader::kIm2col,   Schedule::kClusterSplitK, SplitK::kEach,    128, 128,
     {5, 2, 320}, {{0.5, 0.36, 4.0}}},
    {Loader::kHaloTile, Schedule::kClusterSplitK, SplitK::kEach,    128, 128,
     {5, 2, 320}, {{0.5, 0.36, 6.0}}},
    {Loader::kIm2col,   Schedule::kCooperative,   SplitK::kNone,    128, 32,
     {5, 2, 384, 232, 40}, {{0.68, 0.358, 0.78}}},
    {Loader::kIm2col,   Schedule::kCooperative,   SplitK::kCta,     128, 128,
     {6, 2, 384, 232, 40}, {{1.4, 0.364, 0.9, 1.12}, {1.8, 0.386, 0.8, 1.07}, 0.28}},
    {Loader::kIm2col,   Schedule::kPingPong,      SplitK::kNone,    128, 128,
     {5, 2, 384, 232, 40}, {{1.7, 0.363, 0.6, 1.15}, {2.1, 0.371, 0.53, 1.19}}},
    {Loader::kIm2col,   Schedule::kCooperative,   SplitK::kCta,     128, 160,
     {5, 2, 384, 232, 40}, {{1.1, 0.465, 1.0, 1.08}, {1.7, 0.478, 0.8, 1.10}, 0.43}},
    {Loader::kIm2col,   Schedule::kPingPong,      SplitK::kNone,    128, 160,
     {4, 2, 384, 232, 40}, {{1.3, 0.465, 0.7, 1.06}, {1.8, 0.475, 0.6, 1.06}}},
    {Loader::kIm2col,   Schedule::kCooperative,   SplitK::kCta,     128, 192,
     {4, 2, 384, 232, 40}, {{1.1, 0.56, 1.1, 1.06}, {1.6, 0.56, 1.1, 1.04}, 0.44}},
    {Loader::kIm2col,   Schedule::kCooperative,   SplitK::kNone,    128, 256,
     {3, 2, 384, 232, 40}, {{0.8, 0.73, 1.6, 1.05}, {1.5, 0.75, 1.4, 1.01}}},
    {Loader::kIm2col,   Schedule::kCooperative,   SplitK::kNone,    192, 192,
     {3, 3, 512, 160, 32}, {{1.0, 0.82, 1.5, 1.04}, {1.8, 0.86, 1.2, 1.03}}},
    {Loader::kHaloTile, Schedule::kCooperative,   SplitK::kCta,     128, 32,
     {8, 2, 512, 184, 72, 1, 3}, {{1.1, 0.2, 1.3}, {}, 0.1}},
    {Loader::kHaloTile, Schedule::kCooperative,   SplitK::kCta,     128, 64,
     {8, 2, 512, 184, 72, 1, 3}, {{1.1, 0.235, 1.45}, {}, 0.1}},
    {Loader::kHaloTile, Schedule::kCooperative,   SplitK::kCluster, 128, 80,
     {8, 2, 512, 184, 72, 1, 3}, {{1.5, 0.256, 1.8}, {}, 0.1}},
    {Loader::kHaloTile, Schedule::kCooperative,   SplitK::kCta,     128, 128,
     {7, 2, 512, 184, 72, 1, 2}, {{2.5, 0.301, 1.7}, {}, 0.07}},
    {Loader::kHaloTile, Schedule::kCooperative,   SplitK::kCta,     128, 160,
     {5, 2, 384, 216, 72, 1, 3}, {{2.5, 0.375, 2.0}, {}, 0.08}},
    {Loader::kHaloTile, Schedule::kCooperative,   SplitK::kCta,     128, 192,
     {4, 2, 384, 216, 72, 1, 3}, {{2.5, 0.456, 2.4}}},
    {Loader::kHaloTile, Schedule::kPingPong,      SplitK::kNone,    128, 32,
     {9, 2, 512, 184, 72, 2}, {{1.1, 0.16, 0.8}}},
    {Loader::kHaloTile, Schedule::kPingPong,      SplitK::kNone,    128, 64,
     {9, 2, 512, 184, 72, 2}, {{1.4, 0.2, 0.9}}},
    {Loader::kHaloTile, Schedule::kPingPong,      SplitK::kNone,    128, 128,
     {5, 2, 512, 184, 72, 2}, {{3.0, 0.301, 1.1}}},
    {Loader::kHaloTile, Schedule::kPingPong,      SplitK::kNone,    128, 160,
     {5, 2, 384, 216, 72, 1}, {{2.8, 0.375, 1.3}}},
    {Loader::kHaloTile, Schedule::kPingPong,      SplitK::kNone,    128, 192,
     {4, 2, 384, 232, 40, 1}, {{2.5, 0.456, 1.4}}},
    // In e4m3. A step has the bytes and takes the time of one in bf16, twice as deep. Two sets of
    // accumulators leave no registers for wider tiles.
    {Loader::kIm2col,   Schedule::kCooperative,   SplitK::kNone,    128, 32,
     {5, 2, 384, 232, 40}, {{1.08, 0.276, 1.74, 0.91}}, Element::kE4m3x2},
    {Loader::kIm2col,   Schedule::kCooperative,   SplitK::kNone,    128, 128,
     {6, 2, 384, 232, 40}, {{1.37, 0.355, 1.62, 1.03}, {2.31, 0.357, 1.06, 1.07}}, Element::kE4m3x2},
    {Loader::kIm2col,   Schedule::kCooperative,   SplitK::kNone,    128, 160,
     {5, 2, 384, 232, 40}, {{1.17, 0.438, 2.23}, {2.43, 0.441, 1.4, 1.03}}, Element::kE4m3x2},
    {Loader::kIm2col,   Schedule::kCooperative,   SplitK::kNone,    128, 192,
     {4, 2, 384, 232, 40}, {{0.68, 0.519, 2.91, 1.04}, {2.41, 0.521, 1.67, 1.03}}, Element::kE4m3x2},
    {Loader::kHaloTile, Schedule::kCooperative,   SplitK::kNone,    128, 128,
     {7, 2, 384, 232, 40, 1, 2}, {{1.77, 0.346, 1.66, 0.95}}, Element::kE4m3x2},
    {Loader::kHaloTile, Schedule::kCooperative,   SplitK::kNone,    128, 160,
     {5, 2, 384, 232, 40, 1, 3}, {{1.51, 0.43, 2.13, 0.94}}, Element::kE4m3x2},
    {Loader::kHaloTile, Schedule::kCooperative,   SplitK::kNone,    128, 192,
     {4, 2, 384, 232, 40, 1, 2}, {{1.9, 0.499, 2.3, 0.94}}, Element::kE4m3x2},
};
// clang-format on
constexpr int kHopperTiles = std::size(kTiles);

/// Whether the kernels compute all of a tile, and each of its plans has a kernel that ends.
/// Subtiles are 64 pixels.
constexpr bool IsSound(const HopperTileSpec& spec) {
  const bool halo_tiles = spec.loader == Loader::kHaloTile;
  const int subtiles = spec.m / 64 * (spec.schedule == Schedule::kPingPong ? 2 : 1);
  return spec.m % 64 == 0 && subtiles % spec.kernel.consumers == 0 &&
         !(spec.cost.Multicasts() && (halo_tiles || !spec.IsPersistent())) &&
         (spec.kernel.lag > 0) == (halo_tiles && spec.schedule == Schedule::kCooperative);
}
constexpr bool AllAreSound() {
  for (const HopperTileSpec& spec : kTiles) {
    if (!IsSound(spec)) return false;
  }
  return true;
}
static_assert(AllAreSound());

/// The index of a row of kTiles.
enum class HopperTile : uint8_t {};
constexpr const HopperTileSpec& SpecOf(HopperTile tile) { return kTiles[static_cast<int>(tile)]; }
/// The row with these values, which must exist.
constexpr HopperTile FindTile(Loader loader, Schedule schedule, int m, int n) {
  int row = 0;
  while (kTiles[row].loader != loader || kTiles[row].schedule != schedule || kTiles[row].m != m ||
         kTiles[row].n != n) {
    ++row;
  }
  return HopperTile(row);
}
constexpr HopperTile kTile64x64 = FindTile(Loader::kIm2col, Schedule::kClusterSplitK, 64, 64);

}  // namespace denoised::cuda
