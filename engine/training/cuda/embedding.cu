// SPDX-License-Identifier: Apache-2.0
// The gradient of an embedding table: for each entry, the sum over its lines. Most entries have no
// line; one entry, the padding of captions, has most of them.
//
// Policy. The lines of a chunk are sorted by entry (a stable sort). Then blocks sum pieces of
// kPiece sorted lines, and other blocks sum the pieces of each entry, chunk by chunk. So the order
// of sums depends on the indices of the chunk alone, and no block reads many lines.

#include <algorithm>

#include "engine/backend/cuda/dependent_launch.h"
#include "engine/training/cuda/launch.h"
#include "engine/training/cuda/strips.cuh"

namespace denoised::training::cuda {
namespace {

using namespace denoised::cuda;

constexpr int kThreads = 256, kPiece = 32;

/// sorted[chunk, place] = {entry, line}. Each thread counts the lines that belong before its own,
/// so no thread waits for another.
__global__ void __launch_bounds__(kThreads)
    SortKernel(const int32_t* index, int64_t chunk_lines, int2* sorted) {
  WaitForPredecessors();
  ReleaseDependents();
  __shared__ int32_t tile[kThreads];
  const int32_t* from = index + blockIdx.y * chunk_lines;
  const int64_t line = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int32_t entry = line < chunk_lines ? from[line] : 0;
  int64_t place = 0;
  for (int64_t first = 0; first < chunk_lines; first += kThreads) {
    __syncthreads();
    if (first + threadIdx.x < chunk_lines) tile[threadIdx.x] = from[first + threadIdx.x];
    __syncthreads();
    const int count = static_cast<int>(min(static_cast<int64_t>(kThreads), chunk_lines - first));
    // Lines of the same entry keep their order.
    const int earlier = static_cast<int>(max(int64_t{0}, min(int64_t{count}, line - first)));
    int before = 0;
#pragma unroll 8
    for (int i = 0; i < count; ++i) before += tile[i] < entry || (tile[i] == entry && i < earlier);
    place += before;
  }
  if (line < chunk_lines)
    sorted[blockIdx.y * chunk_lines + place] = make_int2(entry, static_cast<int>(line));
}

/// A thread sums one channel over the lines of a piece. Each run of equal entries has a sum, which
/// is stored at the first place of the run: sums[chunk, place, channel].
__global__ void __launch_bounds__(kThreads)
    PiecesKernel(const __grid_constant__ EmbeddingBackwardLaunch embedding) {
  WaitForPredecessors();
  ReleaseDependents();
  __shared__ int2 places[kPiece];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPiece;
  const int64_t chunk = blockIdx.z * embedding.chunk_lines;
  const int count = static_cast<int>(min(int64_t{kPiece}, embedding.chunk_lines - first));
  if (static_cast<int>(threadIdx.x) < count)
    places[threadIdx.x] = embedding.sorted[chunk + first + threadIdx.x];
  __syncthreads();
  const int channel = blockIdx.y * kThreads + threadIdx.x;
  if (channel >= embedding.dim) return;
  float values[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    values[i] = i < count ? Load(embedding.dout, chunk + places[i].y, channel) : 0.0f;
  float sum = 0;
#pragma unroll
  for (int i = kPiece - 1; i >= 0; --i) {  // backwards, to end each run at its first place
    if (i >= count) continue;
    sum += values[i];
    if (i > 0 && places[i - 1].x == places[i].x) continue;
    embedding.sums[(chunk + first + i) * embedding.dim + channel] = sum;
    sum = 0;
  }
}

/// The first place of a chunk whose entry is at least `entry`.
__device__ int FirstPlace(const int2* sorted, int64_t count, int entry) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (sorted[middle].x < entry) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return static_cast<int>(low);
}

/// Adds this thread's share of the pieces of an entry, whose sorted lines in the chunk are
/// [begin, end).
template <int V>
__device__ void AddPieces(const EmbeddingBackwardLaunch& embedding, const Rows& sums, int64_t chunk,
                          int begin, int end, int column, float (&sum)[V]) {
  // Pieces begin at multiples of kPiece, except the first, which begins with the run.
  const int first = begin / kPiece;
  for (int piece = first + Strip<V>::Line(); piece * kPiece < end; piece += Strip<V>::kLines) {
    float v[V];
    LoadChannelsOf<V, Element::kF32>(
        sums, chunk * embedding.chunk_lines + max(begin, piece * kPiece), column, v);
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] += v[i];
  }
}

template <int V>
__global__ void __launch_bounds__(kStripThreads)
    EntriesKernel(const __grid_constant__ EmbeddingBackwardLaunch embedding) {
  WaitForPredecessors();
  ReleaseDependents();
  using S = Strip<V>;
  __shared__ int bounds[kStripThreads];  // begin and end, by chunk
  __shared__ float shared[S::kLines][S::kChannels];
  const Rows sums = {embedding.sums, embedding.dim, Element::kF32, V == 8};
  const int column = S::Column(), thread = static_cast<int>(threadIdx.x);
  const int64_t chunks = embedding.lines / embedding.chunk_lines;
  for (int entry = blockIdx.y; entry < embedding.entries; entry += gridDim.y) {
    Subtrees<float> subtrees;  // of this thread's channel
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int at = static_cast<int>(chunk % (kStripThreads / 2)) * 2;
      __syncthreads();  // before `shared` and `bounds` are overwritten
      if (at == 0) {
        const int64_t of = chunk + thread / 2;
        if (of < chunks)
          bounds[thread] = FirstPlace(embedding.sorted + of * embedding.chunk_lines,
                                      embedding.chunk_lines, entry + thread % 2);
        __syncthreads();
      }
      const int begin = bounds[at], end = bounds[at + 1];
      float value = 0;
      if (begin < end) {  // the same for all threads
        float sum[V] = {};
        if (column < embedding.dim) AddPieces<V>(embedding, sums, chunk, begin, end, column, sum);
#pragma unroll
        for (int i = 0; i < V; ++i) shared[S::Line()][S::Place() + i] = sum[i];
        __syncthreads();
        if (thread < S::kChannels)
          value = SumOf<S::kLines>([&](int line) { return shared[line][thread]; });
      }
      subtrees.Add(chunk, value);
    }
    const int channel = blockIdx.x * S::kChannels + thread;
    if (thread < S::kChannels && channel < embedding.dim)
      embedding.dtable[static_cast<int64_t>(entry) * embedding.dim + channel] = subtrees.Sum();
  }
}

}  // namespace

cudaError_t LaunchEmbeddingBackward(const EmbeddingBackwardLaunch& embedding, const Queue& queue) {
  const int64_t lines = embedding.chunk_lines;
  const auto chunks = static_cast<unsigned>(embedding.lines / lines);
  const auto blocks = [](int64_t count, int each) {
    return static_cast<unsigned>((count + each - 1) / each);
  };
  const dim3 sort_grid(blocks(lines, kThreads), chunks);
  if (cudaError_t error = LaunchDependent(SortKernel, {.grid = sort_grid, .block = kThreads}, queue,
                                          embedding.index, lines, embedding.sorted);
      error != cudaSuccess) {
    return error;
  }
  const dim3 pieces_grid(blocks(lines, kPiece), blocks(embedding.dim, kThreads), chunks);
  if (cudaError_t error =
          LaunchDependent(PiecesKernel, {.grid = pieces_grid, .block = kThreads}, queue, embedding);
      error != cudaSuccess) {
    return error;
  }
  const int entries = std::min(embedding.entries, kMostSegments);
  const bool vectors = embedding.dim % 8 == 0;
  const auto kernel = vectors ? EntriesKernel<8> : EntriesKernel<1>;
  const dim3 grid = vectors ? Strip<8>::Grid(embedding.dim, entries, 1)
                            : Strip<1>::Grid(embedding.dim, entries, 1);
  return LaunchDependent(kernel, {.grid = grid, .block = kStripThreads}, queue, embedding);
}

}  // namespace denoised::training::cuda
