// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "engine/backend/check.h"
#include "engine/backend/cpu/ops.h"
#include "engine/backend/cpu/parallel.h"
#include "engine/backend/cpu/vector_ops.h"

/// Three steps: sums of each channel over chunks of pixels, the statistics of each group of the
/// row, and the normalisation of each chunk. Chunks have a fixed number of pixels and their sums
/// are added in order. Sums are in double, so the variance can be E[x²] − E[x]² without
/// cancellation, and x is read only once for it.

namespace denoised::cpu {
namespace {

constexpr int64_t kChunkPixels = 64;

/// y = (x − mean) · slope + offset for one channel of one row.
struct Coefficients {
  float* mean;
  float* slope;
  float* offset;
};

/// Adds up the sums of the chunks, and combines each group's statistics with gamma, beta and
/// scale_shift into one mean, slope and offset per channel.
void FoldRow(const GroupNormArgs& args, int64_t row, int64_t chunks, int64_t pixels,
             int64_t channels, const double* sums, const Coefficients& to) {
  const int64_t group_channels = channels / args.norm.groups;
  const float* scale = args.norm.scale_shift ? args.norm.scale_shift.as<float>() +
                                                   row * args.norm.scale_shift.row_stride()
                                             : nullptr;
  const float* shift = scale != nullptr ? scale + channels : nullptr;
  const double count = static_cast<double>(group_channels) * static_cast<double>(pixels);
  for (int64_t begin = 0; begin < channels; begin += group_channels) {
    double sum = 0, square = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const double* part = sums + chunk * 2 * channels;
      for (int64_t c = begin; c < begin + group_channels; ++c) {
        sum += part[c];
        square += part[channels + c];
      }
    }
    const double mean = sum / count;
    const double variance = std::max(0.0, square / count - mean * mean);
    const double reciprocal = 1.0 / std::sqrt(variance + args.norm.eps);
    for (int64_t c = begin; c < begin + group_channels; ++c) {
      const float gain = scale != nullptr ? 1.0f + scale[c] : 1.0f;
      to.mean[c] = static_cast<float>(mean);
      to.slope[c] = static_cast<float>(reciprocal) * args.norm.gamma.as<float>()[c] * gain;
      to.offset[c] = args.norm.beta.as<float>()[c] * gain + (shift != nullptr ? shift[c] : 0.0f);
    }
  }
}

}  // namespace

void GroupNorm(const GroupNormArgs& args, Scratch& scratch) {
  // No structured binding: clang 14 does not capture those in lambdas.
  const RowShape shape = RowsOf(args.out.shape());
  const int64_t rows = shape.rows, pixels = shape.tokens, channels = shape.features;
  if (args.out.elements() == 0) return;
  const int64_t c1 = args.x.dim(-1), c2 = channels - c1;
  const int64_t chunks = (pixels + kChunkPixels - 1) / kChunkPixels;
  const int64_t row_sums = chunks * 2 * channels;
  double* const sums = scratch.Take<double>(rows * (row_sums + 2 * channels));
  float* const folded = reinterpret_cast<float*>(sums + rows * row_sums);
  const auto coefficients = [&](int64_t row) {
    float* at = folded + row * 3 * channels;
    return Coefficients{at, at + channels, at + 2 * channels};
  };
  const float* x = args.x.as<float>();
  const float* x2 = args.x2 ? args.x2.as<float>() : nullptr;
  float* out = args.out.as<float>();

  const auto sum_chunk = [&, pixels = pixels, channels = channels](int64_t row, int64_t chunk) {
    const int64_t begin = chunk * kChunkPixels, length = std::min(kChunkPixels, pixels - begin);
    const int64_t pixel = row * pixels + begin;
    double* sum = sums + row * row_sums + chunk * 2 * channels;
    double* square = sum + channels;
    Moments(x + pixel * c1, length, c1, sum, square);
    if (x2 != nullptr) Moments(x2 + pixel * c2, length, c2, sum + c1, square + c1);
  };
  const auto fold = [&, pixels = pixels, channels = channels](int64_t row) {
    FoldRow(args, row, chunks, pixels, channels, sums + row * row_sums, coefficients(row));
  };
  const auto normalize_chunk = [&, pixels = pixels, channels = channels](int64_t row,
                                                                         int64_t chunk) {
    const int64_t begin = chunk * kChunkPixels, length = std::min(kChunkPixels, pixels - begin);
    const int64_t pixel = row * pixels + begin;
    const Coefficients k = coefficients(row);
    float* to = out + pixel * channels;
    Normalize(x + pixel * c1, length, c1, k.mean, k.slope, k.offset, to, channels);
    if (x2 != nullptr) {
      Normalize(x2 + pixel * c2, length, c2, k.mean + c1, k.slope + c1, k.offset + c1, to + c1,
                channels);
    }
    Activate(args.norm.activation, to, length * channels);
  };

  // Both ways compute the same chunks. By rows where there are enough for all threads, since a row
  // then stays in its core's cache; else by chunks.
  if (rows >= Threads()) {
    ParallelFor(rows, [&](int64_t row, int) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) sum_chunk(row, chunk);
      fold(row);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) normalize_chunk(row, chunk);
    });
  } else {
    ParallelFor(rows * chunks, [&](int64_t unit, int) { sum_chunk(unit / chunks, unit % chunks); });
    for (int64_t row = 0; row < rows; ++row) fold(row);
    ParallelFor(rows * chunks,
                [&](int64_t unit, int) { normalize_chunk(unit / chunks, unit % chunks); });
  }
}

}  // namespace denoised::cpu
